"""The page of releases names the forms that are written, and where the version stands."""

from __future__ import annotations

import re
from pathlib import Path

from kvjax.generation import calibration, context_files

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "releasing.md").read_text("utf-8")


def row(what: str) -> list[str]:
    """The cells of a row of the table of forms."""
    (line,) = re.findall(rf"^\| {what}.*\|$", PAGE, re.MULTILINE)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_forms_are_those_that_are_written():
    assert row("saved contexts")[1] == f"`{context_files.FORMAT}`"
    assert row("calibrations")[1] == f"`{calibration.FORMAT}`"
    assert row("calibrations")[2].startswith(f"`{calibration.FORMAT}`")


def test_targets_exist():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    named = {name for text in re.findall(r"`make ([\w -]+)`", PAGE) for name in text.split()}
    assert named and all(re.search(rf"^{name}:", makefile, re.M) for name in named)


def test_the_version_stands_in_one_place():
    version = re.compile(r"""(?<![\w.])version\s*=\s*["']\d""", re.IGNORECASE)
    files = [ROOT / "pyproject.toml", *(ROOT / "kvjax").rglob("*.py")]
    assert [x.name for x in files if version.search(x.read_text("utf-8"))] == ["files.py"]
