"""The public interface for plug-ins; see `docs/plugins.md`."""

from __future__ import annotations

from steadytorch.backends.call import EngineModel, Run
from steadytorch.backends.exported import Exported, Form, export
from steadytorch.compiled.artefact import obtain
from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UnsupportedError
from steadytorch.transforms.base import (
    Applicable,
    Claim,
    NoParameters,
    NotApplicable,
    Risk,
    Scoped,
    Transform,
)
from steadytorch.transforms.contract import violations
from steadytorch.transforms.engine import Engine
from steadytorch.workload.workload import Workload

__all__ = [
    "Applicable",
    "Claim",
    "DeviceFacts",
    "Engine",
    "EngineModel",
    "Exported",
    "Form",
    "NoParameters",
    "NotApplicable",
    "Risk",
    "Run",
    "Scoped",
    "Transform",
    "UnsupportedError",
    "Workload",
    "export",
    "obtain",
    "violations",
]
