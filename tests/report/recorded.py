"""A search and an explanation of a ResNet-50, as long as real ones."""

from __future__ import annotations

import msgspec

from steadytorch.plan.record import Speedup
from steadytorch.results.candidate import TransformSpec

from .conftest import evidence, plan, result, timing, trial
from .explained import explained, finding

FOLD = TransformSpec("fold_batch_norm")
LAST = TransformSpec("channels_last")
ENGINES = TransformSpec("cudnn_engines", (("choices", "x" * 3000),))
GRAPH = TransformSpec("cuda_graph")
NO_GRAD = TransformSpec("inference_mode")
COMPILE = TransformSpec("compile", (("mode", "max-autotune-no-cudagraphs"), ("freezing", True)))
FUSED = TransformSpec("fused_kernels", (("stem", "conv_relu_max_pool"),))
WON = (FOLD, LAST, ENGINES, FUSED, COMPILE, GRAPH, NO_GRAD)
SECOND = (FOLD, LAST, COMPILE, GRAPH, NO_GRAD)
TRIALS = (
    trial(),
    trial(WON, median_ns=14.2e6, error=1.2e-7),
    trial(SECOND, median_ns=15.1e6, error=1.2e-7),
    trial((LAST, COMPILE, GRAPH), median_ns=15.3e6, error=1.2e-7),
    *(trial((FOLD, TransformSpec(f"transform_{n}")), median_ns=(16 + n) * 1e6) for n in range(20)),
    trial((LAST,), median_ns=None, status="rejected", reason="peaks at 9.00 GiB, over the cap"),
    trial((GRAPH,), median_ns=None, status="failed", reason="set-up: RuntimeError: no"),
)
REFERENCE = (
    "float32 without TF32; float64 does not run: RuntimeError: expected scalar type Float but "
    "found Double in the loss, which closes over a float32 tensor of class weights"
)
EVIDENCE = evidence(
    trials=TRIALS,
    baseline=timing(28.7e6),
    winner=timing(14.2e6),
    speedup=Speedup(2.02, 1.9, 2.1, "process", "faster", 27),
    reference=REFERENCE,
    not_applicable={f"option_{n}": f"reason {n % 5} of those that exist" for n in range(30)},
    not_tried={f"candidate_{n}": "the budget ended" for n in range(12)},
)
STORED = "/home/some-user/.cache/steadytorch/plans/0123/4567.json"
PLAN = plan(candidate=WON, evidence=EVIDENCE, path=STORED)
TRAINED = msgspec.structs.replace(PLAN, trains="0" * 64)


def found(**fields):
    """The search that found `PLAN`."""
    own = {"candidates": TRIALS, "chosen": WON, "reference": REFERENCE}
    left = {"not_applicable": EVIDENCE.not_applicable, "not_tried": EVIDENCE.not_tried}
    return result(**{**own, **left, **fields})


FIX = (
    "Stop or move what else runs on these cores, give the process cores of its own (taskset, "
    "cpuset, a CPU request in the container), and use fewer threads than cores."
)
TITLE = "the GPU waits for launches: 71 % of a step (20.4 ms of 28.7 ms), 161 kernels of 5 us each"
SLICES = {f"idle_{n}": 1_000_000 * (n + 1) for n in range(12)}
EXPLAINED = explained(
    steps=tuple(
        msgspec.structs.replace(step, total_ns=sum(SLICES.values()), slices_ns=SLICES)
        for step in explained().steps
    ),
    findings=tuple(finding(f"finding-{n}", title=TITLE, fix=FIX) for n in range(6)),
)
