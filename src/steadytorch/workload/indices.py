"""Finds the indices and divisors of a call, and tells whether another call has them in range.

PyTorch raises an exception for an index out of range, and for an integer divided by 0. Compiled
code on a CPU ends the process, and other engines return something.

An index may be an input, or be computed, as in `F.embedding(ids + 1, table)`. One call is recorded.
Of its operators, those that lead from inputs to indices are repeated before later calls.

For an engine that computes large integers wrongly, other integers that a call computes are found as
well, such as the product in `ids * 1000003 % 50`.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from steadytorch.workload.index_ranges import Range, uses

MOST_STEPS = 64
"""Maximum number of operators that are repeated. Where more are needed, no computed index is
known."""
MOST_ELEMENTS = 1 << 20
"""Maximum number of elements that the repeated operators return, views apart; converting so many
numbers takes 0.5 ms."""
MOST_CONSTANTS = 1 << 12
"""Maximum size of a floating-point tensor of the model that they read, such as a scale."""
MOST_BYTES = 1 << 26
"""Maximum size of all results that are kept while a call is recorded."""

SECONDS = 0.05
"""CPU time of the thread for which a call without integers among its inputs is recorded: models
convert inputs first, and their large layers come later. A ResNet-50 at batch 64 takes 5 s on two
cores."""

aten = torch.ops.aten
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_WHOLE = (
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.expand.default,
    aten.flip.default,
    aten.permute.default,
    aten.roll.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten._reshape_copy.default,
    aten._to_copy.default,
    aten._unsafe_view.default,
)
"""Operators that return all elements of a tensor, in another order or shape."""
_REPEATED_AS = {
    aten.view.default: aten.reshape.default,  # later inputs may have gaps
    aten._unsafe_view.default: aten.reshape.default,
}
_SELECTING = (
    aten.amax,
    aten.amin,
    aten.cat,
    aten.clamp,
    aten.constant_pad_nd,
    aten.embedding,
    aten.gather,
    aten.index,
    aten.index_select,
    aten.masked_fill,
    aten.max,
    aten.maximum,
    aten.min,
    aten.minimum,
    aten.repeat,
    aten.sort,
    aten.stack,
    aten.topk,
    aten.where,
)
"""Further operators whose results hold no larger integers than they take."""
_PLACES = (aten.argmax, aten.argmin, aten.argsort)
"""Operators that return places, which are in range."""
_ALSO_PLACES = (aten.kthvalue, aten.max, aten.median, aten.min, aten.mode, aten.sort, aten.topk)
"""Operators that return places after values."""
_UNREPEATABLE = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
)


class _Slot(NamedTuple):
    """Stands for a tensor in the arguments of a step."""

    number: int


class _Step(NamedTuple):
    """An operator to repeat; `results` are the slots of the tensors that it returns."""

    operator: Any
    args: Any
    kwargs: Any
    results: tuple[int, ...]


class _Check(NamedTuple):
    """The slot of a computed index, divisor or other integer, and its range."""

    slot: int
    allowed: Range


def _is_check_of(allowed: Range | None, part: _Step | _Check) -> bool:
    return isinstance(part, _Check) and part.allowed == allowed


class Indices:
    """The indices and divisors of a call, and other integers that have a range.

    Args:
        given: ranges of those that are inputs of the call, by place.
        program: steps that compute others, and checks of these, in order. Inputs are in the slots
            of their places.
        constants: other tensors that the steps read, by slot.
        within: range of integers that are neither indices nor divisors, or None.

    Attributes:
        given: ranges of indices and divisors that are inputs, by place.
        within: range of other integers that the call computes; None if it computes none.
    """

    def __init__(
        self,
        given: Mapping[int, Range],
        program: Sequence[_Step | _Check] = (),
        constants: Mapping[int, Tensor] | None = None,
        within: Range | None = None,
    ) -> None:
        self.given, self._program = dict(given), tuple(program)
        self._constants = dict(constants or {})
        is_checked = any(_is_check_of(within, part) for part in self._program)
        self.within = within if is_checked else None

    def __bool__(self) -> bool:
        return bool(self.given or self._program)

    def out_of_range(self, tensors: Sequence[Any]) -> bool:
        """Whether a call on these tensors has an index or other integer out of its range."""
        for place, allowed in self.given.items():
            if allowed.excludes(tensors[place]):
                return True
        return bool(self._program) and self._repeated(tensors)

    def allowing(self, tensors: Sequence[Any]) -> Indices:
        """These without the checks that a call on these tensors fails, although it succeeds.

        A call may use a part of an index only. The range of other integers stays.
        """
        given = {
            n: allowed for n, allowed in self.given.items() if not allowed.excludes(tensors[n])
        }
        failed: list[_Check] = []
        if self._program and self._repeated(tensors, failed):
            return Indices(given)  # a step raised
        kept = [p for p in self._program if p not in failed or _is_check_of(self.within, p)]
        is_needed = any(isinstance(part, _Check) for part in kept)
        return Indices(given, kept if is_needed else (), self._constants, self.within)

    @torch.no_grad()
    def _repeated(self, tensors: Sequence[Any], failed: list[_Check] | None = None) -> bool:
        """Whether a check fails or a step raises; failing checks go to `failed`, if given."""
        slots = dict(enumerate(tensors)) | self._constants
        for part in self._program:
            if isinstance(part, _Check):
                if part.allowed.excludes(slots[part.slot]):
                    if failed is None:
                        return True
                    failed.append(part)
                continue
            try:
                found = part.operator(*_filled(part.args, slots), **_filled(part.kwargs, slots))
                slots.update(zip(part.results, _tensors(found), strict=True))
            except Exception:  # as the call would, for an index of indices
                return True
        return False


def checked(call: Callable[..., Any], indices: Indices) -> Callable[..., Any]:
    """The call of flat tensors, which raises IndexError if an index or divisor is out of range."""
    if not indices:
        return call

    def check(*tensors: Tensor) -> Any:
        if indices.out_of_range(tensors):
            raise IndexError("index out of range")
        return call(*tensors)

    return check


def may_be_index(value: Any) -> bool:
    """Whether a value is an integer tensor on the CPU."""
    return _is_plain(value) and value.dtype in _INTEGERS


def find_indices(
    call: Callable[[], Any],
    tensors: Sequence[Any],
    live: Mapping[int, Tensor] | None = None,
    within: Range | None = None,
) -> Indices:
    """Runs a call and returns which inputs it uses as indices or divisors, and which it computes.

    A computed index is known if at most `MOST_STEPS` operators make it from inputs, integer tensors
    and small tensors of the model. None is known after the call has read a number from a tensor
    that depends on inputs, or after `SECONDS` if no input is an integer tensor. Branches are taken
    as in this call. Places that an operator such as `argmax` returns are taken to be in range.

    Args:
        call: runs PyTorch operators on the tensors; they may be fake tensors.
        tensors: the inputs of the call; those that are not on the CPU are ignored.
        live: if the call reads copies, the originals by the `id` of their copies.
        within: range of all other integers that it computes from its inputs, or None. They are
            left out if they need more operators than are repeated.
    """
    seconds = math.inf if any(map(may_be_index, tensors)) else SECONDS
    is_there = "torch._dynamo" in sys.modules
    kind = _RecorderBesideDynamo if is_there else _Recorder
    recorder = kind(tensors, time.thread_time() + seconds, within)
    try:
        with recorder, torch.no_grad(), suppress(_EnoughError):
            call()
    except NotImplementedError:  # PyTorch has no rule for a higher-order operator under a mode
        recorder.met_higher_order = True
        raise
    finally:
        came = "torch._dynamo" in sys.modules and not is_there
        is_traced = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if (came or recorder.met_higher_order) and not is_traced:
            # Eager ones compile. Under a mode, Dynamo has marked their code as not to be compiled.
            torch._dynamo.reset()
    return Indices(recorder.given, *recorder.tape.program(live or {}), within)


class _EnoughError(BaseException):  # models may catch other exceptions
    """Ends a call that has been recorded for long enough."""


class _Recorder(TorchDispatchMode):
    """Follows inputs through `_WHOLE` operators, and leaves others to a tape.

    Args:
        tensors: the inputs of the call.
        until_s: when the recording ends, in seconds of `time.thread_time`.
        within: range of integers that are neither indices nor divisors, or None.

    Attributes:
        given: ranges of inputs by place.
        tape: computed indices.
        met_higher_order: whether the call ran an operator that takes functions.
    """

    supports_higher_order_operators = True  # such as `torch.cond`, whose results are not known

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch would import Dynamo to keep it out, which takes 1.5 s

    def __init__(self, tensors: Sequence[Any], until_s: float, within: Range | None) -> None:
        super().__init__()
        self._until_s = until_s
        self.given: dict[int, Range] = {}
        self.met_higher_order = False
        self.tape = _Tape(tensors, within)
        # Keeps the tensors alive, so that no id is used twice.
        self._places: dict[int, tuple[Tensor, int]] = {
            id(tensor): (tensor, place)
            for place, tensor in enumerate(tensors)
            if may_be_index(tensor)
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if time.thread_time() > self._until_s:
            raise _EnoughError
        if not isinstance(func, torch._ops.OpOverload):
            self.met_higher_order = True
            found = func(*args, **kwargs)
            self.tape.lose(_tensors(found))
            return found
        found = func(*args, **kwargs)
        for index, allowed in uses(func, args, found):
            if id(index) in self._places:
                place = self._places[id(index)][1]
                self.given[place] = allowed.within(self.given.get(place, allowed))
            else:
                self.tape.check(index, allowed)
        if func in _WHOLE and id(args[0]) in self._places:
            place = self._places[id(args[0])][1]
            if found.dtype in (args[0].dtype, torch.int64):  # others do not hold all values
                self._places[id(found)] = found, place
        written = _written(func, args, kwargs)
        if written:
            memory = set(map(_memory, filter(_is_plain, written)))
            self._places = {
                key: kept for key, kept in self._places.items() if _memory(kept[0]) not in memory
            }
        if isinstance(found, int | float) and not isinstance(found, bool):
            self.tape.read(args[0])
        self.tape.note(_Step(func, args, kwargs, ()), _tensors(found), written)
        return found


class _RecorderBesideDynamo(_Recorder):
    """A recorder that Dynamo does not compile."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Part(NamedTuple):
    """A step or check on the tape.

    Attributes:
        what: the step or check.
        reads: the slots that it reads.
        memory: the memory of all its tensors.
        written: the memory that it writes to.
        size: how many elements it returns.
    """

    what: _Step | _Check
    reads: frozenset[int]
    memory: frozenset[int]
    written: frozenset[int] = frozenset()
    size: int = 0


class _Tape:
    """The operators whose results depend on inputs and constants alone, and checks of results.

    Each view has a slot of its own; a write to one changes all views of that memory.

    Args:
        tensors: the inputs of the call.
        within: range of integers that are neither indices nor divisors, or None. Their checks
            are left out if they need too many steps.
    """

    def __init__(self, tensors: Sequence[Any], within: Range | None = None) -> None:
        self._within = within
        self._slots = {
            id(tensor): (tensor, place) for place, tensor in enumerate(tensors) if _is_plain(tensor)
        }
        self._given = self._next = len(tensors)
        self._parts: list[_Part] = []
        self._checked: set[tuple[_Check, int]] = set()
        self._writes: Counter[int] = Counter()
        self._inputs = frozenset(_memory(tensor) for tensor, _ in self._slots.values())
        self._varying = set(self._inputs)  # memory that depends on inputs
        self._fresh = set[int]()  # memory that steps allocate
        self._unknown: dict[int, Tensor] = {}  # memory whose contents cannot be repeated
        self._bounds: dict[tuple[int, int], Range] = {}  # of slots, after so many writes
        self._bytes, self._ended = 0, False

    def check(self, index: Any, allowed: Range) -> None:
        """Notes that the call uses a tensor as an index or divisor."""
        if self._ended or not may_be_index(index) or id(index) not in self._slots:
            return
        slot, memory = self._slots[id(index)][1], _memory(index)
        key = _Check(slot, allowed), self._writes[memory]
        bounds = self._bounds.get((slot, self._writes[memory]))
        if bounds is not None and allowed.contains(bounds):
            return
        if memory in self._varying and memory not in self._unknown and key not in self._checked:
            self._checked.add(key)
            self._parts.append(_Part(key[0], frozenset((slot,)), frozenset((memory,))))

    def note(self, step: _Step, made: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Notes an operator.

        Args:
            step: the operator and its arguments, tensors among them.
            made: tensors that it returned.
            written: tensors that it wrote to.
        """
        if self._ended:
            return
        given = _tensors((step.args, step.kwargs))
        memory = frozenset(map(_memory, filter(_is_plain, [*given, *made])))
        changed = frozenset(map(_memory, filter(_is_plain, written)))
        if not self._repeats(step.operator, given, made, changed):
            self.lose([*filter(_may_be_constant, made), *written])
            return
        reads = frozenset(map(self._slot, given))
        args, kwargs = self._described(step.args), self._described(step.kwargs)
        results = tuple(map(self._slot, made))
        returned = frozenset(map(_memory, made))
        self._fresh |= returned - frozenset(map(_memory, given))
        self._writes.update(changed)
        if not memory.isdisjoint(self._varying):
            self._varying |= changed | returned
        operator = _REPEATED_AS.get(step.operator, step.operator)
        size = 0 if step.operator.is_view else sum(tensor.numel() for tensor in made)
        self._bytes += 0 if step.operator.is_view else sum(tensor.nbytes for tensor in made)
        what = _Step(operator, args, kwargs, results)
        self._parts.append(_Part(what, reads, memory, changed, size))
        if step.operator.overloadpacket in _ALSO_PLACES and len(made) == 2:
            self._unknown[_memory(made[1])] = made[1]
        elif (bounds := _bounds(step)) is not None:
            self._bounds[results[0], self._writes[_memory(made[0])]] = bounds
        if self._within is not None and _may_grow(step.operator):
            for tensor in made:
                if tensor.dtype in (torch.int64, torch.int32):
                    self.check(tensor, self._within)

    def read(self, tensor: Tensor) -> None:
        """Notes that the call read a number from a tensor, with which it may compute indices."""
        self._ended = self._ended or (_is_plain(tensor) and _memory(tensor) in self._varying)

    def lose(self, tensors: Sequence[Tensor]) -> None:
        """Notes that the contents of tensors cannot be repeated."""
        self._unknown |= {_memory(tensor): tensor for tensor in tensors if _is_plain(tensor)}

    def _repeats(
        self,
        operator: Any,
        given: Sequence[Tensor],
        made: Sequence[Tensor],
        changed: frozenset[int],
    ) -> bool:
        if operator.namespace not in ("aten", "prims") or operator.overloadpacket in _PLACES:
            return False  # an operator of the user's may do more than return
        if not (made or changed) or self._bytes > MOST_BYTES:
            return False
        if any(tag in operator.tags for tag in _UNREPEATABLE):
            return False
        is_known = changed <= self._fresh and all(map(self._is_known, given))
        return is_known and all(
            _is_plain(t) and (operator.is_view or t.numel() <= MOST_ELEMENTS) for t in made
        )

    def _is_known(self, tensor: Tensor) -> bool:
        if not _is_plain(tensor) or _memory(tensor) in self._unknown:
            return False
        if id(tensor) in self._slots:
            return True
        # A constant, or held by the model.
        return _may_be_constant(tensor) and not isinstance(tensor, FakeTensor)

    def _slot(self, tensor: Tensor) -> int:
        if id(tensor) not in self._slots:
            self._slots[id(tensor)] = tensor, self._next
            self._next += 1
        return self._slots[id(tensor)][1]

    def _described(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _Slot(self._slot(value))
        if isinstance(value, dict):
            return {name: self._described(item) for name, item in value.items()}
        if isinstance(value, tuple | list):
            return list(map(self._described, value))
        return value

    def program(self, live: Mapping[int, Tensor]) -> tuple[list[_Step | _Check], dict[int, Tensor]]:
        """The checks and the steps that they need, in order, and the constants of these by slot."""
        parts = self._needed(self._parts)
        if not _is_short(parts):
            parts = self._needed(
                [part for part in self._parts if not _is_check_of(self._within, part.what)]
            )
        if not _is_short(parts):
            return [], {}
        held = {slot: live.get(key, tensor) for key, (tensor, slot) in self._slots.items()}
        constants, known = dict[int, Tensor](), set(range(self._given))
        for part in parts:
            constants |= {slot: held[slot] for slot in part.reads - known}
            known |= part.reads.union(part.what.results if isinstance(part.what, _Step) else ())
        return [part.what for part in parts], constants

    def _needed(self, recorded: Sequence[_Part]) -> list[_Part]:
        """The checks among parts, and the steps before them on which they depend."""
        parts, slots, memory = list[_Part](), set[int](), set[int]()
        for part in reversed(recorded):
            is_needed = isinstance(part.what, _Check) or not slots.isdisjoint(part.what.results)
            if is_needed or not memory.isdisjoint(part.written):
                parts.append(part)
                slots |= part.reads
                memory |= part.memory
        return parts[::-1]


def _may_grow(operator: Any) -> bool:
    """Whether an operator may return larger integers than it takes."""
    if operator.is_view or operator.overloadpacket in _SELECTING:
        return False
    return operator not in _WHOLE or operator is aten._to_copy.default


def _is_short(parts: Sequence[_Part]) -> bool:
    steps = sum(isinstance(part.what, _Step) for part in parts)
    return steps <= MOST_STEPS and sum(part.size for part in parts) <= MOST_ELEMENTS


def _may_be_constant(tensor: Tensor) -> bool:
    return tensor.numel() <= (MOST_CONSTANTS if tensor.is_floating_point() else MOST_ELEMENTS)


def _bounds(step: _Step) -> Range | None:
    """The range of the result, if the operator limits it."""
    if step.operator is aten.remainder.Scalar and isinstance(step.args[1], int):
        return Range(0, step.args[1]) if step.args[1] > 0 else None
    if step.operator is aten.clamp.default and not step.kwargs and len(step.args) == 3:
        low, high = step.args[1:]
        if isinstance(low, int) and isinstance(high, int):
            return Range(low, high + 1)
    return None


def _is_plain(value: Any) -> bool:
    """Whether a value is a strided tensor on the CPU."""
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return False
    return value.layout == torch.strided and not value.is_nested


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that an operator writes to."""
    expected = func._schema.arguments
    given = [args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(expected)]
    changed = zip(expected, given, strict=True)
    return [
        tensor
        for argument, value in changed
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value)
    ]


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in the arguments or results of an operator."""
    return list(_each_tensor(value))


def _each_tensor(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _each_tensor(item)


def _filled(value: Any, slots: Mapping[int, Any]) -> Any:
    if isinstance(value, _Slot):
        return slots[value.number]
    if isinstance(value, dict):
        return {name: _filled(item, slots) for name, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, slots) for item in value]
    return value
