"""Report of a comparison: data files, pictures, and an HTML page without external files."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

import jinja2

from kvjax.evaluation.cells import files
from kvjax.evaluation.cells.results import Results
from kvjax.files import write_whole, writing

from . import plots, tables

REPORT = "report.html"
_SHOWN = {
    "lengths": "tokens of a prompt", "questions": "where the question is",
    "cases": "cases of a task", "seed": "seed of the cases", "chat": "chat template",
    "weights": "checksum of the weights", "text": "checksum of the text",
}  # fmt: skip


def write_report(results: Results, folder: Path) -> None:
    """Writes the table of results, a PNG file per picture, and `report.html`.

    The page embeds its pictures and loads nothing. The folder is made if it does not exist, and
    pictures of an earlier call are replaced.

    Raises:
      OSError: a file cannot be written.

    Example:
      >>> import tempfile
      >>> from pathlib import Path
      >>> from kvjax.evaluation import Cell, Results
      >>> from kvjax.evaluation.report.report import write_report
      >>> record = {"scores": [1.0, 0.0], "depths": [0.0, 1.0], "live_slots": 64.0,
      ...           "cache_bytes": 1000, "full_cache_bytes": 1000, "seconds": 0.1}
      >>> asked = {"methods": [["full", None]], "lengths": [64], "questions": ["inside"],
      ...          "cases": 2, "tasks": {"needle": {"metric": "accuracy", "floor": 0.0}}}
      >>> results = Results(asked, {Cell("needle", 64, "inside", 0, 2, "full", None): record})
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     write_report(results, Path(folder))
      ...     sorted(path.name for path in Path(folder).glob("*.html"))
      ['report.html']
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / files.TABLE, files.as_csv(results))
    pictures = {name: plots.png(figure) for name, figure in plots.figures(results).items()}
    for name, content in pictures.items():
        write_whole(folder / f"{name}.png", content)
    write_whole(folder / REPORT, page(results, pictures))


def page(results: Results, pictures: Mapping[str, bytes]) -> str:
    """Returns the page as HTML; `pictures` are the contents of PNG files by name."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kvjax.evaluation.report", ""), autoescape=True,
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    # Settings that are absent or None are left out below.
    settings = {label: results.settings.get(name) for name, label in _SHOWN.items()}
    return environment.get_template(f"{REPORT}.jinja").render(
        model=results.settings.get("model") or "bundled",
        settings={
            name: ", ".join(map(str, value)) if isinstance(value, list) else value
            for name, value in settings.items()
            if value is not None
        },
        notes=tables.notes(results),
        tables=tables.tables(results),
        pictures={name: base64.b64encode(png).decode() for name, png in pictures.items()},
        failures=results.failures(),
        definitions=tables.DEFINITIONS,
    )
