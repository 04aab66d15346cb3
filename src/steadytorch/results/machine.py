"""A description of a machine: hardware, software, current state and observable metrics."""

from __future__ import annotations

import msgspec

from steadytorch.results.shown import Shown


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Hardware and software of a machine, as plain data that any other machine can read.

    A field that could not be observed is None, and `unknown` holds the reason. If `mig_profile` is
    None and `unknown` has no reason for it, the GPU is not partitioned by MIG.

    Attributes:
        device: "cpu" or "cuda", without an index.
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
        unknown: Reason for each field that could not be observed, by field name.
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


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State of the machine at one moment; a field that could not be observed is None.

    Attributes:
        device: "cpu" or "cuda".
        load_average_1m: Runnable processes, averaged over the last minute.
        cpu_busy: Fraction of all CPU time used by any process during the snapshot.
        cpu_steal: Fraction of all CPU time stolen by other virtual machines during the snapshot.
        memory_free_bytes: Main memory available without swapping.
        gpu_memory_free_bytes: Free memory of the GPU or MIG slice.
        other_gpu_processes: Processes with a compute context on the GPU, without this process and
            its descendants.
        sm_clock_mhz: Current SM clock.
        sm_clock_max_mhz: Maximum SM clock.
        power_watts: Power draw of the whole GPU.
        power_limit_watts: Enforced power limit.
        temperature_celsius: Temperature of the GPU.
        clock_event_reasons: Names of the active clock limits; empty if there are none.
        unknown: Reason for each field that could not be observed, by field name.
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


class Observation(msgspec.Struct, frozen=True):
    """Whether one measuring capability is available on the machine.

    Attributes:
        name: Short name of the capability.
        ok: Whether it can be observed or used here.
        detail: The value seen, or the reason why it is unavailable.
        remedy: What the user can do; None if `ok`.
    """

    name: str
    ok: bool
    detail: str
    remedy: str | None = None


class NoiseFloor(msgspec.Struct, frozen=True):
    """The machine's timing noise: the spread between paired blocks of the same step.

    Attributes:
        a_a_spread: robust standard deviation of the log ratio of a pair, as a fraction.
        pairs: number of pairs.
        what: description of the step.
    """

    a_a_spread: float
    pairs: int
    what: str


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """State of cuDNN's benchmark mode in a process, and the pitfalls of the mode.

    Attributes:
        benchmark: `torch.backends.cudnn.benchmark`.
        benchmark_limit: engines timed per convolution; 0 for all, None if this PyTorch has no
            cuDNN.
        deterministic: `torch.backends.cudnn.deterministic`.
        fp32_precision: precision of float32 convolutions, as PyTorch names it.
        environment: environment variables that control PyTorch's use of cuDNN, by name.
        no_effect: why the switch has no effect here; empty if it has an effect.
        traps: pitfalls of the switch, one sentence each; empty if it has no effect.
    """

    benchmark: bool
    benchmark_limit: int | None
    deterministic: bool
    fp32_precision: str
    environment: dict[str, str]
    no_effect: str
    traps: tuple[str, ...]


class PluginCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The result of checking an installed plug-in.

    Attributes:
        name: name of its transform.
        distribution: the distribution that offers it, with its version.
        refused: why it was refused; None if it keeps the contract.
        not_run: why no variant of it was run here; None if one was.
    """

    name: str
    distribution: str
    refused: str | None
    not_run: str | None


class CheckUp(Shown, msgspec.Struct, frozen=True, kw_only=True):
    """The result of `steady doctor`: a check-up of the machine.

    Attributes:
        environment: fixed facts: device, versions, cores.
        state: load, clocks, power and free memory at the time.
        observability: what can be observed, and remedies for the rest.
        noise_floor: difference between two measurements of the same step.
        benchmark_mode: cuDNN's benchmark mode in this process.
        plugins: the plug-ins that were found; None if they were not looked for.
    """

    environment: DeviceFacts
    state: Snapshot
    observability: list[Observation]
    noise_floor: NoiseFloor
    benchmark_mode: Switch
    plugins: tuple[PluginCheck, ...] | None = None
