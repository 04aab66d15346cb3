"""A watched script, made without running one."""

from __future__ import annotations

import msgspec

from steadytorch.results.explain import SlowStep
from steadytorch.results.watched import LineShare, Watched
from steadytorch.watching.clock import SLICES

from .conftest import FACTS
from .explained import FULL
from .measured import MS, series

SLOW = {i: 50 * MS for i in range(900, 910)}


def watched(**fields):
    measured = fields.pop("measured", series(slow=SLOW, causes={900: "garbage collection"}))
    totals = () if measured is None else measured.samples_ns
    part = {name: tuple(total // len(SLICES) for total in totals) for name in SLICES}
    rest = tuple(total - (len(SLICES) - 1) * (total // len(SLICES)) for total in totals)
    made = Watched(
        unit="optimizer steps",
        environment=FACTS,
        elapsed_s=60.0,
        measured=measured,
        starts_ns=tuple(range(len(totals))),
        slices_ns={**part, "rest": rest},
        variance_shares=dict.fromkeys(SLICES, 1 / len(SLICES)),
        slowest=tuple(
            SlowStep(i, f"step {i}", 50 * MS, 38 * MS, ("rest 38 ms, usually 1 ms (a.py:3 main)",))
            for i in range(900, 910)
        ),
        lines=(LineShare("rest", "a.py:3 main, in save", 0.25),),
        findings=FULL.findings,
        abstained=FULL.abstained,
        peak_memory_bytes=1 << 30,
        overhead_share=0.002,
    )
    return msgspec.structs.replace(made, **fields)
