"""Measurements and comparisons as scripted values."""

from __future__ import annotations

import msgspec

from steadytorch.measure.measurement import summarize
from steadytorch.results.compare import CompareResult, Effect, Side
from steadytorch.results.measure import (
    DeviceBlock,
    HostBlock,
    MeasureResult,
    ProcessMeasurement,
    SetUp,
    WarmUp,
)

MS = 1_000_000
HOST = HostBlock(11.9e6, 210.0, 3, 7 * MS, 1234, 0, None, 0.001)
DEVICE = DeviceBlock(1755.0, 412.3, ("power_cap",), 1)
SET_UP = SetUp(1.26, WarmUp(80 * MS, 41, 12 * MS, 1), 1_234_567_890)


def series(level_ns=12_410_000, count=1000, slow=(), causes=None):
    """A steady series that is the same every time; `slow` is index to what comes on top."""
    samples = [int(level_ns * (1 + 0.002 * ((i * 7919) % 101 - 50) / 50)) for i in range(count)]
    for index, extra in dict(slow).items():
        samples[index] += extra
    return summarize(samples, causes=causes)


def process(period=None, **fields):
    defaults = {
        "period": period or series(),
        "latency": None,
        "set_up": SET_UP,
        "resolved": True,
        "host": HOST,
        "device": None,
        "unknown": {"steal_ns": "no such line"},
    }
    return ProcessMeasurement(**{**defaults, **fields})


def measured(*processes, **fields):
    """The result of these processes; of one if none is given."""
    done = processes or (process(),)
    defaults = {
        "processes": done,
        "claim": "process" if len(done) < 3 else "machine",
        "median_ns": done[0].period.median_ns,
        "median_ci_ns": done[0].period.median_ci_ns,
        "spread": None if len(done) == 1 else 0.0031,
    }
    return MeasureResult.of(**{**defaults, **fields})


EFFECT = Effect(
    estimate=-0.1234,
    low=-0.13,
    high=-0.117,
    verdict="faster",
    claim="process",
    pairs=27,
    processes=1,
    mde=0.006,
)


def compared(a="resnet50", b="resnet50@channels_last", **fields):
    """A comparison; fields of the effect and of the result alike."""
    names = set(Effect.__struct_fields__)
    effect = msgspec.structs.replace(EFFECT, **{k: v for k, v in fields.items() if k in names})
    rest = {k: v for k, v in fields.items() if k not in names}
    defaults = {"samples": (((12.4e6, 10.9e6), (12.5e6, 10.8e6)),), "metric": "latency"}
    return CompareResult.of(effect, a=Side(a, 12.41e6), b=Side(b, 10.88e6), **{**defaults, **rest})
