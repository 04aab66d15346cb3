"""A switch for cuDNN's benchmark mode that reports its effect and restores the old setting."""

from __future__ import annotations

import warnings
from typing import Any, Self

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steadytorch.errors import UsageError

LIMIT = 10
"""PyTorch's default number of engines timed per convolution."""
CHURN = 8
"""Distinct shapes per layer from which on shapes are said to churn. Benchmarking a new shape takes
some 10 to 100 ms."""

_HEURISTICS_LIBRARY = "libcudnn_heuristic"


class BenchmarkReport(msgspec.Struct, frozen=True):
    """Convolution calls and shapes seen while cuDNN's benchmark mode was on.

    Attributes:
        active: whether the mode was switched on.
        reason: why the mode is not active; else empty.
        convolutions: calls of convolution layers on CUDA devices.
        shapes: distinct shapes among these calls; each is benchmarked once per thread.
        layers: convolution layers that were called.
        churns: whether layers see so many shapes that benchmarking may cost more than it gains.
    """

    active: bool
    reason: str
    convolutions: int
    shapes: int
    layers: int
    churns: bool


class benchmark_mode:  # noqa: N801 - used like a function, in `with benchmark_mode(True)`
    """Switches cuDNN's benchmark mode; as a context manager, restores the old setting on exit.

    Without CUDA or cuDNN, switching the mode on only warns. Switching the mode on also warns if
    convolutions have already run in this process: PyTorch keeps the engines chosen for those
    shapes. While benchmark mode is on, the input shapes of convolution layers are counted, and too
    many distinct shapes cause a warning. Functional convolution calls and compiled code are not
    counted.

    Args:
        on: whether to switch the mode on or off.
        limit: engines to time per convolution; 0 for all.

    Raises:
        UsageError: `limit` is not an integer of 0 or more; nothing was switched.
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
        """Restores the benchmark settings found at construction; stops counting convolutions."""
        cudnn: Any = torch.backends.cudnn
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        cudnn.benchmark, cudnn.benchmark_limit = self._found

    def report(self) -> BenchmarkReport:
        """Reports the convolution calls and shapes counted so far."""
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
            return  # guards on these counters would recompile at each call
        try:
            self._shapes.add((id(module), x.shape, x.dtype))
        except Exception:  # a tracer's symbolic sizes have no hash, and are not a real call
            return
        self._calls += 1
        self._layers.add(id(module))
        if self._churns() and not self._warned:
            self._warned = True
            warnings.warn(
                f"benchmark mode has timed {len(self._shapes)} shapes in {len(self._layers)} "
                "convolution layers so far; it slows down inputs of many sizes: "
                "pad them to a few sizes, or switch it off",
                stacklevel=2,
            )

    def _churns(self) -> bool:
        return len(self._shapes) >= CHURN * max(1, len(self._layers))


def why_not() -> str:
    """Returns why benchmark mode has no effect in this process; empty if it has an effect."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if not torch.backends.cudnn.is_available():
        return "this PyTorch has no cuDNN"
    cudnn: Any = torch.backends.cudnn
    if not cudnn.enabled:
        return "cuDNN is switched off in this process"
    return ""


def has_convolved() -> bool:
    """Whether cuDNN has run a convolution in this process; always False outside of Linux.

    PyTorch's cache of convolution engines cannot be read. Instead, `/proc/self/maps` shows whether
    cuDNN has loaded its heuristics library, which the first request for an engine loads.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            return any(_HEURISTICS_LIBRARY in line for line in maps)
    except OSError:
        return False
