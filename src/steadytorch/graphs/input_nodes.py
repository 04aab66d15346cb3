"""Redirects a recorded graph's inputs to the caller's tensors, call by call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor, nn


class InputNode(ABC):
    """Makes replays read the caller's tensor instead of one static input.

    If the graph cannot read the tensor directly, for example because of its dtype, PyTorch copies
    it to the static input before the replay.

    Args:
        target: the static input.

    Attributes:
        source: the address that the next replay reads without a prior copy, or None.
        target: the static input.
    """

    __slots__ = ("_device", "_dtype", "_is_on", "_is_open", "_own", "_strides", "source", "target")

    def __init__(self, target: Tensor) -> None:
        self.target, self._own = target, target.data_ptr()
        self._strides, self._dtype, self._device = target.stride(), target.dtype, target.device
        self.source: int | None = None
        # `_is_on`: replays read another tensor of the target's dtype and layout.
        self._is_open, self._is_on = False, False

    @abstractmethod
    def _point(self, address: int) -> bool:
        """Make the next replay read the input from `address`; return False on failure."""

    @abstractmethod
    def _rest(self) -> bool:
        """Make the next replay read the static input itself; return False on failure."""

    def close(self) -> None:
        """Detach the input from the graph; call this before the graph is destroyed."""
        self.source, self._is_open, self._is_on = None, False, False

    def feed(self, x: Tensor) -> None:
        """Make the next replay read `x`, a tensor of the static input's shape.

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
        """Return a faster `feed` for tensors with the static input's strides, dtype and device.

        Returns:
            A function of a tensor and its address; it raises the same errors as `feed`. Skip it for
            a tensor at `source`, unless that is a negated view. It caches all look-ups, because the
            device idles while it runs.
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
        """Make the next replay read `x`, a tensor other than the current source.

        Raises:
            RuntimeError: the driver refuses; the graph must not be replayed.
        """
        # Cleared first, so that the next call cannot mistake a partial failure for success.
        self.source = None
        address = x.data_ptr() if self._is_plain(x) else 0
        if address not in (0, self._own) and self._is_open and self._point(address):
            self.source = address
            return
        if not self._rest():
            raise RuntimeError("the CUDA driver refused to restore the input of a recorded graph")
        if address == self._own:
            self.source = address
        else:
            self.target.copy_(x.detach() if x.requires_grad else x)

    def _is_plain(self, x: Tensor) -> bool:
        """Whether a tensor's memory can replace the static input byte for byte."""
        return (
            type(x) in (Tensor, nn.Parameter)
            and x.dtype is self._dtype
            and x.device == self._device
            and x.stride() == self._strides
            and not x.is_neg()
        )
