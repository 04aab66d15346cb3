"""Call signatures: the leaves of the nested arguments, and the nesting structure."""

from __future__ import annotations

import msgspec


class Leaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One leaf of the arguments: a tensor's layout, or the value of anything else.

    Attributes:
        path: where it stands in the arguments, such as `[0]` or `['mask']`.
        shape: sizes, or None for a constant.
        dtype: element type without the `torch.` prefix, or None.
        stride: in elements, or None.
        device: device type without its index, or None.
        constant: `repr` of a value that is not a tensor, or None.
    """

    path: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    stride: tuple[int, ...] | None = None
    device: str | None = None
    constant: str | None = None

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.path}={self.constant}"
        return f"{'x'.join(map(str, self.shape)) or 'scalar'}:{self.dtype}"


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The inputs that a plan is valid for: all leaves of the arguments, and their nesting."""

    leaves: tuple[Leaf, ...]
    structure: str

    def __str__(self) -> str:
        return ", ".join(map(str, self.leaves))

    def on(self, device: str) -> Signature:
        """The same signature on another device type; moving dense tensors keeps their strides."""
        moved = (
            leaf if leaf.device is None else msgspec.structs.replace(leaf, device=device)
            for leaf in self.leaves
        )
        return Signature(tuple(moved), self.structure)
