"""What all tests share: quick compilation, a cache of it, promotion, data folder, gpu marker."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from pathlib import Path

import jax
import pytest

# Small functions run a few times: what makes code fast is not worth its compilation, which takes up
# to 10 times longer with it. Commands that tests start inherit it. Other options are those of tests
# that look at compiled code (`tests/attention/test_steps.py`) or compute for long (`optimised`).
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
AS_USERS = {"xla_backend_optimization_level": 3}
if jax.__version_info__ < (0, 11):
    QUICK += " --xla_cpu_use_fusion_emitters=false"  # later versions have no such option
    AS_USERS["xla_cpu_use_fusion_emitters"] = True
if QUICK not in os.environ.get("XLA_FLAGS", ""):  # a worker has them from the process before it
    os.environ["XLA_FLAGS"] = f"{QUICK} {os.environ.get('XLA_FLAGS', '')}"

# Nothing is kept in the user's folder; tests of what is kept name another one.
os.environ["KVJAX_CACHE"] = "off"

ROOT = Path(__file__).resolve().parent.parent
MAPS = Path("/proc/self/maps")
TESTS = pytest.StashKey[int]()

# Workers and later runs find here what was compiled before. JAX_COMPILATION_CACHE_DIR names another
# folder, and JAX_ENABLE_COMPILATION_CACHE=false turns it off. Commands that tests start do not use
# it: one that is killed while it writes would leave a broken file. JAX warns of those, which the
# settings of pytest ignore, and compiles.
# Jobs in the background ignore Ctrl-C, and so would the commands that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
CACHE_HOME = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
OWN_FOLDER = os.path.join(CACHE_HOME, "kvjax-tests")
MOST_BYTES = 2**30
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    jax.config.update("jax_compilation_cache_dir", OWN_FOLDER)
if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "lenient: the module runs other libraries' code under JAX's default promotion"
    )
    if not hasattr(config, "workerinput"):
        _drop_oldest_compiled_code()


def pytest_ignore_collect(collection_path, config):
    """With `-m quick`, passes over files that have no quick test."""
    if config.getoption("markexpr") == "quick" and collection_path.suffix == ".py":
        return None if _is_quick(collection_path) else True
    return None


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    """Marks as quick the first fast test of every method and stored form, and of few others.

    None of them needs files that are not in the repository.
    """
    seen, files = set(), {"data_dir", "qwen", "gemma", "smollm2"}
    for item in items:
        fast = not any(map(item.get_closest_marker, ("slow", "exhaustive", "gpu")))
        fast = fast and files.isdisjoint(item.fixturenames)
        if fast and item.path not in seen and _is_quick(item.path):
            seen.add(item.path)
            item.add_marker(pytest.mark.quick)


def _is_quick(path: Path) -> bool:
    """Whether it is a file of a method, of a stored form, of the cache or of `kvjax.generate`."""
    from kvjax.registry import METHODS, STORAGE, WRAPPERS  # once XLA_FLAGS are set

    others = "cache", "generate", "conftest", "__init__"
    return path.stem.removeprefix("test_") in {*METHODS, *WRAPPERS, *STORAGE, *others}


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")


@pytest.fixture(scope="module", autouse=True)
def strict_promotion(request):
    """No implicit promotion of dtypes or ranks, unless the module is marked `lenient`."""
    if request.node.get_closest_marker("lenient"):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="module")
def optimised():
    """`kvjax.generate` compiled as users have it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, function, static, donated in (
            ("prompt_pass", "_read_layer", 0, (2, 4)),
            ("prompt_pass", "_read_whole", (0, 1, 2), 5),
            ("prompt_pass", "compress_layer", (0, 1, 2), 3),
            ("decode_loop", "_decode", 0, 2),
        ):
            module = sys.modules[f"kvjax.generation.{name}"]
            plain = getattr(module, function).__wrapped__
            jitted = jax.jit(
                plain, static_argnums=static, donate_argnums=donated, compiler_options=AS_USERS
            )
            patch.setattr(module, function, jitted)
        yield


@pytest.fixture(scope="module", autouse=True)
def whole_products():
    """On a GPU, float32 products by XLA are TF32 ones by default, with 10 bits."""
    if jax.default_backend() != "gpu":
        yield
        return
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_code():
    """Frees what a module compiled, see `pytest_runtest_teardown`."""
    yield
    _forget()


def pytest_collection_finish(session):
    """Leaves modules out of garbage collections, of which tracing sets off thousands."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(trylast=True)  # once the test has put back whatever it replaced
def pytest_runtest_teardown(item):
    """Frees compiled code before there is too much of it.

    Every compiled function keeps some memory maps. Linux allows a process 65,530 by default, and
    LLVM crashes it when a few thousand functions have used them up.
    """
    item.session.stash[TESTS] = count = item.session.stash.get(TESTS, 0) + 1
    if count % 20 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > 40_000:
        _forget()


def _drop_oldest_compiled_code():
    """JAX removes nothing by itself, unless it is to look at all files at every compilation."""
    with contextlib.suppress(OSError):  # a folder that is not there, or a file that another removed
        found = [(entry.stat(), entry.path) for entry in os.scandir(OWN_FOLDER)]
        total = 0
        for stat, path in sorted(found, key=lambda x: x[0].st_mtime, reverse=True):
            total += stat.st_size
            if total > MOST_BYTES:
                os.unlink(path)


def _forget():
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of test data: `KVJAX_TEST_DATA`, else `shared/data` beside the repository."""
    given = os.environ.get("KVJAX_TEST_DATA")
    path = Path(given) if given else ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("needs files that CONTRIBUTING.md lists: set KVJAX_TEST_DATA to their folder")
    return path


def _real_file(variable: str, what: str) -> Path:
    given = os.environ.get(variable)
    if not given or not Path(given).is_file():
        pytest.skip(f"no GGUF file of {what}: set {variable} to its path")
    return Path(given)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct: `KVJAX_SMOLLM2`."""
    given = os.environ.get("KVJAX_SMOLLM2")
    if not given or not Path(given).is_dir():
        pytest.skip("no SmolLM2-135M-Instruct: set KVJAX_SMOLLM2 to its folder")
    return Path(given)


@pytest.fixture(scope="session")
def qwen() -> Path:
    """A GGUF file of Qwen2.5-Coder-0.5B-Instruct: `KVJAX_QWEN`."""
    return _real_file("KVJAX_QWEN", "Qwen2.5-Coder-0.5B-Instruct")


@pytest.fixture(scope="session")
def gemma() -> Path:
    """A GGUF file of Gemma 3 270M: `KVJAX_GEMMA`."""
    return _real_file("KVJAX_GEMMA", "Gemma 3 270M")
