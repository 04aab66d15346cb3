"""Time budget of a search: time left, reserves and expected set-up times."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from steadytorch import transforms
from steadytorch.bench.ramp import LONG_NS
from steadytorch.errors import UsageError
from steadytorch.measure.race import LOOKS
from steadytorch.results.candidate import Candidate, TransformSpec
from steadytorch.tune.select import CLAIM, BlockShape
from steadytorch.tune.trial import LiveTrial

SCREEN_BLOCKS = 6
"""Blocks per screening: the fewest whose medians support a 95 % interval."""
KEEP, NEAR = 4, 1.10
"""Maximum number of candidates in the final race, and the factor of the leader's time within which
they must be."""
PATIENCE = 8.0
"""A set-up times out after this multiple of its expected time."""
OVERTIME = 0.2
"""Share of the budget that a search may add for a candidate that is about to be ready."""
START_S = 5.0
"""Seconds to start a worker and load the workload."""
_COMPILE_S, _COMPILE_LAYER_S = 8.0, 0.07
"""A first guess at compiling: fixed and per layer. Networks with 40 to 430 layers took 0.8 to 1.6
times as long with 16 cores and an H200, and 0.8 to 3 times with two cores of two CPUs."""
_AUTOTUNE = 6.0
"""Time of max-autotune over that of other modes."""
_CONVERT_S = 8.0
"""First guess at starting a worker and converting a model for an engine such as ONNX Runtime. For
ResNet-50, ViT-B/16 and GPT-2 on two cores, OpenVINO took 6 to 7 s and ONNX Runtime 8 to 14 s."""
_PLAIN_S = 2.0
_UNDERESTIMATED = 0.2
"""A set-up that has outlasted its expected time is expected to take this share longer."""


class Budget:
    """The time budget of one search.

    Args:
        seconds: total wall-clock time.
        now: returns seconds on a monotonic clock.
        layers: number of the model's layers, which sets the first guess at compiling.
        began: start of the budget on that clock; None for now.

    Attributes:
        shape: block shape; a placeholder until the untouched workload has been timed.
        overtime_s: seconds granted beyond the budget.
        fastest_ns: iteration time of the fastest candidate; None until one has been timed.
        finalists: number of candidates that would be in the final race now.
    """

    def __init__(
        self,
        seconds: float,
        now: Callable[[], float],
        layers: int = 0,
        began: float | None = None,
    ) -> None:
        self.seconds = seconds
        self.overtime_s = 0.0
        self._compile_s = _COMPILE_S + _COMPILE_LAYER_S * layers
        self.shape = BlockShape(5, 1e6)
        self.fastest_ns: float | None = None
        self.finalists = 0
        self._now, self._start = now, now() if began is None else began

    def spent(self) -> float:
        """Seconds since the search began."""
        return self._now() - self._start

    def remaining(self) -> float:
        """Seconds left, including granted overtime; negative once the budget is exceeded."""
        return self.seconds + self.overtime_s - self.spent()

    def may_add_s(self) -> float:
        """Seconds of overtime that could still be granted."""
        return OVERTIME * self.seconds - self.overtime_s

    def confirmation_s(self) -> float:
        """Seconds to time the minimum number of fresh pairs of winner and untouched workload."""
        return LOOKS[0] * self._pair_s()

    def require_confirmation(self) -> None:
        """Checks that the time left suffices to confirm a winner.

        Raises:
            UsageError: the time left is too short.
        """
        least_s = self.confirmation_s()
        if self.remaining() < least_s:
            raise UsageError(
                f"a budget of {self.seconds:.0f} s is too small: starting and measuring the "
                f"untouched workload took {self.spent():.0f} s; give at least "
                f"{3 * self.spent() + 2 * least_s:.0f} s"
            )

    def looks(self) -> tuple[int, ...]:
        """Numbers of fresh pairs at which to look for a verdict, as far as the time left allows.

        The first look is always included. Overtime that could still be granted counts as time left,
        because only an undecided comparison takes overtime.
        """
        pairs = (self.remaining() + self.may_add_s()) / self._pair_s()
        return LOOKS[:1] + tuple(look for look in LOOKS[1:] if look <= pairs)

    def reserve_s(self) -> float:
        """Seconds to reserve for the final race and the confirmation.

        The estimate assumes one more finalist than now, each as slow as the fastest candidate,
        since only near ties enter the race. Before any candidate has been timed, no time is
        reserved for the race, so that long compilations can start.
        """
        race_s = 0.0
        if self.fastest_ns is not None:
            fast = self._fast()
            untouched = self.shape.iteration_ns <= NEAR * self.fastest_ns
            arms = min(self.finalists + 1, KEEP) + untouched
            race_s = LOOKS[0] * arms * fast.expected_s
        needed_s = race_s + self.confirmation_s()
        return min(needed_s, CLAIM * self.seconds)

    def _fast(self) -> BlockShape:
        """Block shape of the fastest candidate; before any is timed, of the untouched workload."""
        iteration_ns = self.fastest_ns or self.shape.iteration_ns
        return msgspec.structs.replace(self.shape, iteration_ns=iteration_ns)

    def _pair_s(self) -> float:
        return self.shape.expected_s + self._fast().expected_s

    def screening_s(self, iterations_ns: Iterable[float], blocks: int = SCREEN_BLOCKS) -> float:
        """Seconds to screen candidates, given their iteration times in ns and blocks of each."""
        shapes = [msgspec.structs.replace(self.shape, iteration_ns=ns) for ns in iterations_ns]
        return blocks * sum(shape.expected_s for shape in shapes)

    def left_to_explore(self) -> float:
        """Seconds left for exploring, after the reserve for final race and confirmation."""
        return self.remaining() - self.reserve_s()

    def left_without_race(self) -> float:
        """Seconds left for exploring if a winner is confirmed without a final race."""
        # Below `LONG_NS`, blocks discard iterations, so that a faster winner may take longer.
        longest_ns = min(self._fast().iteration_ns, LONG_NS - 1)
        longest = msgspec.structs.replace(self.shape, iteration_ns=longest_ns)
        needed_s = LOOKS[0] * (self.shape.expected_s + longest.expected_s)
        return self.remaining() - max(self.confirmation_s(), min(needed_s, CLAIM * self.seconds))

    def expected_setup_s(self, candidate: Candidate, trials: Iterable[LiveTrial]) -> float:
        """Expected seconds to start, set up and screen a candidate.

        If candidates with the same `compiler_options` were set up before, expects their longest
        set-up time. For other compilations, scales the first guess by the largest ratio of actual
        to guessed time so far.
        """
        set_up = [(compiler_options(t.candidate), t.set_up.setup_s) for t in trials if t.set_up]
        compiled = compiler_options(candidate)
        seen = [seconds for options, seconds in set_up if options == compiled]
        screen_s = self.screening_s(2 * [self.shape.iteration_ns])
        start_s = START_S + screen_s
        if seen:
            return start_s + max(seen)
        if not compiled:
            return start_s + _PLAIN_S
        if transforms.engines(candidate):
            return screen_s + _CONVERT_S
        factors = [
            seconds / self._guess_s(options)
            for options, seconds in set_up
            if any(spec.name == "compile" for spec in options)
        ]
        return start_s + max(factors, default=1.0) * self._guess_s(compiled)

    def left_to_set_up_s(self, expected_s: float, elapsed_s: float) -> float:
        """Expected seconds until the end of a set-up that has taken `elapsed_s` so far."""
        return max(expected_s - elapsed_s, _UNDERESTIMATED * elapsed_s)

    def _guess_s(self, compiled: list[TransformSpec]) -> float:
        heavy = any(dict(spec.parameters).get("mode") == "max-autotune" for spec in compiled)
        return self._compile_s * (_AUTOTUNE if heavy else 1.0)

    def deadline_s(self, candidates: Iterable[Candidate], trials: Iterable[LiveTrial]) -> float:
        """Timeout in seconds for each set-up stage of these candidates."""
        known = list(trials)
        expected_s = max((self.expected_setup_s(c, known) for c in candidates), default=0.0)
        return max(20.0, min(self.left_to_explore(), PATIENCE * expected_s))


def compiler_options(candidate: Candidate) -> list[TransformSpec]:
    """The parts of a candidate that decide its set-up time; empty if nothing is compiled.

    The parts are the candidate's `compile` transform and, on an engine other than PyTorch, the
    converted model.
    """
    converted = [TransformSpec(name) for name in transforms.artefacts(candidate)]
    return converted + [spec for spec in candidate if spec.name == "compile"]
