"""Takes an optimizer's step by other means: fused, foreach, compiled, or with merged groups.

After each step, the optimizer's parameter groups, switches and learning rates are restored. The
optimizer's state stays where `state_dict` finds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import unwrap
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor
from torch.optim import Optimizer

from steadytorch.errors import first_line
from steadytorch.workload.hooks import hooks_on_all

OWN, FUSED, FOREACH, COMPILED = "own", "fused", "foreach", "compiled"
_WARNED = "_warned_capturable_if_run_uncaptured"
_SCALES = "_step_supports_amp_scaling"
MOST_COMPILED = 2
"""Maximum number of sets of hyper-parameters for which a step is compiled; beyond this number, the
step runs uncompiled. Momentum schedules change hyper-parameters at every step, and each change
compiles for seconds."""
OWN_STEP = "the optimizer has a step that is not PyTorch's"
UNLIKE = "parameters, gradients and state differ in layout, or changed it"


class Update:
    """Takes the step of an optimizer with a chosen implementation.

    Args:
        optimizer: the caller's optimizer.
        implementation: `own` keeps the optimizer's switches; `fused` and `foreach` set PyTorch's
            switches; `compiled` compiles the step with Inductor.
        merge: whether groups with equal hyper-parameters are updated together.

    Attributes:
        fallback: why steps do not use the implementation now; None if they do.
    """

    fallback: str | None = None

    def __init__(
        self, optimizer: Optimizer, implementation: str = OWN, merge: bool = False
    ) -> None:
        self.optimizer, self.implementation, self.merge = optimizer, implementation, merge
        self._compiled: Any = None
        self._compiled_for: list[Any] = []
        self._strides: dict[int, tuple[int, ...]] = {}
        self._rates: GroupRates | None = None

    def __call__(self, rates: Sequence[Tensor] | None = None) -> None:
        """Takes the optimizer's step.

        Args:
            rates: the learning rate of each group as a tensor on the device, so that a CUDA graph
                reads it at each replay; None for the numbers in the groups.
        """
        if self.implementation == OWN and rates is None and not self._merges():
            self.optimizer.step()
            return
        if self.implementation in (FUSED, COMPILED) or rates is not None:
            move_counters(self.optimizer)
        if self.implementation == COMPILED and not self._changes() and self._compiled_step(rates):
            return
        with self._switched(rates):
            self.optimizer.step()

    @contextmanager
    def switched(self) -> Iterator[None]:
        """Sets the optimizer's switches in the block, for a GradScaler that calls the step."""
        if self.implementation == FUSED:
            move_counters(self.optimizer)
        with self._switched(None):
            yield

    def _merges(self) -> bool:
        """Whether groups are merged; not for hooks, which may change one group or read all."""
        optimizer, on_all = self.optimizer, torch_optimizer
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        registries = on_all._global_optimizer_pre_hooks, on_all._global_optimizer_post_hooks
        return self.merge and not (hooks or hooks_on_all(registries))

    def _own_rates(self) -> list[Tensor]:
        devices = [device_of(group) for group in self.optimizer.param_groups]
        if self._rates is None or [rate.device for rate in self._rates.tensors] != devices:
            self._rates = GroupRates(self.optimizer)
        return self._rates.refreshed()

    def _changes(self) -> bool:
        """Whether the step can no longer be compiled, for what `fallback` says."""
        if self.fallback is not None:
            return True
        if "step" in vars(self.optimizer) and has_own_step(self.optimizer):
            self.fallback = OWN_STEP
            return True
        groups = self.optimizer.param_groups
        found = [hyper_parameters(group, ("lr",)) for group in groups]
        if found not in self._compiled_for:
            self._compiled_for.append(found)
        # Dynamo has no guards on the strides of an optimizer's tensors.
        strides = {id(p): p.stride() for group in groups for p in group["params"]}
        moved = any(self._strides.get(key, now) != now for key, now in strides.items())
        self._strides |= strides
        if len(self._compiled_for) > MOST_COMPILED:
            self.fallback = "hyper-parameters besides the learning rate change"
        elif moved or not _are_alike(self.optimizer):
            self.fallback = UNLIKE
        return self.fallback is not None

    def _compiled_step(self, rates: Sequence[Tensor] | None) -> bool:
        """Takes the compiled step; returns False, before it, if it cannot be compiled."""
        from torch._dynamo.exc import TorchDynamoException

        if self._compiled is None:
            self._compiled = torch.compile(self.optimizer.step, dynamic=False)
        try:
            with self._switched(self._own_rates() if rates is None else rates):
                self._compiled()
        except TorchDynamoException as error:
            self.fallback = f"it cannot be compiled: {first_line(error, 120)}"
            return False
        return True

    @contextmanager
    def _switched(self, rates: Sequence[Tensor] | None) -> Iterator[None]:
        optimizer = self.optimizer
        groups = optimizer.param_groups
        found = [dict(group) for group in groups]
        marks = {
            name: vars(optimizer)[name] for name in (_WARNED, _SCALES) if name in vars(optimizer)
        }
        implementation = self._possible()
        switched: list[dict[str, Any]] = []
        together: list[dict[str, Any]] = []
        merges, versions = self._merges(), [rate._version for rate in rates or ()]
        try:
            for i, group in enumerate(groups):
                switched.append(self._switches(group, rates is not None, implementation))
                if rates is not None:
                    switched[-1]["lr"] = rates[i]
                group.update(switched[-1])
            if rates is not None:  # silences the warning about `capturable` without graph capture
                setattr(optimizer, _WARNED, True)
            if implementation == FUSED:
                setattr(optimizer, _SCALES, True)
            if merges:
                together = merged(groups, found)
                optimizer.param_groups = [dict(group) for group in together]
            yield
        finally:
            if merges:
                _write_back(together, optimizer.param_groups, groups)
            optimizer.param_groups = groups
            _restore(groups, found, switched, versions)
            for name in (_WARNED, _SCALES):
                if name in marks:
                    setattr(optimizer, name, marks[name])
                else:
                    vars(optimizer).pop(name, None)

    def _possible(self) -> str:
        if self.implementation != FUSED:
            return self.implementation
        self.fallback = None if _are_alike(self.optimizer) else UNLIKE
        return FUSED if self.fallback is None and _begin_momentum(self.optimizer) else OWN

    def _switches(
        self, group: Mapping[str, Any], captured: bool, implementation: str
    ) -> dict[str, Any]:
        wanted: dict[str, Any] = {}
        if implementation == FUSED:
            wanted = {"fused": True, "foreach": False}
        elif implementation == FOREACH and (captured or not _needs_own_rate(group)):
            wanted = {"fused": False, "foreach": True}
        if captured or implementation == COMPILED:
            on_gpu = device_of(group).type == "cuda"
            wanted["capturable"] = on_gpu
            if not on_gpu:  # there, foreach refuses a learning rate that is a tensor
                wanted["foreach"] = False
        return {key: value for key, value in wanted.items() if key in group}


def _restore(
    groups: Sequence[dict[str, Any]],
    found: Sequence[dict[str, Any]],
    switched: Sequence[dict[str, Any]],
    versions: Sequence[int],
) -> None:
    """Restores the switches only, since some optimizers count their steps in their groups.

    A learning rate that a hook has replaced or written to, by the versions of our tensors, stays.
    """
    for i, (group, before, keys) in enumerate(zip(groups, found, switched, strict=False)):
        rate: Any = group.get("lr")
        group.update({key: before[key] for key in keys})
        if "lr" in keys and rate is not keys["lr"]:
            group["lr"] = rate
        elif "lr" in keys and rate._version != versions[i]:
            group["lr"] = rate.item()


class GroupRates:
    """Learning rates of an optimizer's groups as scalars, on the parameters' devices.

    They are float64 for float64 parameters, else float32.

    Args:
        optimizer: optimizer of the groups; groups added later need a new object.

    Attributes:
        tensors: the scalars, as last refreshed.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.tensors = [
            torch.empty(
                (),
                dtype=torch.float64 if is_float64(group) else torch.float32,
                device=device_of(group),
            )
            for group in optimizer.param_groups
        ]
        self._numbers: list[Any] = [None] * len(self.tensors)
        self.refreshed()

    def refreshed(self) -> list[Tensor]:
        """Updates the scalars from the groups; copies plain numbers only if they have changed."""
        groups = self._optimizer.param_groups
        for i, (group, held) in enumerate(zip(groups, self.tensors, strict=True)):
            rate = number(group["lr"])
            if isinstance(rate, Tensor):
                held.copy_(rate.reshape(()))
                self._numbers[i] = None
            elif rate != self._numbers[i]:
                held.fill_(rate)
                self._numbers[i] = rate
        return self.tensors


def has_own_step(optimizer: Optimizer) -> bool:
    """Whether the step of an optimizer, or of its class, is not PyTorch's; schedulers wrap theirs.

    Such a step may read and keep any state of Python.
    """
    replaced = vars(optimizer).get("step")
    if replaced is not None and not getattr(replaced, "_wrapped_by_lr_sched", False):
        return True
    return not unwrap(type(optimizer).step).__module__.startswith("torch.optim.")


def is_float64(group: Mapping[str, Any]) -> bool:
    """Whether any parameter of a group is float64, or complex of two such numbers."""
    return any(p.dtype in (torch.float64, torch.complex128) for p in group["params"])


def number(rate: Any) -> Any:
    """A learning rate as a number; a GPU tensor is returned as it is, to avoid a GPU wait."""
    return float(rate) if isinstance(rate, Tensor) and rate.device.type == "cpu" else rate


def _are_alike(optimizer: Optimizer) -> bool:
    """Whether gradients and state have the layout of their parameters, as fused steps need.

    PyTorch's fused steps walk the memory of these tensors in parallel. On a CPU they compute wrong
    weights if strides differ, as after a conversion to channels_last; on a GPU they raise.
    """
    return all(
        _is_alike(parameter, (parameter.grad, *optimizer.state.get(parameter, {}).values()))
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )


def _is_alike(parameter: Tensor, others: Iterable[Any]) -> bool:
    sizes, strides = parameter.shape, parameter.stride()
    if not (parameter.is_contiguous() or _extent(parameter) == parameter.numel()):
        return False
    for other in others:
        if not isinstance(other, Tensor) or other.shape != sizes:
            continue
        if other.layout != torch.strided:
            return False
        found = other.stride()
        if found != strides and any(
            size > 1 and one != another
            for size, one, another in zip(sizes, strides, found, strict=True)
        ):
            return False
    return True


def _extent(tensor: Tensor) -> int:
    """Number of elements of memory from a tensor's first to its last element, both included."""
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _begin_momentum(optimizer: Optimizer) -> bool:
    """Creates missing momentum buffers of SGD, which SGD's fused step needs.

    The fused step fails if only some momentum buffers are missing. If a GradScaler skips the first
    step, the fused step leaves new momentum buffers uninitialised.

    Returns:
        Whether all buffers exist: with dampening, only the first step itself can create them.
    """
    complete = True
    for group in optimizer.param_groups:
        if not group.get("momentum") or "dampening" not in group:
            continue
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                if group["dampening"]:
                    complete = False
                else:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
    return complete


def _needs_own_rate(group: Mapping[str, Any]) -> bool:
    """Whether the foreach step would refuse the group's learning rate because it is a tensor."""
    return isinstance(group.get("lr"), Tensor) and group.get("capturable") is False


def _write_back(
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    groups: Sequence[dict[str, Any]],
) -> None:
    """Copies values that a step set in merged groups back to the optimizer's original groups."""
    wrote: dict[int, dict[str, Any]] = {}
    for one, other in zip(before, after, strict=False):
        values = {key: other[key] for key in other if other[key] is not one.get(key)}
        wrote.update(dict.fromkeys(map(id, one["params"]), values))
    for group in groups:
        group.update(next((wrote[id(p)] for p in group["params"] if id(p) in wrote), {}))


def device_of(group: Mapping[str, Any]) -> torch.device:
    """Device of the first parameter of a group; CPU for a group without parameters."""
    return next((parameter.device for parameter in group["params"]), torch.device("cpu"))


def move_counters(optimizer: Optimizer) -> None:
    """Moves step counters to their parameters' devices, as fused and capturable steps need."""
    for parameter, state in optimizer.state.items():
        counter = state.get("step") if isinstance(state, dict) else None
        if isinstance(counter, Tensor) and counter.device != parameter.device:
            state["step"] = counter.to(parameter.device)


def return_counters(optimizer: Optimizer) -> None:
    """Moves step counters back to the CPU, for groups that are neither fused nor capturable."""
    for group in optimizer.param_groups:
        if group.get("fused") or group.get("capturable") is not False:
            continue
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if not isinstance(state, dict):
                continue
            counter = state.get("step")
            if isinstance(counter, Tensor) and counter.device.type != "cpu":
                state["step"] = counter.cpu()


def merged(
    groups: Sequence[Mapping[str, Any]], by: Sequence[Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Merges parameter groups that have equal hyper-parameters and the same device.

    Args:
        groups: parameter groups of an optimizer.
        by: the same groups with the values that are compared; None for `groups` themselves.
    """
    together: dict[str, dict[str, Any]] = {}
    for group, values in zip(groups, by or groups, strict=True):
        key = repr((hyper_parameters(values), device_of(values)))
        if key in together:
            together[key]["params"] = [*together[key]["params"], *group["params"]]
        else:
            together[key] = dict(group)
    return list(together.values())


def hyper_parameters(group: Mapping[str, Any], but: Sequence[str] = ()) -> tuple[Any, ...]:
    """Comparable hyper-parameters of a group, without the values that LR schedulers store."""
    skipped = {"params", "param_names", "initial_lr", "max_lr", "min_lr", *but}
    return tuple((key, _value(value)) for key, value in sorted(group.items()) if key not in skipped)


def _value(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_value, value))
    return (
        value.item()
        if isinstance(value, Tensor) and value.device.type == "cpu"
        else (("tensor", value.data_ptr()) if isinstance(value, Tensor) else value)
    )
