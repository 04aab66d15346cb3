"""The gain that a search may still expect, from the candidates it has timed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from steadytorch import transforms
from steadytorch.results.candidate import Candidate, TransformSpec

ENOUGH = 0.01
"""A search ends when what is left is expected to gain less than this share of the leader's time."""
HORIZON_S = 60.0
"""Seconds over which the expected gain is stated."""
_BROAD, _NARROW, _PARAMETER = 0.4, 0.1, 0.02
"""Standard deviations of the logarithm of a transform's effect: of one that changes what runs, of
another, and of one of its parameters."""
_ENGINE, _CLASS = 0.8, 0.5
"""The same for what engines beyond PyTorch have in common, and for a lower precision of theirs. For
ResNet-50, MobileNetV3 and ViT on two cores, float32 gave 0.2 to 1.4, bf16 a further 0.4 to 0.6, and
int8 up to 0.6 beyond bf16."""
_TOGETHER, _HERE = 0.15, 0.015
"""The same for effects of combinations: of several that change what runs, and of another transform
beside them. In a recorded search the effect of one transform differed by 1 to 2 % between compiled
and uncompiled code."""
_NOISE = 0.01
"""The same for a screening, and for what else makes a candidate's time."""
_DRAWS = 512


class Prospects:
    """Estimates the gain of candidates that were not timed.

    The logarithm of a candidate's time is the sum of normally distributed effects of its
    transforms, their parameters and their combinations. Those that were timed tell about the
    others. Source: "Gaussian Processes for Machine Learning", Rasmussen and Williams, section 2.2.
    """

    def __init__(self) -> None:
        self._seen: dict[Candidate, float] = {}

    def note(self, candidate: Candidate, iteration_ns: float) -> None:
        """Records the iteration time of a timed candidate in ns; the untouched workload's first."""
        self._seen[candidate] = math.log(iteration_ns)

    def expected_gain(self, candidates: Sequence[Candidate]) -> float:
        """Expected gain of the best of these candidates, as a share of the leader's time."""
        return float(self._gains(candidates).max(axis=1, initial=0.0).mean())

    def expected_gains(self, candidates: Sequence[Candidate]) -> np.ndarray:
        """Expected gain of each of these candidates; shape (candidates,)."""
        return self._gains(candidates).mean(axis=0)

    def _gains(self, candidates: Sequence[Candidate]) -> np.ndarray:
        """Gains drawn at random, 0 where a candidate is slower; shape (draws, candidates)."""
        if not candidates:
            return np.zeros((_DRAWS, 0))
        known, untouched = list(self._seen), next(iter(self._seen.values()))
        times = np.fromiter(self._seen.values(), float) - untouched
        columns = _features([*known, *candidates])
        effects = np.array([deviation * column for deviation, column in columns])
        covariance = effects.T @ effects
        n = len(known)
        noisy = covariance[:n, :n] + _NOISE**2 * np.eye(n)
        across = np.linalg.solve(noisy, covariance[:n, n:])
        mean = times @ across
        spread = covariance[n:, n:] - covariance[n:, :n] @ across
        spread += _NOISE**2 * np.eye(len(candidates))
        values, vectors = np.linalg.eigh(spread)
        normal = np.random.default_rng(0).standard_normal((_DRAWS, len(candidates)))
        drawn = mean + normal * np.sqrt(values.clip(0)) @ vectors.T
        return -np.expm1(-(times.min() - drawn).clip(0))


def _features(candidates: Sequence[Candidate]) -> list[tuple[float, np.ndarray]]:
    """Effects with their standard deviations, and which candidates have them, (candidates,)."""
    found: dict[tuple[object, ...], tuple[float, list[int]]] = {}

    def has(place: int, deviation: float, *effect: object) -> None:
        found.setdefault(effect, (deviation, []))[1].append(place)

    for place, candidate in enumerate(candidates):
        broad = frozenset(spec.name for spec in candidate if _changes_what_runs(spec))
        has(place, _TOGETHER if len(broad) > 1 else 0.0, broad)
        for spec in candidate:
            has(place, _BROAD if spec.name in broad else _NARROW, spec.name)
            has(place, _HERE, spec.name, broad)
            for deviation, *effect in _of_engine(spec):
                has(place, deviation, *effect)
            for parameter in spec.parameters:
                has(place, _PARAMETER, spec.name, parameter)
    columns = []
    for deviation, places in found.values():
        column = np.zeros(len(candidates))
        column[places] = 1.0
        columns.append((deviation, column))
    return columns


def _of_engine(spec: TransformSpec) -> list[tuple[float, str]]:
    """Effects that a transform shares with all engines; none if it is not an engine."""
    found = transforms.create(spec)
    if not found.engine:
        return []
    lower = [] if found.precision == "same" else [(_CLASS, found.precision)]
    return [(_ENGINE, "engine"), *lower]


def _changes_what_runs(spec: TransformSpec) -> bool:
    """Whether it compiles, records, converts to 16 bits or replaces the whole model."""
    found = transforms.create(spec)
    return found.compiles or found.records or found.engine or found.precision in ("bf16", "fp16")
