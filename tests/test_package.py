"""What is shipped: the wheel, and which way imports point."""

import ast
import graphlib
import inspect
import os
import pydoc
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str, **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kvjax_imports_without_models_and_kernels_without_kvjax():
    listing = "import sys; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    kernels = run(sys.executable, "-c", f"import pallas_kernels; {listing}").split()
    assert "jax" in kernels and "kvjax" not in kernels
    models = "import kvjax, sys; print('kvjax.models' in sys.modules)"
    assert run(sys.executable, "-c", models).strip() == "False"


def test_evaluation_imports_without_matplotlib():
    drawing = "import kvjax.evaluation, sys; print('matplotlib' in sys.modules)"
    assert run(sys.executable, "-c", drawing).strip() == "False"


def test_no_folders_of_evaluation_import_each_other():
    folder, name = ROOT / "kvjax" / "evaluation", "kvjax.evaluation."
    arrows: dict[str, set[str]] = {}
    for path in folder.glob("*/**/*.py"):
        own = path.relative_to(folder).parts[0]
        modules = [
            node.module
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and not node.level
        ]
        others = {one.split(".")[2] for one in modules if one.startswith(name)} - {own}
        arrows.setdefault(own, set()).update(others)
    assert arrows["comparison"] >= {"cells", "fidelity", "report", "tasks"}
    graphlib.TopologicalSorter(arrows).prepare()  # raises CycleError


def test_every_folder_is_a_package():
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("kvjax", "models", "pallas_kernels")
        for path in (ROOT / top).rglob("__init__.py")
    }
    installed = {f"kvjax.{one}" if one.split(".")[0] == "models" else one for one in found}
    assert sorted(about["tool"]["setuptools"]["packages"]) == sorted(installed)


def test_version_is_the_packages():
    from importlib.metadata import version

    import kvjax

    assert version("kvjax") == kvjax.__version__


def test_kvjax_shows_its_names_alone():
    import kvjax

    assert dir(kvjax) == sorted(kvjax.__all__)
    modules = {name for name in dir(kvjax) if inspect.ismodule(getattr(kvjax, name))}
    assert modules == {"kit", "testing"}  # for authors of methods
    star = {}
    exec("from kvjax import *", star)
    assert set(star) - {"__builtins__"} == set(kvjax.__all__)


def test_the_signature_of_a_model_is_that_of_its_call():
    import kvjax

    class Mine(kvjax.LanguageModel):
        def __init__(self, size: int):
            self.size = size

    signature = inspect.signature(kvjax.LanguageModel)
    assert list(signature.parameters) == [
        "tokens", "positions", "caches", "layers", "phase", "last", "logits_at"
    ]  # fmt: skip
    assert signature.parameters["layers"].kind is inspect.Parameter.KEYWORD_ONLY
    assert "LanguageModel(tokens: " in pydoc.render_doc(kvjax.LanguageModel)
    assert list(inspect.signature(Mine).parameters) == ["size"]
    assert list(inspect.signature(Mine(3)).parameters) == list(signature.parameters)


@pytest.mark.slow
def test_wheel(tmp_path):
    source = tmp_path / "source"  # a copy: a build leaves its own folders behind
    unwanted = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=unwanted)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, source)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {"kvjax", "pallas_kernels"} < tops
    assert not tops & {"models", "tests", "benchmarks"}, tops
    assert {"kvjax/models/decoder.py", "kvjax/cli/main.py", "kvjax_command.py"} <= set(names)
    assert "kvjax/evaluation/tasks/longbench/longbench.json" in names
    assert "kvjax/evaluation/report/report.html.jinja" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)

    target = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, wheel)
    environment = {**os.environ, "PYTHONPATH": str(target), "KVJAX_CACHE": "off"}
    where = "import kvjax, kvjax.models; print(kvjax.__file__, kvjax.models.__file__)"
    files = run(sys.executable, "-c", where, cwd=tmp_path, env=environment).split()
    assert all(Path(file).is_relative_to(target) for file in files)
    command = (sys.executable, "-m", "kvjax_command", "generate", "--max-new", "8")
    assert "snapkv" in run(*command, cwd=tmp_path, env=environment)
