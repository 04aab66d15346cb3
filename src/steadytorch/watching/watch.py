"""Watches the steps of code that runs inside a `with` block or a loop."""

from __future__ import annotations

import os
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from steadytorch.errors import UsageError
from steadytorch.watching.clock import INPUT, ITERATION, StepClock
from steadytorch.watching.flight import FlightRecorder
from steadytorch.watching.job import Job
from steadytorch.watching.probes import OnImport, Probes
from steadytorch.watching.stacks import StackSampler

if TYPE_CHECKING:
    from steadytorch.device.recorder import Recorder
    from steadytorch.results.watched import Watched

T = TypeVar("T")
_INTERVAL_S, _CPU_SHARE, _FREE_S = 0.1, 0.001, 0.01
"""Settings of the machine's recorder: seconds between ticks, their maximum CPU use as a share of
one core, and CPU seconds before this maximum applies, for scripts that run only seconds."""
TRACES = "steady-traces"
"""Folder for traces of slow steps."""
MOST_KEPT = 1000
_active: list[Watch[Any]] = []


class Watch(Generic[T]):
    """Watches steps while active: `with steady.watch() as seen: train()`, then `seen.result`.

    With a loader, `for batch in steady.watch(loader):` watches the loop, and each iteration is a
    step. Without a loader argument, each optimizer step ends a step of the watch. In code without
    optimizers, each batch of a `DataLoader` ends a step, or else each call of a model.

    Args:
        loader: what to iterate over; None for a `with` block.
        live: whether to show a live line; None shows it if standard error is a terminal.
        keep_slow: number of slowest steps whose traces are kept, at most 1,000. Traces are written
            at the end.
        traces: folder for these traces, `.json.gz` for `steady explain`; made if needed.

    Raises:
        UsageError: `keep_slow` is out of range, or the folder is not writable.
    """

    def __init__(
        self,
        loader: Iterable[T] | None = None,
        *,
        live: bool | None = None,
        keep_slow: int = 0,
        traces: str | Path = TRACES,
    ) -> None:
        if not 0 <= keep_slow <= MOST_KEPT:
            raise UsageError(f"keep_slow is {keep_slow}: keep 0 to {MOST_KEPT:,} slow steps")
        self._loader, self._live, self._keep_slow = loader, live, keep_slow
        self._traces = Path(traces).absolute()
        if keep_slow:
            check_folder(self._traces)
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

    def __bool__(self) -> bool:
        return True  # also without a loader, which has a length

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
        self._flight = FlightRecorder(self._keep_slow) if self._keep_slow else None
        self.clock = StepClock(on_first_step=self._record, flight=self._flight)
        self._probes, self._sampler = Probes(self.clock), None
        self._began_ns = time.perf_counter_ns()
        self._import = OnImport(self._probes.install)
        self._import.install()
        _active.append(self)
        self._line, self._job = None, Job()
        if self._live if self._live is not None else on_terminal():
            from steadytorch.watching.live import LiveLine

            self._line = LiveLine(self.clock)
            self._line.start()

    def stop(self, error: BaseException | None = None) -> None:
        """Stop watching; steps before an exception are kept.

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
        if self._flight is not None:  # writes the traces
            _ = self.result

    @property
    def result(self) -> Watched:
        """The result: where the steps spent their time, and why their times varied.

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
                optimizers=self._probes.stepped(),
                rank=self._job.rank,
                ranks=self._ranks,
                traces=self._traces,
            )
        return self._result

    def _repr_html_(self) -> str:
        """The result as HTML, for display in a notebook."""
        from steadytorch.report.shown import as_html

        return "<p>watching ...</p>" if self._on else as_html(self.result)

    def _record(self) -> None:
        """Start the recorders at the first step, because earlier work is only set-up."""
        from steadytorch.device.recorder import Recorder
        from steadytorch.watching.process import ProcessSampler

        torch: Any = sys.modules.get("torch")
        device = "cpu"
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            device = f"cuda:{torch.cuda.current_device()}"
        self._recorder = Recorder(device, _INTERVAL_S, _CPU_SHARE, free_s=_FREE_S)
        self._recorder.__enter__()
        if self._flight is not None:
            from steadytorch.measure.variability import slow_limit

            self._flight.limit = slow_limit
            slow_limit(array("q", (1, 2)))  # the first call takes long
            self._flight.measure_cost()
            if torch is not None:
                self._flight.profiling = torch.autograd._profiler_enabled
        self._sampler = StackSampler(self.clock, ProcessSampler(device))
        self._sampler.start()


def watch(
    loader: Iterable[T] | None = None,
    *,
    live: bool | None = None,
    keep_slow: int = 0,
    traces: str | Path = TRACES,
) -> Watch[T]:
    """Watches the steps of a block or a loop; see `Watch`.

    Args:
        loader: what to iterate over; None for a `with` block.
        live: whether to show a live line; None shows it if standard error is a terminal.
        keep_slow: number of slowest steps whose traces are kept, at most 1,000.
        traces: folder for these traces, made if needed.

    Raises:
        UsageError: `keep_slow` is out of range, or the folder is not writable.
    """
    return Watch(loader, live=live, keep_slow=keep_slow, traces=traces)


def check_folder(folder: Path) -> None:
    """Check that a folder for traces can be created and written to.

    Raises:
        UsageError: the folder cannot be created or written to.
    """
    try:
        existing = next(each for each in (folder, *folder.parents) if each.exists())
    except OSError as error:
        raise UsageError(f"traces cannot be written to {folder}: {error.strerror}") from error
    if not existing.is_dir():
        raise UsageError(f"traces cannot be written to {folder}: {existing} is no folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"traces cannot be written to {folder}: no permission")


def on_terminal() -> bool:
    """Whether standard error is a terminal that supports cursor movement."""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def forget_in_child() -> None:
    """Stop the parent's watch in a forked child process, which has no recorder threads."""
    for each in _active:
        each.clock.ignore()
        if each._sampler is not None:
            each._sampler.forget()


_register: Callable[..., None] | None = getattr(os, "register_at_fork", None)
if _register is not None:
    _register(after_in_child=forget_in_child)
