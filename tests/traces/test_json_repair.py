import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.traces.json_repair import mend


@pytest.mark.parametrize(
    ("broken", "value", "what"),
    [
        (b'{"name": "a\x01b\nc"}', "a b c", "control characters"),
        (b'{"name": "a\xffb"}', "a?b", "invalid UTF-8"),
        (rb'{"name": "C:\Users\path"}', "C:/Users/path", "backslashes"),
        (rb'{"name": "x\ud800y"}', "x�y", "backslashes"),
        (b'{"name": NaN}', "", "NaN, inf or N/A values"),
        (b'{"name":-inf }', "", "NaN, inf or N/A values"),
        (b'{"name": N/A}', "", "NaN, inf or N/A values"),
    ],
)
def test_what_writers_get_wrong_is_mended(broken, value, what):
    mended, done = mend(broken)
    assert json.loads(mended) == {"name": value}
    assert done == (what,)
    assert len(mended) == len(broken)


@given(
    st.recursive(st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.text(), st.lists)
)
def test_sound_text_is_left_alone(value):
    text = json.dumps(value).encode()
    assert json.loads(mend(text)[0]) == json.loads(text)


@pytest.mark.parametrize(
    "text", [rb'"\\U \" \/ \u00e9 \ud83d\ude00"', '"a: inf, é, NaN, x"'.encode()]
)
def test_sound_escapes_and_words_within_names_are_left_alone(text):
    assert mend(text) == (text, ())


@given(st.binary(max_size=200))
def test_positions_stay(text):
    assert len(mend(text)[0]) == len(text)
