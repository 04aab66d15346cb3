"""Detects whether a model has changed since its executors were built."""

from __future__ import annotations

import ctypes
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, eq, is_, itemgetter
from random import Random
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from steadytorch.native.host import load
from steadytorch.runtime.device_samples import DeviceSamples
from steadytorch.runtime.module_proxy import ModuleProxy
from steadytorch.workload.contents import checksum, home_of, kept_attributes
from steadytorch.workload.hooks import BACKWARD, FORWARD, ON_ALL, ON_ALL_BACKWARD, hooks_on_all
from steadytorch.workload.reads import Reads, environment

SAMPLES = 256
"""Elements compared at each check, at least one per tensor."""
MOST_PER_TENSOR = 16
SAMPLES_HERE = 64
"""Elements compared at each check in Python, at about 0.1 us each."""
ROUNDS = 8
"""Number of position sets; checks rotate through them, so that partial writes are found later."""

LATE = "found late: the last results may come from the old weights"

_END = object()
_CELLS = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}
_OF_MODULES = frozenset(vars(nn.Module()))
_LAYERS = ("torch.nn.modules.", "torch.nn.utils.", "torch.ao.nn.")
"""Where PyTorch defines layers, whose attributes are watched."""
_watching: WeakSet[Weights] = WeakSet()


class Weights:
    """Detects changes of weights, buffers, attributes, modules and hooks since `remember`.

    Each check compares four things:

    - Versions: in-place edits (`copy_`, `load_state_dict`, most optimizers) raise a tensor's
      version counter.
    - Addresses, and weak references to storages: moves and conversions replace a tensor's memory
      without raising its version, and the allocator may reuse freed memory.
    - Values: fused optimizers, `.data`, NumPy and kernels write without raising a version, and
      inference tensors have no version. Each check compares some elements of each CPU tensor; for
      GPUs see `DeviceSamples`.
    - Optimizer steps: PyTorch's global hook reports each step of an optimizer over a watched
      tensor.

    Plain attributes of layers of `torch.nn` and of modules of user-defined classes are compared
    too; of the latter also the contents of arrays and containers, nested ones included. Modules
    that code reads of globals, closures or objects are watched as submodules are.

    Limits, for writes that do not raise the version counter:

    - A write to a few elements of a large tensor may go undetected.
    - Compiled checks compare elements of every CPU tensor. A check in Python compares one element
      each of `SAMPLES_HERE` tensors, which the clock chooses. Of T tensors, it finds a rewrite of
      one whole tensor with a probability of SAMPLES_HERE / T: after T / SAMPLES_HERE stale calls on
      average, and after 5 times as many in 99 of 100 cases.

    Args:
        model: the model to watch.
        contents: whether to compare values. False for training, which writes weights at every
            step; only replaced tensors and `requires_grad` are compared then.

    Attributes:
        changed: whether anything changed since `remember`; called at every tuned call.
        rewritten: whether weights, buffers, modules, hooks or modes changed, without plain
            attributes; compares all samples, for the slow path.
        begin: call this before enqueueing the work of a tuned call; None if not needed.
        interpreted_for: why checks run in Python, which is slower; empty if compiled code runs
            them.
    """

    def __init__(self, model: nn.Module, contents: bool = True) -> None:
        self._model, self._contents = model, contents
        self._storages: list[Any] = []
        self._announced: list[Any] = []
        self._identities: frozenset[int] = frozenset()
        self.changed: Callable[[], bool] = lambda: False
        self.rewritten: Callable[[], bool] = lambda: False
        self.begin: Callable[[], None] | None = None
        self._loads: Counter[int] = Counter()
        self._moved: Callable[[Counter[int]], bool] = lambda loads: True
        self.interpreted_for = ""
        self._on_device = DeviceSamples(())

    def remember(self) -> None:
        """Stores the current state as the reference; call `remember` before `changed`."""
        hooks, on_all = FORWARD, ON_ALL
        if not self._contents:
            hooks, on_all = (*FORWARD, *BACKWARD), (*ON_ALL, *ON_ALL_BACKWARD)
        own = _Watched(self._model, hooks)
        all_held = _Watched(self._model, hooks, plain=self._contents)
        announced: list[Any] = []
        replaced: list[Any] = []
        self._announced, differ = announced, _interpreted
        if self._contents:
            self._identities = frozenset(map(id, all_held.tensors))
            self._storages = [
                *_storages(own.tensors, announced.append),
                *_storages(all_held.tensors[len(own.tensors) :], replaced.append),
            ]
            _watching.add(self)
            _announce_steps()
            compiled, self.interpreted_for = load()
            if compiled is not None and compiled.traits(tuple(all_held.tensors)) is not None:
                differ = partial(_compiled, compiled)
            elif compiled is not None:
                self.interpreted_for = "some weights are not plain tensors"
        rewritten = differ(own, self._contents, False)
        changed = differ(all_held, self._contents, True)
        self._moved = _moved(all_held)
        self._loads = Counter()
        self.rewritten = _with_events(rewritten, on_all, announced)
        self.changed = _with_events(changed, on_all, announced, replaced)
        self._on_device = DeviceSamples(all_held.tensors if self._contents else ())
        if self._on_device:
            self._sample_devices()

    def _sample_devices(self) -> None:
        samples, rewritten, changed = self._on_device, self.rewritten, self.changed
        self.begin = samples.begin
        # Sampled last: the checks before it rule out freed memory.
        self.rewritten = lambda: rewritten() or samples.differ_now()
        self.changed = lambda: changed() or samples.changed()

    @property
    def lateness(self) -> str:
        """Warning text if a write was detected only after results were returned; else empty."""
        return LATE if self._on_device.is_late else ""

    def expect(self, given: Mapping[str, Any], prefix: str = "") -> bool:
        """Records an upcoming state dict load; returns whether its values equal the model's.

        Call `expect` before loading the state dict. Loading equal values raises tensor versions
        without changing the weights; see `is_forgiven`.

        Args:
            given: the state dict to be loaded.
            prefix: prefix of the model's names in `given`.
        """
        own = self._model.state_dict(keep_vars=True)
        pairs = [(tensor, given.get(prefix + name)) for name, tensor in own.items()]
        is_own = not (self.rewritten() or self.changed()) or self._is_only_loaded()
        is_own = is_own and all(_is_same(tensor, other) for tensor, other in pairs)
        self._loads.update(id(tensor) for tensor, _ in pairs if is_own)
        return is_own

    def places(self) -> list[Any]:
        """Returns the identity, address, dtype and device of each parameter and buffer."""
        held = chain(self._model.parameters(), self._model.buffers())
        return [(id(t), _address(t), t.dtype, t.device) for t in held]

    def is_forgiven(self) -> bool:
        """Whether state dict loads with equal values were the only changes; see `expect`.

        If equal loads were the only changes, the current state becomes the new reference.
        """
        if not self._is_only_loaded():
            return False
        self.remember()
        return True

    def _is_only_loaded(self) -> bool:
        is_announced = bool(self._announced)
        return bool(self._loads) and not (is_announced or self._moved(self._loads))

    def step_of(self, optimizer: Optimizer) -> None:
        """Records an optimizer step if the optimizer updates a watched tensor."""
        if self._announced:
            return
        groups = optimizer.param_groups
        if not self._identities.isdisjoint(id(p) for group in groups for p in group["params"]):
            self._announced.append(optimizer.__class__)


def _announce_steps() -> None:
    """Registers PyTorch's global hook on optimizer steps, once per process."""
    if not _hooked:
        _hooked.append(register_optimizer_step_post_hook(_on_step))


_hooked: list[Any] = []


def _on_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():  # guards on watched weights would recompile the step
        return
    for weights in list(_watching):
        weights.step_of(optimizer)


class _Watched:
    """The parts of a model that are compared to detect changes.

    Args:
        model: the model to watch.
        hooks: names of the modules' dictionaries of hooks to include.
        plain: whether to include plain attributes.

    Attributes:
        tensors: all tensors; the model's parameters and buffers first.
        registries: dictionaries of parameters and buffers.
        links: dictionaries of submodules and hooks.
        modes: attribute dictionaries of the modules that have a training mode.
        attributes: attribute dictionaries of modules, and dictionaries in the user's own ones.
        partial: attribute dictionaries with weights that hooks compute at each call, and the names
            of the other attributes.
        sequences: other containers in attributes.
        arrays: arrays, as of NumPy, in attributes and in what is read elsewhere.
        reads: what the modules' code reads elsewhere: of objects, globals and closures.
    """

    def __init__(self, model: nn.Module, hooks: Sequence[str], plain: bool = False) -> None:
        modules = list(model.modules())
        self.attributes: list[dict[Any, Any]] = []
        self.partial: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self.sequences: list[Any] = []
        self.arrays: list[Any] = []
        self.reads = Reads()
        found: list[Tensor] = [*model.parameters(), *model.buffers()]
        roots = [model]
        if plain:
            walk = _Walk(modules, self.reads)
            modules, roots = walk.modules, [model, *walk.roots]
            found += [*walk.tensors, *filter(_is_watchable, self.reads.values())]
            self.partial = walk.partial
            self.attributes = [*walk.dictionaries, *self.reads.dictionaries]
            self.sequences = [*walk.sequences, *self.reads.lists]
            others = (*walk.others, *self.reads.values())
            self.arrays = [value for value in others if checksum(value) is not None]
        self.tensors = list({id(t): t for t in found}.values())
        proxies = list(_proxies(chain(roots, *map(_children, modules))))
        self.attributes += map(vars, proxies if plain else ())
        # Scripted modules make new registries at each access, which are not dictionaries.
        self.registries = [
            registry
            for module in modules
            for registry in (module._parameters, module._buffers)
            if registry and isinstance(registry, dict)
        ]
        self.links = [
            linked
            for module in (*modules, *proxies)
            for linked in (module._modules, *(vars(module).get(name) for name in hooks))
            if isinstance(linked, dict)
        ]
        self.modes = [vars(m) for m in modules if "training" in vars(m)]


class _Walk:
    """Finds tensors, containers and modules that modules hold in plain attributes or read.

    Args:
        modules: the modules to start from.
        reads: is extended by what the modules' code reads.

    Attributes:
        modules: the given modules, and modules found in attributes and in `reads`.
        roots: the modules whose trees were searched.
        tensors: tensors in plain attributes and in containers.
        dictionaries: attribute dictionaries of modules, and dictionaries in the user's own ones.
        partial: attribute dictionaries of which only the named items are compared.
        sequences: lists, sets and deques in the user's own modules.
        others: values in the user's own modules that are none of these.
    """

    def __init__(self, modules: list[nn.Module], reads: Reads) -> None:
        self.modules: list[nn.Module] = []
        self.roots: list[nn.Module] = []
        self.tensors: list[Tensor] = []
        self.dictionaries: list[dict[Any, Any]] = []
        self.partial: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self.sequences: list[Any] = []
        self.others: list[Any] = []
        self._seen: set[int] = set()
        waiting = modules
        while waiting:  # modules that code reads may read others
            known = len(self.modules), len(reads.modules)
            for module in waiting:
                self._module(module)
            for module in self.modules[known[0] :]:
                reads.forward(module)
            waiting = reads.modules[known[1] :]

    def _module(self, module: nn.Module) -> None:
        self.roots.append(module)
        for each in module.modules():
            if id(each) in self._seen:
                continue
            self._seen.add(id(each))
            self.modules.append(each)
            kept, home = kept_attributes(each), home_of(each)
            is_own = not home.startswith("torch.")
            if is_own or home.startswith(_LAYERS):
                # `kept` leaves out what PyTorch's hooks recompute.
                if len(kept) == len(vars(each)):
                    self.dictionaries.append(vars(each))
                else:
                    self.partial.append((vars(each), tuple(kept)))
            for name, value in kept.items():
                if name not in _OF_MODULES:
                    self._value(value, is_own)
            for tensor in (*each._parameters.values(), *each._buffers.values()):
                self.tensors += [] if tensor is None else [tensor]

    def _value(self, value: Any, is_own: bool) -> None:
        if isinstance(value, Tensor):
            self.tensors += [value] if _has_storage(value) else []
        elif isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, (dict, list, tuple, set, frozenset, deque)):
            if id(value) in self._seen:
                return
            self._seen.add(id(value))
            if is_own and isinstance(value, dict):
                self.dictionaries.append(value)
            elif is_own and isinstance(value, (list, set, deque)):
                self.sequences.append(value)
            for item in list(value.values() if isinstance(value, dict) else value):
                self._value(item, is_own)
        elif is_own:
            self.others.append(value)


def _children(module: nn.Module) -> list[nn.Module | None]:
    return [*module._modules.values()]


def _proxies(modules: Iterable[nn.Module | None]) -> Iterator[ModuleProxy]:
    """Yields proxies, which `modules()` leaves out, and proxies of which these are proxies."""
    for module in modules:
        while isinstance(module, ModuleProxy):
            yield module
            module = vars(module)["_model"]


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if _has_storage(tensor) else 0


def _storages(tensors: list[Tensor], freed: Callable[[Any], None]) -> list[Any]:
    """Returns weak references to tensor storages; `freed` is called when a storage is freed."""
    return [ref(tensor.untyped_storage(), freed) for tensor in tensors]


def _is_watchable(value: Any) -> bool:
    return isinstance(value, Tensor) and _has_storage(value)


def _counted(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors with a version; writes to inference tensors are found by their values alone."""
    return [tensor for tensor in tensors if not tensor.is_inference()]


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def _with_events(
    differs: Callable[[], bool], registries: Sequence[Mapping[Any, Any]], *announced: list[Any]
) -> Callable[[], bool]:
    """Extends a comparison with checks of global module hooks and of recorded events.

    Args:
        differs: whether the weights differ from those remembered.
        registries: the global hooks' dictionaries.
        announced: lists to which freed storages, and optimizer steps, add an item.
    """
    on_all = hooks_on_all(registries)
    freed, replaced = announced[0], announced[-1]

    def changed() -> bool:
        if freed or replaced:
            return True
        return differs() or (hooks_on_all(registries) if any(registries) else ()) != on_all

    return changed


def _compiled(module: Any, held: _Watched, contents: bool, by_turns: bool) -> Callable[[], bool]:
    """Returns a function that compares weights in compiled code; needs plain tensors with storage.

    Args:
        module: the compiled code.
        held: the parts of the model.
        contents: always true here; training uses the comparison in Python.
        by_turns: whether each check compares one set of samples instead of all.
    """
    tensors = tuple(held.tensors)
    each = min(MOST_PER_TENSOR, max(1, SAMPLES // max(1, len(tensors))))
    rounds = tuple(module.samples(tensors, each, seed) for seed in range(1, ROUNDS + 1))
    dictionaries = (*held.registries, *held.links, *held.attributes)
    # dict.items gives the order that C sees; an OrderedDict of hooks may iterate otherwise.
    parts = tuple(tuple(chain.from_iterable(dict.items(found))) for found in dictionaries)
    modes = tuple(found["training"] for found in held.modes)
    differs = partial(
        module.changed,
        *(tensors, module.traits(tensors), rounds if by_turns else (b"".join(rounds),)),
        *(dictionaries, parts, tuple(held.modes), modes),
    )
    return _with_containers(differs, held)


def _with_containers(differs: Callable[[], bool], held: _Watched) -> Callable[[], bool]:
    """Extends a comparison with checks of containers and of values that code reads elsewhere."""
    sequences, values, arrays = held.sequences, held.reads.values, held.arrays
    if not (sequences or held.reads or arrays or held.partial):
        return differs
    items, known = [list(found) for found in sequences], values()
    sums = [*map(checksum, arrays)]
    rare = [_Part(found, names).differs for found, names in held.partial]
    if held.reads.asks_for_absent:
        rare.append(held.reads.has_gained)
    if held.reads.reads_environment:
        variables = environment()
        rare.append(lambda: environment() != variables)

    def changed() -> bool:
        return (
            differs()
            or not all(map(_holds, sequences, items))
            or not all(map(is_, values(), known))
            or [*map(checksum, arrays)] != sums
            or (bool(rare) and any(each() for each in rare))
        )

    return changed


class _Part:
    """Compares items of a dictionary with those that it had, and the number of all."""

    def __init__(self, held: dict[str, Any], names: tuple[str, ...]) -> None:
        self._held, self._read = held, itemgetter(*names)
        self._size, self._known = len(held), self._read(held)

    def differs(self) -> bool:
        try:
            now = self._read(self._held)
        except KeyError:
            return True
        return len(self._held) != self._size or not all(map(is_, now, self._known))


def _holds(container: Any, items: list[Any]) -> bool:
    return len(container) == len(items) and all(map(is_, container, items))


def _interpreted(held: _Watched, contents: bool, by_turns: bool) -> Callable[[], bool]:
    """Returns a pure-Python function that compares weights as `_compiled` does."""
    structure = _structure(held, [] if contents else held.tensors)
    written = held.tensors if contents else []
    version, place, value = attrgetter("_version"), Tensor.data_ptr, attrgetter("value")
    counted = _counted(written)
    versions, places = [*map(version, counted)], [*map(place, written)]
    number = max(ROUNDS, len(written) // SAMPLES_HERE + 1)
    rounds = [_round(written, turn) for turn in range(number)]
    own = [[*chain.from_iterable(dict.items(found))] for found in held.attributes]
    clock = time.perf_counter_ns

    def differs() -> bool:
        turn = clock() // 64 % number
        try:
            if [*map(version, counted)] != versions or [*map(place, written)] != places:
                return True
            for some, cells, known in (rounds[turn],) if by_turns else rounds:
                # Compares addresses again in one expression that no other thread interrupts, so
                # that freed memory is not read.
                if not all(map(eq, chain(map(place, some), map(value, cells)), known)):
                    return True
        except RuntimeError:  # a tensor without version or address was swapped in
            return True
        return structure() or not all(map(_has_items, held.attributes, own))

    return _with_containers(differs, held)


def _is_same(tensor: Any, given: Any) -> bool:
    """Whether a state dict entry equals a tensor; False for entries that are not tensors."""
    if not (isinstance(tensor, Tensor) and isinstance(given, Tensor)):
        return False
    is_alike = tensor.dtype == given.dtype and tensor.device == given.device
    return is_alike and torch.equal(tensor, given)


def _moved(held: _Watched) -> Callable[[Counter[int]], bool]:
    """Returns a function that tells whether anything changed besides loads of a state dict.

    Loading a state dict raises the version of each tensor by one. Writes that do not raise a
    version are found by comparing sampled elements.
    """
    structure = _structure(held, [])
    items = [[*chain.from_iterable(dict.items(found))] for found in held.attributes]
    containers = _with_containers(lambda: False, held)
    tensors, counted, turns = held.tensors, _counted(held.tensors), range(ROUNDS)
    versions = [tensor._version for tensor in counted]
    samples = [_round(tensors, turn)[2] for turn in turns]

    def moved(loads: Counter[int]) -> bool:
        return (
            structure()
            or containers()
            or not all(map(_has_items, held.attributes, items))
            or [t._version - loads[id(t)] for t in counted] != versions
            or [_round(tensors, turn)[2] for turn in turns] != samples
        )

    return moved


def _structure(held: _Watched, trained: list[Tensor]) -> Callable[[], bool]:
    """Returns a check for replaced tensors, modules and hooks, and for changed modes and flags."""
    flatten = chain.from_iterable
    # The end marker makes an added or removed item a difference.
    parts = (part for found in held.registries for part in (dict.keys(found), dict.values(found)))
    rows: list[Iterable[Any]] = [*parts, (_END,)]
    objects = list(flatten(rows))
    # Most modules have no children and no hooks. Comparing dictionaries is faster, and sound since
    # modules and hooks compare by identity.
    empty, filled = [d for d in held.links if not d], [d for d in held.links if d]
    linked = [dict(found) for found in filled]
    gradients = [(tensor, tensor.requires_grad) for tensor in trained]
    modes = [(found, found["training"]) for found in held.modes]

    def differs() -> bool:
        for tensor, needed in gradients:
            if tensor.requires_grad != needed:
                return True
        for found, mode in modes:
            if found.get("training") is not mode:
                return True
        return not (all(map(is_, flatten(rows), objects)) and not any(empty) and filled == linked)

    return differs


def _has_items(dictionary: dict[Any, Any], items: list[Any]) -> bool:
    now = chain.from_iterable(dict.items(dictionary))
    return 2 * len(dictionary) == len(items) and all(map(is_, now, items))


_Round = tuple[list[Tensor], list[Any], list[int]]
"""Tensors, a ctypes cell on one element of each, and the expected addresses and cell values."""


def _round(tensors: list[Tensor], turn: int) -> _Round:
    """Samples one set of tensor elements for the comparison in Python."""
    readable = [tensor for tensor in tensors if _is_readable(tensor)]
    begin = turn * SAMPLES_HERE % max(1, len(readable))
    some, random = (
        [*readable, *readable][begin : begin + SAMPLES_HERE][: len(readable)],
        Random(turn),
    )
    cells = [_cell(tensor, random) for tensor in some]
    return some, cells, [*map(Tensor.data_ptr, some), *(cell.value for cell in cells)]


def _is_readable(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_nested
    return (
        is_plain
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and tensor.data_ptr() != 0
    )


def _cell(tensor: Tensor, random: Random) -> Any:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    place = sum(random.randrange(size) * stride for size, stride in sizes)
    kind = _CELLS[min(8, tensor.itemsize)]
    return kind.from_address(tensor.data_ptr() + place * tensor.itemsize)
