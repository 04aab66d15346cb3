"""A saved result of every kind and form, made as the command line makes them."""

from __future__ import annotations

import msgspec

from steadytorch.device.facts import DeviceFacts
from steadytorch.device.probes import Observation
from steadytorch.device.telemetry import Snapshot
from steadytorch.doctor import CheckUp
from steadytorch.measure.noise import NoiseFloor
from steadytorch.measure.variability import UNATTRIBUTED
from steadytorch.plan.record import as_result
from steadytorch.results.compare import SustainedRun
from steadytorch.results.explain import Explanation
from steadytorch.results.saved import to_json
from steadytorch.results.sweep import Sweep, SweepRow
from steadytorch.runtime.switch import Switch

from .commits import ADDED, FAILED, JUDGED, SLOWER, STEPPED, gated, tracked
from .conftest import FACTS, evidence, plan, result, trial
from .explained import FULL, explained
from .measured import DEVICE, MS, compared, measured, process, series
from .swept import DONE, REFUSED
from .test_conv import layer, trained
from .test_conv import report as conv_report
from .test_ranks import LATE, ranks
from .watched import watched

GPU = DeviceFacts(device="cuda", name="NVIDIA H200", compute_capability="9.0", torch="2.13.0")
SLOW = {i: 5 * MS for i in range(900, 910)}
CAUSES = {i: "garbage collection" for i in range(900, 905)}
SWITCH = Switch(
    benchmark=True,
    benchmark_limit=10,
    deterministic=False,
    fp32_precision="tf32",
    environment={"TORCH_CUDNN_USE_HEURISTIC_MODE_B": "1"},
    no_effect="",
    traps=("It may differ.",),
)
SEEN = [Observation("NVML", True, "580.159"), Observation("counters", False, "barred", "ask root")]
INPUTS = "1x3x224x224:float32"
CUT = {"baseline": None, "winner": None, "speedup": None, "break_even_calls": None}
ALONE = tuple(SustainedRun(side, 10.0, ns, 1500.0) for side, ns in (("a", 12e6), ("b", 11e6)))


def _measured(*processes, facts=FACTS, **fields):
    return to_json(measured(*processes, **fields), "resnet50", facts)


def _compared(gate=False, **fields):
    found = compared(gate_failed=gate, **fields)
    return to_json(found, found.workload, FACTS)


def _watched(**fields):
    return to_json(watched(**fields), "train.py", FACTS)


def _searched(kept=None, trains=False, **fields):
    found = result(**fields).as_result(kept, inputs=INPUTS, trains=trains)
    return to_json(found, "resnet50", FACTS)


def _explained(name, found):
    return to_json(found, name, found.environment)


def _checked(facts, state, switch=SWITCH):
    noise = NoiseFloor(0.01, 3, "a product")
    found = CheckUp(
        environment=facts,
        state=state,
        observability=SEEN,
        noise_floor=noise,
        benchmark_mode=switch,
    )
    return to_json(found, "", facts)


def _gated(*rows, **fields):
    found = gated(*rows, **fields)
    return to_json(found, found.workload, FACTS)


def _tracked(*series, **fields):
    found = tracked(*series, **fields)
    return to_json(found, found.workload, FACTS)


def _ranked(**fields):
    found = ranks(**fields)
    return to_json(found, "rank0.json rank1.json", found.environment)


def _swept(*rows):
    return to_json(Sweep(list="w.txt", folder="w.txt.sweep", rows=rows), "w.txt", FACTS)


UNTOUCHED = msgspec.structs.replace(evidence().speedup, low=None, high=None, verdict="untouched")
DOCUMENTS = {
    "measure": _measured(),
    "measure, outliers": _measured(process(series(slow=SLOW, causes=CAUSES))),
    "measure, few samples": _measured(process(series(count=12))),
    "measure, one sample": _measured(process(series(count=1))),
    "measure, three processes": _measured(*[process(series(ms * MS)) for ms in (12, 13, 14)]),
    "measure, a GPU": _measured(
        process(latency=series(13 * MS), device=DEVICE), facts=GPU, median_ci_ns=None
    ),
    "measure, cut short": _measured(
        process(complete=False), process(complete=False), failed="it [broke]", interrupted=True
    ),
    "explain": _explained("resnet50", FULL),
    "explain, nothing": _explained(
        "x.json.gz", Explanation(source="x", environment=FACTS, regime="unclassified")
    ),
    "explain, a trace": _explained(
        "x.json.gz", explained(measured=None, distortion=None, marked=False, variance_shares=None)
    ),
    "explain, doubtful": _explained(
        "resnet50", explained(distortion=2.0, problems=("cut",), remarks=("slow",), failed="x")
    ),
    "tune": _searched(plan()),
    "tune, a training step": _searched(plan(trains="0" * 64), trains=True),
    "tune, replayed": to_json(as_result(plan()), "resnet50", FACTS),
    "tune, cut short": _searched(**CUT, chosen=(), interrupted=True),
    "tune, nothing tried": _searched(**CUT, chosen=(), candidates=(), interrupted=True),
    "tune, untouched": _searched(
        plan(candidate=()), chosen=(), speedup=UNTOUCHED, break_even_calls=None
    ),
    "tune, no number": _searched(
        plan(),
        speedup=msgspec.structs.replace(evidence().speedup, estimate=float("nan")),
        candidates=(trial(error=float("nan")),),
    ),
    "compare": _compared(),
    "compare, three processes": _compared(samples=(((12e6, 11e6),),) * 3, processes=3),
    "compare, saved": _compared(low=None, high=None, mde=None, pairs=0, samples=(), note="one"),
    "compare, nothing": _compared(estimate=None, low=None, high=None, samples=(), failed="no"),
    "compare, a gate": _compared(True, verdict="slower", estimate=0.1, low=0.09, high=0.11),
    "compare, by themselves": _compared(dwells=ALONE, verdict="undecided"),
    "conv": to_json(conv_report(layer()), "net", GPU),
    "conv, nothing": to_json(conv_report(), "net", GPU),
    "conv, a training step": to_json(trained(), "net", GPU),
    "run": _watched(),
    "run, no steps": _watched(measured=None, slices_ns={}, findings=(), slowest=(), lines=()),
    "run, cut short": _watched(failed="it [broke]", interrupted=True, remarks=("slow",)),
    "ranks": _ranked(late=LATE),
    "ranks, many": _ranked(size=100, steps=1, findings=()),
    "ranks, no split": _ranked(variance_shares=None, why_no_variance_shares="two [steps]"),
    "sweep": _swept(DONE, REFUSED, SweepRow(workload="third", status="waiting")),
    "gate": _gated(),
    "gate, failed": _gated(JUDGED, SLOWER, gate_failed=True, notes=("Submodules [x] are out.",)),
    "gate, nothing": _gated(ADDED, FAILED),
    "gate, cut short": _gated(msgspec.structs.replace(ADDED, status="skipped"), interrupted=True),
    "track": _tracked(STEPPED),
    "track, ratios": _tracked(msgspec.structs.replace(STEPPED, unit="ratio", base="0123456789ab")),
    "track, one result": _tracked(
        msgspec.structs.replace(STEPPED, points=STEPPED.points[:1], changes=()),
        notes=("left out: x.json is not a saved result",),
    ),
    "doctor": _checked(FACTS, Snapshot(device="cpu", load_average_1m=0.5)),
    "doctor, unknown": _checked(GPU, Snapshot(device="cuda", unknown={"x": "y"})),
}
assert UNATTRIBUTED.encode() in DOCUMENTS["measure, outliers"]
