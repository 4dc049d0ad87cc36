"""The pages are built without a warning, their links lead somewhere, and their blocks run."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import jax
import pytest

from kvjax.cli.arguments import parser
from kvjax.models import demo

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES, METHODS = (sorted((DOCS / folder).glob("*.md")) for folder in ("guides", "methods"))
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
UNRUN = re.compile(r"^```python title=\"needs [^\"]+\"\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (?:\S*/)?kvjax (.*)$", flags=re.MULTILINE)
PUBLIC = ("kvjax", "kvjax.kit", "kvjax.testing", "kvjax.models", "kvjax.models.demo",
          "kvjax.evaluation", "kvjax.plot")  # fmt: skip

pytestmark = pytest.mark.lenient  # users have JAX's own promotion
needs_docs = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("material", "mkdocstrings")),
    reason="the pages need pip install '.[docs]'",
)


def by_name(pages):
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.stem)


def run(page: Path) -> dict:
    """The names that a page's blocks leave behind, run one after the other."""
    module = ModuleType(page.stem)
    for block in BLOCK.findall(page.read_text()):
        exec(compile(block, str(page), "exec"), vars(module))
    return vars(module)


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """A folder to write to, and JAX's compilation cache as it was."""
    cache = jax.config.jax_compilation_cache_dir
    monkeypatch.chdir(tmp_path)
    yield
    jax.config.update("jax_compilation_cache_dir", cache)


@by_name(METHODS)
@pytest.mark.fast_cases(*(page.stem for page in METHODS if page.stem != "infinigen"))
def test_blocks_of_methods_run(page, own_folder):
    run(page)


@by_name(GUIDES)
@pytest.mark.fast_cases("composing")
def test_blocks_of_guides_run(page, own_folder):
    names = run(page)
    if page.stem == "getting-started":
        answers = names["tokenizer"].batch_decode(names["full"].tokens + names["small"].tokens)
        assert all(demo.document().answer in answer for answer in answers)
    if page.stem == "questions":
        answers = names["tokenizer"].batch_decode(names["answers"].tokens)
        assert demo.document().answer in answers[0] and "730215" in answers[1]


@by_name([*GUIDES, DOCS / "index.md"])
def test_what_does_not_run_can_be_read(page):
    for block in UNRUN.findall(page.read_text()):
        compile(block, str(page), "exec")
    for command in COMMAND.findall(page.read_text()):
        parser().parse_args(shlex.split(command))


def test_every_method_has_a_page_with_its_picture():
    from kvjax.registry import METHODS as methods
    from kvjax.registry import STORAGE, WRAPPERS

    on_other_pages = {"every", "when_full"}  # of the guide to composing
    names = {page.stem for page in METHODS} - {"index"}
    assert names == set(methods | STORAGE | WRAPPERS) - on_other_pages
    pictures = {picture.stem for picture in (DOCS / "pictures").iterdir()}
    assert pictures == names | {"idea"}


@pytest.mark.slow
def test_pictures_of_each_kind_are_drawn(tmp_path):
    from docs.drawing.__main__ import PICTURES, main

    assert {f"{name}.svg" for name in PICTURES} == {x.name for x in (DOCS / "pictures").iterdir()}
    kinds = {getattr(draw, "func", draw): name for name, draw in PICTURES.items()}
    main(["--out", str(tmp_path), "--only", *kinds.values()])
    assert {picture.stem for picture in tmp_path.iterdir()} == set(kinds.values())


class Links(HTMLParser):
    """Where the elements of a page lead."""

    def __init__(self, page: Path):
        super().__init__()
        self.found: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids.add(given.get("id"))
        self.found += [given[name] for name in ("href", "src") if given.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages, built with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@needs_docs
def test_links_lead_somewhere(site):
    pages = {page: Links(page) for page in site.rglob("*.html") if page.name == "index.html"}
    missing = []
    for page, links in pages.items():
        for link in links.found:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            there = target.exists() and (
                not parts.fragment
                or target not in pages
                or unquote(parts.fragment) in pages[target].ids
            )
            if not there:
                missing.append((page.relative_to(site).as_posix(), link))
    assert len(pages) > 40
    assert not missing


@needs_docs
def test_every_public_name_is_listed(site):
    listed = (site / "reference" / "names" / "index.html").read_text()
    for module in PUBLIC:
        start = listed.index(f"<code>{module}</code>")
        part = listed[start : listed.find("</table>", start)]
        for name in importlib.import_module(module).__all__:
            assert f"<code>{name}</code>" in part, f"{module}.{name}"
