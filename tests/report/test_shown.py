"""Results as fragments of HTML for notebooks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import steadytorch as steady
from steadytorch.report.shown import RENDERERS
from steadytorch.results.saved import FORMS, decode, kind_of
from steadytorch.results.shown import Shown
from steadytorch.tune.reverify import Reverified

from .conftest import plan
from .documents import DOCUMENTS

HERE = Path("result.json")
HOSTILE = "<script>alert(1)</script>[link=javascript:alert(2)]&\x1b[2J\udc80\"'>"


class Strict(HTMLParser):
    """Collects the text, and refuses all but spans with colours in one pre."""

    def __init__(self):
        super().__init__()
        self.text, self.open = "", []

    def handle_starttag(self, tag, attrs):
        assert tag == ("span" if self.open else "pre")
        assert [name for name, _ in attrs] == ["style"]
        assert "url(" not in attrs[0][1]
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        assert self.open or not data.strip()
        self.text += data


def text_of(result):
    parser = Strict()
    parser.feed(result._repr_html_())
    parser.close()
    assert parser.open == []
    assert re.sub(r"[\n]", "", parser.text).isprintable()
    return parser.text


def result_of(content):
    return decode(HERE, content, kind_of(HERE, content)).result


def everywhere(value, text):
    """The document with every free text replaced."""
    if isinstance(value, dict):
        return {key: everywhere(each, text) for key, each in value.items()}
    if isinstance(value, list):
        return [everywhere(each, text) for each in value]
    return text if isinstance(value, str) and " " in value else value


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_result_shows_itself(name):
    assert len(text_of(result_of(DOCUMENTS[name]))) > 10


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_result_prints_as_on_the_command_line(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")  # as wide as in a notebook
    made = result_of(DOCUMENTS[name])
    assert str(made).split() == text_of(made).split()
    assert "\x1b" not in str(made)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_hostile_text_stays_text(name):
    document = everywhere(json.loads(DOCUMENTS[name]), HOSTILE.replace("\udc80", ""))
    made = result_of(json.dumps(document).encode())
    assert "<script" not in made._repr_html_()
    assert "\x1b" not in text_of(made)


def test_plans_show_their_candidates_and_names_stay_text():
    text = text_of(plan(name=HOSTILE))
    assert "resnet50" not in text
    assert "alert(1)" in text
    assert "not stored" in text_of(plan(path=None))
    assert "holds" in text_of(Reverified(plan=plan()))


def test_summarized_timings_show_themselves():
    text = text_of(steady.summarize([1_000_000 + 37 * (i % 11) for i in range(200)]))
    assert "1.00 ms" in text
    assert "distribution" in text


def test_colours_are_there():
    assert 'style="color: #' in result_of(DOCUMENTS["tune"])._repr_html_()


def test_every_form_has_a_renderer():
    for form in FORMS.values():
        assert issubclass(form, Shown)
        assert {kind.__name__ for kind in form.__mro__} & RENDERERS.keys()


def test_showing_a_result_needs_no_torch(tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(DOCUMENTS["measure"])
    code = (
        "import sys, steadytorch; from pathlib import Path; from steadytorch.results import saved;"
        f"p = Path({str(path)!r}); made = saved.decode(p, p.read_bytes(), 'measure').result;"
        "assert 'ms' in made._repr_html_(); assert 'ms' in str(made);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
