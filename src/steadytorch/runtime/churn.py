"""Decides whether tuning an input signature pays, which depends on how often it repeats."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock

from steadytorch.errors import UsageError
from steadytorch.quantities import counted

SETUP_S = 30.0
"""Initial estimate of the cost of tuning one signature, in seconds; measurements correct it."""
BREAK_EVEN_CALLS = 2000
"""Initial estimate of the calls after which a set-up is paid back."""
FIRST_SIGHT = 4
"""Signatures tuned on first sight: training and validation shapes, each with its last, smaller
batch."""
REMEMBERED = 1000
"""Limit on signatures whose calls are counted."""
WITHHELD = "its signature has not repeated often enough for tuning to pay"


class ChurnGuard:
    """Decides when to tune a signature that has no plan.

    The first `first_sight` signatures are tuned at their first call. Any other signature is tuned
    once its untouched calls exceed the number of tuned calls that pay back a set-up. Waiting for
    break-even is the classic rule for the ski rental problem. The break-even rule costs at most
    twice as much as perfect foresight, and no deterministic rule does better (Karlin, Manasse,
    Rudolph and Sleator, "Competitive snoopy caching", Algorithmica 3, 1988). If the estimates hold,
    tuning at the first call wastes at most `first_sight` further set-ups.

    Estimates: the initial cost and gain of a set-up count as one observation alongside those
    reported to `paid`. The break-even count is total cost over total gain, so set-ups without a
    gain raise the count.

    Counts: only the `remembered` most recently called signatures are counted. The count of a
    forgotten signature restarts at 0, so counts are never too high. A signature called at least
    once in `remembered` calls is never forgotten.

    Call `observe` only for calls without a plan. Thread-safe.

    Args:
        setup_s: cost of tuning one signature, in seconds.
        break_even_calls: calls after which a set-up is paid back.
        first_sight: number of signatures tuned on first sight.
        remembered: limit on counted signatures.

    Raises:
        UsageError: a number is out of range.
    """

    def __init__(
        self,
        *,
        setup_s: float = SETUP_S,
        break_even_calls: float = BREAK_EVEN_CALLS,
        first_sight: int = FIRST_SIGHT,
        remembered: int = REMEMBERED,
    ) -> None:
        for name, value, least in (
            ("setup_s", setup_s, 0.001),
            ("break_even_calls", break_even_calls, 1),
            ("first_sight", first_sight, 0),
            ("remembered", remembered, 1),
        ):
            if not least <= value < float("inf"):
                raise UsageError(f"{name} is {value}: it must be finite and at least {least}")
        self._first_sight, self._remembered = first_sight, remembered
        self._setup_s, self._gain_s = setup_s, setup_s / break_even_calls
        self._setups = 1
        self._break_even_calls = float(break_even_calls)
        self._counts: OrderedDict[Hashable, float] = OrderedDict()
        self._calls = self._distinct = self._granted = 0
        self._forgot = False
        self._lock = Lock()

    def observe(self, signature: Hashable) -> str | None:
        """Counts an untouched call; returns None to tune its signature now, else the reason not to.

        The reason is a fixed text, so that calls can be counted by reason; `why` gives the numbers.
        After None, later calls of a remembered signature also return None, so the caller must start
        tuning only once.

        Args:
            signature: any hashable value that is equal for calls of one signature.
        """
        with self._lock:
            counts = self._counts
            count = counts.get(signature, 0.0) + 1.0
            if count == float("inf"):
                counts.move_to_end(signature)
                return None
            self._calls += 1
            counts[signature] = count
            if count == 1.0:
                self._distinct += 1
                if len(counts) > self._remembered:
                    counts.popitem(last=False)
                    self._forgot = True
                pays = self._granted < self._first_sight
            else:
                counts.move_to_end(signature)
                pays = count > self._break_even_calls
            if not pays:
                return WITHHELD
            self._granted += 1
            counts[signature] = float("inf")
            return None

    def paid(self, setup_s: float, gain_s: float) -> None:
        """Updates the estimates of cost and gain with a measured set-up.

        Args:
            setup_s: cost of the set-up, in seconds.
            gain_s: time saved per call, in seconds; 0 if nothing was faster.
        """
        if not (0 <= setup_s < float("inf") and 0 <= gain_s < float("inf")):
            raise UsageError(f"a set-up cannot cost {setup_s} s and gain {gain_s} s per call")
        with self._lock:
            self._setup_s += setup_s
            self._gain_s += gain_s
            self._setups += 1
            self._break_even_calls = self._setup_s / self._gain_s if self._gain_s else float("inf")

    def why(self) -> str:
        """Describes the current call counts and cost estimates in one line."""
        with self._lock:
            calls, distinct = self._calls, self._distinct
            cost, patience = self._setup_s / self._setups, self._break_even_calls
            more = "more than " if self._forgot else ""
            seen = counted(self._remembered if self._forgot else distinct, "signature")
        each = calls / distinct if distinct else 0.0
        back = f"pays back after ~{patience:,.0f} calls" if patience < float("inf") else "gains 0"
        return (
            f"{more}{seen} in {counted(calls, 'call')} without a plan, "
            f"{each:.1f} calls each; tuning one costs ~{cost:.0f} s and {back}"
        )
