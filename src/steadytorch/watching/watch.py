"""Watches the steps of the code that runs inside a `with` block."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from steadytorch.errors import UsageError
from steadytorch.watching.clock import INPUT, ITERATION, StepClock
from steadytorch.watching.job import Job
from steadytorch.watching.probes import OnImport, Probes
from steadytorch.watching.stacks import StackSampler

if TYPE_CHECKING:
    from steadytorch.device.recorder import Recorder
    from steadytorch.results.watched import Watched

T = TypeVar("T")
_INTERVAL_S = 0.1
"""Time between ticks of the machine's recorder: a script runs longer than a measurement."""
_active: list[Watch[Any]] = []


class Watch(Generic[T]):
    """Watches steps while active: `with steady.watch() as seen: train()`, then `seen.result`.

    With a loader, `for batch in steady.watch(loader):` watches the loop, and each iteration is a
    step. Without one, a step ends with an optimizer's step; without optimizers, with a batch of a
    `DataLoader`; without these, with a model's call.

    Args:
        loader: what to iterate over; None for a `with` block.
        live: whether to show a live line; None shows it if standard error is a terminal.
    """

    def __init__(self, loader: Iterable[T] | None = None, *, live: bool | None = None) -> None:
        self._loader, self._live = loader, live
        self._recorder: Recorder | None = None
        self._result: Watched | None = None
        self._on = False

    # -- as a block -----------------------------------------------------------------------------

    def __enter__(self) -> Watch[T]:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop(error)

    # -- as a loop ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[T]:
        if self._loader is None:
            raise UsageError("watch() without a loader is for `with`: pass one to iterate over")
        self.start()
        error: BaseException | None = None
        try:
            clock, source = self.clock, iter(self._loader)
            while True:
                clock.reset()
                clock.boundary(ITERATION, "loop")
                entered = clock.begin(INPUT)
                try:
                    batch = next(source)
                except StopIteration:
                    return
                finally:
                    if entered:
                        clock.end()
                yield batch
        except GeneratorExit:  # the loop ended with `break`
            raise
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.stop(error)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    # -- in pieces ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start watching.

        Raises:
            UsageError: something is being watched in this process already.
        """
        if _active:
            raise UsageError("a watch is active in this process: end it before the next one")
        self._result, self._on = None, True
        self._pid = os.getpid()
        self.clock = StepClock(on_first_step=self._record)
        self._probes, self._sampler = Probes(self.clock), None
        self._began_ns = time.perf_counter_ns()
        self._import = OnImport(self._probes.install)
        self._import.install()
        _active.append(self)
        self._line, self._job = None, Job()
        if self._live if self._live is not None else _on_terminal():
            from steadytorch.watching.live import LiveLine

            self._line = LiveLine(self.clock)
            self._line.start()

    def stop(self, error: BaseException | None = None) -> None:
        """Stop watching; what an exception ended is kept.

        Args:
            error: the exception that ended the watched code.
        """
        if not self._on or os.getpid() != self._pid:
            return
        self._on = False
        _active.remove(self)
        if self._line is not None:
            self._line.stop()
        self._import.remove()
        self._probes.remove()
        if self._sampler is not None:
            self._sampler.stop()
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)
        self._elapsed_ns = time.perf_counter_ns() - self._began_ns
        self._error = error
        self._ranks = self._job.exchange(self.clock.late_means_ns())

    @property
    def result(self) -> Watched:
        """Where time and variability of the steps went.

        Raises:
            UsageError: the watched code still runs, or never started.
        """
        if self._result is None:
            if self._on or not hasattr(self, "_elapsed_ns"):
                raise UsageError("the result is available once the watched code has ended")
            from steadytorch.watching.outcome import outcome

            self._result = outcome(
                self.clock,
                self._sampler,
                None if self._recorder is None else self._recorder.recording,
                elapsed_ns=self._elapsed_ns,
                error=self._error,
                optimizers=self._probes.optimizers,
                rank=self._job.rank,
                ranks=self._ranks,
            )
        return self._result

    def _repr_html_(self) -> str:
        """The result for a notebook."""
        from steadytorch.report.run import as_html

        return "<p>watching ...</p>" if self._on else as_html("watch", self.result)

    def _record(self) -> None:
        """Start the recorders at the first step: what comes before is set-up."""
        from steadytorch.device.recorder import Recorder
        from steadytorch.watching.process import ProcessSampler

        torch: Any = sys.modules.get("torch")
        device = "cpu"
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            device = f"cuda:{torch.cuda.current_device()}"
        self._recorder = Recorder(device, _INTERVAL_S)
        self._recorder.__enter__()
        self._sampler = StackSampler(self.clock, ProcessSampler(device))
        self._sampler.start()


def watch(loader: Iterable[T] | None = None, *, live: bool | None = None) -> Watch[T]:
    """Watches the steps of a block or a loop; see `Watch`.

    Args:
        loader: what to iterate over; None for a `with` block.
        live: whether to show a live line; None shows it if standard error is a terminal.
    """
    return Watch(loader, live=live)


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def forget_in_child() -> None:
    """Stop the watch of a parent in its forked child, which has no recorders."""
    for each in _active:
        each.clock.ignore()


_register: Callable[..., None] | None = getattr(os, "register_at_fork", None)
if _register is not None:
    _register(after_in_child=forget_in_child)
