"""Hooks for MkDocs, beside `mkdocs.yml`: files outside of `docs/`, commands, and methods.

Pages link to files of the repository as they are read there (`../RESULTS.md`). Every file that is
linked becomes part of the site, at its place in the repository, and links follow it there.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"  # the site has a first page of its own
OUTSIDE = ("ARCHITECTURE.md", "RESULTS.md", "CHANGELOG.md", "notebooks/README.md")
COMMANDS = "reference/commands.md"

# Sections of docstrings by the names that mkdocstrings knows.
_SECTIONS = {"  Example:\n": "  Examples:\n", "  Class attributes:\n": "  Attributes:\n"}
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


@event_priority(100)  # before mkdocstrings looks at its configuration
def on_config(config: MkDocsConfig) -> None:
    """Gives mkdocstrings the packages as they are installed: `models/` as `kvjax.models`.

    Adds the pages of methods to the navigation, in the order of `kvjax/registry.py`.
    """
    from kvjax.registry import METHODS, STORAGE, WRAPPERS

    (methods,) = (entry["Methods"] for entry in config.nav if "Methods" in entry)
    pages = (f"methods/{name}.md" for name in METHODS | WRAPPERS | STORAGE)
    methods += [page for page in pages if (DOCS / page).is_file()]
    folder = tempfile.TemporaryDirectory(prefix="kvjax-pages-")
    config.extra["installed"] = folder  # is removed with the configuration
    for source, place in (("kvjax",) * 2, ("models", "kvjax/models"), ("pallas_kernels",) * 2):
        for path in (ROOT / source).rglob("*.py*"):
            if path.suffix not in (".py", ".pyi"):
                continue
            copy = Path(folder.name, place, path.relative_to(ROOT / source))
            copy.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text(encoding="utf-8")
            for ours, theirs in _SECTIONS.items():
                text = text.replace(ours, theirs)
            copy.write_text(text, encoding="utf-8")
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [folder.name]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages and files outside of `docs/` that are linked, and commands."""
    pages = {Path(file.abs_src_path): file for file in files.documentation_pages()}
    waiting = [*pages, *(ROOT / name for name in OUTSIDE)]
    seen = {*waiting, README}
    while waiting:
        path = waiting.pop()
        if path not in pages:
            files.append(_file(config, path))
        linked = set(path.iterdir()) if path.is_dir() else set()
        if path.suffix == ".md":
            linked = {one for one in _targets(path) if not one.is_relative_to(DOCS)}
        waiting += linked - seen
        seen |= linked
    files.append(File.generated(config, COMMANDS, content=_commands()))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links at where the files are in the site."""
    if page.file.abs_src_path is None:
        return markdown
    path = Path(page.file.abs_src_path)

    def moved(link: re.Match) -> str:
        target = _target(path, link[1])
        return os.path.relpath(_place(target), Path(page.file.src_uri).parent)

    return _LINK.sub(moved, markdown)


def _target(page: Path, link: str) -> Path:
    """The file that a page's link means in the repository."""
    return Path(os.path.normpath(page.parent / link))


def _targets(page: Path) -> Iterator[Path]:
    """The files and folders of the repository that a page links to, those that are there."""
    for link in _LINK.finditer(page.read_text(encoding="utf-8")):
        target = _target(page, link[1])
        if target.exists():
            yield target


def _place(target: Path) -> str:
    """Where a file of the repository is in the site, as MkDocs names its sources."""
    if target == README:
        return "index.md"
    place = target.relative_to(DOCS if target.is_relative_to(DOCS) else ROOT).as_posix()
    return f"{place}/index.md" if target.is_dir() else place


def _file(config: MkDocsConfig, path: Path) -> File:
    """A file of the repository in the site; of a folder, a page that lists it."""
    if not path.is_dir():
        return File.generated(config, _place(path), abs_src_path=str(path))
    lines = [f"# {path.relative_to(ROOT)}", ""]
    lines += [
        f"- [{one.name}]({one.name}{'/index.md' * one.is_dir()})" for one in sorted(path.iterdir())
    ]
    return File.generated(config, _place(path), content="\n".join(lines))


def _commands() -> str:
    """A page of what `kvjax COMMAND --help` prints."""
    from kvjax.cli.arguments import COMMANDS as commands
    from kvjax.cli.arguments import parser

    lines = ["# Command line", "", "Every command, as `kvjax COMMAND --help` describes it."]
    for name, does in commands.items():
        text = io.StringIO()
        with (
            mock.patch.dict(os.environ, {"COLUMNS": "90"}),
            contextlib.redirect_stdout(text),
            contextlib.suppress(SystemExit),
        ):
            parser().parse_args([name, "--help"])
        lines += ["", f"## kvjax {name}", "", f"{does[0].upper()}{does[1:]}.", ""]
        lines += ["```text", text.getvalue().rstrip(), "```"]
    return "\n".join(lines)
