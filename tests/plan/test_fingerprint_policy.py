"""A key names the policy of measurement by the version of the rules: both change together."""

from __future__ import annotations

from steadytorch.bench import ramp
from steadytorch.measure import race
from steadytorch.plan.fingerprint import RULES_VERSION
from steadytorch.runtime import agreement, slices
from steadytorch.training import passes
from steadytorch.tune import budget, candidate_pool, select
from steadytorch.verification import verdict, verify

FIRST = {
    "looks": (12, 18, 27, 40, 60),
    "alpha": 0.01,
    "tie": 0.005,
    "power": 0.90,
    "least processes": 3,
    "screening": (6, 4, 1.10),
    "blocks": [(10, 69), (5, 69), (3, 69)],
    "discarded": 2,
    "errors": (4.0, 2.0, 4.0, {"tf32": 5e-3, "fp16": 1e-2, "bf16": 5e-2}),
    "inputs": (3, (0.5, 0.9), 1e-4),
    "training": (0.25, 1e-2),
}
CLASSES = {"tf32": 5e-3, "fp16": 1e-2, "bf16": 5e-2, "int8": 1e-1}
SECOND = {**FIRST, "discarded": (2, 4e6), "errors": (4.0, 2.0, 4.0, CLASSES)}
THIRD = {**SECOND, "blocks": [(10, 69), (5, 69), (1, 69)], "discarded": (2, 4e6, 5e8)}
FOURTH = {**THIRD, "blocks": [(10, 69), (5, 69), (1, 10)]}
FIFTH = {**FOURTH, "blocks": [(10, 69), (5, 69), (1, 3)]}
SIXTH = {**FIFTH, "slices": (4.0, 4.0, 32, 2.0**-14)}
POLICIES = {1: FIRST, 2: SECOND, 3: THIRD, 4: FOURTH, 5: FIFTH, 6: SIXTH}
"""What plans of each version of the rules were measured and verified by. What changes belongs to a
new version: plans of the old one are in stores. An added class changes no plan of the others."""


def test_the_policy_of_measurement_is_that_of_the_version_of_the_rules():
    found = {
        "looks": race.LOOKS,
        "alpha": race.ALPHA,
        "tie": race.TIE,
        "power": race.POWER,
        "least processes": race.LEAST_PROCESSES,
        "screening": (budget.SCREEN_BLOCKS, budget.KEEP, candidate_pool.NEAR),
        "blocks": [
            tuple(
                select.block_shape(select.SearchOptions(objective=o), ns).count
                for o in ("latency", "p99")
            )
            for ns in (1e6, 1e7, 1e9)
        ],
        "discarded": (ramp.DISCARD, ramp.RAMP_NS, ramp.LONG_NS),
        "errors": (
            verdict.SAME_FACTOR,
            verdict.STEP_FACTOR,
            agreement.MAX_ERROR_FACTOR,
            agreement.TOLERANCES,
        ),
        "slices": (
            verdict.SLICE_FACTOR,
            slices.ROUNDINGS,
            slices.LEAST,
            slices.SMALLEST,
        ),
        "inputs": (verify.INPUT_SETS, verify.NEARBY, verify.REPEATABLE),
        "training": (passes.BLEND, passes.SMALL),
    }
    assert found == POLICIES[RULES_VERSION]
