"""Worker handler that loads a workload by name in a revision's own environment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from steadytorch import transforms
from steadytorch.bench.bench_worker import WorkloadHandler, own_errors
from steadytorch.device.facts import load_facts
from steadytorch.errors import MissingWorkloadError, one_line
from steadytorch.measure.sampler import sampler_for
from steadytorch.workload.loading import load_workload
from steadytorch.workload.start import Start, with_optimizer

MISSING, STRAY, LOADED = "missing", "stray", "loaded"


class Loaded(NamedTuple):
    """The reply to `load_named`.

    Attributes:
        status: `loaded`; `missing`: the revision has no such workload; `stray`: it imported code of
            another tree.
        reason: one line; empty if loaded.
    """

    status: str
    reason: str = ""


class RevisionHandler(WorkloadHandler):
    """Worker handler that times a workload of one revision in that revision's environment."""

    def load_named(
        self, workload: str, device: str, shape: dict[str, Any], own: str, foreign: str | None
    ) -> tuple[str, str]:
        """Loads a workload onto the device; returns `Loaded`.

        Process-wide settings start at PyTorch's defaults; the revision's code may change them.

        Args:
            workload: name or factory, with optional `@TRANSFORM+TRANSFORM`.
            device: such as `cpu` or `cuda:0`.
            shape: `batch`, `inputs`, `train` and `seed` of `load_workload`.
            own: the tree of the revision.
            foreign: a tree whose code must not be imported; None for no check.
        """
        spec, settings = split(workload)
        if torch.device(device).index is not None:
            torch.cuda.set_device(device)
        self._candidate = transforms.parse(settings, load_facts(device)) if settings else ()
        try:
            loaded = load_workload(spec, device="cpu", **shape)
        except MissingWorkloadError as error:
            return Loaded(MISSING, one_line(error))
        if foreign is not None and (strays := _strays(Path(foreign), Path(own))):
            return Loaded(STRAY, f"it imports {', '.join(strays[:3])} from {foreign}")
        self.workload = with_optimizer(loaded.to(device))
        self._start = Start(self.workload)
        self.sampler = sampler_for(self.workload.device.type)
        return Loaded(LOADED)

    @own_errors()
    def set_up_named(self) -> dict[str, Any]:
        """Applies the transforms in the workload's name and warms up; returns a `SetUp`."""
        return self.set_up(msgspec.to_builtins(self._candidate))


def split(name: str) -> tuple[str, str]:
    """Splits `WORKLOAD@TRANSFORMS`; the second part is empty without transforms."""
    spec, at, settings = name.rpartition("@")
    # In user@host/model.py:factory the @ is part of a path.
    return (name, "") if not at or set(settings) & set("/:") else (spec, settings)


def _strays(tree: Path, own: Path) -> list[str]:
    """Returns names of modules imported from a foreign source tree, except installed packages.

    Args:
        tree: the foreign tree.
        own: the own tree, which may lie within the foreign one if temporary folders do.
    """
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str):
            continue
        path = Path(file).resolve()
        if path.is_relative_to(own):
            continue
        if path.is_relative_to(tree) and not {"site-packages", "dist-packages"} & set(
            path.relative_to(tree).parts
        ):
            found.append(name)
    return sorted(found)
