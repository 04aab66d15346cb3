"""A machine as data: what it is, its state, and what can be observed on it."""

from __future__ import annotations

import msgspec

from steadytorch.errors import UsageError


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to run on; plain data that opens on any machine.

    A field that could not be observed is None and has its reason in `unknown`. The one None that
    needs no reason is `mig_profile`: a whole GPU.

    Attributes:
        device: "cpu" or "cuda"; never an index, which is no property of the machine.
        name: GPU name, or the processor's model.
        compute_capability: As "9.0".
        sm_count: Multiprocessors of the GPU or of the MIG slice.
        memory_bytes: Memory of the GPU, or main memory.
        l2_cache_bytes: L2 cache of the GPU.
        mig_profile: As "1g.10gb", None for a whole GPU.
        driver: NVIDIA driver version.
        cuda: CUDA version that PyTorch was built with.
        cudnn: cuDNN version as "9.19.0".
        triton: Triton version.
        torch: PyTorch version with its build tag.
        python: Python version.
        cores_physical: Physical cores usable by this process.
        cores_logical: Logical cores usable by this process (affinity, cgroup quota).
        cpu_name: The processor's model.
        isa: Vector instructions PyTorch uses on the CPU, as "AVX512".
        os: Kernel name, release and architecture.
        unknown: Field name to the reason why it could not be observed.
    """

    device: str
    name: str | None = None
    compute_capability: str | None = None
    sm_count: int | None = None
    memory_bytes: int | None = None
    l2_cache_bytes: int | None = None
    mig_profile: str | None = None
    driver: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    triton: str | None = None
    torch: str | None = None
    python: str | None = None
    cores_physical: int | None = None
    cores_logical: int | None = None
    cpu_name: str | None = None
    isa: str | None = None
    os: str | None = None
    unknown: dict[str, str] = {}

    def to_json(self) -> str:
        """The facts as one JSON object."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> DeviceFacts:
        """Reads what `to_json` wrote.

        Raises:
            UsageError: The text is not JSON, or not of this shape.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise UsageError(f"not a record of device facts: {error}") from None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the machine; a field that could not be observed is None, with its reason.

    Attributes:
        device: "cpu" or "cuda".
        load_average_1m: Runnable processes, averaged over the last minute.
        cpu_busy: Fraction of all CPU time in use during the look, by any process.
        cpu_steal: Fraction of all CPU time taken by other virtual machines during the look.
        memory_free_bytes: Main memory that can be had without swapping.
        gpu_memory_free_bytes: Free memory of the GPU or of the MIG slice.
        other_gpu_processes: Processes with a compute context on the GPU, less this process and
            those it started.
        sm_clock_mhz: Clock of the multiprocessors.
        sm_clock_max_mhz: The highest that clock can be.
        power_watts: Power draw of the whole GPU.
        power_limit_watts: The limit in force.
        temperature_celsius: Temperature of the GPU.
        clock_event_reasons: What holds the clock, by name; empty: nothing.
        unknown: Field name to the reason why it could not be observed.
    """

    device: str
    load_average_1m: float | None = None
    cpu_busy: float | None = None
    cpu_steal: float | None = None
    memory_free_bytes: int | None = None
    gpu_memory_free_bytes: int | None = None
    other_gpu_processes: int | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: int | None = None
    clock_event_reasons: tuple[str, ...] | None = None
    unknown: dict[str, str] = {}

    def to_json(self) -> str:
        """The snapshot as one JSON object."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Snapshot:
        """Reads what `to_json` wrote.

        Raises:
            UsageError: The text is not JSON, or not of this shape.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise UsageError(f"not a snapshot of a device: {error}") from None


class Observation(msgspec.Struct, frozen=True):
    """One thing that a diagnosis can need.

    Attributes:
        name: What it is, in a few words.
        ok: Whether it can be observed or used here.
        detail: What was seen, or why it cannot be.
        remedy: What to do; None where nothing needs doing.
    """

    name: str
    ok: bool
    detail: str
    remedy: str | None = None


class NoiseFloor(msgspec.Struct, frozen=True):
    """Pairs of blocks of one and the same step.

    Attributes:
        a_a_spread: robust standard deviation of the log ratio of a pair, as a fraction.
        pairs: how many were taken.
        what: the step.
    """

    a_a_spread: float
    pairs: int
    what: str


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """The switch and what it depends on.

    Attributes:
        benchmark: `torch.backends.cudnn.benchmark`.
        benchmark_limit: engines that it times per convolution; 0 for all, None where this PyTorch
            has no cuDNN.
        deterministic: `torch.backends.cudnn.deterministic`.
        fp32_precision: what float32 convolutions compute in, as PyTorch names it.
        environment: variables that set PyTorch's use of cuDNN, by name.
        no_effect: why the switch does nothing here; empty where it does something.
        traps: what to know while it is on, or before it is switched on, a sentence each; none
            where it does nothing.
    """

    benchmark: bool
    benchmark_limit: int | None
    deterministic: bool
    fp32_precision: str
    environment: dict[str, str]
    no_effect: str
    traps: tuple[str, ...]


class CheckUp(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as it was found.

    Attributes:
        environment: what does not change: device, versions, cores.
        state: what does: load, clocks, power, memory that is free.
        observability: what can be observed, and what to do about the rest.
        noise_floor: how far two measurements of the same thing are apart here.
        benchmark_mode: cuDNN's switch in this process, and its traps.
    """

    environment: DeviceFacts
    state: Snapshot
    observability: list[Observation]
    noise_floor: NoiseFloor
    benchmark_mode: Switch
