"""The contract of a transform: one reversible change to how a workload executes."""

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


class Risk(StrEnum):
    """What a transform may change besides speed."""

    EXACT = "exact"
    """The same arithmetic up to the order of operations."""
    TF32 = "tf32"
    """float32 products rounded to TF32's 10 bits of mantissa."""
    HALF = "half"
    """16-bit arithmetic."""
    HOST = "host"
    """Nothing numeric; a setting of the host process."""


class Claim(StrEnum):
    """A resource that one transform of a candidate may claim for itself."""

    ELEMENT_TYPE = "the element type"
    CAPTURE = "the capture of CUDA graphs"
    FLOAT32_PRECISION = "the float32 precision setting"
    SUMS = "the sums at the ends of residual blocks"
    BIASES = "the biases of convolutions"


class Applicable(msgspec.Struct, frozen=True):
    """The transform can be applied to this workload on this device."""


class NotApplicable(msgspec.Struct, frozen=True):
    """It cannot, or would do nothing.

    Attributes:
        reason: one clause a user understands, such as "the model has no convolution".
    """

    reason: str


class NoParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For transforms without a setting."""


class Transform(ABC):
    """One reversible change to how a workload executes.

    A transform that sets global flags does so around each call, never between calls, so that
    nothing of the process is changed behind the caller's back. One that needs other weights makes
    its own copy. The model it yields accepts the original inputs; the `inputs` it yields are those
    that the model takes without conversion.

    Attributes:
        name: how plans and users refer to it.
        parameters: its setting.
        compiles: whether `torch.compile` takes part: set-up takes long and keeps cores busy.
        records: whether applying it runs the model to record it; calls then replay the recording.
        process_wide: whether a setting that it makes around each call holds for all threads.
    """

    name: ClassVar[str]
    of_step: ClassVar[bool] = False
    """Whether it changes the training step around the model, which `plan.step` takes."""
    Parameters: ClassVar[type[msgspec.Struct]] = NoParameters
    risk: ClassVar[Risk]
    compiles: ClassVar[bool] = False
    records: ClassVar[bool] = False
    process_wide: ClassVar[bool] = True

    def __init__(self, parameters: Any = None) -> None:
        self.parameters: Any = self.Parameters() if parameters is None else parameters

    @property
    def precision(self) -> str:
        """How far it moves the numerics: same, tf32, bf16 or fp16."""
        return "same"

    @property
    def takes_half_only(self) -> bool:
        """Whether it works on 16-bit values only, those of the workload or of a transform's."""
        return False

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Resources that no other transform of the same candidate may claim."""
        return ()

    @classmethod
    def variants(cls, facts: DeviceFacts) -> Sequence[Any]:
        """The parameter values worth trying on this device, the most promising first."""
        return (cls.Parameters(),)

    @abstractmethod
    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Whether it can be applied, without applying it. Must not run the model.

        The workload may not be on its device yet: `facts` names where it is to run.
        """

    @abstractmethod
    def applied(self, workload: Workload) -> AbstractContextManager[Workload]:
        """A context that yields the changed workload and undoes everything on leaving."""

    @property
    def spec(self) -> TransformSpec:
        """This transform as data."""
        fields = msgspec.structs.asdict(self.parameters)
        return TransformSpec(self.name, tuple(fields.items()))


@contextmanager
def applied_in_order(transforms: Sequence[Transform], workload: Workload) -> Iterator[Workload]:
    """Applies the transforms innermost first and undoes them in reverse on leaving."""
    with ExitStack() as stack:
        for transform in transforms:
            workload = stack.enter_context(transform.applied(workload))
        yield workload


class Scoped:
    """A model that runs inside a fresh context at every call: how flags are set and put back.

    Args:
        model: the callable to run.
        scope: makes the context, anew for each call.
    """

    def __init__(self, model: Any, scope: Callable[[], AbstractContextManager[Any]]) -> None:
        self.model = model
        self.scope = scope

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model within the scope."""
        with self.scope():
            return self.model(*args, **kwargs)
