"""What was seen of the machine while something was measured, as plain columns."""

from __future__ import annotations

import msgspec

from steadytorch.device.nvml import CLOCK_EVENT_REASONS
from steadytorch.errors import UsageError

REASON_BITS = {name: bit for bit, name in CLOCK_EVENT_REASONS.items()}
"""Bit of `clock_event_mask` to each named reason."""

COUNTERS = (
    "voluntary_switches",
    "involuntary_switches",
    "wait_ns",
    "minor_faults",
    "major_faults",
    "steal_ns",
    "iowait_ns",
    "allocator_retries",
    "allocator_device_calls",
    "compilations",
)
"""Channels that only rise; each counts from the first tick of the recording."""

LEVELS = ("sm_clock_mhz", "power_milliwatts", "clock_event_mask", "other_gpu_processes")
"""Channels that say how things stand at a tick."""

READ_EVERY = {
    "steal_ns": 3,
    "iowait_ns": 3,
    "allocator_retries": 3,
    "allocator_device_calls": 3,
    "sm_clock_mhz": 3,
    "power_milliwatts": 3,
    "clock_event_mask": 3,
    "other_gpu_processes": 10,
}
"""Channels read at every so many ticks only, taking turns, and held in between: a rise shows up to
that many ticks late, less one. All others are read at every tick."""

Column = tuple[int, ...] | None


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """Telemetry beside one measurement; all times on the clock of the samples, in ns.

    Every channel holds one value per tick, shape (ticks,), or is None with its reason in `unknown`;
    those in `READ_EVERY` hold theirs over several.

    Attributes:
        device: "cpu" or "cuda".
        interval_ns: what a tick was meant to last at the end; it doubles whenever a long recording
            is thinned, and stretches where ticks are dear.
        at_ns: when each tick was taken.
        gc_start_ns: start of each run of Python's garbage collector, exact, shape (collections,).
        gc_duration_ns: how long each took, likewise.
        gc_generation: the generation it collected, likewise.
        gc_dropped: collections let go to bound memory; each was shorter than `gc_least_ns`.
        gc_least_ns: collections at least this long are all here.
        voluntary_switches: times any thread of the process gave up its core to wait; the recorder's
            own are left out, here and in the next three.
        involuntary_switches: times one was made to give it up.
        minor_faults: pages mapped without reading a disk.
        major_faults: pages that had to be read from one.
        wait_ns: time the measured thread was ready to run and had no core.
        cpus: logical CPUs of the machine, those included that this process may not use; None where
            unknown.
        steal_ns: CPU time taken by other virtual machines, over all of these, in steps of 10 ms.
        iowait_ns: time cores were idle with a disk access outstanding, likewise.
        sm_clock_mhz: clock of the GPU's multiprocessors.
        power_milliwatts: draw of the whole GPU.
        clock_event_mask: what holds the clock, as bits; see `REASON_BITS` and `reasons`.
        other_gpu_processes: processes of others with a compute context on the GPU.
        allocator_retries: times PyTorch's allocator had to empty its cache to serve a request.
        allocator_device_calls: segments it requested from the driver or gave back.
        compilations: frames that torch.compile began to compile, recompilations included.
        tick_ns: mean time of a tick; where the measured thread waits for Python's lock meanwhile,
            the iteration is longer by about as much.
        cpu_share: CPU time of the recorder's own thread over the time recorded.
        unknown: channel to the reason why it could not be observed.
    """

    device: str
    interval_ns: int
    at_ns: tuple[int, ...] = ()
    gc_start_ns: tuple[int, ...] = ()
    gc_duration_ns: tuple[int, ...] = ()
    gc_generation: tuple[int, ...] = ()
    gc_dropped: int = 0
    gc_least_ns: int = 0
    voluntary_switches: Column = None
    involuntary_switches: Column = None
    minor_faults: Column = None
    major_faults: Column = None
    wait_ns: Column = None
    cpus: int | None = None
    steal_ns: Column = None
    iowait_ns: Column = None
    sm_clock_mhz: Column = None
    power_milliwatts: Column = None
    clock_event_mask: Column = None
    other_gpu_processes: Column = None
    allocator_retries: Column = None
    allocator_device_calls: Column = None
    compilations: Column = None
    tick_ns: int = 0
    cpu_share: float = 0.0
    unknown: dict[str, str] = {}

    def to_json(self) -> str:
        """The recording as one JSON object."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Recording:
        """Reads what `to_json` wrote.

        Raises:
            UsageError: The text is not JSON, or not of this shape.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise UsageError(f"not a recording of a device: {error}") from None


def reasons(mask: int) -> tuple[str, ...]:
    """Names of the bits of a `clock_event_mask`; one without a name is given as "bit_0x1000"."""
    bits = [1 << place for place in range(mask.bit_length()) if mask >> place & 1]
    return tuple(CLOCK_EVENT_REASONS.get(bit, f"bit_{bit:#x}") for bit in bits)


def mask_of(names: tuple[str, ...]) -> int:
    """The bits of these reasons: undoes `reasons`."""
    return sum(REASON_BITS.get(name) or int(name.removeprefix("bit_"), 16) for name in names)
