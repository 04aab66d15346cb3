"""Telemetry recorded during a measurement, as plain columns."""

from __future__ import annotations

import msgspec

from steadytorch.device.nvml import CLOCK_EVENT_REASONS

REASON_BITS = {name: bit for bit, name in CLOCK_EVENT_REASONS.items()}
"""Bit in `clock_event_mask`, by name of the reason."""

COUNTERS = (
    "voluntary_switches",
    "involuntary_switches",
    "wait_ns",
    "pool_wait_ns",
    "minor_faults",
    "major_faults",
    "steal_ns",
    "iowait_ns",
    "allocator_retries",
    "allocator_device_calls",
    "compilations",
    "collections",
    "collecting_ns",
)
"""Channels that only increase, counted from the first tick of the recording."""

LEVELS = (
    "sm_clock_mhz",
    "power_milliwatts",
    "clock_event_mask",
    "other_gpu_processes",
    "resident_bytes",
    "heap_free_bytes",
)
"""Channels that hold the current state at each tick."""

READ_EVERY = {
    "pool_wait_ns": 10,
    "steal_ns": 3,
    "iowait_ns": 3,
    "allocator_retries": 3,
    "allocator_device_calls": 3,
    "sm_clock_mhz": 3,
    "power_milliwatts": 3,
    "clock_event_mask": 3,
    "other_gpu_processes": 10,
    "resident_bytes": 3,
    "heap_free_bytes": 3,
}
"""Ticks between reads of the slower channels, which take turns; all others are read at every tick.

A value is held until the next read, so a change appears up to N - 1 ticks late."""

Column = tuple[int, ...] | None


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """Telemetry of one measurement; times are in ns, on the clock of the timing samples.

    Every channel holds one value per tick, shape (ticks,), or is None with its reason in `unknown`.
    Channels in `READ_EVERY` repeat each value over several ticks.

    Attributes:
        device: "cpu" or "cuda".
        interval_ns: nominal tick interval at the end; it doubles each time a long recording is
            thinned, and grows if ticks are expensive.
        at_ns: time of each tick.
        gc_start_ns: exact start of each garbage collection, shape (collections,).
        gc_duration_ns: duration of each collection, same shape.
        gc_generation: generation collected, same shape.
        gc_dropped: collections dropped to bound memory; each was shorter than `gc_least_ns`.
        gc_dropped_ns: their total duration.
        gc_least_ns: all collections of at least this length are included.
        voluntary_switches: times a thread of the process gave up its core to wait. This and the
            next three counts exclude the recorder's thread.
        involuntary_switches: times a thread was preempted.
        minor_faults: page faults served without disk access.
        major_faults: page faults that read from disk.
        wait_ns: time the measured thread was runnable but had no core.
        pool_wait_ns: the longest time that another native thread of the process, such as one of
            OpenMP's, was runnable but had no core.
        cpus: logical CPUs of the machine, including those this process cannot use; None if
            unknown.
        steal_ns: CPU time stolen by other virtual machines, summed over `cpus`, in 10 ms steps.
        iowait_ns: idle time with disk access outstanding, summed over `cpus`, in 10 ms steps.
        sm_clock_mhz: SM clock.
        power_milliwatts: power draw of the whole GPU.
        clock_event_mask: active clock limits, as bits; see `REASON_BITS` and `reasons`.
        other_gpu_processes: number of other processes with a compute context on the GPU.
        resident_bytes: resident memory of the process, without pages of files and shared
            memory.
        heap_free_bytes: part of the C heap that is not in use; read only while resident memory
            grows.
        allocator_retries: times PyTorch's allocator emptied its cache to serve a request.
        allocator_device_calls: segments allocated from or freed to the driver.
        compilations: frames that torch.compile began to compile, including recompilations.
        collections: garbage collections, including those dropped.
        collecting_ns: their total duration.
        tick_ns: mean duration of a tick; an iteration that waits for the GIL meanwhile is longer
            by about as much.
        cpu_share: CPU time of the recorder's thread over the recorded time.
        unknown: reason for each channel that could not be observed, by name.
    """

    device: str
    interval_ns: int
    at_ns: tuple[int, ...] = ()
    gc_start_ns: tuple[int, ...] = ()
    gc_duration_ns: tuple[int, ...] = ()
    gc_generation: tuple[int, ...] = ()
    gc_dropped: int = 0
    gc_dropped_ns: int = 0
    gc_least_ns: int = 0
    voluntary_switches: Column = None
    involuntary_switches: Column = None
    minor_faults: Column = None
    major_faults: Column = None
    wait_ns: Column = None
    pool_wait_ns: Column = None
    cpus: int | None = None
    steal_ns: Column = None
    iowait_ns: Column = None
    sm_clock_mhz: Column = None
    power_milliwatts: Column = None
    clock_event_mask: Column = None
    other_gpu_processes: Column = None
    resident_bytes: Column = None
    heap_free_bytes: Column = None
    allocator_retries: Column = None
    allocator_device_calls: Column = None
    compilations: Column = None
    collections: Column = None
    collecting_ns: Column = None
    tick_ns: int = 0
    cpu_share: float = 0.0
    unknown: dict[str, str] = {}


def reasons(mask: int) -> tuple[str, ...]:
    """Names of the bits set in a `clock_event_mask`; unknown bits get names like "bit_0x1000"."""
    bits = [1 << place for place in range(mask.bit_length()) if mask >> place & 1]
    return tuple(CLOCK_EVENT_REASONS.get(bit, f"bit_{bit:#x}") for bit in bits)


def mask_of(names: tuple[str, ...]) -> int:
    """Convert names of clock limits to a bit mask; the inverse of `reasons`."""
    return sum(REASON_BITS.get(name) or int(name.removeprefix("bit_"), 16) for name in names)
