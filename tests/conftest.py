"""What all tests share: strict promotion, the data folder, the gpu marker."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parent.parent


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


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of test data: `KVJAX_TEST_DATA`, else `shared/data` beside the repository."""
    given = os.environ.get("KVJAX_TEST_DATA")
    path = Path(given) if given else ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no test data at {path}: set KVJAX_TEST_DATA")
    return path
