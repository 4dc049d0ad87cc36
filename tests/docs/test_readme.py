"""Every block of README.md runs as it is printed, and what it links to is there."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvjax.cli.arguments import parser
from kvjax.cli.main import main
from kvjax.models import demo

README = Path(__file__).parents[2] / "README.md"
TEXT = README.read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)")
WRITTEN = re.compile(r"^python -c \"(.*)\" > (\S+)", flags=re.MULTILINE)
SHARE = re.compile(r"([\d.]+)% of the bytes")
OPTIONS = re.compile(r"`(--method [^`]+)`")

pytestmark = pytest.mark.lenient  # users have JAX's own promotion


def blocks(language: str) -> list[str]:
    return [block for found, block in BLOCK.findall(TEXT) if found == language]


def commands() -> list[list[str]]:
    """The commands of `kvjax` but those behind an installation, which the package's tests run."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    found = [line.removeprefix("kvjax ") for line in lines if line.startswith("kvjax ")]
    return [shlex.split(words) for words in found]


def test_its_links_lead_somewhere():
    places = [link for link in LINK.findall(TEXT) if "://" not in link]
    assert [link for link in places if not (README.parent / link).exists()] == []


def test_every_command_can_be_read():
    options = [shlex.split(found) for found in OPTIONS.findall(TEXT)]
    assert len(commands()) >= 7 and len(options) >= 6
    for words in [*commands(), *(["generate", *words] for words in options)]:
        parser().parse_args(words)


@pytest.mark.parametrize("options", OPTIONS.findall(TEXT))
def test_methods_by_situation_suit_the_bundled_model(options, capsys):
    folder = str(demo.directory())
    assert main(["plan", "--model", folder, *shlex.split(options), "--tokens", "512"]) == 0


@pytest.mark.slow
def test_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    module = ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)  # dataclasses look there
    printed = []
    for number, block in enumerate(blocks("python")):
        exec(compile(block, f"README.md, block {number + 1}", "exec"), vars(module))
        printed.append(capsys.readouterr().out)
    assert module.out.shape == (2, 4, 1, 16)  # of the attention layer
    story = demo.document()
    assert len(module.prompt) == 3914 and story.question in printed[0]
    assert story.answer in printed[0] and float(SHARE.search(printed[0])[1]) < 4.0
    assert story.answer in printed[1] and "730215" in printed[1]


# Commands that compare methods take longest; the tests of each have others like them.
COMPARING = {"compare", "diagnose"}


@pytest.mark.parametrize(
    "left_out",
    [
        pytest.param(COMPARING, id="but those that compare", marks=pytest.mark.slow),
        pytest.param(set(), id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_commands_run(tmp_path, monkeypatch, capsys, left_out):
    monkeypatch.chdir(tmp_path)
    ((code, file),) = WRITTEN.findall(TEXT)
    exec(code, {})
    Path(file).write_text(capsys.readouterr().out)
    printed = {}
    for words in (words for words in commands() if words[0] not in left_out):
        code = main(words)
        output = capsys.readouterr()
        assert code == 0, f"kvjax {shlex.join(words)}: {output.err}"
        printed[words[0]] = output.out
    assert printed["generate"].count(demo.document().answer) == 3  # expected, full, and the method
    assert printed["ask"].strip() == f"{demo.document().answer}."
    shares = [float(share) for share in re.findall(r"([\d.]+)%", printed["generate"])]
    assert min(shares) < 4.0
