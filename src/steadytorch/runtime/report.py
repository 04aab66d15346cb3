"""Reports how many calls of a tuned module had which outcome, as data and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import wraps
from threading import Lock
from types import MethodType
from typing import Any

import msgspec

from steadytorch.conv import executables
from steadytorch.quantities import counted

TUNED = "tuned"
_UNTOUCHED = "untouched: "
_ENGINES = "cudnn_engines"
_MOST_SHOWN = 5
"""Convolutions shown in the text; the log has all of them."""


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """How calls with one input signature were served.

    Attributes:
        signature: the inputs as text; padded inputs are listed under their bucket too.
        executor: the transforms in order; None for the untouched model.
        reason: why the model runs untouched; None if it runs tuned.
        detail: details of the reason.
        hits: calls that the executor answered.
        others: calls of this signature that the untouched model answered.
        plan: id of the plan.
        saved_per_call_ns: time saved per call, as measured when the plan was made.
        break_even_calls: calls after which set-up is paid back; None if unknown.
        finding: the canary's finding; empty while it runs, or without a canary.
    """

    signature: str
    executor: str | None
    reason: str | None
    detail: str
    hits: int
    others: int
    plan: str | None
    saved_per_call_ns: float
    break_even_calls: int | None
    finding: str

    @property
    def saved_ns(self) -> float:
        """Time saved so far: tuned calls times the saving per call that tuning measured."""
        return self.hits * self.saved_per_call_ns

    def __str__(self) -> str:
        calls = counted(self.hits + self.others, "call")
        head = f"{self.signature}: {self.executor or 'untouched'}, {calls}"
        return ", ".join(part for part in (head, self._why(), self._saving()) if part)

    def _why(self) -> str:
        said = [part for part in (self.reason, self.detail, self.finding) if part]
        return "; ".join(dict.fromkeys(said))

    def _saving(self) -> str:
        if not self.hits or not self.saved_per_call_ns:
            return ""
        text = f"{self.saved_ns * 1e-9:.3g} s saved by plan {self.plan}"
        if self.break_even_calls is None:
            return text
        if self.hits >= self.break_even_calls:
            return f"{text}, set-up paid back"
        return f"{text}, set-up to be paid back after {counted(self.break_even_calls, 'call')}"


class Report(msgspec.Struct, frozen=True):
    """How the calls of a tuned module were served so far.

    Attributes:
        calls: number of calls by outcome: `tuned`, `untouched: <reason>` or `raised: <reason>`.
        signatures: the remembered signatures, most calls first.
        off: why tuned serving is off for all inputs, or None.
        convolutions: convolutions without their engine; see `missed_convolutions`.
        saved_before_ns: time saved by executors that were freed since.
        interpreted_for: why weights are checked in Python, which is five times as slow. Empty if
            compiled code checks them, before the first check, and for training plans.
        methods: calls of the model's other methods by name, such as `generate`. They run untouched,
            with everything they call.
        checked: tuned calls compared with the untouched model, because of `verify_every`.
        verify_every: the requested interval between checks; None for no checks.
    """

    calls: dict[str, int]
    signatures: tuple[Serving, ...] = ()
    off: str | None = None
    convolutions: dict[str, str] = {}
    saved_before_ns: float = 0.0
    interpreted_for: str = ""
    methods: dict[str, int] = {}
    checked: int = 0
    verify_every: int | None = None

    @property
    def hits(self) -> int:
        """Calls that ran tuned."""
        return self.calls.get(TUNED, 0)

    @property
    def misses(self) -> int:
        """Calls of signatures without an executor: no plan exists, or the plan was demoted."""
        return sum(each.others for each in self.signatures if each.executor is None)

    @property
    def fallbacks(self) -> dict[str, int]:
        """Numbers of calls that ran the untouched model, by reason."""
        untouched = {k: n for k, n in self.calls.items() if k.startswith(_UNTOUCHED)}
        return {reason.removeprefix(_UNTOUCHED): n for reason, n in untouched.items()}

    @property
    def saved_s(self) -> float:
        """Seconds saved by tuned calls, based on the savings per call that tuning measured."""
        return 1e-9 * (self.saved_before_ns + sum(each.saved_ns for each in self.signatures))

    def __str__(self) -> str:
        total = sum(self.calls.values())
        lines = [f"{self.hits:,} of {counted(total, 'call')} tuned, {self.saved_s:.3g} s saved"]
        if not total:
            lines = ["never called: call this module in place of the model"]
        if self.off is not None:
            lines.append(f"off: {self.off}")
        lines += [f"  {count:,} untouched: {why}" for why, count in self.fallbacks.items()]
        if self.methods:
            named = ", ".join(f"{name} ({count:,})" for name, count in self.methods.items())
            lines.append(f"  other methods of the model run untouched: {named}")
        lines += [f"  {each}" for each in self.signatures]
        return "\n".join(lines + self._verification_lines() + self._convolution_lines())

    def _verification_lines(self) -> list[str]:
        if self.verify_every is not None:
            every = counted(self.verify_every, "call")
            return [f"  compared with the untouched model every {every}: {self.checked:,} so far"]
        if self.off is None and any(each.executor is not None for each in self.signatures):
            return ["  later calls are not verified; verify_every=1000 verifies every 1,000th"]
        return []

    def _convolution_lines(self) -> list[str]:
        if not self.convolutions:
            return []
        count, shown = len(self.convolutions), list(self.convolutions.items())[:_MOST_SHOWN]
        more = [f"    and {count - len(shown)} more"] if count > len(shown) else []
        told = [f"    {problem}: {why}" for problem, why in shown]
        return [f"  convolutions that ran without their stored engine: {count}", *told, *more]


class Tally:
    """Counts calls by outcome. Thread-safe."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._methods: Counter[str] = Counter()
        self._noting: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._saved_ns = 0.0
        self._checked = 0
        self._lock = Lock()

    def after_fork(self) -> None:
        """Replaces the lock in a forked child, because a thread of the parent may have held it."""
        self._lock = Lock()

    def count(self, outcome: str) -> None:
        """Counts a call by outcome, except for tuned calls, which are counted by signature."""
        with self._lock:
            self._calls[outcome] += 1

    def count_check(self) -> None:
        """Counts a tuned call that was compared with the untouched model."""
        with self._lock:
            self._checked += 1

    def noted(self, method: MethodType) -> MethodType:
        """Wraps a method of the model to count its calls."""
        function = method.__func__
        found = self._noting.get(function)
        if found is None:
            found = self._noting[function] = self._counting(function)
        return MethodType(found, method.__self__)

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__

        @wraps(function)
        def counting(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._methods[name] += 1
            return function(*args, **kwargs)

        return counting

    def keep(self, freed: Iterable[Serving]) -> None:
        """Adds the counts of freed executors to the totals of later reports."""
        with self._lock:
            for each in freed:
                self._calls[TUNED] += each.hits
                self._saved_ns += each.saved_ns

    def report(
        self,
        signatures: Iterable[Serving],
        off: str | None,
        interpreted_for: str = "",
        verify_every: int | None = None,
    ) -> Report:
        """Builds the report on all calls so far.

        Args:
            signatures: the current entries.
            off: why tuned serving is off, or None.
            interpreted_for: as in `Report`.
            verify_every: as in `Report`.
        """
        served = tuple(signatures)
        with self._lock:
            calls, methods, saved_ns = +self._calls, dict(self._methods), self._saved_ns
            checked = self._checked
        tuned = sum(each.hits for each in served) + calls.pop(TUNED, 0)
        found = {TUNED: tuned, **calls} if tuned else dict(calls)
        return Report(
            calls=found,
            signatures=served,
            off=off,
            convolutions=missed_convolutions(served),
            saved_before_ns=saved_ns,
            interpreted_for=interpreted_for,
            methods=methods,
            checked=checked,
            verify_every=verify_every,
        )


def missed_convolutions(signatures: Iterable[Serving]) -> dict[str, str]:
    """Returns convolutions that PyTorch ran instead of a stored cuDNN engine, with reasons.

    The list covers the whole process, because it is not known which model ran a convolution. Every
    module with an executor that uses stored engines reports the same list.

    Args:
        signatures: the module's entries.

    Returns:
        Reason by problem; empty if no executor uses engines.
    """
    engined = any(_ENGINES in each.executor for each in signatures if each.executor is not None)
    return dict(executables.MISSES) if engined else {}
