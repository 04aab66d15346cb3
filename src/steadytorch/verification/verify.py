"""Verifies a candidate's outputs against the untouched workload's, in a worker process.

The worker runs the candidate on three random input sets and compares its outputs with a reference
of higher precision. The worker also detects outputs that a later call overwrites, and writes to
inputs. The parent process accepts or rejects the candidate from the errors alone; see `verdict`.
Training steps are verified by `training.verify`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from steadytorch.errors import first_line
from steadytorch.runtime.agreement import (
    SHARED,
    UNIT_ROUNDOFF,
    as_tensor,
    memory_of,
    real,
    unit_roundoff,
)
from steadytorch.runtime.slices import COMPARED, explained, largest
from steadytorch.verification.verdict import OutputError, Reference, Verification, worst
from steadytorch.workload.containers import BorrowedArguments
from steadytorch.workload.opened import opened, tensors_in_caches
from steadytorch.workload.signature import CONSTANTS, map_tensors, strides_of, tensors_of
from steadytorch.workload.slots import slots_of
from steadytorch.workload.workload import Workload

T = TypeVar("T")

INPUT_SETS = 3
"""Number of random input sets per verification."""
NEARBY = (0.5, 0.9)
"""Range of the random factor for single-element inputs.

It keeps the sign and moves the value towards zero, so that probabilities and indices stay valid.
It changes the value by more than any tolerance (at most 0.05), so that a candidate that baked in
the original value fails."""
REPEATABLE = 1e-4
"""Largest relative L2 error between two reference calls: far above the effect of summation order in
float32, far below that of a random mask."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Value = torch.Tensor | complex
"""Types of outputs compared by their error: tensors, and floating-point and complex numbers."""


def fresh_inputs(workload: Workload, seed: int) -> Arguments:
    """Random arguments with the shapes, layouts and value ranges of the workload's arguments.

    Each new element is drawn from the elements of the original tensor, so that indices and masks
    stay valid. All-zero floating-point tensors are replaced by standard normal values.
    Floating-point and complex tensors of one element are multiplied by a random factor (`NEARBY`).
    Integer and boolean tensors of one element keep their value, because another index, size or
    switch may be invalid.
    """
    generator = torch.Generator().manual_seed(seed)

    def redraw(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 0 or not _is_dense(tensor):
            return tensor.clone()
        host = tensor.detach().cpu()
        if host.is_floating_point() and not host.any():
            values = torch.randn(host.shape, generator=generator).to(host.dtype)
        elif host.numel() == 1 and (host.is_floating_point() or host.is_complex()):
            factor = torch.empty(()).uniform_(*NEARBY, generator=generator)
            values = (widening(torch.float64)(host) * factor).to(host.dtype)
        else:
            picks = torch.randint(host.numel(), (host.numel(),), generator=generator)
            values = host.flatten()[picks].reshape(host.shape)
        return torch.empty_like(tensor).copy_(values)

    return (
        map_tensors(redraw, workload.inputs),
        map_tensors(redraw, dict(workload.kwargs)),
    )


class Returned(NamedTuple):
    """A call's result, and its arguments if the call wrote to a container in them."""

    result: Any
    written: Any


def call(model: Any, arguments: Arguments) -> Returned:
    """Calls a model with copied argument containers, so that calls cannot affect each other."""
    borrowed = BorrowedArguments(arguments)
    args, kwargs = borrowed.arguments
    result = model(*args, **kwargs)
    return Returned(result, borrowed.arguments if borrowed.is_written() else None)


def widening(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that casts floats to `dtype`, and complex tensors to the matching type."""

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            return tensor.to(dtype.to_complex())
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return widen


def without_tf32() -> None:
    """Disables TF32 in this process, up to the end of a surrounding `kept_tf32`."""
    for operator in _operators():
        operator.fp32_precision = "ieee"


@contextmanager
def kept_tf32() -> Iterator[None]:
    """Restores the TF32 settings of this process at the end of the `with` block."""
    before = [operator.fp32_precision for operator in _operators()]
    try:
        yield
    finally:
        for operator, precision in zip(_operators(), before, strict=True):
            operator.fp32_precision = precision


def _operators() -> tuple[Any, ...]:
    return torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]


def detached(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Detached copies of tensors."""
    return [tensor.detach().clone() for tensor in tensors]


def copied(tree: Any) -> list[Value]:
    """Copies of the tensors and numbers in a model's result."""
    return [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values_of(tree)]


def values_of(tree: Any) -> list[Value]:
    """The tensors, floats and complex numbers in a model's result, without copying tensors."""
    return [
        leaf if isinstance(leaf, torch.Tensor) else complex(leaf)
        for leaf in _leaves(tree)
        if isinstance(leaf, (torch.Tensor, float, complex))
    ]


def _leaves(tree: Any) -> list[Any]:
    """Tensors and constants in nested containers and in the attributes of other objects.

    Objects such as caches are searched too, because transforms pass them through unchanged.
    """
    return list(_walk(tree, set()))


def _walk(value: Any, seen: set[int]) -> Iterator[Any]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, (torch.Tensor, *CONSTANTS)):
            yield leaf
        elif not isinstance(leaf, (type, nn.Module)) and id(leaf) not in seen:
            seen.add(id(leaf))
            yield from _walk(_fields_of(leaf), seen)


def _fields_of(thing: Any) -> list[Any]:
    if is_dataclass(thing):
        return [getattr(thing, field.name, None) for field in fields(thing)]
    held = [*vars(thing).values()] if hasattr(thing, "__dict__") else []
    held += [getattr(thing, name, None) for name in slots_of(type(thing))]
    if isinstance(thing, dict):
        return [*thing.keys(), *thing.values(), *held]
    return [*thing, *held] if isinstance(thing, (list, tuple, deque)) else held


def nesting(tree: Any) -> list[str]:
    """Describes nested containers and leaves as text; floats and complex numbers by type only."""
    cached = tensors_in_caches(tree)
    leaves = [_format_leaf(leaf, id(leaf) in cached) for leaf in _leaves(tree)]
    return [str(pytree.tree_structure(opened(tree))), *leaves]


def _format_leaf(leaf: Any, cached: bool) -> str:
    if isinstance(leaf, torch.Tensor):
        if cached:  # only the cache's own code reads it, whatever its strides
            return "a tensor in a cache"
        return f"a tensor with strides {strides_of(leaf)}"
    return f"a {type(leaf).__name__}" if isinstance(leaf, (float, complex)) else repr(leaf)


def nesting_fault(found: list[str], own: list[str], strides: bool = True) -> str | None:
    """Describes how outputs are nested unlike the untouched workload's; None if nested alike.

    Args:
        found: the nesting of the outputs.
        own: the nesting of the untouched workload's outputs.
        strides: whether tensors must have the untouched workload's strides.
    """
    if found[0] != own[0]:
        return "nests its outputs in other containers than the untouched workload"
    for one, other in zip_longest(found[1:], own[1:], fillvalue="missing"):
        if one != other and (strides or not _are_tensors(one, other)):
            return f"an output is {one:.60}, expected {other:.60}"
    return None


def _are_tensors(*leaves: str) -> bool:
    return all(leaf.startswith("a tensor with strides") for leaf in leaves)


def _outputs(model: Any, arguments: Arguments) -> tuple[list[Value], list[str]]:
    returned = call(model, arguments)
    return copied(returned), nesting(returned)


def make_reference(workload: Workload, seed: int) -> tuple[dict[str, Any], Reference]:
    """Runs the untouched workload at its own precision, and in float64 or else float32.

    Returns:
        The data for comparing candidates (tensors of each input set, reference outputs, own outputs
        and their nesting, and which outputs are on the CPU), to be saved for the workers; and the
        summary for the parent.
    """
    notes: list[str] = []
    with torch.no_grad():
        sets = [fresh_inputs(workload, seed + i) for i in range(INPUT_SETS)]
        fresh = True
        try:
            called = [_outputs(workload.model, arguments) for arguments in sets]
        except (RuntimeError, IndexError, ValueError, AssertionError) as error:
            fresh = False
            notes.append(
                f"random inputs do not fit ({first_line(error, 120)}), used the given ones"
            )
            sets = [(workload.inputs, dict(workload.kwargs))]
            called = [_outputs(workload.model, arguments) for arguments in sets]
        own = [outputs for outputs, _ in called]
        again, nested_again = _outputs(workload.model, sets[0])
        unit = unit_roundoff(workload.model, sets[0])
        run = partial(_outputs_in, workload=workload, sets=[*sets, sets[0]])
        try:
            runs, precision = in_float64(partial(run, torch.float64)), "float64"
        except (RuntimeError, TypeError, ValueError) as error:
            notes.append(f"float64 cannot run ({first_line(error, 120)})")
            runs, precision = run(torch.float32), "float32"
    reference, reference_again = runs[:-1], runs[-1]
    error = worst(output_error(o, r) for o, r in zip(own, reference, strict=True))
    noise = output_error(again, own[0]).relative_l2
    # Repeated calls can differ for a random workload and for an imprecise one. At the higher
    # precision, they differ by more than rounding only for a random one.
    repeatable = (
        nested_again == called[0][1]
        and noise <= max(error.relative_l2, _resolution(own[0]))
        and output_error(reference_again, reference[0]).relative_l2 <= REPEATABLE
    )
    data = {
        "sets": [tensors_of(arguments) for arguments in sets],
        "reference": reference,
        "own": own,
        "slices": [
            _explained(*pair, unit, UNIT_ROUNDOFF[getattr(torch, precision)])
            for pair in zip(own, reference, strict=True)
        ],
        "on_cpu": [[as_tensor(value).is_cpu for value in outputs] for outputs in own],
        "nesting": [nested_as for _, nested_as in called],
    }
    return data, Reference(error, precision, repeatable, fresh, "; ".join(notes), roundoff=unit)


def in_float64(run: Callable[[], T]) -> T:
    """Runs a model in float64; where that fails, without the model's conversions to float32.

    Args:
        run: calls a model whose weights and inputs are float64.

    Raises:
        Exception: what the model raised, with its conversions.
    """
    try:
        return run()
    except (RuntimeError, TypeError, ValueError):
        with suppress(RuntimeError, TypeError, ValueError), _Widening():
            return run()
        raise


class _Widening(TorchDispatchMode):
    """Makes float64 what a model converts to float32, or creates in the default dtype.

    Many models compute sines, norms or a softmax behind `.float()`, and multiply the result by
    weights.
    """

    def __enter__(self) -> _Widening:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch.set_default_dtype(self._default)
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.view.dtype:
            raise RuntimeError("it reads the bits of numbers")
        if kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def _explained(
    own: list[Value], reference: list[Value], unit: float, higher: float
) -> list[dict[int, torch.Tensor]]:
    """What rounding explains in each output; nothing if the reference has as large roundings."""
    pairs = [real(*pair) for pair in zip(own, reference, strict=True)]
    return [explained(o, r, unit) if unit > higher and _is_dense(r) else {} for o, r in pairs]


def _outputs_in(dtype: torch.dtype, workload: Workload, sets: list[Arguments]) -> list[list[Value]]:
    """Outputs of a copy of the model that is converted to `dtype`."""
    without_tf32()
    widen = widening(dtype)
    model = copy.deepcopy(workload.model)
    if isinstance(model, torch.nn.Module):
        model = model._apply(widen)  # Module.to would make complex weights real
    return [copied(call(model, map_tensors(widen, arguments))) for arguments in sets]


@torch.no_grad()
def verify(
    model: Any, workload: Workload, data: dict[str, Any], strides: bool = True
) -> Verification:
    """Compares a candidate with the reference on every input set.

    Args:
        model: the transformed model, called like the untouched one.
        workload: the untouched workload; its arguments give the nesting of the inputs.
        data: the data that `make_reference` returned; on any device.
        strides: whether outputs must have the strides of the untouched workload's outputs.
    """
    errors: list[OutputError] = []
    first, kept = None, []

    def expected(part: str, i: int) -> list[Value]:
        """Outputs on the devices where the untouched workload returns them."""
        placed = zip(data[part][i], data["on_cpu"][i], strict=True)
        return [value if on_cpu else on_device(value, workload) for value, on_cpu in placed]

    for i, on_file in enumerate(data["sets"]):
        tensors = on_device(on_file, workload)
        given = detached(tensors)
        returned = call(model, nested(workload, tensors))
        outputs = copied(returned)
        fault = form_fault(outputs, expected("own", i))
        if fault is None:
            fault = nesting_fault(nesting(returned), data["nesting"][i], strides)
        if fault is None and not equal(given, tensors):
            fault = "writes to its inputs"
        if fault is not None:
            return Verification(None, fault)
        errors.append(output_error(outputs, expected("reference", i), data["slices"][i]))
        if first is None:
            first, kept = returned, outputs
    if _overwrites(model, workload, data["sets"], first, kept):
        return Verification(None, SHARED)
    return Verification(worst(errors))


def on_device(tree: Any, workload: Workload) -> Any:
    """Returns nested containers with their tensors on the workload's device."""
    return map_tensors(lambda tensor: tensor.to(workload.device), tree)


def nested(workload: Workload, tensors: Sequence[torch.Tensor]) -> Arguments:
    """The workload's arguments, with their tensors replaced by the given ones in order."""
    following = iter(tensors)
    return map_tensors(lambda _: next(following), (workload.inputs, dict(workload.kwargs)))


def _overwrites(
    model: Any, workload: Workload, sets: list[Any], first: Any, kept: list[Value]
) -> bool:
    """Whether a later call overwrites the first call's result."""
    if len(sets) > 1:
        return not equal(kept, values_of(first))
    # With one input set a second call writes equal values, so compare addresses.
    again = call(model, nested(workload, detached(on_device(sets[0], workload))))
    return bool(memory_of(first) & memory_of(again))


def form_fault(outputs: list[Value], own: list[Value]) -> str | None:
    """Describes how outputs differ in form from the untouched workload's; None if they do not.

    Checks the number of outputs, shapes, dtypes, devices, and the positions of non-finite values.
    """
    if (reason := _incomparable(own)) is not None:
        return f"cannot be verified: {reason}"
    if len(outputs) != len(own):
        return f"returns {len(outputs)} values, the untouched workload returns {len(own)}"
    for i, pair in enumerate(zip(outputs, own, strict=True)):
        out, expected = map(as_tensor, pair)
        if out.shape != expected.shape:
            return f"output {i} has shape {tuple(out.shape)}, expected {tuple(expected.shape)}"
        if out.dtype != expected.dtype:
            return f"output {i} is {out.dtype}, expected {expected.dtype}".replace("torch.", "")
        if out.device != expected.device:
            return f"output {i} is on {out.device}, expected {expected.device}"
        lost = expected.isfinite() & ~out.isfinite()
        if lost.any():
            kind = "NaN" if out[lost].isnan().any() else "infinity"
            return f"output {i} holds {kind}"
        if not equal([expected[~expected.isfinite()]], [out[~expected.isfinite()]]):
            return f"output {i} differs where the untouched workload's is infinite or NaN"
    return None


def _incomparable(own: list[Value]) -> str | None:
    """Why the untouched workload's outputs cannot be compared; None if they can."""
    if not any(isinstance(value, torch.Tensor) for value in own):
        return "the untouched workload returns no tensor to compare"
    for i, value in enumerate(own):
        if not _is_dense(value):
            kind = str(as_tensor(value).layout).removeprefix("torch.")
            return f"output {i} is {kind}, but only dense tensors can be compared"
    values = list(map(as_tensor, own))
    if any(v.numel() for v in values) and not any(v.isfinite().any() for v in values):
        return "the untouched workload returns no finite number to compare"
    return None


def _is_dense(value: Value) -> bool:
    return not isinstance(value, torch.Tensor) or value.layout == torch.strided


def _dense(value: Value) -> torch.Tensor:
    tensor = as_tensor(value)
    return tensor if _is_dense(tensor) else tensor.to_dense()


def equal(before: Sequence[Value], after: Sequence[Value]) -> bool:
    """Whether two sequences of values are equal, tensors elementwise; NaN equals NaN."""
    pairs = (map(_dense, pair) for pair in zip(before, after, strict=True))
    return all(
        torch.equal(a, b)
        or (a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()))
        for a, b in pairs
    )


def output_error(
    outputs: list[Value],
    reference: list[Value],
    slices: Sequence[dict[int, torch.Tensor]] | None = None,
) -> OutputError:
    """Worst error over outputs; for integers and booleans, the fraction of differing elements.

    Args:
        outputs: the values that a workload returned.
        reference: the same values in higher precision.
        slices: what `slices.explained` returned for each value; None to compare no slices.
    """
    found = OutputError(0.0, 0.0)
    for i, pair in enumerate(zip(outputs, reference, strict=True)):
        out, ref = real(*pair)
        if ref.numel() == 0 or not _is_dense(ref):  # `form_fault` rejects sparse ones
            continue
        if not ref.is_floating_point():
            differs = int((out != ref).count_nonzero()) / ref.numel()
            found = worst([found, OutputError(differs, differs)])
            continue
        found = worst([found, _relative_error(out, ref)])
        if slices is not None:
            error, where = largest(out, ref, slices[i])
            found = worst([found, OutputError(0.0, 0.0, error, f"output {i}{where}")])
    return found


def _relative_error(out: torch.Tensor, ref: torch.Tensor) -> OutputError:
    """Error over the finite elements, divided by the reference's size unless that is zero."""
    parts = zip(out.reshape(-1).split(COMPARED), ref.reshape(-1).split(COMPARED), strict=True)
    l2, peak, scale, largest = torch.stack([_sizes(*part) for part in parts]).unbind(1)
    l2, scale = float(l2.norm()), float(scale.norm())
    peak, largest = float(peak.max()), float(largest.max())
    return OutputError(l2 / scale if scale else l2, peak / largest if largest else peak)


def _sizes(out: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """L2 norm and largest magnitude of the error, then of the reference, in float64."""
    finite = ref.isfinite() & out.isfinite()
    wide = torch.where(finite, ref.double(), 0.0)
    delta = torch.where(finite, out.double() - wide, 0.0)
    return torch.stack([size for t in (delta, wide) for size in (t.norm(), t.abs().max())])


def _resolution(outputs: list[Value]) -> float:
    inexact = [o.dtype for o in map(as_tensor, outputs) if o.is_floating_point() or o.is_complex()]
    return max((torch.finfo(dtype).eps for dtype in inexact), default=0.0)
