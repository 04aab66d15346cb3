"""Loads and checks plug-ins in worker processes, which isolate crashes and hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from steadytorch import transforms
from steadytorch.process.folder import shared_folder
from steadytorch.process.worker import Worker, WorkerFault
from steadytorch.results.machine import PluginCheck
from steadytorch.transforms import contract, plugins

HANDLER = "steadytorch.transforms.plugin_worker:PluginHandler"
LOAD_S = 60.0
"""Seconds that a plug-in may take to be imported."""
CHECK_S = 300.0
"""Seconds that the contract may take, as some plug-ins compile."""

_admitted: set[str] = set()


class PluginHandler:
    """Worker handler that loads one plug-in. Methods take and return msgpack types.

    Args:
        directory: not used.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self, name: str) -> None:
        """Loads a plug-in.

        Raises:
            UnsupportedError: it is refused.
        """
        plugins.load(name)

    def check(self, name: str, device: str) -> list[str]:
        """Returns why no variant was run ("" if one was), then the broken contract rules."""
        found = contract.check(plugins.load(name), device)
        return [found.not_run, *found.violations]


def admit() -> None:
    """Loads each installed plug-in in a worker; refuses plug-ins that fail or crash the worker.

    Plug-ins that were admitted or refused earlier are not loaded again.
    """
    _refuse_taken()
    names = [name for name in plugins.found() if name not in _admitted | plugins.refused().keys()]
    if not names:
        return
    with shared_folder() as directory:
        for name in names:
            fault = _asked(directory, name, lambda w, n=name: w.call("load", LOAD_S, name=n))
            _admitted.add(name)
            if isinstance(fault, WorkerFault):
                plugins.refuse(name, _clause(fault, name))


def check_all(device: str) -> tuple[PluginCheck, ...]:
    """Checks each installed plug-in against the contract of a transform, in its own process.

    Args:
        device: a torch device string.
    """
    _refuse_taken()
    checks = []
    with shared_folder() as directory:
        for name in plugins.found():
            not_run, *violations = _checked(directory, name, device)
            checks.append(
                PluginCheck(
                    name=name,
                    distribution=plugins.distribution(name),
                    refused=violations[0] if violations else None,
                    not_run=not_run or None,
                )
            )
    return tuple(checks)


def _checked(directory: Path, name: str, device: str) -> list[str]:
    """Returns why no variant was run ("" if one was), then the contract rules that are broken."""
    if name in plugins.refused():
        return ["", plugins.refused()[name]]
    found = _asked(directory, name, lambda w: w.call("check", CHECK_S, name=name, device=device))
    return ["", _clause(found, name)] if isinstance(found, WorkerFault) else found


def _refuse_taken() -> None:
    for name in transforms.names():
        if name in plugins.found():
            plugins.refuse(name, "steadytorch has a transform of this name")


def _asked(
    directory: Path, name: str, request: Callable[[Worker], list[str]]
) -> list[str] | WorkerFault:
    worker = Worker(HANDLER, directory, f"plugin-{name}")
    try:
        return request(worker)
    except WorkerFault as fault:
        return fault
    finally:
        worker.kill()


def _clause(fault: WorkerFault, name: str) -> str:
    return fault.reason.removeprefix(f"plug-in {name} was refused: ")
