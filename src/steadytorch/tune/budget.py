"""Time budget of a search: time left, reserves and expected set-up times."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import torch

from steadytorch import transforms
from steadytorch.errors import UsageError
from steadytorch.measure.race import LOOKS
from steadytorch.results.candidate import Candidate, TransformSpec
from steadytorch.tune.select import BlockShape
from steadytorch.tune.trial import LiveTrial

SCREEN_BLOCKS = 6
"""Blocks per screening: the fewest whose medians support a 95 % interval."""
KEEP = 4
"""Maximum number of candidates in the final race."""
PATIENCE = 8.0
"""A set-up times out after this multiple of its expected time."""
_START_S = 5.0
_COMPILE_S = 28.0
_COMPILE_CUDA_S = 13.0
"""Deliberately low: on an H200 most networks compile in 10 to 20 s, the longest in 50 s.

Twice this value kept every compiled candidate, and so the fastest, out of budgets of 36 and 55 s.
The cost: a compilation that misses its deadline delays the other candidates of its round."""
_AUTOTUNE_S = 150.0
_CONVERT_S = 12.0
"""For engines: ResNet-50 took 6 to 14 s on two cores."""
_PLAIN_S = 2.0
_MOST_RESERVED = 0.4


class Budget:
    """The time budget of one search.

    Args:
        seconds: total wall-clock time.
        now: returns seconds on a monotonic clock.
        device: device that candidates are compiled for, as a torch device string.
        began: start of the budget on that clock; None for now.

    Attributes:
        shape: block shape; a placeholder until the untouched workload has been timed.
        fastest_ns: iteration time of the fastest candidate; None until one has been timed.
    """

    def __init__(
        self,
        seconds: float,
        now: Callable[[], float],
        device: str = "cpu",
        began: float | None = None,
    ) -> None:
        self.seconds = seconds
        on_gpu = torch.device(device).type == "cuda"
        self._compile_s = _COMPILE_CUDA_S if on_gpu else _COMPILE_S
        self.shape = BlockShape(5, 1e6)
        self.fastest_ns: float | None = None
        self._now, self._start = now, now() if began is None else began

    def spent(self) -> float:
        """Seconds since the search began."""
        return self._now() - self._start

    def remaining(self) -> float:
        """Seconds left; negative once the budget is exceeded."""
        return self.seconds - self.spent()

    def confirmation_s(self) -> float:
        """Seconds for the minimum number of fresh pairs of winner and untouched workload."""
        return 2 * LOOKS[0] * self.shape.expected_s

    def require_confirmation(self) -> None:
        """Checks that the minimum number of fresh pairs fits into the budget.

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
        """The planned looks at fresh pairs that fit into the time left; always the first."""
        pairs = self.remaining() / (2 * self.shape.expected_s)
        return LOOKS[:1] + tuple(look for look in LOOKS[1:] if look <= pairs)

    def reserve_s(self) -> float:
        """Seconds to reserve for the final race and the confirmation.

        The race is costed at the fastest candidate's time, since only near ties enter it. Before
        any candidate has been timed, it reserves nothing, so that long compilations can start.
        """
        race_s = 0.0
        if self.fastest_ns is not None:
            fast = msgspec.structs.replace(self.shape, iteration_ns=self.fastest_ns)
            race_s = LOOKS[0] * (self.shape.expected_s + KEEP * fast.expected_s)
        return min(race_s + self.confirmation_s(), _MOST_RESERVED * self.seconds)

    def screening_s(self, iterations_ns: Iterable[float]) -> float:
        """Seconds to screen arms with these iteration times in ns."""
        shapes = [msgspec.structs.replace(self.shape, iteration_ns=ns) for ns in iterations_ns]
        return SCREEN_BLOCKS * sum(shape.expected_s for shape in shapes)

    def left_to_explore(self) -> float:
        """Seconds left after the reserve."""
        return self.remaining() - self.reserve_s()

    def expected_setup_s(self, candidate: Candidate, trials: Iterable[LiveTrial]) -> float:
        """Expected set-up seconds: the longest seen with the same compiler or engine, or a guess.

        Options of an engine do not count, because its variants share one conversion.
        """
        compiled, converted = _compiled(candidate), transforms.engines(candidate)
        seen = [
            trial.set_up.setup_s
            for trial in trials
            if trial.set_up is not None
            and _compiled(trial.candidate) == compiled
            and transforms.engines(trial.candidate) == converted
        ]
        start_s = _START_S + self.screening_s(2 * [self.shape.iteration_ns])
        if seen:
            return start_s + max(seen)
        if converted:
            return start_s + _CONVERT_S
        heavy = any(dict(spec.parameters).get("mode") == "max-autotune" for spec in compiled)
        return start_s + (_AUTOTUNE_S if heavy else self._compile_s if compiled else _PLAIN_S)

    def deadline_s(self, candidates: Iterable[Candidate], trials: Iterable[LiveTrial]) -> float:
        """Seconds that any stage of these candidates may take before it times out."""
        known = list(trials)
        expected_s = max((self.expected_setup_s(c, known) for c in candidates), default=0.0)
        return max(20.0, min(self.left_to_explore(), PATIENCE * expected_s))


def _compiled(candidate: Candidate) -> list[TransformSpec]:
    return [spec for spec in candidate if spec.name == "compile"]
