"""Predicts the gain of candidates that were not timed, from the times of timed candidates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from steadytorch import transforms
from steadytorch.results.candidate import Candidate
from steadytorch.transforms.base import Transform

ENOUGH = 0.01
"""A search ends when what is left is expected to gain less than this share of the leader's time."""
LEAST = 0.002
"""A candidate is not started if its own expected gain is below this share of the leader's time. In
66 recorded searches on GPUs and CPUs, 309 of 701 timed candidates were below this limit when their
turn came, and 9 of them beat the leader by `ENOUGH`."""
HORIZON_S = 60.0
"""Seconds over which the expected gain is stated."""
_BROAD, _NARROW, _PARAMETER = 0.6, 0.1, 0.02
"""Standard deviations of the logarithm of a transform's effect: of one that changes what runs, of
another, and of one of its parameters."""
_TUNING = 0.0005
"""The same for tuning the kernels of a variant; 0.02 together with the interaction below. In 19
recorded pairs on two GPUs, Inductor's autotuning modes changed the time by -2.7 % to +5.2 % against
the default mode (standard deviation 2.5 %). Their set-up took 1 to 4 times as long."""
_ENGINE, _CLASS = 1.5, 0.5
"""The same for the effect that all engines beyond PyTorch share, and for their lower precisions. On
two cores, float32 engines gained 0.1 (ResNet-50) to 2.7 (a network of two layers) in log time, and
both engines agreed within 0.4. bf16 gained a further 0.4 to 0.6, and int8 up to 0.6 beyond bf16."""
_TOGETHER, _APART = 0.5, 0.5
"""The same for the interaction of a candidate's transforms, beyond the sum of their effects; and
the length scale on which two candidates share it. Their distance is the sum of the deviations above
over the effects that only one of them has. In 49 recorded searches on two GPUs, 95 % of 597 times
lay within two deviations of their prediction. Effects alone were off by more than three in half of
26 searches: engines, layouts and compilers depend on each other."""
_NOISE = 0.01
"""The same for the noise of a screening, and for effects on a candidate that the model lacks."""
_RARE = 2.0
"""After n timed candidates, the deviation towards faster times is scaled by
`_RARE` / (`_RARE` + n): each candidate that was not faster is a hint that the leader is near what
the device can do. In simulated searches, with times and set-ups from 37 recorded searches on two
GPUs, the median search took 62 s and its plan 0.5 % longer than the best candidate, 2.3 % at most.
With 3.0 it took 77 s and 0.3 %, with 1.5 it took 61 s and 0.9 %, 12 % at most. From 12 searches on
two CPUs it took 95 s, and 111 s with 3.0, with the same plans."""
_FREEDOM = 3.0
"""Degrees of freedom of the Student-t process. The fewer, the more a search's own times determine
the scale of all deviations."""
_DRAWS = 512


class Prospects:
    """Estimates the gain of candidates that were not timed.

    Models the log time of a candidate as the sum of effects of transforms and parameters, plus an
    interaction that similar candidates share. Conditioning on the timed candidates predicts the
    untimed ones. The model is a Student-t process: a Gaussian process ("Gaussian Processes for
    Machine Learning", Rasmussen and Williams, section 2.2) whose deviations shrink or grow with the
    errors of the predictions so far ("Student-t Processes as Alternatives to Gaussian Processes",
    Shah and others, section 3). The t distribution is approximated by a normal one.
    """

    def __init__(self) -> None:
        self._seen: dict[Candidate, float] = {}

    def note(self, candidate: Candidate, iteration_ns: float) -> None:
        """Records a candidate's iteration time in ns; the untouched workload must be first."""
        self._seen[candidate] = math.log(iteration_ns)

    def expected_gain(self, candidates: Sequence[Candidate]) -> float:
        """Expected gain of the best of these candidates, as a share of the leader's time."""
        if not candidates:
            return 0.0
        lead, covariance = self._lead(candidates)
        values, vectors = np.linalg.eigh(covariance)
        normal = np.random.default_rng(0).standard_normal((_DRAWS, len(candidates)))
        drawn = lead + normal * np.sqrt(values.clip(0)) @ vectors.T
        best = -np.expm1(-drawn.max(axis=1).clip(0))
        return float(best.mean())

    def expected_gains(self, candidates: Sequence[Candidate]) -> np.ndarray:
        """Expected gain of each candidate, shape (candidates,)."""
        if not candidates:
            return np.zeros(0)
        lead, covariance = self._lead(candidates)
        deviation = np.sqrt(np.diag(covariance))
        # The mean of 1 - exp(-lead), where the lead is positive.
        beyond = np.exp(deviation**2 / 2 - lead) * _normal(lead / deviation - deviation)
        return _normal(lead / deviation) - beyond

    def _lead(self, candidates: Sequence[Candidate]) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance of log(leader's time / candidate's time) over these candidates.

        The covariance is scaled as the errors of the predictions so far suggest, and towards faster
        times by `_RARE`.
        """
        known, untouched = list(self._seen), next(iter(self._seen.values()))
        times = np.fromiter(self._seen.values(), float) - untouched
        prior, n = _covariance([*known, *candidates]), len(known)
        among_known = prior[:n, :n] + _NOISE**2 * np.eye(n)
        across = np.linalg.solve(among_known, prior[:n, n:])
        covariance = prior[n:, n:] - prior[n:, :n] @ across
        covariance += _NOISE**2 * np.eye(len(candidates))
        # The untouched workload is the unit of all times and says nothing about the scale.
        surprise = times @ np.linalg.solve(among_known, times)
        scale = (_FREEDOM + surprise) / (_FREEDOM + n - 1)
        upward = _RARE / (_RARE + n - 1)
        return times.min() - times @ across, upward**2 * scale * covariance


def _normal(values: np.ndarray) -> np.ndarray:
    """The standard normal distribution function of each value."""
    return np.array([math.erfc(-value / math.sqrt(2)) / 2 for value in values])


def _covariance(candidates: Sequence[Candidate]) -> np.ndarray:
    """Prior covariance of the logarithms of candidate times, shape (candidates, candidates)."""
    effects = [_effects(candidate) for candidate in candidates]
    deviations = {name: deviation for each in effects for name, deviation in each.items()}
    has = np.array([[name in each for name in deviations] for each in effects], dtype=float)
    weights = np.fromiter(deviations.values(), float)
    total = has @ weights
    apart = total[:, None] + total - 2 * (has * weights) @ has.T
    return (has * weights**2) @ has.T + _TOGETHER**2 * np.exp(-apart / _APART)


def _effects(candidate: Candidate) -> dict[object, float]:
    """The effects of a candidate's transforms and parameters, with their standard deviations."""
    found: dict[object, float] = {}
    for spec in candidate:
        transform = transforms.create(spec)
        untuned = type(transform)(transform.untuned).spec
        found[spec.name] = _BROAD if _changes_what_runs(transform) else _NARROW
        found.update(_of_engine(transform))
        found.update({(spec.name, parameter): _PARAMETER for parameter in untuned.parameters})
        if untuned != spec:
            found[spec] = _TUNING
    return found


def _of_engine(found: Transform) -> dict[object, float]:
    """Effects that an engine transform shares with all engines; empty for other transforms."""
    if not found.engine:
        return {}
    lower = {} if found.precision == "same" else {("class", found.precision): _CLASS}
    return {("engine",): _ENGINE, **lower}


def _changes_what_runs(found: Transform) -> bool:
    """Whether a transform compiles, records, converts to 16 bits or replaces the whole model."""
    return found.compiles or found.records or found.engine or found.precision in ("bf16", "fp16")
