"""Defines a transform: one reversible change to how a workload executes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from steadytorch.device.facts import DeviceFacts
from steadytorch.results.candidate import TransformSpec
from steadytorch.workload.workload import Workload

PRECISIONS = ("same", "tf32", "fp16", "bf16", "int8")
"""Precision classes, the lowest last."""


class Risk(StrEnum):
    """The numeric or other effects that a transform may have besides speed."""

    EXACT = "exact"
    """The same arithmetic, up to the order of operations."""
    TF32 = "tf32"
    """float32 factors rounded to TF32's 10-bit mantissa."""
    HALF = "half"
    """16-bit arithmetic."""
    HOST = "host"
    """No numeric change: a setting of the host process."""


class Claim(StrEnum):
    """A resource that at most one transform of a candidate may control."""

    ELEMENT_TYPE = "the dtype"
    CAPTURE = "CUDA graph capture"
    FLOAT32_PRECISION = "the float32 precision setting"
    SUMS = "the residual sums"
    BIASES = "the convolution biases"


class Applicable(msgspec.Struct, frozen=True):
    """Result of `applies_to`: the transform can be applied to this workload on this device."""


class NotApplicable(msgspec.Struct, frozen=True):
    """Result of `applies_to`: the transform cannot be applied, or would have no effect.

    Attributes:
        reason: one clause for the user, such as "the model has no convolution".
    """

    reason: str


class NoParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of a transform without settings."""


class Transform(ABC):
    """One reversible change to how a workload executes.

    A transform sets global flags only during a call, so that the caller's process is unchanged
    between calls. A transform that changes weights works on its own copy of the weights. The
    transformed model still accepts the original inputs; the workload's new `inputs` are in a form
    that needs no conversion.

    Attributes:
        name: the name that plans and users refer to.
        parameters: the settings.
        compiles: whether `torch.compile` takes part: set-up takes long and keeps cores busy.
        records: whether applying it runs the model to record it; calls then replay the recording.
        process_wide: whether a setting that it makes around each call holds for all threads.
    """

    name: ClassVar[str]
    of_step: ClassVar[bool] = False
    """Whether it changes the training step around the model, which `plan.step` runs."""
    of_loader: ClassVar[bool] = False
    """Whether it changes only where batches come from."""
    engine: ClassVar[bool] = False
    """Whether it runs the whole model outside PyTorch: it combines with no transform of a model."""
    Parameters: ClassVar[type[msgspec.Struct]] = NoParameters
    risk: ClassVar[Risk]
    before: ClassVar[str] = "compile"
    """For plug-ins: the transform of the project that it is applied before."""
    idle_beside: ClassVar[tuple[str, ...]] = ()
    """Names of transforms beside which it changes nothing that runs; no search combines them."""
    compiles: ClassVar[bool] = False
    records: ClassVar[bool] = False
    process_wide: ClassVar[bool] = True

    def __init__(self, parameters: Any = None) -> None:
        self.parameters: Any = self.Parameters() if parameters is None else parameters

    @property
    def precision(self) -> str:
        """The precision class of a transform's results: same, tf32, bf16, fp16 or int8."""
        return "same"

    @property
    def artefact(self) -> str:
        """The name of the converted model that an engine outside PyTorch runs.

        Transforms with the same artefact name run the same converted model.
        """
        return self.name

    @property
    def drops_nan(self) -> bool:
        """Whether, on the CPU, it may return numbers for NaN inputs where the model returns NaN.

        Plans with such a transform serve finite inputs only.
        """
        return False

    @property
    def narrows_integers(self) -> bool:
        """Whether it computes integers in float32. Calls with some beyond 2^24 run untouched."""
        return False

    @property
    def untuned(self) -> Any:
        """The parameters of the variant whose kernels this one only configures anew; or its own."""
        return self.parameters

    @property
    def takes_half_only(self) -> bool:
        """Whether the transform needs 16-bit inputs, from workload or another transform."""
        return False

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Resources that no other transform in the same candidate may control."""
        return ()

    def libraries(self) -> dict[str, str]:
        """Return the versions of libraries other than PyTorch that the transform uses.

        A plan serves only if the installed library versions are the same as in tuning.

        Raises:
            PackageNotFoundError: one is not installed.
        """
        return {}

    @classmethod
    def variants(cls, facts: DeviceFacts) -> Sequence[Any]:
        """Return the parameter values worth trying on this device, the most promising first."""
        return (cls.Parameters(),)

    @abstractmethod
    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Decide whether the transform can be applied. Must not run the model.

        The workload may not be on the target device yet, so use the device in `facts`.
        """

    @abstractmethod
    def applied(self, workload: Workload) -> AbstractContextManager[Workload]:
        """Return a context that yields the changed workload and undoes everything on exit."""

    @property
    def spec(self) -> TransformSpec:
        """The transform's name and parameters as plain data."""
        fields = msgspec.structs.asdict(self.parameters)
        return TransformSpec(self.name, tuple(fields.items()))


@contextmanager
def applied_in_order(transforms: Sequence[Transform], workload: Workload) -> Iterator[Workload]:
    """Apply transforms innermost first, and undo them in reverse order on exit."""
    with ExitStack() as stack:
        for transform in transforms:
            workload = stack.enter_context(transform.applied(workload))
        yield workload


class Scoped:
    """A model that runs each call inside a new context, which sets and restores flags.

    Args:
        model: the callable to run.
        scope: creates the context of one call.
    """

    def __init__(self, model: Any, scope: Callable[[], AbstractContextManager[Any]]) -> None:
        self.model = model
        self.scope = scope

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model inside a new context made by `scope`."""
        with self.scope():
            return self.model(*args, **kwargs)
