"""Each mend of a class of faults, taken back: the suite must find what it mended."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from steadytorch.rewrite import conversion
from steadytorch.runtime import agreement, dispatch, entries, keys, probation, smoke_check, weights
from steadytorch.runtime import module as serving
from steadytorch.runtime.module import TunedModule
from steadytorch.transforms import channels_last, compile
from steadytorch.workload import signature

from . import compare
from . import test_torture as inference
from . import test_training as training
from .test_torture import DEVICE

MOST = 600
"""Combinations that are gone through before a fault counts as not found."""


class Patch:
    """Takes back mends by `pytest.MonkeyPatch`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._set = monkeypatch.setattr

    def values(self) -> None:
        """Weights are compared by versions and addresses alone."""
        self._set(weights, "_compiled", lambda code, held, contents, turns: _versions(held))
        self._set(weights, "_interpreted", lambda held, contents, turns: _versions(held))
        self._set(weights.Weights, "step_of", lambda self, optimizer: None)

    def strides(self) -> None:
        """Outputs come in whatever layout they have, and nobody compares it."""
        self._set(channels_last, "_in_order", lambda tensor: tensor)
        self._set(agreement, "strides_of", lambda tensor: None)

    def lending(self) -> None:
        """Transforms convert containers, and what is written to the copies is lost."""
        for user in (conversion, entries):
            self._set(user, "holds_containers", lambda values: False)

    def checkpoints(self) -> None:
        """What checkpointing raises is taken for an executor's fault, in a smoke check as well."""
        self._set(smoke_check, "is_callers", lambda *given, **named: False)
        self._set(serving, "is_callers", lambda *given, **named: False)
        passes = smoke_check.TrainingSmokeCheck._unhooked_passes
        self._set(smoke_check.TrainingSmokeCheck, "_passes", passes)

    def exceptions(self) -> None:
        """Every exception of an executor is answered by the model."""
        for user in (serving, probation):
            self._set(user, "is_callers", lambda *given, **named: False)

    def forks(self) -> None:
        """A forked child goes on with what its parent built."""
        self._set(TunedModule, "after_fork", lambda self: None)

    def closures(self) -> None:
        """What hooks close over is frozen."""
        self._set(compile, "steered", lambda workload: (False, ""))

    def moves(self) -> None:
        """Whatever moves, converts or loads ends the plan."""
        self._set(TunedModule, "_look_again", lambda self, before, why: self._switch_off(why))
        self._set(weights.Weights, "_is_only_loaded", lambda self: False)

    def lazy(self) -> None:
        """What is to be negated when it is read has the key of what is not."""
        plain = keys.quick_key

        def key(args: Any, kwargs: Any) -> Any:
            return plain(*signature.map_tensors(torch.Tensor.resolve_neg, (args, dict(kwargs))))

        for user in (dispatch, serving, keys):
            self._set(user, "quick_key", key)
        self._set(serving, "load", lambda: (None, "not compiled"))
        self._set(keys, "_oddity", lambda tensor: "")

    def attributes(self) -> None:
        """Tensors that modules hold as plain attributes are not looked at."""
        self._set(weights._Walk, "_value", lambda self, value, is_own: None)


def _versions(held: Any) -> Callable[[], bool]:
    def read() -> list[Any]:
        linked = [list(map(id, dict.values(d))) for d in (*held.registries, *held.links)]
        modes = [found["training"] for found in held.modes]
        return [[(t._version, t.data_ptr()) for t in held.tensors], linked, modes]

    before = read()
    return lambda: read() != before


MENDS: dict[str, tuple[str, Callable[[Any], bool], bool]] = {
    "values": ("inference", lambda d: any("fused" in a for a in d.actions), False),
    "strides": ("inference", lambda d: "channels_last" in str(d.candidate), False),
    "lending": ("inference", lambda d: d.write != "nothing", False),
    "checkpoints": ("training", lambda d: d.around or d.reentrant is not None, False),
    "exceptions": ("inference", lambda d: d.hook == "expiring" and "raise" in d.actions, False),
    "forks": ("inference", lambda d: "threads" in str(d) and "fork" in str(d.ways), False),
    "closures": ("inference", lambda d: d.hook == "steering" and "steer" in d.actions, True),
    "moves": ("inference", lambda d: True, False),
    "lazy": ("inference", lambda d: "with a negated view" in d.ways and d.hook is None, True),
    "attributes": ("inference", lambda d: "plain tensor" in d.actions, False),
}
"""By mend: which suite finds its loss, in which combinations, and whether those compile."""


def _found(suite: Any, wanted: Callable[[Any], bool], compiles: bool) -> str | None:
    first, tried = 100_000 if compiles else 0, 0
    for seed in range(first, first + 20_000):
        draw = suite.drawn(seed, compiles)
        if not wanted(draw):
            continue
        fault, _ = suite.run(draw)
        if fault is not None:
            return f"{draw}: {fault}"
        tried += 1
        if tried >= (12 if compiles else MOST):
            break
    return None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mend", MENDS)
def test_a_mend_that_is_taken_back_is_missed(mend, monkeypatch):
    if mend == "forks" and DEVICE == "cuda":
        pytest.skip("CUDA and forks do not go together")
    monkeypatch.setattr(compare, "FORK_S", 5)
    getattr(Patch(monkeypatch), mend)()
    name, wanted, compiles = MENDS[mend]
    fault = _found({"inference": inference, "training": training}[name], wanted, compiles)
    print(f"{mend}: {fault}")
    assert fault is not None, f"the suite does not miss {mend}"


def test_models_that_are_dropped_are_freed():
    """As gc.freeze would keep them for ever."""
    dropped = []
    for seed in range(20):
        draw = inference.drawn(seed)
        caller = inference.Caller()
        model = inference._model(draw, caller)
        tuned = TunedModule(model, lambda a, c=draw.candidate: inference.Resolution(c))
        for _ in range(2):
            compare.seen(tuned, inference._input(draw, 0), None, compare.Way(), caller.collected)
        tuned.close()
        dropped += [weakref.ref(model), weakref.ref(tuned)]
        del model, tuned
    gc.collect()
    assert [ref() is None for ref in dropped] == [True] * len(dropped)
