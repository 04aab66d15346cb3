"""A network's convolutions and the cuDNN engines chosen for them, as data."""

from __future__ import annotations

from typing import Literal

import msgspec

from steadytorch.results.shown import Shown

Pass = Literal["fprop", "dgrad", "wgrad"]
PASSES: tuple[Pass, ...] = ("fprop", "dgrad", "wgrad")
"""Passes of a convolution: forward, gradient by the input, gradient by the weight."""
NONDETERMINISTIC = "NONDETERMINISTIC"
"""cuDNN's note on engines whose results differ between runs."""


class Measured(msgspec.Struct, frozen=True):
    """The measurement of one convolution engine.

    Attributes:
        choice: its name.
        median_ns: median of its runs; None if untimed.
        spread: half the interquartile range over the median; None below two blocks.
        runs: number of blocks timed.
        workspace_bytes: scratch memory; None if unknown (PyTorch's own engine).
        notes: cuDNN's notes on the engine.
        error: relative L2 error; None if unverified.
        excluded: why the engine must not be used; None if it may be.
        repeats: whether two runs gave the same bits; None if run only once.
    """

    choice: str
    median_ns: float | None = None
    spread: float | None = None
    runs: int = 0
    workspace_bytes: int | None = None
    notes: tuple[str, ...] = ()
    error: float | None = None
    excluded: str | None = None
    repeats: bool | None = None

    @property
    def deterministic(self) -> bool | None:
        """Whether every run gives the same bits; None if unknown.

        True requires two bitwise equal runs and no `NONDETERMINISTIC` note from cuDNN.
        """
        return False if NONDETERMINISTIC in self.notes else self.repeats


class ConvOutcome(msgspec.Struct, frozen=True):
    """The engines tried for one convolution, and the chosen engine.

    Attributes:
        problem: key of the convolution.
        choice: name of the chosen engine.
        default_ns: PyTorch's default, with its epilogue in separate kernels; None if untimed.
        benchmark_ns: the same in PyTorch's benchmark mode; None if untimed.
        chosen_ns: the chosen engine; None if untimed.
        engines: fastest first, then the excluded ones.
        seconds: time spent on choosing.
    """

    problem: str
    choice: str
    default_ns: float | None
    benchmark_ns: float | None
    chosen_ns: float | None
    engines: tuple[Measured, ...]
    seconds: float

    @property
    def chosen(self) -> Measured:
        """The engine chosen for this convolution.

        Raises:
            LookupError: `choice` names none of the engines.
        """
        for engine in self.engines:
            if engine.choice == self.choice:
                return engine
        raise LookupError("the chosen engine is not in the list of engines")


class Layer(msgspec.Struct, frozen=True):
    """A distinct convolution; in training, one of its passes. Create layers with `Layer.of`.

    Attributes:
        names: its layers in the model.
        problem: its key.
        outcome: its engines; None if unmeasured. Without times if an engine was taken untimed.
        operations: multiplications and additions of one run.
        traffic_bytes: bytes moved if each element moves once.
        reason: why it was not timed, else None.
        operation: its pass; `pass` in JSON.
        deterministic: whether the chosen engine gives the same bits on every run; None if unknown.
    """

    names: tuple[str, ...]
    problem: str
    outcome: ConvOutcome | None
    operations: int
    traffic_bytes: int
    reason: str | None = None
    operation: Pass = msgspec.field(name="pass", default="fprop")
    deterministic: bool | None = None

    @classmethod
    def of(
        cls,
        names: tuple[str, ...],
        problem: str,
        outcome: ConvOutcome | None,
        operations: int,
        traffic_bytes: int,
        reason: str | None = None,
    ) -> Layer:
        """Creates a layer; derives its pass from `problem` and `deterministic` from `outcome`."""
        operation = msgspec.convert(problem.partition("/")[0], Pass)
        deterministic = None if outcome is None else outcome.chosen.deterministic
        return cls(
            *(names, problem, outcome, operations, traffic_bytes, reason),
            operation=operation,
            deterministic=deterministic,
        )


class LeftOut(msgspec.Struct, frozen=True):
    """Convolutions left to PyTorch because no cuDNN engine can run them.

    Attributes:
        names: their layers in the model.
        reason: why.
    """

    names: tuple[str, ...]
    reason: str


class ConvReport(Shown, msgspec.Struct, frozen=True):
    """Every distinct convolution of a workload, with the engines chosen.

    Attributes:
        layers: in the order of the network; in training, the passes of a convolution side by side.
        choices: the parameter of the transform `cudnn_engines`.
        cold: whether the L2 cache was flushed before each run.
        operations_per_s: measured rate of a matrix product, in the first convolution's type.
        bytes_per_s: measured memory bandwidth.
        cudnn: version number of cuDNN, such as 91900.
        seconds: time spent on choosing.
        left_out: convolutions that have no choice of engine.
    """

    layers: tuple[Layer, ...]
    choices: str
    cold: bool
    operations_per_s: float
    bytes_per_s: float
    cudnn: int
    seconds: float
    left_out: tuple[LeftOut, ...] = ()

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The convolution passes in this report, in training order; inference has only `fprop`."""
        found = {layer.operation for layer in self.layers}
        return tuple(each for each in PASSES if each in found)
