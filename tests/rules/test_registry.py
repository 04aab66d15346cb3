from __future__ import annotations

import importlib
import logging
import pkgutil
import re

import pytest
from hypothesis import given

from steadytorch import rules, transforms
from steadytorch.findings.finding import CONFIDENCES, SOURCES, Abstention, Case, Finding
from steadytorch.ledger.ledger import CPU_SLICES, SLICES, build_ledger
from steadytorch.rates.device_rates import Rates
from steadytorch.rules import REGISTRY, findings

from ..findings.cases import MS, kernel, step, the, trace, traced
from ..traces import generated, published

MODULES = {rule.__module__.rpartition(".")[2]: rule for rule in REGISTRY.values()}
IDS = (
    "pageable-copy",
    "synchronous-copy",
    "copies",
    "layout-conversion",
    "memory-bound",
    "launch-bound",
    "slow-kernels",
    "clock-throttled",
    "neighbour-process",
    "cpu-contention",
    "synchronisation",
    "input-pipeline",
    "allocation-in-loop",
    "gc-pause",
    "recompilation",
    "graph-break",
    "lazy-loading",
    "autotuning-in-loop",
    "benchmark-mode",
    "tensor-cores-unused",
    "single-tensor-optimizer",
    "unfused-optimizer",
    "equal-groups",
    "bias-before-batch-norm",
    "idle-ramp",
    "queue-full",
    "script-work",
    "evaluation",
    "late-rank",
    "interpreter-lock",
    "idle-cores",
    "debug-mode",
    "memory-growth",
)
CITED = re.compile(
    r"NVIDIA|CUDA|CUPTI|NVML|PyTorch|torch\.|Kineto|tb_plugin|HolisticTrace|TraceLens|Python|Linux|Roofline"
)
RATES = Rates(
    device="",
    copy_bandwidth_bytes_per_s=2e12,
    matrix_flops_per_s={"float32": 2e13, "bfloat16": 5e14, "float16": 5e14},
)


def test_the_stable_names_are_all_there():
    assert sorted(REGISTRY) == sorted(IDS)


def test_every_file_of_a_rule_is_listed():
    found = {
        module.name
        for module in pkgutil.iter_modules(rules.__path__)
        if hasattr(importlib.import_module(f"{rules.__name__}.{module.name}"), "rule")
    }
    assert found == set(MODULES)


@pytest.mark.parametrize("name", REGISTRY)
def test_a_rule_stands_in_the_file_of_its_name(name):
    assert REGISTRY[name].__module__.rpartition(".")[2] == name.replace("-", "_")


@pytest.mark.parametrize("name", REGISTRY)
def test_a_rule_says_where_it_comes_from(name):
    module = importlib.import_module(REGISTRY[name].__module__)
    said = f"{module.__doc__} {REGISTRY[name].__doc__}"
    assert CITED.search(said)


@pytest.mark.parametrize("name", REGISTRY)
def test_a_rule_without_anything_to_look_at_abstains(name):
    verdict = REGISTRY[name](Case())
    assert isinstance(verdict, Abstention)
    assert verdict.rule == name
    assert verdict.why
    assert verdict.recapture


def _check(found: tuple[Finding, ...], abstained: tuple[Abstention, ...], case: Case) -> None:
    assert {finding.id for finding in found} | {one.rule for one in abstained} <= set(IDS)
    assert not [one for one in abstained if one.why.startswith("the rule failed")]
    names = SLICES if case.ledger.kind == "gpu" else CPU_SLICES
    for finding in found:
        assert finding.source in SOURCES
        assert finding.confidence in CONFIDENCES
        assert set(finding.slices) <= set(names)
        assert set(finding.transforms) <= set(transforms.names())
        low, high = finding.recoverable_ns
        assert 0 <= low <= high
        for text in (finding.title, finding.fix, finding.check, finding.false_alarm):
            assert text
            assert "\n" not in text
    for name in names:
        alone = [f.recoverable_ns[1] for f in found if f.slices == (name,)]
        assert sum(alone) <= case.ledger.mean(name)
    claimed = sum(finding.recoverable_ns[1] for finding in found if finding.slices)
    assert claimed <= sum(case.ledger.mean(name) for name in names)


@given(generated.traces())
def test_whatever_a_trace_holds_no_rule_fails(events):
    case = traced(events, rates=RATES)
    _check(*findings(case), case)


def test_a_rule_that_fails_could_not_tell(monkeypatch, caplog):
    def fails(case):
        raise ZeroDivisionError("by zero")

    monkeypatch.setitem(REGISTRY, "copies", fails)
    with caplog.at_level(logging.WARNING):
        _, abstained = findings(Case())
    (told,) = [one for one in abstained if one.rule == "copies"]
    assert "ZeroDivisionError: by zero" in told.why
    assert "copies" in caplog.text


def _claims(name, high, slices=("gpu_kernel",), **more):
    known = {"title": name, "evidence": ("seen",), "fix": "", "check": "", "false_alarm": ""}
    return Finding(
        id=name,
        source=SOURCES[0],
        slices=slices,
        recoverable_ns=(min(100, high), high),
        cost_ns=high,
        **known,
        **more,
    )


@pytest.fixture
def settled(monkeypatch):
    """Findings of a step whose kernels take 1,000 ns, by rules that claim as given."""

    def settle(*claims):
        case = traced([step(1, 0, 5_000), kernel("k", 1_000, 2_000, correlation=1)])
        monkeypatch.setattr(rules, "REGISTRY", {c.id: (lambda _, c=c: [c]) for c in claims})
        return findings(case)[0]

    return settle


def test_no_nanosecond_is_promised_twice(settled):
    found = settled(_claims("a", 700), _claims("b", 600), _claims("c", 600))
    assert [(f.id, f.recoverable_ns) for f in found] == [
        ("a", (100, 700)),
        ("b", (100, 300)),
        ("c", (0, 0)),
    ]


def test_a_claim_of_several_slices_is_met_from_all_of_them(settled):
    idle = ("idle_launch", "gpu_kernel", "unknown")
    found = settled(_claims("a", 900), _claims("b", 10_000, slices=idle))
    assert sum(finding.recoverable_ns[1] for finding in found) == 5_000


def test_findings_about_slices_that_the_trace_makes_unreliable_have_low_confidence(monkeypatch):
    slices = ("idle_launch", "gpu_kernel")
    claims = [_claims(name, 100, slices=(name,), confidence="high") for name in slices]
    monkeypatch.setattr(rules, "REGISTRY", {c.id: (lambda _, c=c: [c]) for c in claims})
    without_calls = traced([step(1, 0, 5_000), kernel("k", 1_000, 2_000, correlation=1)])
    found = {finding.id: finding.confidence for finding in findings(without_calls)[0]}
    assert found == {"idle_launch": "low", "gpu_kernel": "high"}


def test_what_is_about_no_slice_is_not_cut(settled):
    assert the(settled(_claims("a", 9_000, slices=()))).recoverable_ns == (100, 9_000)


def test_a_leak_comes_first_then_the_largest_and_information_last(settled):
    found = settled(
        _claims("small", 100),
        _claims("memory-growth", 0, slices=()),
        _claims("info", 0, slices=(), information=True),
        _claims("large", 500),
        _claims("nothing", 0),
    )
    assert [finding.id for finding in found] == [
        "memory-growth",
        "large",
        "small",
        "nothing",
        "info",
    ]


MUST_FIND = {
    "kineto_v100_resnet50_workers0": {"input-pipeline", "tensor-cores-unused", "pageable-copy"},
    "h100_bert_small": {"launch-bound"},
    "h100_owlv2": {"input-pipeline"},
    "v100_resnet_ns_resolution": {"queue-full"},
    "a100_event_sync": set(),
}
MUST_NOT_CLAIM = {
    "kineto_v100_resnet50_workers0": {"launch-bound", "queue-full"},
    "h100_bert_small": {"input-pipeline", "tensor-cores-unused", "pageable-copy", "queue-full"},
    "h100_owlv2": {"launch-bound", "tensor-cores-unused", "layout-conversion", "queue-full"},
    "v100_resnet_ns_resolution": {"launch-bound", "input-pipeline", "single-tensor-optimizer"},
    "a100_event_sync": {"pageable-copy", "copies", "queue-full"},
}


@published.needs_published
@pytest.mark.parametrize("name", MUST_FIND)
def test_published_traces_are_explained_as_published(name):
    read = published.trace(name)
    case = Case(trace=read, ledger=build_ledger(read), rates=RATES)
    found, abstained = findings(case)
    _check(found, abstained, case)
    ids = {finding.id for finding in found}
    assert ids >= MUST_FIND[name]
    assert not ids & MUST_NOT_CLAIM[name]


@published.needs_published
def test_synchronisation_is_not_the_main_cause_where_it_only_covers_work():
    read = published.trace("h100_owlv2")
    found, _ = findings(Case(trace=read, ledger=build_ledger(read)))
    assert found[0].id == "input-pipeline"
    assert not [f for f in found if f.id == "synchronisation" and f.recoverable_ns[1] > 10 * MS]


@published.needs_published
def test_figures_of_published_traces_are_those_published():
    read = published.trace("kineto_v100_resnet50_workers0")
    found, _ = findings(Case(trace=read, ledger=build_ledger(read)))
    by_id = {finding.id: finding for finding in found}
    assert "68 %" in by_id["tensor-cores-unused"].title
    assert "33 %" in by_id["input-pipeline"].title
    read = published.trace("v100_resnet_ns_resolution")
    found, _ = findings(Case(trace=read, ledger=build_ledger(read)))
    assert "1,022 outstanding" in found[-1].title
    read = published.trace("h100_bert_small")
    found, _ = findings(Case(trace=read, ledger=build_ledger(read)))
    assert any("idle 92 %" in line for line in found[0].evidence)


def test_a_trace_without_events_of_interest_is_not_called_healthy():
    case = Case(trace=trace([step(1, 0, MS)]), ledger=build_ledger(trace([step(1, 0, MS)])))
    found, abstained = findings(case)
    assert found == ()
    assert len(abstained) > 10
