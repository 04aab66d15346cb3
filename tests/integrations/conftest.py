from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_STORED = Path(__file__).parents[1] / "tune" / "stored.py"


def _load() -> None:
    """Loads a module of other tests from its path, since tests are not a package."""
    if "stored" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location("stored", _STORED)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["stored"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["stored"])


_load()
