"""Measured memory bandwidth and matrix-product rate of a device; runs in a worker process.

Findings compare a workload with measured rates instead of data-sheet values. The measurements leave
global flags, random state and defaults unchanged. Matrix products use the process's TF32 setting.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil

from steadytorch.device import host
from steadytorch.device.facts import parse_device
from steadytorch.device.observe import NotObservable
from steadytorch.errors import UnsupportedError, UsageError, first_line

if TYPE_CHECKING:
    import torch

_MIB = 1 << 20
_WARM_UP_RUNS = 2
_FEWEST_RUNS = 5
_MOST_RUNS = 50
SIDES = (512, 1024, 2048, 4096, 8192)
"""Sides of the square matrices to multiply, in ascending order."""
_GPU_PRODUCT_S = 0.02
_CPU_PRODUCT_S = 0.04


def copy_bandwidth(device: str, *, budget_s: float = 0.2) -> float:
    """Measure the bandwidth of a copy in device memory, in bytes read plus written per second.

    The two buffers hold random data and exceed the last-level cache, unless memory is short. Each
    buffer has at least 256 MiB on a GPU and 64 MiB on a CPU, unless memory is short. On a CPU, the
    copy uses the process's PyTorch threads.

    Args:
        device: "cpu", "cuda" or "cuda:i".
        budget_s: Approximate measuring time in seconds; at least 5 copies are made.

    Raises:
        UnsupportedError: The device is missing or cannot hold the buffers.
        UsageError: `device` is malformed.
    """
    import torch

    kind, _ = parse_device(device)
    try:
        count = (_gpu_buffer_bytes(device) if kind == "cuda" else cpu_buffer_bytes()) // 4
        source = torch.empty(count, dtype=torch.float32, device=device)
        source.uniform_(generator=_generator(device))
        target = torch.empty_like(source)
        seconds = median_seconds(lambda: target.copy_(source), device, budget_s)
    except (RuntimeError, AssertionError) as error:
        raise _cannot("copy memory", device, error) from error
    return 2 * source.nbytes / seconds


def matrix_rate(device: str, dtype: str | torch.dtype, *, budget_s: float = 0.2) -> float:
    """Measure the rate of a square matrix product on random data, in FLOP/s.

    The matrix side n is the largest of 512 to 8192 whose expected time is at most 20 ms (GPU) or 40
    ms (CPU). A product of two n x n matrices counts as 2 n^3 operations.

    Args:
        device: "cpu", "cuda" or "cuda:i".
        dtype: A floating-point type, e.g. "bfloat16" or `torch.bfloat16`.
        budget_s: Approximate measuring time in seconds; at least 5 products are made.

    Raises:
        UnsupportedError: The device is missing or cannot multiply matrices of this type.
        UsageError: `device` or `dtype` is malformed.
    """
    import torch

    kind, _ = parse_device(device)
    element = _floating_type(dtype)
    limit_s = _GPU_PRODUCT_S if kind == "cuda" else _CPU_PRODUCT_S
    try:
        with torch.no_grad(), _any_algorithm():
            side = SIDES[0]
            product = _product(side, element, device)
            for larger in SIDES[1:]:
                once = median_seconds(product, device, 0.0, fewest=3)
                if once * (larger / side) ** 3 > limit_s:
                    break
                side, product = larger, _product(larger, element, device)
            seconds = median_seconds(product, device, budget_s)
    except (RuntimeError, AssertionError) as error:
        raise _cannot(f"multiply {element} matrices", device, error) from error
    return 2 * side**3 / seconds


@contextmanager
def _any_algorithm() -> Iterator[None]:
    """Allow non-deterministic algorithms, because the results of the products are not used."""
    import torch

    found = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(0)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(found)


def _product(side: int, element: torch.dtype, device: str) -> Callable[[], object]:
    import torch

    generator = _generator(device)
    # Drawn in float32 and converted, because some types have no random generator.
    left, right = (
        torch.empty(side, side, dtype=torch.float32, device=device)
        .normal_(generator=generator)
        .to(element)
        for _ in range(2)
    )
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def _floating_type(dtype: str | torch.dtype) -> torch.dtype:
    import torch

    element = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(element, torch.dtype) or not element.is_floating_point:
        raise UsageError(f"matrix_rate needs a floating-point type like 'float32'; got {dtype!r}")
    return element


def _generator(device: str) -> torch.Generator:
    # A separate generator, so that the process's random state does not change.
    import torch

    return torch.Generator(device=device).manual_seed(0)


def _gpu_buffer_bytes(device: str) -> int:
    import torch

    cache = torch.cuda.get_device_properties(device).L2_cache_size
    free, _total = torch.cuda.mem_get_info(device)
    return min(max(256 * _MIB, 8 * cache), free // 4)


def cpu_buffer_bytes() -> int:
    """Size of each copy buffer on the CPU: beyond the last-level cache, within free memory."""
    try:
        cache = host.last_level_cache_bytes()
    except NotObservable:
        cache = 32 * _MIB
    # Twice the cache per buffer; the cap bounds the time on servers with gigabytes of cache.
    wanted = min(max(64 * _MIB, 2 * cache), 1024 * _MIB)
    return min(wanted, psutil.virtual_memory().available // 8)


def median_seconds(
    run: Callable[[], object], device: str, budget_s: float, fewest: int = _FEWEST_RUNS
) -> float:
    """Median time in seconds of a call of `run` on a device, after a warm-up."""
    timed = _timed_on_gpu(device) if device != "cpu" else _timed_on_cpu
    for _ in range(min(_WARM_UP_RUNS, fewest)):
        timed(run)
    return median_of_runs(lambda: timed(run), budget_s, fewest)


def median_of_runs(once: Callable[[], float], budget_s: float, fewest: int = _FEWEST_RUNS) -> float:
    """Median of the times that `once` returns, in s; calls stop when they add up to `budget_s`.

    Calls `once` at least `fewest` times and at most 50 times.
    """
    seconds: list[float] = []
    while len(seconds) < fewest or (sum(seconds) < budget_s and len(seconds) < _MOST_RUNS):
        seconds.append(once())
    return statistics.median(seconds)


def _timed_on_cpu(run: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    run()
    # At least 1 ns: a clock that did not advance would make the rate infinite.
    return max(1, time.perf_counter_ns() - start) / 1e9


def _timed_on_gpu(device: str) -> Callable[[Callable[[], object]], float]:
    import torch

    def timed(run: Callable[[], object]) -> float:
        with torch.cuda.device(device):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
        # Events have a resolution of 0.5 us.
        return max(start.elapsed_time(end), 5e-4) / 1e3

    return timed


def _cannot(what: str, device: str, error: Exception) -> UnsupportedError:
    return UnsupportedError(f"cannot {what} on {device!r}: {first_line(error)}")
