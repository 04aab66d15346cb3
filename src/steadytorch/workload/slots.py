"""Attributes that objects keep in slots."""

from __future__ import annotations

from types import MemberDescriptorType


def slots_of(kind: type) -> list[str]:
    """The attributes that instances of a class keep in slots, as named outside of the class."""
    kinds = [base for base in kind.__mro__ if "__slots__" in vars(base)]
    held = [item for base in kinds for item in vars(base).items()]
    return [name for name, value in held if isinstance(value, MemberDescriptorType)]
