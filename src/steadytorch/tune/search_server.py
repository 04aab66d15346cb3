"""The private folder and the fork server of one search.

`steady tune` starts the server before it loads the workload, so that both import PyTorch at the
same time. This module therefore does not import PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from steadytorch.device.host import allowed_cpus, usable_logical_cores
from steadytorch.process.folder import shared_folder
from steadytorch.process.fork_server import ForkServer
from steadytorch.process.interpreter import Interpreter

HANDLER = "steadytorch.tune.tuning_worker:TuningHandler"
_LIBRARIES = {
    "torchvision": "torchvision.models",
    "timm": "timm.models",
    "transformers": "transformers.modeling_utils",
}
"""What takes longest to import for workloads of these prefixes."""
_OF_CUDA = "CUDA_MODULE_LOADING"
"""Environment variable that some versions of PyTorch set to their default when CUDA starts."""


class SearchServer:
    """A private folder, and a fork server that starts the workers of one search.

    The server imports the module of the workers' handler at once.

    Args:
        cores: number of logical cores; None if unknown.
        devices: number of devices that share the search.
        imports: further modules to import at once; failures are ignored.

    Attributes:
        directory: the folder.
        environment: extra environment variables of the workers.
        fork_server: the fork server.
    """

    def __init__(self, cores: int | None, devices: int = 1, imports: Sequence[str] = ()) -> None:
        with ExitStack() as at_the_end:
            self.directory = at_the_end.enter_context(shared_folder())
            self.environment = _environment(self.directory, cores, devices)
            self._inherited = _inherited(self.environment)
            first = HANDLER.partition(":")[0]
            self.fork_server = ForkServer(self.directory, self.environment, (first, *imports))
            at_the_end.callback(self.fork_server.close)
            self._at_the_end = at_the_end.pop_all()

    def fits(self, cores: int | None, devices: int) -> bool:
        """Whether a server started now, with these arguments, would inherit the same settings.

        They differ if the user's code has changed them, for example `os.environ` or `sys.path`.
        """
        wanted = _inherited(_environment(self.directory, cores, devices))
        return self.fork_server.alive and self._inherited == wanted

    def close(self) -> None:
        """Kills the server and its workers, and removes the folder. Repeated calls do nothing."""
        self._at_the_end.close()


@contextmanager
def started_in_advance(workload: str) -> Iterator[SearchServer | None]:
    """Starts a server for a search on one device; closes it at the end of the `with` block.

    Yields None on a single core, which gains nothing, and if the server cannot be started.

    Args:
        workload: the name or factory of the workload, as for `load_workload`.
    """
    server = None
    if (cores := usable_logical_cores()) > 1:
        with suppress(OSError):  # a search will report the error, and a stored plan needs no server
            library = _LIBRARIES.get(workload.partition(":")[0])
            server = SearchServer(cores, imports=[library] if library else [])
    try:
        yield server
    finally:
        if server is not None:
            server.close()


def set_ups_at_once(cores: int | None, devices: int) -> int:
    """Number of set-ups that may overlap: one per core, at most eight per device."""
    return max(1, min(8 * devices, cores or 1))


def compiler_cache(directory: Path) -> dict[str, str]:
    """Environment variable for the workers' compiler cache, whose entries are keyed by content."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(directory / "compiler-cache")}


def _environment(directory: Path, cores: int | None, devices: int) -> dict[str, str]:
    return {
        **_compile_threads(cores, devices),
        **compiler_cache(directory),
        # Otherwise looking for devices would prevent CUDA in forked workers.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


def _compile_threads(cores: int | None, devices: int) -> dict[str, str]:
    """Environment variable to limit Inductor's compile processes: workers share the cores."""
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    # More than the share of each compilation, which mostly runs Python on one core.
    most = max(1, (cores or 1) // max(1, set_ups_at_once(cores, devices) // 2))
    return {name: os.environ.get(name, str(most))}


def _inherited(environment: Mapping[str, str]) -> tuple[object, ...]:
    """Settings that a new process inherits: variables, import path, working directory, cores."""
    folder = os.stat(os.curdir)  # works even if the folder was removed, unlike `os.getcwd`
    variables = {**os.environ, **environment}
    variables.pop(_OF_CUDA, None)
    return (
        variables,
        Interpreter.own().paths,
        (folder.st_dev, folder.st_ino),
        allowed_cpus(),
    )
