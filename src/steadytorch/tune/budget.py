"""What a search may spend, what it has to keep back, and what a set-up will probably cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import torch

from steadytorch.errors import UsageError
from steadytorch.measure.race import LOOKS
from steadytorch.results.candidate import Candidate
from steadytorch.tune.select import BlockShape
from steadytorch.tune.trial import LiveTrial

SCREEN_BLOCKS = 6
"""The fewest whose medians support a 95 % interval."""
KEEP = 4
"""Candidates that stay for the final race."""
PATIENCE = 8.0
"""A set-up is given up when it takes this many times what was expected of it."""
_START_S = 5.0
_COMPILE_S = 28.0
_COMPILE_CUDA_S = 13.0
"""Short of the usual on an H200, 10 to 20 s for most networks, 50 s for the longest:
with twice as much nothing that compiles was begun in budgets of 36 and 55 s, and what is fastest
not tried. The price: a round whose compiler is not ready in time has kept the others waiting."""
_AUTOTUNE_S = 150.0
_PLAIN_S = 2.0
_MOST_RESERVED = 0.4


class Budget:
    """The time of one search.

    Args:
        seconds: in all, by the wall clock.
        now: seconds on a monotonic clock.
        device: that candidates are compiled for, as a torch device string.
        began: when the time began, on that clock; None for now.

    Attributes:
        shape: of a block; known once the untouched workload was timed.
        fastest_ns: an iteration of the fastest candidate; None until one was timed.
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
        """Seconds left; negative when the budget is over."""
        return self.seconds - self.spent()

    def confirmation_s(self) -> float:
        """Seconds that the fewest fresh pairs of winner and untouched workload take."""
        return 2 * LOOKS[0] * self.shape.expected_s

    def require_confirmation(self) -> None:
        """Sees to it that there is time for the fewest fresh pairs.

        Raises:
            UsageError: there is not.
        """
        least_s = self.confirmation_s()
        if self.remaining() < least_s:
            raise UsageError(
                f"a budget of {self.seconds:.0f} s is too small: starting and measuring the "
                f"untouched workload took {self.spent():.0f} s of it; give at least "
                f"{3 * self.spent() + 2 * least_s:.0f} s"
            )

    def looks(self) -> tuple[int, ...]:
        """The planned looks at fresh pairs that fit into what is left; the first in any case."""
        pairs = self.remaining() / (2 * self.shape.expected_s)
        return LOOKS[:1] + tuple(look for look in LOOKS[1:] if look <= pairs)

    def reserve_s(self) -> float:
        """Seconds to keep back for the final race and the confirmation.

        Only candidates about as fast as the fastest come to the race. Until one was timed nothing
        is kept back for it: it ends whenever the time does, and what compiles long has to begin.
        """
        race_s = 0.0
        if self.fastest_ns is not None:
            fast = msgspec.structs.replace(self.shape, iteration_ns=self.fastest_ns)
            race_s = LOOKS[0] * (self.shape.expected_s + KEEP * fast.expected_s)
        return min(race_s + self.confirmation_s(), _MOST_RESERVED * self.seconds)

    def screening_s(self, iterations_ns: Iterable[float]) -> float:
        """Seconds that screening takes for arms of these times per iteration, in ns."""
        shapes = [msgspec.structs.replace(self.shape, iteration_ns=ns) for ns in iterations_ns]
        return SCREEN_BLOCKS * sum(shape.expected_s for shape in shapes)

    def left_to_explore(self) -> float:
        """Seconds left beside the reserve."""
        return self.remaining() - self.reserve_s()

    def expected_setup_s(self, candidate: Candidate, trials: Iterable[LiveTrial]) -> float:
        """The longest set-up with the same compiler setting, else a guess; in seconds."""
        compiled = [spec for spec in candidate if spec.name == "compile"]
        seen = [
            trial.set_up.setup_s
            for trial in trials
            if trial.set_up is not None
            and [spec for spec in trial.candidate if spec.name == "compile"] == compiled
        ]
        start_s = _START_S + self.screening_s(2 * [self.shape.iteration_ns])
        if seen:
            return start_s + max(seen)
        heavy = any(dict(spec.parameters).get("mode") == "max-autotune" for spec in compiled)
        return start_s + (_AUTOTUNE_S if heavy else self._compile_s if compiled else _PLAIN_S)

    def deadline_s(self, candidates: Iterable[Candidate], trials: Iterable[LiveTrial]) -> float:
        """How long any stage of these candidates may take: one that hangs must not take it all."""
        known = list(trials)
        expected_s = max((self.expected_setup_s(c, known) for c in candidates), default=0.0)
        return max(20.0, min(self.left_to_explore(), PATIENCE * expected_s))
