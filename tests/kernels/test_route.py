"""The one place that decides how kernels are lowered, and a JAX that has no such route."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import pallas_kernels
from pallas_kernels.base import dispatch, route

KERNELS = Path(pallas_kernels.__file__).parent


def test_no_other_file_asks_jax_for_triton():
    asking = re.compile(r"pallas[. ](import )?triton|pl\.pallas_call\(|compiler_params=")
    found = {
        path.relative_to(KERNELS).as_posix()
        for path in KERNELS.rglob("*.py")
        if not path.name.startswith("tpu_") and asking.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"base/route.py"}


@pytest.mark.parametrize("implementation", ["pallas", "interpret"])
def test_without_the_lowering_a_named_kernel_is_an_error(monkeypatch, implementation):
    monkeypatch.setattr(route, "CompilerParams", None)
    message = rf"lowers Pallas by way of Triton, 0\.10\.2 to 0\.12, got {jax.__version__}"
    with pytest.raises(RuntimeError, match=message):
        dispatch.choose_implementation(implementation)
    with pytest.raises(RuntimeError, match=message):
        route.pallas_call(lambda out: None, out_shape=jax.ShapeDtypeStruct((1,), "float32"))


def test_without_the_lowering_a_gpu_takes_xla(monkeypatch):
    monkeypatch.setattr(dispatch, "gpu_capability", lambda: (9, 0))
    assert dispatch.choose_implementation(None) == "pallas"
    monkeypatch.setattr(route, "CompilerParams", None)
    assert dispatch.choose_implementation(None) == "xla"


@pytest.mark.slow  # another process
def test_a_jax_without_triton_imports_and_computes():
    code = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None
import jax.numpy as jnp
from pallas_kernels import page_scores
x = jnp.ones((1, 1, 1, 2))
print(page_scores(x, x, x).tolist())
try:
    page_scores(x, x, x, implementation="interpret")
except RuntimeError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    scores, error = found.stdout.splitlines()
    assert scores == "[[[[2.0]]]]"
    assert error.startswith("kernels need a JAX that lowers Pallas by way of Triton")
