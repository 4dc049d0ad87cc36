"""Everything that results are shown in: files, pictures, and a page that needs nothing else."""

from __future__ import annotations

import base64
import itertools
from pathlib import Path
from typing import Any

import jinja2

from kvjax.evaluation.cells import files
from kvjax.evaluation.cells.results import Results
from kvjax.files import write_whole, writing
from kvjax.messages import printable

from . import pictures, plots, tables
from .pictures import Picture

REPORT = "report.html"
_TEMPLATE = "report.html.jinja"
_PANEL = 4.4, 3.1  # inches of a panel on the page
_MOST_FAILURES = 100  # that are told with their reasons


def write_report(results: Results, folder: Path) -> None:
    """Writes `results.csv`, a PNG file per picture, and `report.html`.

    The page holds its pictures and loads nothing. The folder is made if it is absent; pictures of
    an earlier call are replaced.

    Raises:
      OSError: a file cannot be written.

    Example:
      >>> import tempfile
      >>> from pathlib import Path
      >>> from kvjax.evaluation import Cell, Results
      >>> from kvjax.evaluation.report.report import write_report
      >>> found = {"scores": [1.0, 0.0], "depths": [0.0, 1.0], "live_slots": 64.0, "dropped": 0,
      ...          "cache_bytes": 1000, "full_cache_bytes": 1000, "seconds": 0.1}
      >>> asked = {"methods": [["full", None]], "lengths": [64], "questions": ["inside"],
      ...          "cases": 2, "tasks": {"needle": {"metric": "accuracy", "floor": 0.0}}}
      >>> results = Results(asked, {Cell("needle", 64, "inside", 0, 2, "full", None): found})
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     write_report(results, Path(folder))
      ...     sorted(path.name for path in Path(folder).glob("*.html"))
      ['report.html']
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files.write(results, folder)
    drawn = plots.all_pictures(results)
    for picture in drawn:
        pictures.save(picture, folder)
    write_whole(folder / REPORT, page(results, drawn))


def page(results: Results, drawn: list[Picture]) -> str:
    """The page as HTML.

    Args:
      results: of the comparison.
      drawn: its pictures, from `all_pictures`.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kvjax.evaluation.report", ""), autoescape=True,
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    failures = [(printable(cell), printable(reason)) for cell, reason in results.failures()]
    more = len(failures) - _MOST_FAILURES
    if more > 0:
        failures[_MOST_FAILURES:] = [(f"{more:,} more", "see results.csv")]
    lost = [
        f"{printable(method)} lost {count:,} tokens that found no free slot."
        for method, count in results.dropped().items()
    ]
    settings = tables.settings(results)
    return environment.get_template(_TEMPLATE).render(
        title=f"Compressed caches of {settings['Model']}",
        settings=settings,
        notes=tables.notes(results) + lost,
        sections=[_section(table, drawn) for table in tables.tables(results)],
        swatches=_swatches(results),
        heat_maps=[_heat_map(picture) for picture in drawn if picture.length is None],
        failures=failures,
        definitions=tables.DEFINITIONS,
    )


def _section(table: tables.Table, drawn: list[Picture]) -> dict[str, Any]:
    """What is said of prompts of one length."""
    own = [picture for picture in drawn if picture.length == table.length]
    return {
        "length": table.length,
        "heading": f"{table.length:,} tokens",
        "table": table,
        "groups": _groups(table),
        "pictures": [
            {"title": picture.title, "panels": [
                {"title": printable(panel.title),
                 "source": _source(pictures.panel_svg(panel, _PANEL))}
                for line in picture.panels for panel in line
            ]}
            for picture in own
        ],
    }  # fmt: skip


def _groups(table: tables.Table) -> list[dict[str, Any]]:
    """The rows of each method: budgets, and fields with their columns."""
    fields = zip(*(column.fields for column in table.columns), strict=True)
    rows = zip(table.candidates, fields, strict=True)
    groups = itertools.groupby(rows, lambda row: row[0][0])
    return [
        {"method": method, "rows": [
            (budget, list(zip(table.columns, line, strict=True))) for (_, budget), line in own
        ]}
        for method, own in groups
    ]  # fmt: skip


def _heat_map(picture: Picture) -> dict[str, str]:
    title = printable(picture.title)
    return {"title": title, "source": _source(pictures.picture_svg(picture))}


def _swatches(results: Results) -> list[tuple[str, str]]:
    """The legend of all lines: names, and pictures of the lines."""
    names = [(pictures.FULL, _source(pictures.swatch_svg(None)))]
    for number, method in enumerate(plots.methods(results)):
        names.append((printable(method), _source(pictures.swatch_svg(number))))
    return names


def _source(svg: str) -> str:
    """An SVG picture as what an image's `src` can hold."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
