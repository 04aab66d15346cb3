"""cuDNN's benchmark mode as a switch that says what it does, and undoes itself."""

from __future__ import annotations

import warnings
from typing import Any, Self

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steadytorch.errors import UsageError

LIMIT = 10
"""PyTorch's own: how many engines it times per convolution."""
CHURN = 8
"""Distinct convolutions per layer from which on shapes are said to churn: each costs a benchmark of
some 10 to 100 ms at its first call."""

_LOADED_WITH_THE_FIRST = "libcudnn_heuristic"


class BenchmarkReport(msgspec.Struct, frozen=True):
    """What happened while the mode was on.

    Attributes:
        active: whether it was switched on at all.
        reason: why not, where it was not; else empty.
        convolutions: calls of convolution layers on CUDA devices.
        shapes: distinct ones among them: each is benchmarked once per thread.
        layers: layers that were called.
        churns: whether layers see so many shapes that benchmarking costs more than it may gain.
    """

    active: bool
    reason: str
    convolutions: int
    shapes: int
    layers: int
    churns: bool


class benchmark_mode:  # noqa: N801 - used like a function, in `with benchmark_mode(True)`
    """Switches cuDNN's benchmark mode, at once; as a context it puts back on leaving what it found.

    Where there is no CUDA or cuDNN it does nothing and says so in a warning. It also warns where
    convolutions have run in this process before: for their shapes PyTorch keeps the engine that it
    chose then, and the mode has no effect. While it is on, the shapes of convolution layers are
    counted (not those of functional calls or in compiled code), and a warning says when they churn.

    Args:
        on: whether to switch it on or off.
        limit: engines to time per convolution; 0 for all.

    Raises:
        UsageError: the limit is no whole number, or below 0; nothing was switched.
    """

    def __init__(self, on: bool = True, *, limit: int = LIMIT) -> None:
        if type(limit) is not int or limit < 0:
            raise UsageError(f"limit {limit!r}: use a number of engines such as 10, or 0 for all")
        cudnn: Any = torch.backends.cudnn
        self._found = (cudnn.benchmark, cudnn.benchmark_limit)
        self._hook: RemovableHandle | None = None
        self._calls, self._shapes, self._layers = 0, set[Any](), set[int]()
        self._warned = False
        self._reason = why_not() if on else "switched off"
        if on and self._reason:
            warnings.warn(f"benchmark mode has no effect: {self._reason}", stacklevel=2)
            return
        cudnn.benchmark = on
        if not on:
            return
        cudnn.benchmark_limit = limit
        if has_convolved():
            warnings.warn(
                "benchmark mode comes late: convolutions have run in this process, and shapes "
                "that have run keep the engine chosen then; switch it on before the first call",
                stacklevel=2,
            )
        self._hook = nn.modules.module.register_module_forward_pre_hook(self._count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Puts back what was found, and stops counting."""
        cudnn: Any = torch.backends.cudnn
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        cudnn.benchmark, cudnn.benchmark_limit = self._found

    def report(self) -> BenchmarkReport:
        """What happened so far."""
        return BenchmarkReport(
            active=not self._reason,
            reason=self._reason,
            convolutions=self._calls,
            shapes=len(self._shapes),
            layers=len(self._layers),
            churns=self._churns(),
        )

    def _count(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not isinstance(module, nn.modules.conv._ConvNd) or not args:
            return
        x = args[0]
        if isinstance(x, Tensor) and x.is_cuda:
            self._seen(module, x)

    def _seen(self, module: nn.Module, x: Tensor) -> None:
        if torch.compiler.is_compiling():
            return  # counts that change from call to call would have it compiled at each
        try:
            self._shapes.add((id(module), x.shape, x.dtype))
        except Exception:  # sizes that are symbols have no hash: a tracer's, which are no call
            return
        self._calls += 1
        self._layers.add(id(module))
        if self._churns() and not self._warned:
            self._warned = True
            warnings.warn(
                f"benchmark mode pays for {len(self._shapes)} shapes in {len(self._layers)} "
                "convolution layers so far: inputs of many sizes are slower with it than without; "
                "pad them to a few sizes, or switch it off",
                stacklevel=2,
            )

    def _churns(self) -> bool:
        return len(self._shapes) >= CHURN * max(1, len(self._layers))


def why_not() -> str:
    """Why the mode has no effect in this process; empty where it has one."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if not torch.backends.cudnn.is_available():
        return "this PyTorch has no cuDNN"
    cudnn: Any = torch.backends.cudnn
    if not cudnn.enabled:
        return "cuDNN is switched off in this process"
    return ""


def has_convolved() -> bool:
    """Whether cuDNN has run a convolution in this process, as far as can be seen.

    PyTorch does not say what its cache holds. cuDNN loads its heuristics when it is first asked for
    an engine, and Linux lists what is loaded; elsewhere the answer is no.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            return any(_LOADED_WITH_THE_FIRST in line for line in maps)
    except OSError:
        return False
