"""The tables of a comparison, and its page."""

from __future__ import annotations

import base64
import html
import math
import re

import pytest

from kvjax.evaluation import Results
from kvjax.evaluation.report import tables
from kvjax.evaluation.report.report import page, write_report
from tests.support.comparisons import FAILED, LONG, REASON, comparison, share_interval

PAGE = ("needle", "vt", "perplexity")  # tasks of the page


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
    low, high = share_interval(5, 20)
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
    assert field(results, 128, "needle", "inside", ("infinigen", None)).state == tables.AS_FULL
    assert field(results, 128, "needle", "inside", ("h2o", 0.5)).state == ""
    assert field(results, 128, "vt", "inside", ("infinigen", None)).state == "", "at the floor"
    assert field(results, 128, "needle", "inside", ("full", None)).state == ""
    # A share is rounded down to slots, as methods do it.
    results = comparison(["needle"], [126], [("full", None), ("h2o", 0.25)])
    assert field(results, 126, "slots", "", ("h2o", 0.25)).text == "31"


def test_percentages_do_not_round_to_all_or_nothing():
    shown = {0: "0", 1: "100", 1 / 3: "33", 0.999: "99.9", 0.9999: "99.9", 1 / 300: "0.3"}
    for share, text in {**shown, 1e-4: "0.1", 0.995: "99.5"}.items():
        assert tables.percent(share) == text


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
    whole = comparison(["needle"], [128], [("full", None), ("h2o", 32), ("h2o", 0.5)])
    records = dict(whole.records)
    for cell in whole.records:
        found = {**whole.records[cell], "depths": [0.0] * 5, "scores": [1.0] * 5}
        if cell.budget == 0.5:
            found = {"failed": "no luck", "seconds": 0.0}
        records[cell._replace(first=15)] = found
    results = Results(whole.settings, records)
    assert results.rows() == whole.rows() and not results.failures()


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


@pytest.fixture(scope="module")
def shown() -> str:
    results = comparison(PAGE, model="<script>alert('$1$')</script>")
    return page(results, {"heatmap_h2o": b"png"})


def test_the_page_needs_nothing_else(shown):
    assert not re.search(r"<(script|link|iframe|object)|url\(|@import", shown)
    sources = re.findall(r'(?:src|href)="([^"]*)', shown)
    assert sources == ["data:image/png;base64," + base64.b64encode(b"png").decode()]


def test_what_the_page_says(shown):
    text = re.sub(r"<[^>]*>", " ", shown.partition("<body>")[2])
    words = " ".join(html.unescape(text).split())
    assert "<script>alert('$1$')</script>" in words, "names are text"
    for length in ("128", "256"):
        assert f"Prompts of {length} tokens" in words
    assert words.count(LONG) > 1 and REASON in words and str(FAILED) in words
    assert "vt inside at the floor" in words
    for name, meaning in tables.DEFINITIONS.items():
        assert f"{name} {meaning}" in words
    assert "100 83-100" in words and "+0.200" in words and "25.0%" in words
    assert f"vt, question after, 128, 256 tokens: {tables.AT_FLOOR}." in words
    assert shown.count("<tr>") == 2 * (1 + 8)
    assert shown.count('class="as-full"') == 4, "infinigen, on the needles of two lengths"
    assert shown.count('<td class="failed"') == 1


def test_files(tmp_path):
    """Equal results become equal files."""
    results = comparison(["perplexity"], [128])
    first, second = tmp_path / "first", tmp_path / "a" / "second"
    for folder in (first, second):
        write_report(results, folder)
    names = {path.name for path in first.iterdir()}
    assert {"results.csv", "report.html", "perplexity_128.png"} <= names
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_no_floor_where_the_full_cache_failed():
    whole = comparison(["needle", "vt"], [128])
    records = {
        cell: {"failed": "no", "seconds": 0.0} if cell.method == "full" else found
        for cell, found in whole.records.items()
    }
    results = Results(whole.settings, records)
    assert not any(map(results.at_floor, results.panels()))
    assert field(results, 128, "needle", "inside", ("infinigen", None)).state == ""
