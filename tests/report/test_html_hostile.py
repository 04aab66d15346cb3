"""Files that no command wrote: a page or a UsageError, whatever they hold."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadytorch.errors import UsageError
from steadytorch.report.html import page

from .documents import DOCUMENTS

HERE = Path("result.json")
ODD = [
    *(None, True, False, 0, 1, -1, 0.0, -0.5, 1e308, -1e308, 5e-324, 2**63, -(2**70), 10**300),
    *("", "x", "\x1b[2J", "</script>", "measure", [], {}, [[]], [0, 0], [None], {"": None}),
    *([1, -1], [1e308, -1e308], ["a", "b"], {"idle_launch": -5, "x": 2**80}),
]
values = st.sampled_from(ODD) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@functools.cache
def _places(name):
    """Every way to a value in a document; of lists the first three."""

    def walk(value, way):
        yield way
        pairs = list(value.items()) if isinstance(value, dict) else []
        if isinstance(value, list):
            pairs = list(enumerate(value[:3]))
        for key, each in pairs:
            yield from walk(each, (*way, key))

    return [way for way in walk(json.loads(DOCUMENTS[name]), ()) if way]


def _changed(document, way, value):
    *outer, last = way
    inner = document
    for key in outer:
        inner = inner[key]
    if value is DELETED:
        del inner[last]
    else:
        inner[last] = value


DELETED = object()


def _holds(document):
    with contextlib.suppress(UsageError):
        assert page(HERE, json.dumps(document).encode()).endswith("</html>")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_place_of_a_document_may_hold_anything(name):
    whole, chance = json.loads(DOCUMENTS[name]), random.Random(name)
    for way in _places(name):
        document = copy.deepcopy(whole)
        _changed(document, way, chance.choice([DELETED, *ODD]))
        _holds(document)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_several_places_may_hold_anything(data):
    name = data.draw(st.sampled_from(sorted(DOCUMENTS)))
    document = json.loads(DOCUMENTS[name])
    for way in data.draw(st.lists(st.sampled_from(_places(name)), min_size=1, max_size=4)):
        with contextlib.suppress(LookupError, TypeError):  # a change before took the place away
            _changed(document, way, data.draw(values))
    _holds(document)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_bytes_may_be_cut_or_garbled(data):
    content = bytearray(DOCUMENTS[data.draw(st.sampled_from(sorted(DOCUMENTS)))])
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.none() | st.integers(0, len(content)))
    with contextlib.suppress(UsageError):
        page(HERE, bytes(content[:cut]))
