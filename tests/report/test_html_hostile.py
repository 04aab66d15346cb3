"""Files that no command wrote: a page or a UsageError, whatever they hold."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import random
from pathlib import Path

import pytest
from hypothesis import event, given
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


def _tried(content):
    try:
        return None, page(HERE, content)
    except UsageError as error:
        return str(error), ""


def _makes_a_page(content):
    """Whether it does; if not, the error names the file, in one printable line."""
    error, made = _tried(content)
    if error is not None:
        assert error.startswith("result.json ")
        assert error.isprintable()
        return False
    assert made.endswith("</html>")
    assert made.count("<script") == made.count("</script>")
    assert "\x1b" not in made
    return True


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_place_of_a_document_may_hold_anything(name, step):
    whole, chance = json.loads(DOCUMENTS[name]), random.Random(name)
    refused = False
    for way in _places(name)[::step]:
        document = copy.deepcopy(whole)
        _changed(document, way, chance.choice([DELETED, *ODD]))
        refused |= not _makes_a_page(json.dumps(document).encode())
    assert refused


@pytest.mark.parametrize("text", ["</script>", "\x1b[2J"])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_hostile_name_makes_a_page(name, text):
    document = json.loads(DOCUMENTS[name])
    document["environment"]["cpu_name"] = text
    assert _makes_a_page(json.dumps(document).encode())


@given(data=st.data())
def test_several_places_may_hold_anything(data):
    name = data.draw(st.sampled_from(sorted(DOCUMENTS)))
    document = json.loads(DOCUMENTS[name])
    for way in data.draw(st.lists(st.sampled_from(_places(name)), min_size=1, max_size=4)):
        with contextlib.suppress(LookupError, TypeError):  # a change before took the place away
            _changed(document, way, data.draw(values))
    event("a page" if _makes_a_page(json.dumps(document).encode()) else "an error")


@given(data=st.data())
def test_bytes_may_be_cut_or_garbled(data):
    whole = DOCUMENTS[data.draw(st.sampled_from(sorted(DOCUMENTS)))].strip()
    assert not _makes_a_page(whole[: data.draw(st.integers(0, len(whole) - 1))])
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    _makes_a_page(bytes(content))
