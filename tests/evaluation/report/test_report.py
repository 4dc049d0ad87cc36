"""The tables of a comparison, and its page."""

from __future__ import annotations

import base64
import math
import xml.etree.ElementTree
from html.parser import HTMLParser

import pytest

from kvjax.budgets.budgets import slots_for
from kvjax.evaluation import Results
from kvjax.evaluation.cells.estimates import Estimate, Proportion
from kvjax.evaluation.report import tables
from kvjax.evaluation.report.plots import all_pictures
from kvjax.evaluation.report.report import page, write_report
from tests.support.comparisons import FAILED, LONG, REASON, comparison

PAGE = ("needle", "vt", "perplexity")  # tasks of the page
VOID = {"meta", "img", "br", "wbr"}


# Tables


def field(results: Results, length: int, heading: str, under: str, candidate) -> tables.Field:
    (table,) = [one for one in tables.tables(results) if one.length == length]
    (column,) = [one for one in table.columns if (one.heading, one.under) == (heading, under)]
    method, budget = candidate
    return column.fields[table.candidates.index((method, "-" if budget is None else str(budget)))]


def test_columns_of_a_table():
    first, second = tables.tables(comparison())
    assert (first.length, second.length) == (128, 256)
    for table in (first, second):
        headings = [(column.heading, column.under) for column in table.columns]
        assert headings == [
            ("cache", ""), ("needle", "inside"), ("needle", "after"),
            ("niah multivalue", "inside"), ("niah multivalue", "after"), ("vt", "inside"),
            ("vt", "after"), ("Δ nats", ""), ("error", ""), ("recall", ""), ("slots", ""),
        ]  # fmt: skip
        assert table.candidates[0] == ("full", "-")
        assert [column.heading for column in table.columns if column.at_floor] == ["vt", "vt"]
    assert second.columns[1].prompts == "20 cases, 256 tokens"


def test_fields_of_a_table():
    results = comparison()
    low, high = Proportion(5, 20).interval
    assert field(results, 128, "needle", "inside", ("h2o", 0.25)) == (
        "25", f"{math.floor(100 * low)}-{math.ceil(100 * high)}", ""
    )  # fmt: skip
    assert field(results, 256, "needle", "after", ("h2o", 0.5)).state == tables.FAILED
    assert field(results, 128, "cache", "", ("h2o", 0.25)) == ("25.0%", "32.0 kB", "")
    assert field(results, 128, "slots", "", ("h2o", 0.25)).text == "32"
    assert field(results, 256, "slots", "", ("h2o", 32)).text == "32"
    assert field(results, 128, "slots", "", ("infinigen", None)).text == "-"
    assert field(results, 128, "Δ nats", "", ("full", None)) == ("2.500", "nats", "")
    nats = field(results, 128, "Δ nats", "", ("h2o", 0.5))
    assert nats.text == "+0.200" and nats.detail.startswith("+0.") and nats.state == ""
    assert field(results, 128, "error", "", ("h2o", 0.5)).text == "0.375"
    assert field(results, 128, "recall", "", ("h2o", 0.5)).text == "50%"


def test_a_share_is_rounded_down_to_slots():
    """As `kvjax.budgets.budgets.slots_for` does it."""
    results = comparison(["needle"], [126], [("full", None), ("h2o", 0.25)])
    assert slots_for(0.25, 126, minimum=1) == 31
    assert field(results, 126, "slots", "", ("h2o", 0.25)).text == "31"


def test_what_is_as_good_as_the_full_cache():
    results = comparison()
    assert field(results, 128, "needle", "inside", ("infinigen", None)).state == tables.AS_FULL
    assert field(results, 128, "needle", "inside", ("h2o", 0.5)).state == ""
    assert field(results, 128, "vt", "inside", ("infinigen", None)).state == "", "at the floor"
    assert field(results, 128, "needle", "inside", ("full", None)).state == ""


def test_percentages_do_not_round_to_all_or_nothing():
    shown = {0: "0", 1: "100", 1 / 3: "33", 0.999: "99.9", 0.9999: "99.9", 1 / 300: "0.3"}
    for share, text in {**shown, 1e-4: "0.1", 0.995: "99.5"}.items():
        assert tables.percent(share) == text


def test_differences_have_no_interval_of_shares():
    """A method that always loses as much as the full cache has no interval of a proportion."""
    assert Estimate.resampled([0.0] * 8) == (0.0, 0.0, 0.0, 8)
    assert Estimate.of([0.0] * 8).high > 0.2
    low, high = Estimate.resampled([0.0, 1.0] * 10)[1:3]
    assert 0.2 < low < 0.5 < high < 0.8


def test_notes():
    whole = comparison(lengths=[128, 256])
    said = tables.notes(whole)
    assert f"vt, question inside, 128, 256 tokens: {tables.AT_FLOOR}." in said
    assert not any("finished" in note for note in said)
    kept = {
        cell: found
        for cell, found in whole.records.items()
        if not (cell.task == "needle" and cell.method == LONG and cell.length == 256)
    }
    assert tables.notes(Results(whole.settings, kept))[0].startswith("Missing: 6 rows ")


def test_rows_with_fewer_cases_are_not_finished():
    whole = comparison(["perplexity"], [128])
    cell = next(cell for cell in whole.records if cell.budget == 0.5)
    found = {**whole.records[cell], "scores": whole.records[cell]["scores"][:10]}
    records = {**whole.records, cell._replace(stop=10): found}
    del records[cell]
    assert whole.missing() == 0
    assert Results(whole.settings, records).missing() == 1


def test_a_cell_that_a_larger_one_repeats_does_not_count():
    """Neither its failure, nor what it lost."""
    whole = comparison(["needle"], [128], [("full", None), ("h2o", 32), ("h2o", 0.5)])
    records = dict(whole.records)
    for cell in whole.records:
        found = {**whole.records[cell], "depths": [0.0] * 5, "scores": [1.0] * 5}
        if cell.budget == 0.5:
            found = {"failed": "no luck", "seconds": 0.0}
        records[cell._replace(first=15)] = found
    results = Results(whole.settings, records)
    assert results.rows() == whole.rows() and not results.failures()
    assert results.dropped() == whole.dropped() == {"h2o 32": 6}


def test_bytes_and_slots_are_means_over_the_cases():
    """Prompts of documents differ in length, and so do the caches of their units."""
    whole = comparison(["needle"], [128], [("full", None)], questions=["inside"])
    ((cell, found),) = whole.records.items()
    parts = {}
    for first, stop, size in ((0, 15, 100), (15, 20, 500)):
        of_cases = {name: found[name][first:stop] for name in ("scores", "depths", "prompt_tokens")}
        sizes = {"cache_bytes": size, "full_cache_bytes": 2 * size, "live_slots": size / 10}
        parts[cell._replace(first=first, stop=stop)] = {**found, **of_cases, **sizes}
    (row,) = Results(whole.settings, parts).rows()
    assert (row.cache_bytes, row.full_cache_bytes, row.live_slots) == (200, 400, 20.0)


# The page


class Page(HTMLParser):
    """Elements, texts and attributes of a page; fails where elements do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.text += "" if tag == "wbr" else " "
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag
        self.text += " "

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def shown() -> Page:
    results = comparison(PAGE, model="<script>alert('$1$')</script>")
    return Page(page(results, all_pictures(results)))


def test_the_page_needs_nothing_else(shown):
    assert not {"script", "link", "iframe", "object"} & {name for name, _ in shown.elements}
    for name, attributes in shown.elements:
        for key, value in attributes.items():
            assert not key.startswith("on") and key != "style"
            if key in ("src", "href"):
                start = "#" if name == "a" else "data:image/svg+xml;base64,"
                assert value.startswith(start)
    ids = {attributes["id"] for _, attributes in shown.elements if "id" in attributes}
    for link in shown.all("a"):
        assert link["href"][1:] in ids
    for image in shown.all("img"):
        svg = base64.b64decode(image["src"].partition(",")[2])
        xml.etree.ElementTree.fromstring(svg)
        assert b"<image" not in svg or b"data:image/png" in svg
        assert "alt" in image


def test_the_page_can_be_read(shown):
    assert shown.all("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in shown.all(
        "meta"
    )
    for cell in shown.all("th"):
        assert cell["scope"] in ("col", "rowgroup")
    scrolled = [one for one in shown.all("div") if one.get("class") == "scroll"]
    assert len(scrolled) == 2 + 4, "tables and heat maps have boxes of their own"
    assert all(one["tabindex"] == "0" and one["aria-label"] for one in scrolled)


def test_what_the_page_says(shown):
    words = " ".join(shown.text.split())
    assert "<script>alert('$1$')</script>" in words, "names are text"
    for length in ("128", "256"):
        assert f"Prompts of {length} tokens" in words
    assert words.count(LONG) > 2 and REASON in words and str(FAILED) in words
    assert "vt inside at the floor" in words
    for name, meaning in tables.DEFINITIONS.items():
        assert f"{name} {meaning}" in words
    assert "100 83-100" in words and "+0.200" in words and "25.0%" in words
    assert f"vt, question after, 128, 256 tokens: {tables.AT_FLOOR}." in words
    assert "h2o 32 lost 24 tokens that found no free slot." in words
    rows = [one for one in shown.all("tr")]
    assert len(rows) == 2 * (1 + 8)
    green = [one for one in shown.all("td") if one.get("class") == "as-full"]
    red = [one for one in shown.all("td") if one.get("class") == "failed"]
    assert len(green) == 2 * 2 and len(red) == 1, "infinigen, on the needles of two lengths"


def test_every_picture_is_on_the_page(shown):
    pictures = all_pictures(comparison(PAGE))
    labels = [image["alt"] for image in shown.all("img")]
    for picture in pictures:
        if picture.length is None:
            assert picture.title in labels
            continue
        for line in picture.panels:
            for panel in line:
                assert f"{picture.title}: {panel.title}" in labels


@pytest.mark.parametrize("task", ["needle", "perplexity", "attention"])
def test_a_page_of_one_task(task):
    results = comparison([task], [128], candidates=[("full", None), ("h2o", 0.5)])
    shown = Page(page(results, all_pictures(results)))
    words = " ".join(shown.text.split())
    assert "failed" not in words.partition("What the figures are")[0].lower()
    assert ("Scores by depth" in words) == (task == "needle")
    assert len(shown.all("tr")) == 3


def test_many_failures_are_cut():
    whole = comparison(["needle"])
    failed = {
        cell._replace(first=number, stop=number + 1): {"failed": "no luck", "seconds": 0.0}
        for cell in whole.records
        for number in range(10)
    }
    shown = Page(page(Results(whole.settings, failed), []))
    assert shown.text.count("no luck") == 100
    assert f"{len(failed) - 100} more" in shown.text


def test_files(tmp_path):
    results = comparison(["perplexity"], [128])
    first, second = tmp_path / "first", tmp_path / "a" / "second"
    for folder in (first, second):
        write_report(results, folder)
    names = {path.name for path in first.iterdir()}
    pictures = {f"{picture.name}.png" for picture in all_pictures(results)}
    assert names == {"results.csv", "report.html"} | pictures
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_a_full_cache_that_failed_is_not_at_the_floor():
    whole = comparison(["needle", "vt"], [128])
    records = {
        cell: {"failed": "no", "seconds": 0.0} if cell.method == "full" else found
        for cell, found in whole.records.items()
    }
    results = Results(whole.settings, records)
    assert not any(map(results.at_floor, results.panels()))
    assert field(results, 128, "needle", "inside", ("infinigen", None)).state == ""
