"""What results of all kinds have in common."""

from __future__ import annotations

import msgspec

from steadytorch.device.facts import DeviceFacts


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What every page needs of a result.

    Attributes:
        workload: its name; empty where there is none.
        environment: where it was taken.
        created: when, ISO 8601.
    """

    workload: str
    environment: DeviceFacts
    created: str
