"""Exports a model for another engine as a flat program, with a description of its results.

The exported program takes and returns flat sequences of tensors. `Form` records the input names,
how results are nested, and which results are constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from steadytorch.errors import UnsupportedError, first_line
from steadytorch.workload.contents import contents, same
from steadytorch.workload.generators import restored
from steadytorch.workload.signature import in_order, strides_of
from steadytorch.workload.workload import Workload

WRITES = "the model writes to its inputs, buffers or containers, which an engine would not"
DRAWS = "the model draws random numbers when called, which an engine would draw otherwise"
_CONSTANTS = (bool, int, float, str, type(None))
_PLAIN = (Tensor, nn.Parameter)


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layout of a tensor.

    Attributes:
        shape: sizes.
        dtype: element type without the `torch.` prefix.
        strides: in elements, of dimensions longer than 1.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """The layout of a tensor."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(tuple(map(int, tensor.shape)), dtype, tuple(map(int, strides_of(tensor))))


class Form(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names of an exported program's inputs, and layout and nesting of its results.

    Attributes:
        inputs: names of the program's inputs, one per tensor among the arguments.
        nesting: how results are nested, in the format of PyTorch's pytree.
        results: each result in order: the layout of a tensor, or a constant.
    """

    inputs: tuple[str, ...]
    nesting: str
    results: tuple[Layout | bool | int | float | str | None, ...]


class Exported(NamedTuple):
    """An exported model.

    Attributes:
        program: takes the tensors of a call and returns tensors.
        form: the names of the inputs, and the layout and nesting of the results.
    """

    program: torch.export.ExportedProgram
    form: Form


def flattened(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the pytree leaves of a call: positional arguments, then keyword arguments by name."""
    return pytree.tree_leaves((args, in_order(kwargs)))


def export(workload: Workload) -> Exported:
    """Exports a workload's model with `torch.export` for the shapes of the workload's inputs.

    Args:
        workload: an inference workload on the CPU whose model is an `nn.Module`.

    Raises:
        UnsupportedError: the model cannot be exported, writes to state or arguments, draws random
            numbers, asserts values of tensors, or returns something other than tensors and
            constants; or an input cannot be passed to an engine.
    """
    given = workload.inputs, in_order(workload.kwargs)
    leaves, nesting = pytree.tree_flatten(given)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    for tensor in tensors:
        _check(tensor)
    seen: list[tuple[list[Any], Any]] = []
    flat = _Flat(workload.model, leaves, nesting, seen)
    why = "the model cannot be exported"
    with torch.inference_mode(False), torch.no_grad(), _reason(why), _containers(workload.model):
        program = torch.export.export(flat, tensors, strict=False)
    if any(map(_may_draw, program.graph.nodes)) and _draws(workload):
        raise UnsupportedError(DRAWS)
    if any(map(_asserts, program.graph.nodes)):
        raise UnsupportedError("engines would not check what the model asserts")
    signature = program.graph_signature
    found, returned = seen[-1]
    held = {spec.arg.name for spec in signature.input_specs}
    layouts = []
    for spec in signature.output_specs:
        if spec.arg.name in held:
            raise UnsupportedError("the model returns one of its inputs or weights unchanged")
        layouts.append(Layout.of(_value(program, spec.arg.name)))
    following = iter(layouts)
    results = tuple(next(following) if isinstance(v, Tensor) else v for v in found)
    return Exported(
        program, Form(tuple(map(str, signature.user_inputs)), _dumped(returned), results)
    )


@contextmanager
def _containers(model: nn.Module) -> Iterator[None]:
    """Puts a model's own containers back in its attributes, where `torch.export` leaves equals."""
    kept = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for held, before in kept:
            for name, value in before.items():
                now = held.get(name)
                if now is not value and same(contents(value), contents(now)):
                    held[name] = value


def _may_draw(node: torch.fx.Node) -> bool:
    """Whether an operator draws random numbers with some arguments, as attention and dropout do."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _asserts(node: torch.fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) is torch.ops.aten._assert_async


def _draws(workload: Workload) -> bool:
    """Whether a call of the model, on copies of its inputs, draws random numbers."""
    copies = pytree.tree_map_only(Tensor, Tensor.clone, (workload.inputs, dict(workload.kwargs)))
    with restored(), torch.no_grad():
        before = torch.get_rng_state()
        workload.model(*copies[0], **copies[1])
        return not torch.equal(before, torch.get_rng_state())


def _check(tensor: Tensor) -> None:
    if type(tensor) not in _PLAIN or tensor.layout != torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        raise UnsupportedError(f"an input is a {kind} {type(tensor).__name__}, not a plain tensor")
    if tensor.is_complex():
        raise UnsupportedError("an input is complex, which engines do not take")
    if tensor.device.type != "cpu":
        raise UnsupportedError(f"an input is on {tensor.device}, not on the CPU")


class _Flat(nn.Module):
    """Wraps a model so that it takes flat tensors and returns the flat tensors of its result.

    Args:
        model: the model.
        leaves: pytree leaves of the arguments; the flat tensors of a call replace the tensors among
            them.
        nesting: the pytree structure of the arguments.
        seen: receives the leaves and the nesting of each result.
    """

    def __init__(self, model: nn.Module, leaves: list[Any], nesting: Any, seen: list[Any]) -> None:
        super().__init__()
        self.model = model
        places = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        self._arguments = lambda following: pytree.tree_unflatten(
            [next(following) if place is None else place[0] for place in places], nesting
        )
        self._seen: Callable[[Any], None] = lambda result: seen.append(result)
        self.training = model.training  # `train` would set the modes of the model's modules

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = self._arguments(iter(tensors))
        before = pytree.tree_flatten((args, kwargs))
        returned = self.model(*args, **kwargs)
        after = pytree.tree_flatten((args, kwargs))
        if before[1] != after[1] or any(
            a is not b for a, b in zip(before[0], after[0], strict=True)
        ):
            raise UnsupportedError(WRITES)
        leaves, nesting = pytree.tree_flatten(returned)
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *_CONSTANTS)):
                kind = type(leaf).__name__
                raise UnsupportedError(f"the model returns a {kind}, which cannot be rebuilt")
        self._seen((leaves, nesting))
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


def _value(program: torch.export.ExportedProgram, name: str) -> Tensor:
    return next(node.meta["val"] for node in program.graph.nodes if node.name == name)


def _dumped(nesting: pytree.TreeSpec) -> str:
    with _reason("the model's results cannot be described"):
        return pytree.treespec_dumps(nesting)


@contextmanager
def _reason(clause: str) -> Iterator[None]:
    try:
        yield
    except UnsupportedError:
        raise
    except Exception as error:
        raise UnsupportedError(f"{clause}: {first_line(error)}") from error
