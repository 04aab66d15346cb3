"""Pages as their readers use them, in Chromium."""

from __future__ import annotations

import json

import pytest

from steadytorch.report.html import report
from steadytorch.report.pages import KINDS

from .browser import PROGRAM, Browser
from .documents import DOCUMENTS

pytestmark = pytest.mark.skipif(not PROGRAM, reason="Chromium is not installed")
PAPER = "getComputedStyle(document.querySelector('.chart .main-svg')).backgroundColor"
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(20, 24, 30)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def shown(browser, tmp_path):
    """Opens the page of one or two documents; at the end no page has had an error."""
    opened = []

    def show(*documents, embed=False, alone=False, **emulated):
        files = [tmp_path / name for name in ("before.json", "after.json")[: len(documents)]]
        for file, document in zip(files, documents, strict=True):
            file.write_bytes(document)
        page = report(files[0], other=files[1] if files[1:] else None, embed=embed)
        if alone:  # loading Plotly takes a second
            for script in tmp_path.glob("*.js"):
                script.unlink()
        opened.append((browser.page(page, **emulated), alone))
        return opened[-1][0]

    yield show
    for page, alone in opened:
        assert [error for error in page.errors if not alone or "ERR_FILE_NOT" not in error] == []
        page.close()


def column(page, number):
    rows = "document.querySelector('table[data-sorts]').tBodies[0].rows"
    return page.see(f"[...{rows}].map((row) => row.cells[{number}].textContent)")


def test_a_table_sorts_by_mouse_and_by_keyboard(shown):
    document = json.loads(DOCUMENTS["compare"])
    document["samples_ns"] = [[[1.2e6, 1e6], [900e3, 1e6], [11e3, 1e6], [2e9, 1e6]]]
    page = shown(json.dumps(document).encode(), alone=True)
    heads = "document.querySelectorAll('table[data-sorts] th button')"
    orders = [column(page, 2)]
    page.click(f"{heads}[2]")
    orders.append(column(page, 2))
    assert page.see("document.querySelector('th[aria-sort]').ariaSort") == "ascending"
    page.press("Enter")
    orders.append(column(page, 2))
    assert page.see("document.querySelector('th[aria-sort]').ariaSort") == "descending"
    page.press("Enter")
    assert page.see("document.querySelector('th[aria-sort]')") is None
    assert column(page, 2) == orders[0]
    up = ["11.00 us", "900.0 us", "1.20 ms", "2.00 s"]
    assert orders == [["1.20 ms", "900.0 us", "11.00 us", "2.00 s"], up, up[::-1]]
    page.press("Tab")
    assert page.see(f"document.activeElement === {heads}[3]")
    assert page.see("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_a_point_tells_its_value_and_leads_to_its_step(shown):
    page = shown(DOCUMENTS["run"])
    page.wait_for_charts()
    point = "document.querySelector('.chart .scatterlayer .trace:last-child .point')"
    page.hover(point)
    page.wait("document.querySelector('.hoverlayer .hovertext') !== null")
    said = page.see("document.querySelector('.hoverlayer .hovertext').textContent")
    assert "sample 904: 62.43 ms" in said
    closed = "document.querySelectorAll('details:not([open])').length"
    before = page.see(closed)
    page.click(point)
    page.wait("location.hash.startsWith('#step-90')")
    assert page.see(closed) == before - 1
    assert page.see("document.querySelector('details[open] tfoot').textContent.includes('62.43')")


def test_a_step_opens_by_keyboard(shown):
    page = shown(DOCUMENTS["explain"], alone=True)
    page.see("document.querySelector('summary').focus()")
    page.press("Enter")
    assert page.see("document.querySelector('details').open")
    assert "launching" in page.see("document.querySelector('details').innerText")


@pytest.mark.slow  # draws its charts four times
def test_the_dark_scheme_has_dark_charts_and_prints_are_light(shown):
    page = shown(DOCUMENTS["measure"], dark=True)
    page.wait_for_charts()
    assert page.see("getComputedStyle(document.body).backgroundColor") == DARK
    assert page.see(PAPER) == DARK
    page.see(f"addEventListener('beforeprint', () => {{ window.printed = {PAPER} }})")
    assert page.printed().startswith(b"%PDF")
    assert page.see("window.printed") == LIGHT
    assert page.see(PAPER) == DARK
    page.prefer(dark=False)
    page.wait(f"{PAPER} === '{LIGHT}'")


@pytest.mark.parametrize(
    ("emulated", "said"),
    [
        ({"script": False}, "Charts need JavaScript. The headline and the tables need none."),
        (
            {"alone": True},
            ".min.js is not beside this page. The headline and the tables need none.",
        ),
    ],
)
def test_a_page_without_charts_says_so_and_keeps_its_tables(shown, emulated, said):
    page = shown(DOCUMENTS["measure"], **emulated)
    page.wait(f"document.body.innerText.includes({json.dumps(said)})")
    assert page.see("[...document.querySelectorAll('figure')].every((each) => each.hidden)")
    assert page.see("document.querySelectorAll('table').length") >= 2


def test_two_results_stand_side_by_side_if_the_window_is_wide(shown):
    page = shown(DOCUMENTS["measure"], DOCUMENTS["measure, few samples"], alone=True, width=1400)
    tops = "[...document.querySelectorAll('main > article')].map((each) => each.offsetTop)"
    heads = page.see("[...document.querySelectorAll('h1')].map((each) => each.textContent)")
    assert heads == ["before.json: resnet50", "after.json: resnet50"]
    assert len(set(page.see(tops))) == 1
    narrow = shown(DOCUMENTS["measure"], DOCUMENTS["measure"], alone=True, width=800)
    assert len(set(narrow.see(tops))) == 2


@pytest.mark.slow  # loads Plotly
def test_a_page_with_plotly_in_it_needs_no_file(shown, tmp_path):
    page = shown(DOCUMENTS["measure"], embed=True)
    page.wait_for_charts()
    assert list(tmp_path.glob("*.js")) == []


@pytest.mark.slow  # draws the charts of every kind
def test_no_page_is_wider_than_a_phone(shown):
    for name in KINDS:
        page = shown(DOCUMENTS[name], width=400)
        page.wait_for_charts()
        assert page.see("document.documentElement.scrollWidth") <= 400, name
