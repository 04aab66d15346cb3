from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from steadytorch.ambient import flags
from steadytorch.results.candidate import TransformSpec
from steadytorch.transforms.base import Applicable, Risk, Scoped, Transform, applied_in_order
from steadytorch.workload.workload import Workload


class Journal(Transform):
    """Writes down when it is entered and left."""

    name = "journal"
    risk = Risk.HOST

    def __init__(self, label, lines):
        super().__init__()
        self.label, self.lines = label, lines

    def applies_to(self, workload, facts):
        return Applicable()

    @contextmanager
    def applied(self, workload):
        self.lines.append(f"enter {self.label}")
        try:
            yield workload.with_model(lambda x: f"{self.label}({workload.model(x)})")
        finally:
            self.lines.append(f"leave {self.label}")


def test_the_first_transform_is_the_innermost_and_the_last_to_be_undone():
    lines = []
    transforms = [Journal("a", lines), Journal("b", lines)]
    with applied_in_order(transforms, Workload(str, (1,))) as changed:
        assert changed.model(1) == "b(a(1))"
    assert lines == ["enter a", "enter b", "leave b", "leave a"]


def test_everything_is_undone_when_the_body_raises():
    lines = []
    with (
        pytest.raises(ZeroDivisionError),
        applied_in_order([Journal("a", lines)], Workload(str, (1,))),
    ):
        raise ZeroDivisionError
    assert lines == ["enter a", "leave a"]


def test_flags_are_set_inside_and_put_back_after():
    owner = SimpleNamespace(a=1, b=2)
    with flags((owner, "a", 10), (owner, "b", 20)):
        assert owner == SimpleNamespace(a=10, b=20)
    assert owner == SimpleNamespace(a=1, b=2)


def test_flags_are_put_back_when_the_body_raises():
    owner = SimpleNamespace(a=1)
    with pytest.raises(ZeroDivisionError), flags((owner, "a", 10)):
        raise ZeroDivisionError
    assert owner.a == 1


def test_flags_already_set_are_put_back_when_a_later_one_cannot_be():
    class ReadOnly:
        @property
        def b(self):
            return 2

    owner = SimpleNamespace(a=1)
    with pytest.raises(AttributeError), flags((owner, "a", 10), (ReadOnly(), "b", 20)):
        pass
    assert owner.a == 1


def test_the_other_flags_are_put_back_when_one_cannot_be():
    class Stuck:
        b = 2

        def __setattr__(self, name, value):
            if value == 2:
                raise ValueError(value)
            object.__setattr__(self, name, value)

    owner = SimpleNamespace(a=1)
    with pytest.raises(ValueError, match="2"), flags((owner, "a", 10), (Stuck(), "b", 20)):
        pass
    assert owner.a == 1


def test_a_flag_that_has_its_value_already_is_not_written():
    class Counted:
        writes = 0

        def __setattr__(self, name, value):
            type(self).writes += 1
            object.__setattr__(self, name, value)

    owner = Counted()
    owner.a = 1
    with flags((owner, "a", 1)):
        pass
    assert Counted.writes == 1


def test_a_scoped_model_enters_a_new_scope_at_each_call():
    entered = []

    @contextmanager
    def scope():
        entered.append(True)
        yield

    model = Scoped(lambda x, *, y: x + y, scope)
    assert [model(1, y=2), model(3, y=4)] == [3, 7]
    assert len(entered) == 2


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (TransformSpec("tf32"), "tf32"),
        (TransformSpec("threads", (("count", 4),)), "threads(4)"),
        (
            TransformSpec("compile", (("mode", "default"), ("freezing", True))),
            "compile(default, freezing)",
        ),
        (TransformSpec("compile", (("mode", "default"), ("freezing", False))), "compile(default)"),
    ],
)
def test_a_spec_reads_as_a_call(spec, text):
    assert str(spec) == text
