"""What a recorded graph computes with, changed from call to call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor, nn


class InputNode(ABC):
    """Has replays of a graph compute with the caller's tensor instead of one static input.

    Where the graph cannot take the tensor as it lies, because of its type or layout say, PyTorch
    copies it to the static input before the replay.

    Args:
        target: the static input.

    Attributes:
        source: address of what the next replay computes with as it is, or None.
        target: the static input.
    """

    __slots__ = ("_device", "_dtype", "_is_on", "_is_open", "_own", "_strides", "source", "target")

    def __init__(self, target: Tensor) -> None:
        self.target, self._own = target, target.data_ptr()
        self._strides, self._dtype, self._device = target.stride(), target.dtype, target.device
        self.source: int | None = None
        # Whether replays compute with what is not the target: of its type and layout, that is.
        self._is_open, self._is_on = False, False

    @abstractmethod
    def _point(self, address: int) -> bool:
        """Has the next replay compute with what lies there; False where it cannot."""

    @abstractmethod
    def _rest(self) -> bool:
        """Has the next replay compute with the target as it is; False where it cannot."""

    def close(self) -> None:
        """Leaves the graph alone from now on; to be called before it is destroyed."""
        self.source, self._is_open, self._is_on = None, False, False

    def feed(self, x: Tensor) -> None:
        """Has the next replay compute with a tensor, which is of the target's shape.

        Raises:
            RuntimeError: the driver refuses; the graph must not be replayed.
        """
        if (
            x.data_ptr() != self.source
            or x.stride() != self._strides
            or x.dtype is not self._dtype
            or x.is_neg()
            or x.device != self._device
        ):
            self.change(x)

    def mover(self) -> Callable[[Tensor, int], None]:
        """The same for tensors that are known to agree with the target in strides, type and device.

        Returns:
            A function of a tensor and where it lies. It need not be called for one that lies at
            `source`, unless that is a negative view. It raises what `feed` raises. The device idles
            while it runs, so it looks nothing up that stays.
        """
        own, point, change = self._own, self._point, self.change

        def move(x: Tensor, address: int) -> None:
            if self._is_on and address != own and type(x) is Tensor and not x.is_neg():
                self.source = None
                if point(address):
                    self.source = address
                    return
            change(x)

        return move

    def change(self, x: Tensor) -> None:
        """The same for a tensor that is not the one that replays compute with as it is.

        Raises:
            RuntimeError: the driver refuses; the graph must not be replayed.
        """
        # What fails half-way must not pass for done at the next call.
        self.source = None
        address = x.data_ptr() if self._is_plain(x) else 0
        if address not in (0, self._own) and self._is_open and self._point(address):
            self.source = address
            return
        if not self._rest():
            raise RuntimeError("the CUDA driver refuses to give a graph its own input back")
        if address == self._own:
            self.source = address
        else:
            self.target.copy_(x.detach() if x.requires_grad else x)

    def _is_plain(self, x: Tensor) -> bool:
        """Whether its bytes, in the order of memory, are those that the target is to have."""
        return (
            type(x) in (Tensor, nn.Parameter)
            and x.dtype is self._dtype
            and x.device == self._device
            and x.stride() == self._strides
            and not x.is_neg()
        )
