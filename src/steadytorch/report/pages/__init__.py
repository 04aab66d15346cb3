"""The pages, one for each kind of result; `KINDS` is the one place that lists them.

To add one: a file with the document that its page needs of the JSON and a function from that to
what its template shows, a template of the kind's name, and a line here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from steadytorch.report.pages import compare, conv, doctor, explain, measure, tune


class Kind(NamedTuple):
    """How results of one kind become a page.

    Attributes:
        document: a msgspec struct of what the page needs of the file.
        contents: from that document to the variables of the template.
    """

    document: Any
    contents: Callable[[Any], dict[str, Any]]


KINDS = {
    "measure": Kind(measure.MeasureDocument, measure.contents),
    "explain": Kind(explain.ExplainDocument, explain.contents),
    "tune": Kind(tune.TuneDocument, tune.contents),
    "compare": Kind(None, compare.contents),
    "conv": Kind(conv.ConvDocument, conv.contents),
    "doctor": Kind(None, doctor.contents),
}
