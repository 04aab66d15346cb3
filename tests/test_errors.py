import pytest

from steadytorch.errors import PlanError, first_line, one_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\nb"), "ValueError: a"),
        (RuntimeError("why:\nbecause\nmore"), "RuntimeError: why: because"),
        (PlanError("tune again"), "tune again"),
        (OSError("\x1b[2Jgone"), "OSError: ?[2Jgone"),
        (KeyError(), "KeyError: "),
    ],
)
def test_errors_become_one_printable_line(error, line):
    assert one_line(error) == line


@pytest.mark.parametrize(
    ("error", "line"),
    [(ValueError("a\nb"), "a"), (KeyError(), "KeyError"), (OSError("x" * 300), "x" * 200)],
)
def test_the_first_line_names_the_type_only_where_nothing_is_said(error, line):
    assert first_line(error) == line
