"""Whole training steps as CUDA graphs.

The first steps of each input signature run eagerly: they are real training steps and serve as
warm-up. The step after the warm-up is recorded, which executes nothing, and then replayed.
Recording changes no weights, statistics or random number state.

Before each replay, the host checks that all values baked into the graph are unchanged. Values baked
into a graph are the addresses of parameters, buffers and optimizer state, hyper-parameters, modes
and plain attributes. Inputs and learning rates are copied to buffers that the graph reads. Steps
that cannot be replayed run eagerly.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from itertools import chain
from numbers import Number
from operator import is_
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import increment_version
from torch.optim import LBFGS, SparseAdam

from steadytorch.ambient import has_function_mode, in_force
from steadytorch.graphs.checks import Snapshot, synchronisations
from steadytorch.graphs.recording import first_cause, recording, release_frames
from steadytorch.graphs.settings import Settings
from steadytorch.graphs.static_buffers import feeder, static_inputs
from steadytorch.workload.contents import Contents, contents, kept_attributes, same, version
from steadytorch.workload.generators import host_states
from steadytorch.workload.hooks import BACKWARD as BACKWARD_HOOKS
from steadytorch.workload.hooks import FORWARD
from steadytorch.workload.reads import modules_read
from steadytorch.workload.signature import CONSTANTS, tensors_of
from steadytorch.workload.step import EagerStep
from steadytorch.workload.update import (
    FUSED,
    OWN,
    OWN_STEP,
    GroupRates,
    has_own_step,
    hyper_parameters,
    move_counters,
    number,
    return_counters,
)

BACKWARD, UPDATE, STEP = "backward", "update", "step"
"""What is recorded. BACKWARD: forward, loss and backward. UPDATE: also the update, as a second
graph. STEP: all in one graph; with gradient accumulation, the same as UPDATE."""
WARM_UP = 3
"""Eager steps before the first recording. PyTorch's own recipe takes as many: libraries choose
their algorithms and allocate workspaces meanwhile."""
WARM_UP_AGAIN = 2
"""Eager steps of each further signature."""
MOST_SIGNATURES = 16
"""Graphs kept; the least recently used goes."""
MOST_ANEW = 3
"""Maximum re-recordings because a hyper-parameter or attribute changed, or a tensor moved. After
that, the affected part of the step runs eagerly."""
REPAID = 100
"""Replays that repay a recording, which takes about five eager steps. Graphs dropped for memory
earlier count as changes do (`MOST_ANEW`)."""

WARMING = "warming up"
OTHER_DEVICE = "an input is not on the current GPU: call torch.cuda.set_device"
ELSEWHERE = "a parameter or buffer is not on the current GPU"
NOT_STRIDED = "a parameter or buffer is not a strided tensor"
NEEDS_GRADIENT = "an input requires gradients"
OUTER_GRAPH = "called while a CUDA graph is recorded"
NO_GRAD = "gradients are switched off"
DROPPED = "the optimizer's state is incomplete"
CHANGING = "hyper-parameters other than the learning rate change from step to step"
MOVING = "parameters, buffers or groups are replaced again and again"
MOVED = "parameters, buffers or groups were replaced"
CHANGED = "hyper-parameters other than the learning rate changed"
OUTSIDE = "parameters that the optimizer does not hold require gradients"
CLOSED = "closed"
AUTOCAST = "called under autocast"
MODE = "called inside a dispatch or function mode"
ANOMALY = "called inside detect_anomaly, which checks each backward operation"
SAVED = "called inside saved_tensors_hooks"
KEEPS_STATE = "the model or the loss keeps Python state between its calls"
HOST_RANDOM = "the step draws random numbers on the CPU"
SET = "attributes of the model, or values that the loss reads, changed"
SETTING = "attributes of the model, or values that the loss reads, change from step to step"
STEP_HOOKS = "the optimizer has hooks"
WRITES_INPUTS = "the step writes to its inputs"
SPARSE = "the gradients are sparse"
FULL = "memory runs out beside the graphs again and again"
NO_ROOM = "too little memory to compare the graph with the eager step"


class CapturedStep:
    """A training step that replays CUDA graphs where it can, and runs eagerly where it cannot.

    Args:
        step: the step itself; eager calls and recordings run it.
        scope: what is recorded: `BACKWARD`, `UPDATE` or `STEP`.
        modules: the model and the loss, each if it is a module; a step may write to their tensors.
        valid: polled before each replay; returns why graphs must not be used now, or None.
        check: whether each new graph is compared with the eager step once, before it serves.

    Attributes:
        step: as given.
        replays: micro-batches that were replayed.
        eager: reason to the number of micro-batches that ran eagerly.
        graphs: recordings made.
        update_reason: why updates run eagerly whatever `scope` says; None if they may be recorded.
    """

    warm_up = WARM_UP
    """Eager steps before the first recording."""

    def __init__(
        self,
        step: EagerStep,
        scope: str = STEP,
        modules: Sequence[nn.Module] = (),
        valid: Callable[[], str | None] = lambda: None,
        check: bool = False,
    ) -> None:
        self.step, self._scope, self._own = step, scope, tuple(modules)
        self._modules = self._modules_now()
        self._valid, self._check = valid, check
        self._entries: OrderedDict[Any, _Entry] = OrderedDict()
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._last: torch.cuda.Stream | None = None
        self._fixed: _Fixed | None = None
        self._settings: Settings | None = None
        self._anew, self._repaid_at = 0, 0
        self._stepped = False
        self._records_update = False
        self._off: str | None = None
        self.replays, self.graphs = 0, 0
        self.eager: Counter[str] = Counter()
        self.update_reason = self._no_update_graph()

    def __call__(
        self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...]
    ) -> Tensor:
        """Runs the step on one micro-batch; see `EagerStep`.

        Returns:
            Its loss, detached, in memory of its own.
        """
        given = (inputs, dict(kwargs), targets)
        if self._off is None and self._settings is not None and self._settings.changed():
            return self._after_change(self._settings, given)
        reason = self._off or self._obstacle(given)
        if reason is not None:
            return self._eagerly(reason, given)
        try:
            key = key_of(given)
        except _IndescribableError as error:
            return self._eagerly(str(error), given)
        entry = self._entries.get(key)
        if entry is None:
            warm_up = WARM_UP_AGAIN if self.graphs else self.warm_up
            entry = self._entries[key] = _Entry(warm_up, sum(t.nbytes for t in tensors_of(given)))
            while len(self._entries) > MOST_SIGNATURES:
                self._entries.popitem(last=False)[1].reset()
        self._entries.move_to_end(key)
        if entry.warm_up > 0:
            return self._warming(entry, given)
        if entry.refused is not None:
            return self._eagerly(entry.refused, given)
        return self._served(entry, given)

    def _modules_now(self) -> tuple[nn.Module, ...]:
        """The roots of the step's module trees: the model, and what the loss reads now."""
        known = {id(module) for tree in self._own for module in tree.modules()}
        return (*self._own, *(m for m in modules_read(self.step.loss) if id(m) not in known))

    def run_eagerly(
        self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...]
    ) -> Tensor:
        """Runs one micro-batch without graphs, by the code that the graphs were recorded from."""
        return self._run((inputs, dict(kwargs), targets))

    def reason(self) -> str:
        """The most frequent reason why steps run eagerly, other than warming up."""
        others = Counter({k: n for k, n in self.eager.items() if k != WARMING})
        return others.most_common(1)[0][0] if others else WARMING

    def close(self) -> None:
        """Frees the graphs; steps run eagerly from then on."""
        self._off = CLOSED
        self._forget()
        if self._updates():
            self._leave_update(CLOSED)

    # -- eager steps ------------------------------------------------------------------------------

    def _eagerly(self, reason: str, given: tuple[Any, ...]) -> Tensor:
        self.eager[reason] += 1
        return self._run(given)

    def _run(self, given: tuple[Any, ...]) -> Tensor:
        """Run the step eagerly; a recordable update reads its learning rates from GPU tensors."""
        try:
            loss = self._backward(given)
            self._advance()
        finally:
            self._remember_settings()
        return loss

    def _backward(self, given: tuple[Any, ...]) -> Tensor:
        """Run forward, loss and backward; if memory runs out beside graphs, again without them.

        Graphs keep the memory of a step, which a plain loop has left for this one. A further
        micro-batch is not repeated, since its gradients may have been added in part.
        """
        if self.step.turn > 0 or self._fixed is None or not self._has_graphs():
            return self.step.backward(*given)
        before = None
        with suppress(torch.OutOfMemoryError):
            before = Snapshot(self._fixed.buffers, room=0)
            return self.step.backward(*given)
        for parameter in self.step.parameters():
            parameter.grad = None
        if before is not None:
            before.restore()
        self._forget()
        self._count_anew(FULL)
        gc.collect()  # what the failed pass holds
        return self.step.backward(*given)

    def _has_graphs(self) -> bool:
        return any(entry.has_graphs() for entry in self._entries.values())

    def _remember_settings(self) -> None:
        """Take current Python values as the reference; values set by the step are not changes."""
        if self._settings is None:
            self._settings = Settings(self._own, self.step.loss)
        else:
            self._settings.remember()

    def _after_change(self, settings: Settings, given: tuple[Any, ...]) -> Tensor:
        """Run one eager step after Python values changed between steps.

        If the step restores the old values, only outside code, such as a validation, changed them,
        and the graphs stay valid. If the values stay changed, the graphs are dropped.
        """
        before = settings.values
        loss = self._eagerly(SET, given)
        if self._settings is settings and settings.values != before:
            self._begin_anew(SETTING)
        return loss

    def _advance(self) -> None:
        step = self.step
        step.turn += 1
        if step.turn == step.accumulate:
            step.turn = 0
            step.advance(self._rates())
            self._stepped = True

    def _rates(self) -> list[Tensor] | None:
        """The learning-rate tensors that a recorded update reads; None if updates stay eager."""
        if self._scope == BACKWARD or self.update_reason is not None:
            return None
        if self._fixed is not None and self._fixed.moved():
            self._begin_anew(MOVING)
        if self._fixed is None:
            self._fixed = _Fixed(self.step, self._modules, self._own)
        return self._fixed.rates.refreshed()

    def _begin_anew(self, often: str) -> None:
        """Drop all graphs; after more than `MOST_ANEW` changes, run eagerly for reason `often`."""
        self._forget()
        self._anew += 1
        if self._anew > MOST_ANEW:
            self._off = self._off or often

    def _count_anew(self, often: str) -> None:
        """Count graphs that were dropped before they repaid their recording, as `_begin_anew`."""
        if self.replays < self._repaid_at:
            self._anew += 1
        self._repaid_at = self.replays + REPAID
        if self._anew > MOST_ANEW:
            self._off = self._off or often

    def _warming(self, entry: _Entry, given: tuple[Any, ...]) -> Tensor:
        """Run a warm-up step of a new input signature, on the recording stream.

        The last warm-up step is checked for operations that a graph cannot record. Graphs cannot
        record calls that wait for the GPU, changes of Python state, and random numbers drawn on the
        CPU.
        """
        is_last = entry.warm_up == 1
        # Ignore the optimizer until its first update, which creates its state and attributes.
        stepped = self._stepped
        before = self._python_state(stepped) if is_last else []
        drawn = host_random() if is_last else None
        versions = [(t, t._version) for t in self._written_to(given)] if is_last else []
        leaves = set[int]()
        watches_update = is_last and stepped and self._updates()
        self.eager[WARMING] += 1
        try:
            self.step.inspect = partial(_find_leaves, leaves) if is_last else None
            with self._beside():
                with synchronisations(is_last) as found:
                    loss = self._backward(given)
                with synchronisations(watches_update) as in_update:
                    self._advance()
        finally:
            self.step.inspect = None
            self._remember_settings()
        entry.warm_up -= 1
        entry.written = [tensor for tensor, version in versions if tensor._version != version]
        if in_update:
            self._leave_update(in_update[0])
        if found:
            entry.refused = found[0]
        elif is_last and drawn != host_random():
            entry.refused = HOST_RANDOM
        elif is_last and self._has_sparse_gradients():
            entry.refused = SPARSE
        elif not leaves <= set(map(id, self.step.parameters())):
            entry.refused = OUTSIDE
        elif any(each is tensor for each in entry.written for tensor in tensors_of(given)):
            entry.refused = WRITES_INPUTS
        elif is_last and not _all_same(before, self._python_state(stepped)):
            entry.refused = KEEPS_STATE
        return loss

    def _written_to(self, given: tuple[Any, ...]) -> list[Tensor]:
        """Tensors that a step may write to besides parameters, buffers and optimizer state."""
        modules = (module for tree in self._modules for module in tree.modules())
        held = [value for module in modules for value in kept_attributes(module).values()]
        held += [] if self._settings is None else self._settings.read.held()
        found = [value for value in (*held, *tensors_of(given)) if isinstance(value, Tensor)]
        return [t for t in found if t.layout == torch.strided and not t.is_inference()]

    def _has_sparse_gradients(self) -> bool:
        gradients = (parameter.grad for parameter in self.step.parameters())
        return any(g is not None and g.layout != torch.strided for g in gradients)

    def _python_state(self, of_optimizer: bool) -> list[Contents]:
        """Python state of modules and the optimizer between steps, and of values the step reads."""
        modules = (module for tree in self._modules for module in tree.modules())
        held = [value for module in modules for value in kept_attributes(module).values()]
        held += vars(self.step.optimizer).values() if of_optimizer else []
        held += [] if self._settings is None else self._settings.read.held()
        return [contents(value, _version_elsewhere) for value in held]

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Runs the `with` block on the recording stream, ordered with the caller's stream."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    # -- replays ----------------------------------------------------------------------------------

    def _served(self, entry: _Entry, given: tuple[Any, ...]) -> Tensor:
        first, last = self.step.turn == 0, self.step.turn == self.step.accumulate - 1
        reason = self._prepared(entry, first)
        if reason is not None:
            return self._eagerly(reason, given)
        if self._is_stale(entry):
            return self._after_others(entry, given)
        if entry.lacks_graph(first, last, self._has_update_graph()):
            return self._first_replay(entry, given, first, last)
        return self._replayed(entry, given, first, last)

    def _is_stale(self, entry: _Entry) -> bool:
        """Whether steps of other signatures have set values that the entry's graphs have fixed."""
        assert self._settings is not None
        now = self._settings.fixed
        if entry.fixed is not now and entry.fixed == now:
            entry.fixed = now
        return entry.has_graphs() and entry.fixed is not now

    def _after_others(self, entry: _Entry, given: tuple[Any, ...]) -> Tensor:
        """Run a stale entry's step eagerly; drop its graphs unless that restores their values."""
        loss = self._eagerly(SET, given)
        if self._settings is not None and self._is_stale(entry):
            torch.cuda.synchronize()
            entry.reset()
            self._count_anew(SETTING)
        return loss

    def _first_replay(
        self, entry: _Entry, given: tuple[Any, ...], first: bool, last: bool
    ) -> Tensor:
        """Record the graphs that this micro-batch lacks; replay them if they pass the check."""
        if first:
            self._drop_smaller(entry)
        before = self._rehearsed(entry, given, first, last) if self._check else None
        if isinstance(before, str):
            return self._refuse(entry, before, given)
        reason, around = None, sys.exception()
        try:
            self._record_lacking(entry, given, first, last)
        except Exception as error:
            reason = self._refused(entry, f"cannot be recorded: {first_cause(error, around)}")
            release_frames(error, around)
        if reason is not None:
            return self._eagerly(reason, given)
        fault = before and self._disagreement(before, entry, given, first, last)
        if fault is not None:
            return self._refuse(entry, fault, given)
        return self._replayed(entry, given, first, last)

    def _refused(self, entry: _Entry, reason: str) -> str:
        """Run updates eagerly if the failed recording held an update, else the whole signature."""
        self._recover(entry)
        if self._records_update:
            self._leave_update(reason)
        else:
            entry.refused = reason
        return reason

    def _leave_update(self, reason: str) -> None:
        """Makes all later optimizer updates run eagerly."""
        self._drop_updates()
        self.update_reason = reason
        if self.step.update.implementation == OWN:
            return_counters(self.step.optimizer)

    def _prepared(self, entry: _Entry, first: bool) -> str | None:
        """Check all values baked into graphs; return why this step must run eagerly, or None."""
        fixed = self._fixed = self._fixed or _Fixed(self.step, self._modules, self._own)
        if fixed.moved():
            self._begin_anew(MOVING)
            return MOVED
        if fixed.unfit is not None:
            return fixed.unfit
        if not on_current_device(fixed.one_each):
            return ELSEWHERE
        if not first and entry.first is None:
            return WARMING
        if not first and entry.lacks_gradients(self.step.parameters()):
            return "parameters outside of the graph have gradients"
        return self._prepared_update(fixed) if self._updates() else None

    def _prepared_update(self, fixed: _Fixed) -> str | None:
        if (reason := self._step_hooks()) is not None:
            self._leave_update(reason)
            return None
        if fixed.changed():
            self._anew += 1
            self._drop_updates()
            if self._anew > MOST_ANEW:
                self._leave_update(CHANGING)
            fixed.remember()
            self._stepped = False  # the eager update makes the state that the new values need
            return CHANGED
        if not self._stepped or not fixed.adopted():
            return DROPPED
        if fixed.counts:
            self._leave_update("the optimizer counts its steps in Python")
            return self.update_reason
        fixed.rates.refreshed()
        return None

    def _record_lacking(
        self, entry: _Entry, given: tuple[Any, ...], first: bool, last: bool
    ) -> None:
        """Record the graphs that this micro-batch still lacks."""
        if entry.feed is None:
            entry.static = static_inputs((given[0], given[2]), given[1])
            entry.feed = feeder(entry.static)
        if first and entry.first is None:
            graph = self._record(entry, update=self._is_whole())
            entry.gradients = [p.grad for p in self.step.parameters()]
            entry.first = graph
        if not first and entry.more is None:
            self._place_gradients(entry, keep=True)
            entry.more = self._record(entry, update=False)
        if last and self._has_update_graph() and entry.update is None:
            self._place_gradients(entry, keep=not first)
            entry.update = self._record(entry, update=True, backward=False)
        assert self._settings is not None
        entry.fixed = self._settings.fixed

    def _drop_smaller(self, entry: _Entry) -> None:
        """Drop all other graphs if this signature is larger; their next steps record them anew.

        All graphs use one memory pool. A graph fits into memory that a larger graph has reserved,
        while a larger graph reserves most of its memory anew: eleven batch sizes of ResNet-50 in
        ascending order reserved 1.8 times the memory of the largest alone (H200).
        """
        others = [e for e in self._entries.values() if e is not entry and e.has_graphs()]
        if others and entry.size > max(other.size for other in others):
            torch.cuda.synchronize()
            for parameter in self.step.parameters():  # in the old graphs' memory
                parameter.grad = None
            for other in others:
                other.reset()

    def _is_whole(self) -> bool:
        return self._scope == STEP and self.step.accumulate == 1 and self._updates()

    def _has_update_graph(self) -> bool:
        """Whether updates are recorded as a graph of their own."""
        return self._updates() and not self._is_whole()

    def _updates(self) -> bool:
        return self._scope != BACKWARD and self.update_reason is None

    def _record(self, entry: _Entry, update: bool, backward: bool = True) -> _Graph:
        assert entry.static is not None
        assert self._fixed is not None
        (inputs, targets), kwargs = entry.static.args, entry.static.kwargs
        step, rates = self.step, self._fixed.rates.tensors
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        # PyTorch refuses a pool whose last graph is gone.
        if self._pool is None or not self._has_graphs():
            self._pool = torch.cuda.graph_pool_handle()
        graph, loss = torch.cuda.CUDAGraph(), None
        self._records_update = update
        turn, norm, state = step.turn, step.norm, self._fixed.state_names()
        held = None if turn == 0 else [p.grad for p in step.parameters()]
        versions = [buffer._version for buffer in self._fixed.buffers]
        if update:
            self._fixed.remember_state()
        try:
            with _unannounced(), recording(graph, self._pool, self._stream):
                if backward:
                    loss = step.backward(inputs, kwargs, targets)
                if update:
                    step.advance(rates)
            recorded = _Graph(graph, loss, step.norm if update else None)
            recorded.writes = [
                buffer
                for buffer, version in zip(self._fixed.buffers, versions, strict=True)
                if buffer._version != version
            ]
            if self._fixed.state_names() != state:
                self._fixed.drop_new_state(state)
                raise RuntimeError("the optimizer would make its state within the graph")
            if held is not None and any(
                p.grad is not g for p, g in zip(step.parameters(), held, strict=True)
            ):
                raise RuntimeError("a further micro-batch has gradients of other parameters")
        except BaseException:
            # Gradients that a failed recording has made were never computed.
            parameters = step.parameters()
            for parameter, gradient in zip(
                parameters, held or [None] * len(parameters), strict=True
            ):
                parameter.grad = gradient
            raise
        finally:
            step.turn, step.norm = turn, norm
            self._remember_settings()
        self.graphs += 1
        return recorded

    def _replayed(self, entry: _Entry, given: tuple[Any, ...], first: bool, last: bool) -> Tensor:
        assert entry.feed is not None
        step = self.step
        current = torch.cuda.current_stream()
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current
        entry.feed((given[0], given[2]), given[1])
        if not first:
            self._place_gradients(entry, keep=True)
        graph = entry.first if first else entry.more
        assert graph is not None
        assert graph.loss is not None
        graph.graph.replay()
        increment_version(graph.writes)
        self._place_gradients(entry)
        loss = graph.loss.clone()
        step.turn += 1
        if last:
            step.turn = 0
            if self._is_whole():
                step.norm = graph.norm
                self._announce()
            elif entry.update is not None and self._updates():
                entry.update.graph.replay()
                step.norm = entry.update.norm
                self._announce()
            else:
                step.advance()
        self.replays += 1
        return loss

    def _announce(self) -> None:
        """Tells autograd, schedulers and PyTorch's global hooks that an update has been made."""
        optimizer = self.step.optimizer
        increment_version(self.step.parameters())
        optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        for hook in torch_optimizer._global_optimizer_post_hooks.values():
            hook(optimizer, (optimizer,), {})

    def _place_gradients(self, entry: _Entry, keep: bool = False) -> None:
        """Set `.grad` of each parameter to the tensor that the entry's graphs write and read.

        Args:
            entry: the entry with the graphs.
            keep: whether to copy the current gradients into these tensors: those of micro-batches
                that ran eagerly, or with another signature.
        """
        for parameter, gradient in zip(self.step.parameters(), entry.gradients, strict=True):
            held = parameter.grad
            if held is gradient:
                continue
            if gradient is None:
                if not keep:
                    parameter.grad = None
                continue
            if keep and held is not None:
                gradient.copy_(held)
            elif keep:
                gradient.zero_()
            parameter.grad = gradient

    # -- checks -----------------------------------------------------------------------------------

    def _refuse(self, entry: _Entry, fault: str, given: tuple[Any, ...]) -> Tensor:
        self._recover(entry)
        entry.refused = fault
        return self._eagerly(fault, given)

    def _rehearsed(
        self, entry: _Entry, given: tuple[Any, ...], first: bool, last: bool
    ) -> Snapshot | str:
        """Return the results of two eager steps from one state, or why they failed; restore it.

        Comes before the recording: a graph keeps as much memory as an eager step needs.
        """
        assert self._fixed is not None
        updates = last and self._updates()  # an eager update is the same on both sides

        def eager() -> Tensor:
            loss = self.step.backward(*given)
            if updates:
                self.step.advance(self._rates())
            return loss

        try:
            before = Snapshot([*self._fixed.tensors(), *entry.written])
            for _ in range(2):
                with self._beside():
                    self._tried(before, eager, first)
        except torch.OutOfMemoryError:
            return NO_ROOM
        return before

    def _disagreement(
        self, before: Snapshot, entry: _Entry, given: tuple[Any, ...], first: bool, last: bool
    ) -> str | None:
        """Return how new graphs differ from the eager steps before, or None; restore all state."""
        replay = partial(self._replayed, entry, given, first, last and self._updates())
        try:
            self._tried(before, replay, first)
        except torch.OutOfMemoryError:
            return NO_ROOM
        except BaseException:
            self._recover(entry)
            raise
        return before.disagreement()

    def _tried(self, before: Snapshot, run: Callable[[], Tensor], first: bool) -> None:
        """Take a step, give its results to the snapshot, and restore all state."""
        step, parameters = self.step, self.step.parameters()
        turn, replays = step.turn, self.replays
        held = [None if first or p.grad is None else p.grad.clone() for p in parameters]
        try:
            with _unannounced():
                loss = run()
            before.taken(loss, [p.grad for p in parameters])
        finally:
            step.turn, self.replays = turn, replays
            for parameter, gradient in zip(parameters, held, strict=True):
                parameter.grad = gradient
            before.restore()
            self._remember_settings()

    # -- what stands in the way -------------------------------------------------------------------

    def _obstacle(self, given: tuple[Any, ...]) -> str | None:
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return NO_GRAD
        if torch.cuda.is_current_stream_capturing():
            return OUTER_GRAPH
        if torch.is_autocast_enabled("cuda"):
            return AUTOCAST
        if _len_torch_dispatch_stack() or has_function_mode():
            return MODE
        if torch.is_anomaly_enabled():
            return ANOMALY
        if _top_saved_tensors_default_hooks(True) is not None:
            return SAVED
        tensors = tensors_of(given)
        if any(tensor.requires_grad for tensor in tensors):
            return NEEDS_GRADIENT
        if not on_current_device(tensors):
            return OTHER_DEVICE
        if (reason := self._valid()) is not None:
            return reason
        return self._hooks()

    def _hooks(self) -> str | None:
        for parameter in self.step.parameters():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                return "gradients of parameters have hooks"
        return None

    def _no_update_graph(self) -> str | None:
        """Reason why the optimizer's update cannot be recorded; None if recording may be tried."""
        optimizer = self.step.optimizer
        if isinstance(optimizer, (LBFGS, SparseAdam)):
            return f"{type(optimizer).__name__} cannot be recorded"
        if self.step.scaler is not None:
            return "a GradScaler decides on the host whether the optimizer steps"
        fused = self.step.update.implementation == FUSED
        if not all(fused or g.get("fused") or "capturable" in g for g in optimizer.param_groups):
            return f"{type(optimizer).__name__} cannot read its learning rate from the GPU"
        return self._step_hooks()

    def _step_hooks(self) -> str | None:
        optimizer = self.step.optimizer
        if has_own_step(optimizer):
            return OWN_STEP
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return STEP_HOOKS
        if torch_optimizer._global_optimizer_pre_hooks:
            return "all optimizers have hooks"
        return None

    # -- life -------------------------------------------------------------------------------------

    def _forget(self) -> None:
        if self._entries:
            torch.cuda.synchronize()
        for entry in self._entries.values():
            entry.reset()
        self._entries.clear()
        self._fixed, self._pool, self._settings = None, None, None
        self._modules = self._modules_now()

    def _drop_updates(self) -> None:
        if self._entries:
            torch.cuda.synchronize()
        for entry in self._entries.values():
            entry.update = None
            if self._scope == STEP and self.step.accumulate == 1:
                entry.first = None

    def _recover(self, entry: _Entry) -> None:
        """Discard the entry's graphs after a failure, and gradients that they may have left."""
        if self.step.turn == 0:
            for parameter in self.step.parameters():
                parameter.grad = None
        entry.reset()
        self._pool = None


class _Graph:
    """A recorded graph with its results: loss, gradient norm, and the buffers it writes to."""

    __slots__ = ("graph", "loss", "norm", "writes")

    def __init__(
        self, graph: torch.cuda.CUDAGraph, loss: Tensor | None, norm: Tensor | None
    ) -> None:
        self.graph, self.loss, self.norm = graph, loss, norm
        self.writes: list[Tensor] = []


class _Entry:
    """The CUDA graphs of one input signature.

    Attributes:
        warm_up: eager steps left before the recording.
        size: bytes of a micro-batch.
        refused: why nothing is recorded, or None.
        written: tensors that a step writes to, other than parameters, buffers and state.
        fixed: values of Python that the graphs have fixed; see `Settings`.
    """

    def __init__(self, warm_up: int, size: int) -> None:
        self.warm_up, self.size = warm_up, size
        self.refused: str | None = None
        self.fixed: Any = None
        self.written: list[Tensor] = []
        self.static: Any = None
        self.feed: Any = None
        self.gradients: list[Tensor | None] = []
        self.first: _Graph | None = None
        self.more: _Graph | None = None
        self.update: _Graph | None = None

    def lacks_gradients(self, parameters: Sequence[Tensor]) -> bool:
        """Whether a parameter has a gradient that the graphs of this entry do not compute."""
        known = self.gradients or [None] * len(parameters)
        return bool(self.gradients) and any(
            gradient is None and parameter.grad is not None
            for parameter, gradient in zip(parameters, known, strict=True)
        )

    def lacks_graph(self, first: bool, last: bool, updates: bool) -> bool:
        """Whether a micro-batch needs a graph that is not recorded yet.

        Args:
            first: whether it is the first of its step.
            last: whether it is the last.
            updates: whether updates are recorded as a graph of their own.
        """
        graph = self.first if first else self.more
        return graph is None or (last and updates and self.update is None)

    def has_graphs(self) -> bool:
        """Whether the entry holds any graph."""
        return any(graph is not None for graph in (self.first, self.more, self.update))

    def reset(self) -> None:
        """Frees the entry's graphs and their memory."""
        self.first = self.more = self.update = None
        self.static = self.feed = self.fixed = None
        self.gradients = []


class _Fixed:
    """External values baked into the graphs: addresses, hyper-parameters, optimizer state.

    Args:
        step: whose optimizer counts.
        modules: whose parameters and buffers count.
        own: those whose parameters the optimizer must hold, if these require gradients.

    Attributes:
        held: parameters and buffers.
        one_each: one of them for each device.
    """

    def __init__(
        self, step: EagerStep, modules: Sequence[nn.Module], own: Sequence[nn.Module]
    ) -> None:
        self._step, self._modules = step, modules
        self._optimizer = step.optimizer
        self._members = self._members_now()
        self.held = self._tensors()
        self._addresses = list(map(_address, self.held))
        self._trains = [tensor.requires_grad for tensor in self.held]
        self._registries = _Registries(modules)
        self.one_each = list({tensor.device: tensor for tensor in self.held}.values())
        buffers = [buffer for module in modules for buffer in module.buffers()]
        self.buffers = [buffer for buffer in buffers if not buffer.is_inference()]
        self.rates = GroupRates(step.optimizer)
        self._slots: list[tuple[Any, dict[str, Any], str, Tensor]] = []
        self._hyper = self._hyper_now()
        self.counts = False
        updated = {id(parameter) for parameter in step.parameters()}
        outside = any(
            parameter.requires_grad and id(parameter) not in updated
            for module in own
            for parameter in module.parameters()
        )
        strided = all(tensor.layout == torch.strided for tensor in self.held)
        self.unfit = OUTSIDE if outside else None if strided else NOT_STRIDED

    def _members_now(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self._optimizer.param_groups]

    def _tensors(self) -> list[Tensor]:
        held = [tensor for module in self._modules for tensor in module.parameters()]
        held += [tensor for module in self._modules for tensor in module.buffers()]
        known = {id(tensor) for tensor in held}
        return held + [p for p in self._step.parameters() if id(p) not in known]

    def tensors(self) -> list[Tensor]:
        """All tensors that a step may write to: parameters, buffers and optimizer state."""
        state = [
            value
            for values in self._optimizer.state.values()
            for value in values.values()
            if isinstance(value, Tensor)
        ]
        return [*self.held, *state]

    def moved(self) -> bool:
        """Whether a tensor moved or was replaced, or `requires_grad` or `param_groups` changed."""
        return (
            self._registries.changed()
            or list(map(_address, self.held)) != self._addresses
            or [tensor.requires_grad for tensor in self.held] != self._trains
            or self._members_now() != self._members
        )

    def adopted(self) -> bool:
        """Put optimizer state into the tensors that graphs read; return False if state is missing.

        `load_state_dict` gives the optimizer new state tensors. Values of new state tensors are
        copied into the recorded tensors, which then go back into the optimizer.
        """
        state = self._optimizer.state
        if not self._slots:
            return self.remember_state()
        for parameter, kept, name, tensor in self._slots:
            now = state.get(parameter)
            if now is None or not isinstance(now.get(name), Tensor):
                return False
            if now is kept and now[name] is tensor:
                continue
            if now[name] is not tensor:
                tensor.copy_(now[name])
                now[name] = tensor
        self._slots = [(p, state[p], name, tensor) for p, _, name, tensor in self._slots]
        return True

    def remember_state(self) -> bool:
        """Store the current state tensors as those that graphs read; return False if incomplete."""
        move_counters(self._optimizer)
        state = self._optimizer.state
        self.counts = any(
            isinstance(value, (int, float)) for held in state.values() for value in held.values()
        )
        if state and any(p.grad is not None and p not in state for p in self._step.parameters()):
            return False
        self._slots = [
            (parameter, held, name, value)
            for parameter, held in state.items()
            for name, value in held.items()
            if isinstance(value, Tensor)
        ]
        return True

    def state_names(self) -> dict[Any, frozenset[str]]:
        """Names of the optimizer's state entries, for each parameter."""
        state = self._optimizer.state
        return {parameter: frozenset(_present(held)) for parameter, held in state.items()}

    def drop_new_state(self, before: Mapping[Any, frozenset[str]]) -> None:
        """Removes optimizer state made during a recording, whose values were never computed."""
        for parameter, held in list(self._optimizer.state.items()):
            known = before.get(parameter, frozenset())
            for name in _present(held) - known:
                del held[name]
            if not known:
                del self._optimizer.state[parameter]

    def _hyper_now(self) -> list[Any]:
        groups = self._optimizer.param_groups
        found: list[Any] = [hyper_parameters(group, ("lr",)) for group in groups]
        if self._step.update.merge:  # groups of one rate are recorded as one group
            rates = [number(group["lr"]) for group in groups]
            found.append([rates.index(rate) for rate in rates])
        return found

    def changed(self) -> bool:
        """Whether a hyper-parameter other than the learning rate has changed since `remember`."""
        return self._hyper_now() != self._hyper

    def remember(self) -> None:
        """Takes the current hyper-parameters as those baked into the graphs."""
        self._hyper = self._hyper_now()


class _Registries:
    """The classes of modules, and the dictionaries of their parameters, buffers, modules and hooks.

    Comparing the items of the dictionaries takes a tenth of the time of `parameters()` and
    `buffers()`.

    Args:
        modules: the module trees.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        own = [module for tree in modules for module in tree.modules()]
        self._own, self._classes = own, list(map(type, own))
        held: list[Any] = [d for m in own for d in (m._parameters, m._buffers, m._modules)]
        held += [vars(m).get(name) for m in own for name in (*FORWARD, *BACKWARD_HOOKS)]
        # Those of scripted modules are made at each access, and are no dictionaries.
        self._scripted = [m for m in own if not isinstance(m._parameters, dict)]
        self._held = [found for found in held if isinstance(found, dict)]
        self._filled = [found for found in self._held if found]
        self._lengths, self._items = self._now()

    def _now(self) -> tuple[list[int], list[Any]]:
        items = list(chain.from_iterable(map(dict.values, self._filled)))
        for module in self._scripted:
            items += [*module.parameters(), *module.buffers()]
        return list(map(len, self._held)), items

    def changed(self) -> bool:
        """Whether a module's class changed, or an item was replaced, added or removed."""
        lengths, items = self._now()
        # Without the check of lengths, `map` would ignore what was appended.
        same = lengths == self._lengths and len(items) == len(self._items)
        same = same and list(map(type, self._own)) == self._classes
        return not (same and all(map(is_, items, self._items)))


class _IndescribableError(Exception):
    """An input holds values that its signature cannot describe but a graph would bake in."""


def key_of(given: tuple[Any, ...]) -> Any:
    """The key of a call's graphs: its signature and the process-wide settings that graphs keep.

    Raises:
        _IndescribableError: an argument has no signature.
    """
    return _described(given), in_force()


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_nested:
            raise _IndescribableError("an input is not a strided tensor")
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, dict):
        return (type(value), *((key, _described(item)) for key, item in value.items()))
    if isinstance(value, tuple | list):
        return (type(value), *map(_described, value))
    if not isinstance(value, (*CONSTANTS, Number, Enum)):
        raise _IndescribableError(
            f"an input holds a {type(value).__name__}, which a graph would fix"
        )
    return type(value), value


def on_current_device(tensors: Iterable[Tensor]) -> bool:
    """Whether all tensors are on the current GPU, the only device that a recording captures."""
    here = torch.device("cuda", torch.cuda.current_device())
    return all(tensor.device == here for tensor in tensors)


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout == torch.strided else 0


def host_random() -> tuple[Any, ...]:
    """States of the random number generators on the host: PyTorch's, Python's and NumPy's."""
    return torch.get_rng_state().tolist(), *host_states()


@contextmanager
def _unannounced() -> Iterator[None]:
    """Disables PyTorch's global optimizer hooks for steps that are only recorded or undone."""
    hooks, torch_optimizer._global_optimizer_post_hooks = (
        torch_optimizer._global_optimizer_post_hooks,
        OrderedDict(),
    )
    try:
        yield
    finally:
        torch_optimizer._global_optimizer_post_hooks = hooks


def _all_same(before: list[Contents], after: list[Contents]) -> bool:
    return len(before) == len(after) and all(map(same, before, after))


def _find_leaves(found: set[int], loss: Tensor) -> None:
    """Add the ids of all tensors that the loss's backward pass gives gradients to."""
    seen, waiting = set[Any](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        waiting += [further for further, _ in node.next_functions]


def _version_elsewhere(value: Any) -> int | None:
    """The version of what a replay does not change: of a tensor elsewhere, or of a generator."""
    is_tensor = isinstance(value, Tensor)
    return None if is_tensor and on_current_device([value]) else version(value)


def _present(held: Mapping[str, Any]) -> set[str]:
    return {name for name, value in held.items() if value is not None}
