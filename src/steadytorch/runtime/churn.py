"""Whether tuning pays: it does where signatures repeat, and not where they churn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock

from steadytorch.errors import UsageError
from steadytorch.quantities import counted

SETUP_S = 30.0
"""First guess of what tuning one signature costs, in seconds; measured set-ups correct it."""
BREAK_EVEN_CALLS = 2000
"""First guess of the calls after which a set-up is paid back."""
FIRST_SIGHT = 4
"""Signatures tuned when first seen, on credit: training and validation shapes, each with the
remainder of its last batch."""
REMEMBERED = 1000
"""Signatures whose calls are counted."""
WITHHELD = "its signature has not repeated often enough for tuning to pay"


class ChurnGuard:
    """Decides for signatures that no plan serves whether to tune them now.

    The first few are tuned on first sight, as benchmark mode promises. Any further one must earn
    it: it is tuned once its own untouched calls would have paid for the set-up. This is the
    break-even rule of ski rental: without knowing the future it costs at most twice what knowing it
    would, and no deterministic rule does better (A. Karlin, M. Manasse, L. Rudolph and D. Sleator,
    "Competitive snoopy caching", Algorithmica 3, 1988). As far as the estimates hold, tuning wastes
    at most `first_sight` set-ups beyond twice the price of perfect foresight.

    What a set-up costs and gains is a first guess, which counts as one observation among those
    reported to `paid`; the break-even is total cost over total gain, so set-ups that gained nothing
    raise it.

    Counts are kept for the signatures called last. A forgotten one starts anew, so that counts are
    never too high; one that is called at least once in `remembered` calls is never forgotten.

    Calls served by a plan need not, and should not, be observed. Those of a signature are counted
    until its tuning is granted. Thread-safe.

    Args:
        setup_s: cost of tuning one signature, in seconds.
        break_even_calls: calls after which one is paid back.
        first_sight: how many signatures are tuned on first sight.
        remembered: how many signatures are counted at most.

    Raises:
        UsageError: a number that makes no sense.
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
        self._patience = float(break_even_calls)
        self._counts: OrderedDict[Hashable, float] = OrderedDict()
        self._calls = self._distinct = self._granted = 0
        self._forgot = False
        self._lock = Lock()

    def observe(self, signature: Hashable) -> str | None:
        """Counts an unserved call: None if its signature should be tuned now, else why not.

        The reason is always the same text, fit to count calls by; `why` gives the numbers. Once
        None, a signature stays None while it is remembered, so the caller starts its tuning once.

        Args:
            signature: anything hashable that is equal for calls with one signature.
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
                pays = count > self._patience
            if not pays:
                return WITHHELD
            self._granted += 1
            counts[signature] = float("inf")
            return None

    def paid(self, setup_s: float, gain_s: float) -> None:
        """Corrects the guess by one tuning as it turned out.

        Args:
            setup_s: what it cost, in seconds.
            gain_s: what a call gains by it, in seconds; 0 where nothing was faster.
        """
        if not (0 <= setup_s < float("inf") and 0 <= gain_s < float("inf")):
            raise UsageError(f"a tuning cannot cost {setup_s} s and gain {gain_s} s a call")
        with self._lock:
            self._setup_s += setup_s
            self._gain_s += gain_s
            self._setups += 1
            self._patience = self._setup_s / self._gain_s if self._gain_s else float("inf")

    def why(self) -> str:
        """The numbers at this moment, in one line."""
        with self._lock:
            calls, distinct = self._calls, self._distinct
            cost, patience = self._setup_s / self._setups, self._patience
            more = "more than " if self._forgot else ""
            seen = counted(self._remembered if self._forgot else distinct, "signature")
        each = calls / distinct if distinct else 0.0
        back = f"pays back after ~{patience:,.0f} calls" if patience < float("inf") else "gains 0"
        return (
            f"{more}{seen} in {counted(calls, 'call')} that no plan served, "
            f"{each:.1f} calls each; tuning one costs ~{cost:.0f} s and {back}"
        )
