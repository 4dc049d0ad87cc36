"""The pages are built without a warning, their blocks run, and every public name is on one."""

from __future__ import annotations

import importlib
import importlib.util
import pydoc
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import pytest

import kvjax
from kvjax.cli.arguments import parser
from kvjax.cli.situations import SITUATIONS, methods_for
from kvjax.cli.situations import page as page_of
from kvjax.models import demo
from tests.support.marks import some_slow

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES, METHODS = (sorted((DOCS / folder).glob("*.md")) for folder in ("guides", "methods"))
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
UNRUN = re.compile(r"^```python title=\"needs [^\"]+\"\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (?:\S*/)?kvjax (.*)$", flags=re.MULTILINE)
PUBLIC = ("kvjax", "kvjax.kit", "kvjax.testing", "kvjax.models", "kvjax.models.demo",
          "kvjax.evaluation", "kvjax.plot")  # fmt: skip

pytestmark = pytest.mark.lenient  # users have JAX's own promotion


def name_of(page: Path) -> str:
    return page.stem


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


QUICK = [page for page in METHODS if page.stem != "infinigen"]


@pytest.mark.parametrize("page", some_slow(METHODS, *QUICK), ids=name_of)
def test_blocks_of_methods_run(page, own_folder):
    run(page)


# Pages whose blocks compute for minutes.
LONG = [
    DOCS / "guides" / f"{name}.md"
    for name in "devices evaluation getting-started questions recall stored-forms".split()
] + [DOCS / "index.md"]
COMPOSING = DOCS / "guides" / "composing.md"


@pytest.mark.parametrize(
    "page", some_slow([*GUIDES, DOCS / "index.md"], COMPOSING, exhaustive=LONG), ids=name_of
)
def test_blocks_of_guides_run(page, own_folder):
    names = run(page)
    if page.stem == "getting-started":
        answers = names["tokenizer"].batch_decode(names["full"].tokens + names["small"].tokens)
        assert all(demo.document().answer in answer for answer in answers)
    if page.stem == "questions":
        answers = names["tokenizer"].batch_decode(names["answers"].tokens)
        assert demo.document().answer in answers[0] and "730215" in answers[1]


@pytest.mark.parametrize("page", [*GUIDES, DOCS / "index.md"], ids=name_of)
def test_what_does_not_run_can_be_read(page):
    for block in UNRUN.findall(page.read_text()):
        compile(block, str(page), "exec")
    for command in COMMAND.findall(page.read_text()):
        parser().parse_args(shlex.split(command))


def test_texts_for_presses_of_kvpress_can_be_parsed():
    table = (DOCS / "guides" / "from-kvpress.md").read_text().split("<!-- presses -->")[1]
    texts = re.findall(r"^\| `\w+Press[^|]*\| `([^`|]+)` \|", table, flags=re.MULTILINE)
    assert len(texts) == 14
    for text in texts:
        assert kvjax.parse(text)


def test_every_method_has_a_page_with_its_picture():
    names = {page.stem for page in METHODS} - {"index"}
    shown = {page_of(name) for when in SITUATIONS for name in methods_for(when)}
    assert {f"docs/methods/{name}.md" for name in names} | {"docs/guides/composing.md"} == shown
    pictures = {picture.stem for picture in (DOCS / "pictures").iterdir()}
    assert pictures == names | {"idea"}


@pytest.mark.exhaustive
def test_pictures_of_each_kind_are_drawn(tmp_path):
    from docs.drawing.__main__ import PICTURES, main

    assert {f"{name}.svg" for name in PICTURES} == {x.name for x in (DOCS / "pictures").iterdir()}
    kinds = {getattr(draw, "func", draw): name for name, draw in PICTURES.items()}
    main(["--out", str(tmp_path), "--only", *kinds.values()])
    assert {picture.stem for picture in tmp_path.iterdir()} == set(kinds.values())


def test_every_public_name_is_documented_on_a_page():
    pages = "\n".join(page.read_text() for page in DOCS.rglob("*.md"))
    documented = [pydoc.locate(name) for name in re.findall(r"^::: (\S+)$", pages, re.MULTILINE)]
    for module in PUBLIC:
        for name in importlib.import_module(module).__all__:
            thing = getattr(importlib.import_module(module), name)
            assert any(thing is other for other in documented), f"no page has {module}.{name}"


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("material", "mkdocstrings")),
    reason="the pages need pip install '.[docs]'",
)
def test_pages_are_built_without_a_warning(tmp_path):
    """A link or an anchor that leads nowhere is a warning, and warnings are errors here."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
