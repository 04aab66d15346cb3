"""Proof by simulation of what the statistics claim; on noise that was never tuned on, too.

    python benchmarks/statistics/validate.py --replications 4000 --out benchmarks/results

Checks the functions that the package itself uses. Gates and their limits stand in `gates.py`; each
is reported met or missed. A process takes one kind of noise after the other; all take about half an
hour of one core.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import gates
import numpy as np
import ruptures
import scipy
from noise import BLOCK, DISCARDED, KINDS, Noise, pair_differences, true_quantile
from scipy.stats import ttest_ind
from unseen import SEEN, UNSEEN

from steadytorch import __version__
from steadytorch.measure.measurement import median_interval
from steadytorch.measure.race import ALPHA, LOOKS, TIE, judge, race
from steadytorch.measure.statistics import quantile_interval, signed_rank_cut
from steadytorch.measure.warmup import steady_part

EFFECTS = (0.0, 0.0025, -0.0025, 0.005, -0.005, 0.01, -0.01, 0.03, -0.03)
LENGTHS = (500, 1000, 2000, 10_000)
P99_LENGTH = 10_000
ARMS = (0.0, 0.003, 0.006, 0.01, 0.02, 0.03, 0.05, 0.10)
"""How much slower than the best the arms of a race are."""
CROSS_CHECKED = 25
VERDICTS = ("undecided", "faster", "slower", "tie")


def seeded(seed: int, *words: object) -> np.random.Generator:
    """A generator of its own for each experiment, so that none depends on what ran before."""
    return np.random.default_rng([seed, *"/".join(map(str, words)).encode()])


# -- intervals ----------------------------------------------------------------------------------


def coverage(name: str, noise: Noise, length: int, rows: int, seed: int) -> dict[str, Any]:
    """How often intervals are claimed, and how often they hold, beside the naive one."""
    truth, tail = (true_quantile(noise, q, length) for q in (0.5, 0.99))
    rng = seeded(seed, "coverage", name, length)
    held, naive, held_tail, steady, off = [], [], [], 0, []
    for samples in (np.exp(row) for row in _rows(noise, rng, rows, length)):
        verdict = steady_part(samples)
        steady += verdict.steady
        kept = samples[verdict.dropped :]
        interval, _ = median_interval(kept, verdict)
        half = 1.96 * 1.2533 * samples.std(ddof=1) / np.sqrt(length)
        naive.append(abs(np.median(samples) - np.exp(truth)) <= half)
        off.append(abs(np.log(np.median(kept)) - truth))
        if interval:
            held.append(interval[0] <= np.exp(truth) <= interval[1])
        if length >= P99_LENGTH and verdict.steady and (far := quantile_interval(kept, 0.99)[0]):
            held_tail.append(far[0] <= np.exp(tail) <= far[1])
    return {
        "kind": name,
        "samples": length,
        "steady": steady / rows,
        "claimed": len(held) / rows,
        "coverage": _mean(held),
        "naive_coverage": _mean(naive),
        "p99_claimed": len(held_tail) / rows,
        "p99_coverage": _mean(held_tail),
        "median_off_p95_percent": 100 * float(np.quantile(off, 0.95)),
    }


def _rows(noise: Noise, rng: np.random.Generator, rows: int, length: int) -> Iterator[np.ndarray]:
    """Lines one at a time, made a few hundred at a time, because all would not fit in memory."""
    batch = max(1, 2_000_000 // length)
    for start in range(0, rows, batch):
        yield from noise(rng, min(batch, rows - start), length)


def _mean(values: Sequence[bool]) -> float | None:
    return float(np.mean(values)) if len(values) else None


# -- pairs --------------------------------------------------------------------------------------


def intervals_at(differences: np.ndarray, look: int) -> tuple[np.ndarray, np.ndarray]:
    """`race.judge`'s interval at one look for many rows at once; shape (rows,) each."""
    rows, columns = np.triu_indices(look)
    taken = differences[:, :look]
    cut = signed_rank_cut(look, ALPHA / len(LOOKS))
    assert cut is not None
    averages = np.sort((taken[:, rows] + taken[:, columns]) / 2.0, axis=1)
    return averages[:, cut], averages[:, -1 - cut]


def outcomes(
    bounds: Sequence[tuple[np.ndarray, np.ndarray]], effect: float
) -> tuple[np.ndarray, np.ndarray]:
    """Verdict (index into VERDICTS) and pairs used per row, for an effect on B."""
    shift = np.log1p(effect)
    verdict = np.zeros(len(bounds[0][0]), dtype=int)
    used = np.full(len(verdict), LOOKS[-1])
    for look, (lower, upper) in zip(LOOKS, bounds, strict=True):
        low, high = np.expm1(lower + shift), np.expm1(upper + shift)
        now = np.select([high < 0, low > 0, (low >= -TIE) & (high <= TIE)], [1, 2, 3], 0)
        fresh = (verdict == 0) & (now > 0)
        verdict[fresh], used[fresh] = now[fresh], look
    return verdict, used


def verdicts(name: str, noise: Noise, rows: int, seed: int) -> list[dict[str, Any]]:
    """What is said of each effect, how soon, and whether `judge` says the same."""
    rng = seeded(seed, "pairs", name)
    differences, _ = pair_differences(noise, rng, rows, LOOKS[-1])
    bounds = [intervals_at(differences, look) for look in LOOKS]
    found = []
    for effect in EFFECTS:
        verdict, used = outcomes(bounds, effect)
        for row in range(min(CROSS_CHECKED, rows)):
            pairs = [(1.0, float(t)) for t in np.exp(differences[row] + np.log1p(effect))]
            same = judge(pairs)
            assert (same.verdict, same.pairs) == (VERDICTS[verdict[row]], used[row])
        right = {0: -1, 1: 2, -1: 1}[int(np.sign(effect))]
        wrong = {0: -1, 1: 1, -1: 2}[int(np.sign(effect))]
        share = {word: float(np.mean(verdict == i)) for i, word in enumerate(VERDICTS)}
        found.append(
            {
                "kind": name,
                "effect": effect,
                **share,
                "wrong_direction": float(np.mean(verdict == wrong)),
                "found_by_27": float(np.mean((verdict == right) & (used <= 27))),
                "median_pairs": float(np.median(used)),
            }
        )
    return found


def naive_verdicts(name: str, noise: Noise, rows: int, seed: int, count: int = 27 * 7) -> float:
    """False verdicts of all of A, then all of B, and a t-test at 1 %, on two equal arms."""
    line = noise(seeded(seed, "naive", name), rows, 2 * count)
    a, b = np.exp(line[:, :count]), np.exp(line[:, count:])
    return float(np.mean(ttest_ind(a, b, axis=1).pvalue < ALPHA))


# -- races --------------------------------------------------------------------------------------


def races(name: str, noise: Noise, rows: int, seed: int) -> dict[str, Any]:
    """Whether the best of eight survives, and which part of the full number of blocks it took."""
    rng, full = seeded(seed, "race", name), len(ARMS) * LOOKS[-1]
    lines = noise(rng, rows, full * BLOCK).reshape(rows, full, BLOCK)
    medians = np.median(lines[..., DISCARDED:], axis=2)
    lost, cost = 0, []
    for row in range(rows):
        blocks = iter(medians[row])
        result = race([_arm(blocks, slower) for slower in ARMS], rng=Random(row))
        lost += 0 not in result.survivors
        cost.append(sum(map(len, result.times)) / full)
    return {
        "kind": name,
        "races": rows,
        "best_dropped": lost / rows,
        "median_cost": float(np.median(cost)),
    }


def _arm(blocks: Iterator[np.floating], slower: float) -> Callable[[], float]:
    """Takes the next block on the line, whoever's turn it is, and is slower by its own factor."""
    return lambda: float(np.exp(next(blocks))) * (1 + slower)


# -- all together -------------------------------------------------------------------------------


def study(
    kinds: Iterable[str],
    replications: int,
    lengths: Sequence[int] = LENGTHS,
    seed: int = 1,
    over: Callable[..., Iterable[dict[str, Any]]] = map,
) -> dict[str, Any]:
    """Every experiment on every kind; `over` is a pool's `map`, which shares out the kinds."""
    ask = partial(_study_of, replications=replications, lengths=lengths, seed=seed)
    found: dict[str, Any] = {"coverage": [], "verdicts": [], "naive_false": {}, "races": []}
    for one in over(ask, kinds):
        for part in ("coverage", "verdicts", "races"):
            found[part] += one[part]
        found["naive_false"] |= one["naive_false"]
    return found


def _study_of(name: str, replications: int, lengths: Sequence[int], seed: int) -> dict[str, Any]:
    noise = {**KINDS, **SEEN, **UNSEEN}[name]
    return {
        "coverage": [coverage(name, noise, n, replications, seed) for n in lengths],
        "verdicts": verdicts(name, noise, replications, seed),
        "naive_false": {name: naive_verdicts(name, noise, replications, seed)},
        "races": [races(name, noise, max(10, replications // 8), seed)],
    }


def _only(kinds: Collection[str], found: dict[str, Any]) -> dict[str, Any]:
    parts = ("coverage", "verdicts", "races")
    return {
        **{part: [cell for cell in found[part] if cell["kind"] in kinds] for part in parts},
        "naive_false": {k: rate for k, rate in found["naive_false"].items() if k in kinds},
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--replications", type=int, default=4000)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--date", default=str(datetime.date.today()))
    options.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    chosen = options.parse_args()
    start = time.perf_counter()

    with ProcessPoolExecutor(chosen.processes) as pool:
        everything = study(
            [*KINDS, *SEEN, *UNSEEN], chosen.replications, seed=chosen.seed, over=pool.map
        )
    tuned, seen, fresh = (_only(kinds, everything) for kinds in (KINDS, SEEN, UNSEEN))
    result = {
        "schema": 1,
        "kind": "statistics_simulation",
        "created": chosen.date,
        "versions": {
            "steadytorch": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "scipy": scipy.__version__,
            "ruptures": ruptures.__version__,
        },
        "configuration": {
            "replications": chosen.replications,
            "processes": chosen.processes,
            "seed": chosen.seed,
            "lengths": LENGTHS,
            "looks": LOOKS,
            "alpha": ALPHA,
            "tie": TIE,
            "arms": ARMS,
        },
        "seconds": round(time.perf_counter() - start),
        "gates": gates.judge_all(tuned),
        "gates_seen": gates.judge_all(seen),
        "gates_unseen": gates.judge_all(fresh),
        "tuned": tuned,
        "seen": seen,
        "unseen": fresh,
    }
    stem = chosen.out / f"statistics_simulation_{chosen.date}"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    stem.with_suffix(".md").write_text(gates.as_markdown(result))
    missed = [g["gate"] for g in (*result["gates"], *result["gates_unseen"]) if not g["met"]]
    print("all gates met" if not missed else "missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
