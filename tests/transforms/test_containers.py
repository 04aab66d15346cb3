"""Containers of inputs and outputs survive every rewriting."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque, namedtuple
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from steadytorch import transforms
from steadytorch.device.facts import load_facts
from steadytorch.rewrite.tracing import traced_to_run
from steadytorch.transforms.base import Applicable, applied_in_order
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session
from steadytorch.verification.verify import make_reference, nesting, verify
from steadytorch.workload.opened import opened
from steadytorch.workload.signature import map_tensors
from steadytorch.workload.workload import Workload

from ..verification.conftest import kept_settings

FACTS = load_facts("cpu")
Pair = namedtuple("Pair", "y h")


class Typed(NamedTuple):
    y: Any
    h: Any


@dataclasses.dataclass
class Data:
    y: Any
    h: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    y: Any
    h: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    y: Any
    h: Any


class Dictionary(dict):
    pass


class Listed(list):
    pass


@dataclasses.dataclass
class Unregistered(OrderedDict):
    """A dataclass that is a dictionary too, as transformers' outputs are."""

    y: Any = None
    h: Any = None
    loss: Any = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Registered(Unregistered):
    pass


pytree.register_pytree_node(
    Registered, lambda v: (list(v.values()), list(v)), lambda held, keys: Registered(*held)
)

KINDS = {
    "ordered": lambda y, h: OrderedDict(y=y, h=h),
    "default": lambda y, h: defaultdict(list, y=y, h=h),
    "named": Pair,
    "typed": Typed,
    "data": Data,
    "frozen": Frozen,
    "slotted": Slotted,
    "dictionary": lambda y, h: Dictionary(y=y, h=h),
    "listed": lambda y, h: Listed([y, h]),
    "deque": lambda y, h: deque([y, h], maxlen=3),
    "namespace": lambda y, h: SimpleNamespace(y=y, h=h),
    "unregistered": Unregistered,
    "registered": Registered,
    "nested": lambda y, h: {"a": (y, [Data(Pair(y, Listed([h])), OrderedDict(x=Frozen(h, 1)))])},
}


def parts(kind, held):
    if kind in ("listed", "deque"):
        return held
    if kind in ("ordered", "default", "dictionary"):
        return held["y"], held["h"]
    if kind == "nested":
        return held["a"][0], held["a"][1][0].y.h[0]
    return held.y, held.h


class Model(nn.Module):
    """Takes a container and returns one of the same kind."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.convolution, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 6)

    def forward(self, held):
        x, h = parts(self.kind, held)
        y = torch.relu(self.norm(self.convolution(x)))
        return KINDS[self.kind](y, self.head(y.mean((2, 3))) + h)


class Every(nn.Module):
    """Returns all kinds at once."""

    def __init__(self):
        super().__init__()
        self.models = nn.ModuleDict({kind: Model(kind) for kind in KINDS})

    def forward(self, x, h):
        return {kind: model(KINDS[kind](x, h)) for kind, model in self.models.items()}


def workload_of(kind):
    torch.manual_seed(0)
    given = KINDS[kind](torch.randn(2, 3, 8, 8), torch.randn(6))
    return Workload(Model(kind).eval(), (given,))


def applicable(workload):
    variants = transforms.all_variants(FACTS)
    return [t for t in variants if isinstance(t.applies_to(workload, FACTS), Applicable)]


def check(workload, candidate):
    with kept_settings():
        data, _ = make_reference(workload, 0)
    expected = nesting(workload.model(*workload.inputs))
    with applied_in_order(candidate, workload) as applied:
        found = applied.model(*workload.inputs)
        assert verify(applied.model, workload, data).fault is None
    assert nesting(found)[0] == expected[0]


@pytest.mark.parametrize("kind", KINDS)
def test_every_uncompiled_candidate_keeps_the_containers(kind):
    workload = workload_of(kind)
    quick = [t for t in applicable(workload) if not (t.compiles or t.engine)]
    assert {"fold_batch_norm", "channels_last", "cast_weights"} <= {t.name for t in quick}
    for transform in quick:
        check(workload, [transform])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", ["channels_last+compile(freezing)", "cast_weights(bf16)+compile"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_candidates_keep_the_containers(kind, text):
    torch._dynamo.reset()
    check(workload_of(kind), [transforms.create(s) for s in transforms.parse(text, FACTS)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_traced_graph_keeps_the_containers(kind):
    workload = workload_of(kind)
    graph = torch.fx.GraphModule(*traced_to_run(workload))
    found, expected = graph(*workload.inputs), workload.model(*workload.inputs)
    assert nesting(found) == nesting(expected)
    pairs = zip(*(pytree.tree_leaves(opened(v)) for v in (found, expected)), strict=True)
    assert all((torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b) for a, b in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_equal_form_share_a_signature(kind):
    first, second = (workload_of(kind).signature() for _ in range(2))
    assert first == second
    assert {(2, 3, 8, 8), (6,)} <= {leaf.shape for leaf in first.leaves}


def test_a_container_of_another_class_is_another_nesting():
    one, other = torch.zeros(1), torch.zeros(1)
    assert nesting(Data(one, other))[0] != nesting(Frozen(one, other))[0]
    assert nesting(Dictionary(y=one))[0] != nesting({"y": one})[0]


def test_other_attributes_and_the_original_stay():
    given = Dictionary(y=torch.ones(1))
    given.name = "kept"
    found = map_tensors(lambda t: t + 1, given)
    assert (type(found), found.name, found["y"].item()) == (Dictionary, "kept", 2.0)
    assert given["y"].item() == 1.0
    twice = map_tensors(lambda t: t + 1, Unregistered(torch.ones(1)))
    assert twice.y is twice["y"]
    assert (twice.h, list(twice)) == (None, ["y"])


def test_a_tree_without_such_containers_is_returned_itself():
    tree = {"a": [torch.ones(1), torch.Size([2])], "b": (1, None)}
    assert opened(tree) is tree


@pytest.mark.slow
def test_a_search_rejects_no_candidate_for_its_containers(tmp_path):
    workload = Workload(Every().eval(), (torch.randn(2, 3, 8, 8), torch.randn(6)))
    options = SearchOptions(budget_s=150.0, precision="bf16")
    result = Session(workload, options, store=tmp_path).search()
    assert result.winner is not None
    assert len(result.candidates) > 2
    reasons = [trial.reason or "" for trial in result.candidates]
    assert not [r for r in reasons if "contain" in r or "strides" in r or "output" in r]
