from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import plotly.graph_objects
import pytest
from plotly.offline import get_plotlyjs

from steadytorch.errors import UsageError
from steadytorch.report import html, pages
from steadytorch.report.files import plotly_name
from steadytorch.report.html import page

from .documents import DOCUMENTS

HERE = Path("result.json")
NASTY = "</script><script>alert(1)</script><img src=x onerror=y>\x1b[2J\u2028<!--'\"&amp;{{1}}"
SMALL = 1_500_000
"""Most bytes of a page."""
CLOSED = {"status", "pass", "kind", "side"}
"""Fields whose words are from a closed list."""


class Reader(HTMLParser):
    """Elements, attributes, and what scripts and all else hold."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.scripts, self.text, self._open = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in ("meta", "br"):
            self._open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), []))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts[-1][1].append(data)
        elif "style" not in self._open:
            self.text.append(data)

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    @property
    def flat(self):
        return " ".join(" ".join(self.text).split())

    @property
    def figures(self):
        kind = "application/json"
        return [json.loads("".join(data)) for each, data in self.scripts if each == kind]

    @property
    def programs(self):
        return ["".join(data) for kind, data in self.scripts if not kind]


def read(content):
    return Reader(page(HERE, content))


@pytest.fixture(params=DOCUMENTS)
def variant(request):
    return request.param


def test_every_kind_that_is_written_has_a_page():
    assert set(pages.KINDS) == {name.partition(",")[0] for name in DOCUMENTS}


def test_a_result_becomes_a_whole_page_with_its_facts(variant):
    shown, document = read(DOCUMENTS[variant]), json.loads(DOCUMENTS[variant])
    assert shown._open == []
    assert document["created"] in shown.flat
    assert (document["workload"] or document["environment"]["name"]) in shown.flat
    assert "None" not in shown.flat.replace("None.", "")
    assert "nan" not in shown.flat.split()


def test_pictures_are_what_plotly_accepts(variant):
    for figure in read(DOCUMENTS[variant]).figures:
        # Raises where there is no such property, or no such value of it.
        plotly.graph_objects.Figure(figure["data"], figure["layout"])
        for axis in ("xaxis", "yaxis"):
            assert "text" in figure["layout"][axis]["title"]
        assert all(len(trace["x"]) == len(trace["y"]) > 0 for trace in figure["data"])


def test_nothing_is_fetched(variant):
    shown = read(DOCUMENTS[variant])
    for tag, name, value in shown.attributes:
        assert name not in ("src", "srcset", "action", "background"), (tag, value)
        assert name != "href" or value.startswith("#"), (tag, value)
        assert not name.startswith("on"), (tag, name)
    style = html.template_source("page.css") + html.template_source("page.js")
    assert not re.search(r"url\(|@import|//\w|fetch|XMLHttp", style)
    assert {"link", "iframe", "object", "embed", "base", "img"}.isdisjoint(shown.tags)


def test_only_the_scripts_of_the_page_may_run(variant):
    shown = read(DOCUMENTS[variant])
    (policy,) = [v for tag, name, v in shown.attributes if tag == "meta" and "default-src" in v]
    assert policy.startswith("default-src 'none';")
    listed = re.search(r"script-src ([^;]*);", policy)[1].split()
    hashes = [
        base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
        for program in shown.programs
    ]
    # What the one script of the page loads may run: Plotly, from the file beside the page.
    loads = ["'strict-dynamic'"] if shown.figures else []
    assert listed == [*(f"'sha256-{each}'" for each in hashes), *loads]
    assert len(shown.programs) == 1


def test_an_embedded_plotly_is_whole_and_allowed_by_its_hash():
    shown = Reader(page(HERE, DOCUMENTS["measure"], embed=True))
    ((packed,),) = [data for kind, data in shown.scripts if kind == "application/gzip"]
    script = gzip.decompress(base64.b64decode(packed))
    assert script.decode() == get_plotlyjs()
    allowed = base64.b64encode(hashlib.sha256(script).digest()).decode()
    (policy,) = [v for tag, name, v in shown.attributes if tag == "meta" and "default-src" in v]
    assert f"'sha256-{allowed}'" in policy
    assert "strict-dynamic" not in policy


def test_pages_are_small(variant):
    assert len(page(HERE, DOCUMENTS[variant]).encode()) < SMALL


def test_links_lead_to_places_and_tables_have_names(variant):
    shown = read(DOCUMENTS[variant])
    places = [value for _, name, value in shown.attributes if name == "id"]
    assert len(set(places)) == len(places)
    links = {value for _, name, value in shown.attributes if name in ("href", "aria-labelledby")}
    assert {link.removeprefix("#") for link in links} <= set(places)
    assert shown.tags.count("caption") == shown.tags.count("table")
    assert shown.tags.count("th") == [name for _, name, _ in shown.attributes].count("scope")


def test_two_results_share_a_page_without_sharing_names(tmp_path):
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, name in zip(paths, ("explain", "explain, doubtful"), strict=True):
        path.write_bytes(DOCUMENTS[name])
    made = html.report(paths[0], other=paths[1])
    assert made == tmp_path / "a-b.html"
    shown = Reader(made.read_text("utf-8"))
    places = [value for _, name, value in shown.attributes if name == "id"]
    assert len(set(places)) == len(places)
    assert {"a-step-3", "b-step-3"} <= set(places)
    paths[1].write_bytes(DOCUMENTS["doctor"])
    with pytest.raises(UsageError, match=r"a 'explain' result and .*b\.json a 'doctor' result: na"):
        html.report(paths[0], other=paths[1])


def _poisoned(value, key=""):
    if isinstance(value, str):
        return value if key in CLOSED else value + NASTY
    if isinstance(value, list):
        return [_poisoned(each, key) for each in value]
    if isinstance(value, dict):
        # Names of slices are keys, of which the steps' must agree.
        return {
            (k + NASTY[:60] if key.endswith(("_ns", "shares", "unknown")) else k): _poisoned(v, k)
            for k, v in value.items()
        }
    return value


def test_hostile_names_stay_text(variant):
    document = _poisoned(json.loads(DOCUMENTS[variant]))
    text = page(HERE, json.dumps(document).encode())
    clean, hostile = read(DOCUMENTS[variant]), Reader(text)
    allowed = set(clean.tags) | {"p", "li", "ul"}
    assert set(hostile.tags) <= allowed | {"table", "td", "tr", "th", "tbody", "thead", "section"}
    assert hostile.programs == clean.programs
    assert len(hostile.figures) == len(clean.figures)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028]", text.partition("<body>")[2][:5000])
    rest = text
    for program in hostile.programs:
        rest = rest.replace(program, "")
    assert "\x1b" not in rest
    assert "\u2028" not in rest
    assert "<img" not in rest
    assert "<!--" not in rest
    assert rest.count("<script") == len(hostile.scripts)


def test_lone_surrogates_are_refused_or_shown():
    # No encoder writes them; a file may have them escaped.
    content = DOCUMENTS["doctor"].replace(b'"AMD EPYC"', b'"\\ud800"')
    with pytest.raises(UsageError, match="not a saved result"):
        page(HERE, content)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a saved result"),
        (b"not JSON", "is not a saved result"),
        (b"[1, 2]", "is not a saved result"),
        (b"\xff\xfe", "is not a saved result"),
        (b'{"kind": "tune"}', "missing required field `schema`"),
        (b'{"schema": 2, "kind": "tune"}', "has schema 2, this version reads 1"),
        (b'{"schema": 1, "kind": "rivals"}', "holds a 'rivals' result; pages exist for meas"),
        (b'{"schema": 1, "kind": "%s"}' % (b"x" * 10**6), "xx…' result"),
        (b'{"schema": 1, "kind": "measure"}', "missing required field `workload`"),
        (b'{"schema": 1, "kind": "tune", "x": ' + b"[" * 200_000, "not a saved result"),
        (DOCUMENTS["measure"][:-20], "is not a saved result"),
        (DOCUMENTS["measure"].replace(b'"cv": ', b'"cv": 1e999, "x": '), "Number out of range"),
        (DOCUMENTS["measure"].replace(b'"cv": ', b'"cv": NaN, "x": '), "malformed"),
        (DOCUMENTS["measure"].replace(b'"cv": ', b'"cv": -1e308, "x": '), None),
        (DOCUMENTS["measure"].replace(b'"processes": [', b'"processes": [], "x": ['), "figures"),
        (
            DOCUMENTS["explain"].replace(
                b'"slices_ns": {',
                b'"slices_ns": {' + b",".join(b'"x%d": 1' % i for i in range(200)) + b",",
                1,
            ),
            "a ledger has at most",
        ),
    ],
    ids=range(16),
)
def test_what_is_no_result_is_an_error_of_one_short_line(content, said):
    if said is None:
        page(HERE, content)
        return
    with pytest.raises(UsageError) as caught:
        page(HERE, content)
    assert said in str(caught.value)
    assert str(caught.value).startswith("result.json ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_text_without_end_is_cut_and_that_is_told():
    document = json.loads(DOCUMENTS["measure"])
    document["workload"] = "</p>" * 500_000
    text = page(HERE, json.dumps(document).encode())
    assert "… (2,000,000 characters)" in text
    assert len(text) < SMALL


def test_all_samples_are_told_where_few_are_drawn():
    document = json.loads(DOCUMENTS["measure"])
    period = document["processes"][0]["period"]
    period["samples_ns"] = [1000 + i % 7 for i in range(60_000)]
    period["samples_ns"][31_234] = 1_000_000
    period["outliers"] = [{"index": 31_234, "sample_ns": 1_000_000, "cause": "a pause"}]
    content = json.dumps(document).encode()
    shown = read(content)
    assert len(page(HERE, content)) < SMALL
    traces = shown.figures[0]["data"]
    drawn = sum(len(trace["x"]) for trace in traces)
    assert drawn <= 20_000
    assert f"{drawn:,} of 60,000 samples are drawn" in shown.flat
    (outlier,) = [trace for trace in traces if trace["name"] == "outlier: a pause"]
    assert outlier["x"] == [31_234]
    assert "are drawn" not in read(DOCUMENTS["measure"]).flat


@pytest.mark.parametrize("embed", [False, True])
def test_pages_with_charts_say_what_charts_need(embed):
    made = page(HERE, DOCUMENTS["measure"], embed=embed)
    beside = "" if embed else f", and {plotly_name()} beside it"
    assert f"<p>This page opens offline. Its charts need JavaScript{beside}.</p>" in made
    assert re.search("<noscript><p [^>]*>Charts need JavaScript", made)
    without = page(HERE, DOCUMENTS["doctor"], embed=embed)
    assert "<p>This page opens offline.</p>" in without
    assert "noscript" not in without
