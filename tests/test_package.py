"""What is shipped: the wheel and the sdist, what imports bring along, and which way they point."""

import ast
import graphlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import pkgutil
import pydoc
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvjax
import kvjax.models

ROOT = Path(__file__).parents[1]


def run(*command: object, **options) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Imports


def imported_by(code: str) -> set[str]:
    """The modules that a process has after some code."""
    listing = "import sys; print('\\n' + ' '.join(sys.modules))"
    return set(run(sys.executable, "-c", f"{code}\n{listing}").splitlines()[-1].split())


# Each of them takes from a tenth of a second to several seconds.
HEAVY = {"jax", "numpy", "flax", "orbax", "transformers", "tokenizers", "matplotlib", "rich"}
OTHERS = {"transformers", "tokenizers", "huggingface_hub", "kvjax.models", "torch", "matplotlib",
          "jinja2", "kvjax.evaluation", "kvjax.cli"}  # fmt: skip


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("import pallas_kernels", {"kvjax"}),
        ("import kvjax.evaluation", {"matplotlib"}),
        ("import kvjax", HEAVY),
        ("from kvjax.cli.main import main; main(['--help'])", HEAVY),
        ("from kvjax.cli.main import main; main(['--version'])", HEAVY),
        ("from kvjax.cli.main import main; main(['genrate'])", HEAVY),
        ("from kvjax import attend, init_cache, bind, SnapKV",
         OTHERS | {"flax", "orbax", "rich"}),
        ("from kvjax import generate, stream, Sampling", OTHERS | {"orbax"}),
        ("from kvjax import *", OTHERS),
    ],
)  # fmt: skip
def test_what_an_import_does_without(code, unwanted):
    assert not imported_by(code) & unwanted


@pytest.mark.exhaustive  # minutes, and without circles of imports it is hardly ever wrong
def test_every_module_can_be_the_first():
    """Names of kvjax are imported when they are used, and so modules in any order."""
    names = [
        module.name
        for package in ("kvjax", "pallas_kernels")
        for module in pkgutil.walk_packages([str(ROOT / package)], f"{package}.")
    ]
    assert len(names) > 100
    if importlib.util.find_spec("lm_eval") is None:
        names.remove("kvjax.lm_eval")
    code = (
        "import importlib, os, sys, jax, flax.nnx\n"
        "for name in sys.argv[1:]:\n"
        "    if os.fork() == 0:\n"
        "        importlib.import_module(name)\n"
        "        os._exit(0)\n"
        "    if os.wait()[1] != 0:\n"
        "        sys.exit(f'import {name} fails')\n"
    )
    run(sys.executable, "-W", "ignore", "-c", code, *names)


def not_for_types(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a syntax tree, without what stands under `if TYPE_CHECKING`."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.If) or "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from not_for_types(node)


def arrows() -> dict[str, set[str]]:
    """For each file, the files that it imports, inside functions too."""
    files = {}
    for top in ("kvjax", "models", "pallas_kernels"):
        for path in (ROOT / top).rglob("*.py"):
            file = path.relative_to(ROOT)
            module = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
            files[f"kvjax.{module}" if top == "models" else module] = file

    def imports(module: str, file: Path) -> Iterator[str]:
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        for node in not_for_types(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (name.name for name in node.names)
            elif isinstance(node, ast.ImportFrom):
                source = "." * node.level + (node.module or "")
                source = importlib.util.resolve_name(source, package)
                names = [f"{source}.{name.name}" for name in node.names]
                yield from (name if name in files else source for name in names)

    return {
        str(file): {str(files[name]) for name in imports(module, file) if name in files}
        for module, file in files.items()
    }


def room_of(file: str, rooms: list[list[str]]) -> int:
    """The number of a file's room, from the top down."""
    (number,) = (i for i, room in enumerate(rooms) if any(map(file.startswith, room)))
    return number


def test_arrows_point_down():
    """In the order of the rooms of ARCHITECTURE.md, and in no circle."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \|", page.partition("| room |")[2].partition("\n\n")[0], re.M)
    rooms = [re.findall("`(.*?)`", row) for row in rows]
    imported = arrows()
    assert len(rooms) > 10 and len(imported) > 200
    assert "kvjax/cache/slots.py" in imported["kvjax/attention/attend.py"]
    up = [
        f"{file} imports {other}"
        for file, others in imported.items()
        for other in others
        if room_of(other, rooms) < room_of(file, rooms)
    ]
    assert up == [], "import names from the files of lower rooms that define them"
    graphlib.TopologicalSorter(imported).prepare()  # raises CycleError


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
    installed.remove("kvjax.models.demo.training")  # in the repository alone
    assert sorted(about["tool"]["setuptools"]["packages"]) == sorted(installed)


def test_version_is_the_packages():
    assert importlib.metadata.version("kvjax") == kvjax.__version__


def test_models_are_found_from_a_clone_whose_package_is_installed_elsewhere():
    """Python imports what lies in the current directory before anything that is installed."""
    code = (
        "import sys\n"
        "sys.meta_path[:] = [one for one in sys.meta_path if '__editable__' not in repr(one)]\n"
        "from kvjax.models import demo\n"
        "print(demo.__file__)"
    )
    found = run(sys.executable, "-c", code, cwd=ROOT)
    assert Path(found.strip()) == ROOT / "models" / "demo" / "__init__.py"


def test_kvjax_shows_its_names_alone():
    assert dir(kvjax) == sorted(kvjax.__all__)
    modules = {name for name in dir(kvjax) if inspect.ismodule(getattr(kvjax, name))}
    assert modules == {"guests", "kit", "testing"}  # for models of others, and authors of methods
    stub = ast.parse((ROOT / "kvjax" / "__init__.pyi").read_text(encoding="utf-8"))
    imported = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    public = [name.asname for node in imported for name in node.names]  # for type checkers
    assert sorted(public) == sorted(kvjax.__all__)


def test_the_signature_of_a_model_is_that_of_its_call():
    class Mine(kvjax.models.LanguageModel):
        def __init__(self, size: int):
            self.size = size

    signature = inspect.signature(kvjax.models.LanguageModel)
    assert list(signature.parameters) == [
        "tokens", "positions", "caches", "layers", "phase", "last", "logits_at"
    ]  # fmt: skip
    assert signature.parameters["layers"].kind is inspect.Parameter.KEYWORD_ONLY
    shown = pydoc.render_doc(kvjax.models.LanguageModel, renderer=pydoc.plaintext)
    assert re.search(r"LanguageModel\([\s|]*tokens: ", shown)  # Python 3.13 breaks the line
    assert list(inspect.signature(Mine).parameters) == ["size"]
    assert list(inspect.signature(Mine(3)).parameters) == list(signature.parameters)  # pyright: ignore[reportAbstractUsage]  # only its signature matters


# The packages


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """A folder with the sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("packages")
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "source", ignore=unwanted)  # a build leaves folders behind
    run(sys.executable, "-m", "build", "--outdir", folder, folder / "source")
    return folder


@pytest.mark.slow
def test_what_the_wheel_holds(packages):
    (wheel,) = packages.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvjax", "pallas_kernels"}
    shipped = {
        "kvjax/__init__.pyi", "kvjax/py.typed", "kvjax/models/decoder.py", "kvjax/cli/main.py",
        "kvjax/models/demo/model.safetensors", "pallas_kernels/py.typed",
        "pallas_kernels/base/tiles.json",
    }  # fmt: skip
    assert shipped <= set(names)
    assert any(name.endswith("/longbench.json") for name in names)
    assert any(name.endswith("/report.html.jinja") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "training" in name]


@pytest.mark.slow
def test_what_the_sdist_holds(packages):
    (sdist,) = packages.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "tests/conftest.py", "models/demo/training/train.py", "CHANGELOG.md", "CONTRIBUTING.md",
        "CITATION.cff", "docs/writing-a-method.md", "examples/nnx_decoder.py",
    } <= names  # fmt: skip


@pytest.mark.slow
def test_the_wheel_in_an_empty_environment(packages, tmp_path):
    """What who installs kvjax alone has: the answer, and a line where an extra is missing."""
    (wheel,) = packages.glob("*.whl")
    venv.create(tmp_path / "empty", with_pip=True)
    programs = tmp_path / "empty" / "bin"
    keep = ("PATH", "HOME", "SSL_CERT_FILE", "LANG")
    user = {name: value for name, value in os.environ.items() if name in keep or "PIP" in name}
    user |= {"KVJAX_CACHE": "off", "COLUMNS": "100"}
    run(programs / "pip", "install", "-q", "--no-compile", wheel, env=user)  # few files are used

    where = "import kvjax.models; print(kvjax.models.__file__)"
    assert run(programs / "python", "-c", where, cwd=tmp_path, env=user).startswith(str(tmp_path))
    shown = run(programs / "kvjax", "generate", cwd=tmp_path, env=user)
    for line in ("The bundled model read a document", " full       right   482913.", " snapkv"):
        assert line in shown, shown
    record = json.loads(run(programs / "python", "-m", "kvjax", "methods", "--json", env=user))
    assert "clusterkv" in record["methods"]

    for command, package, extra in (
        (["compare"], "matplotlib", "eval"),
        (["show", "folder"], "matplotlib", "eval"),
        (["eval", "vt"], "matplotlib", "eval"),
        (["chat", "--model", "model.gguf"], "gguf", "gguf"),
    ):
        (tmp_path / "model.gguf").write_bytes(b"GGUF")
        done = subprocess.run(
            [programs / "kvjax", *command], cwd=tmp_path, env=user, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert f"need the package {package}, which is not installed" in done.stderr
        assert done.stderr.endswith(f"pip install 'kvjax[{extra}]'\n")
