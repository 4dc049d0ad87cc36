"""What all tests share: strict promotion, the data folder, the gpu marker."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parent.parent
MAPS = Path("/proc/self/maps")
TESTS = pytest.StashKey[int]()


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "lenient: the module runs other libraries' code under JAX's default promotion"
    )


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


@pytest.hookimpl(trylast=True)  # once the test has put back whatever it replaced
def pytest_runtest_teardown(item):
    """Frees compiled code before there is too much of it.

    Every compiled function keeps some memory maps. Linux allows a process 65,530 by default, and
    LLVM crashes it when a few thousand functions have used them up.
    """
    item.session.stash[TESTS] = count = item.session.stash.get(TESTS, 0) + 1
    if count % 20 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > 40_000:
        _forget()


def _forget():
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of test data: `KVJAX_TEST_DATA`, else `shared/data` beside the repository."""
    given = os.environ.get("KVJAX_TEST_DATA")
    path = Path(given) if given else ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no test data at {path}: set KVJAX_TEST_DATA")
    return path
