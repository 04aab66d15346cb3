"""What the CUDA driver does on a GPU, done on the host, so that nodes can be tried without one."""

from __future__ import annotations

import ctypes

from steadytorch.graphs.copy_nodes import DescribedCopy


class Driver:
    """Executes the single copy node of a graph, or refuses to change it.

    Args:
        refuses: `point` for another source, `turn` for on and off.
    """

    def __init__(self, *refuses: str) -> None:
        self.refuses, self.changes = refuses, 0
        self.is_on = True
        self.planned: DescribedCopy | None = None

    def cuGraphExecMemcpyNodeSetParams(self, executable, node, copy, context):  # noqa: N802
        self.changes += 1
        if "point" in self.refuses:
            return 1
        self.planned = DescribedCopy.from_buffer_copy(copy._obj)
        return 0

    def cuGraphNodeSetEnabled(self, executable, node, on):  # noqa: N802
        if "turn" in self.refuses:
            return 1
        self.is_on = bool(on.value)
        return 0

    def replay(self) -> None:
        """Executes the copy node."""
        if self.is_on and self.planned is not None:
            ctypes.memmove(self.planned.target, self.planned.source, self.planned.width_bytes)
