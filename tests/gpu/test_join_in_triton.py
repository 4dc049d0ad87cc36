"""One kernel by both routes: Pallas, and Triton's own language for jax-triton."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.kernel import _join
from tests.support.lowering import lower_for_cuda, triton_of_kernel

SHAPES = [(1, 2, 5, 3, 16), (2, 1, 33, 1, 96), (1, 1, 1, 2, 64)]
NAMES = ["small", "wide", "one part"]
INTERPRETED = """
import sys
import numpy as np, torch
from tests.gpu.join_in_triton import join_kernel, sizes
path, *names = sys.argv[1:]
given, found = np.load(path), {}
for name in names:
    out, lse = (torch.from_numpy(given[f"{name} {part}"]) for part in (0, 1))
    batch, lists, _, rows, channels = out.shape
    joined = torch.empty(batch, lists, rows, channels), torch.empty(batch, lists, rows)
    join_kernel[batch * lists, rows](out, lse, *joined, **sizes(out.shape))
    found |= {f"{name} {part}": x.numpy() for part, x in enumerate(joined)}
np.savez(path, **found)
"""


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is not chosen
    pytest.importorskip("triton")
    from tests.gpu import join_in_triton

    return join_in_triton


def parts_of(shape):
    """Parts of which some have seen nothing; of the first row, none has seen anything."""
    rng = np.random.default_rng(0)
    out, lse = rng.normal(size=shape), rng.normal(size=shape[:-1]) * 5
    lse[rng.random(lse.shape) < 0.2] = -np.inf
    lse[0, 0, :, 0] = -np.inf
    out = np.where(np.isfinite(lse)[..., None], out, 0)
    return out.astype(np.float32), lse.astype(np.float32)


def joined(out, lse):
    """In float64: softmax over the parts of their log-sum-exps, times their outputs."""
    out, lse = out.astype(np.float64), lse.astype(np.float64)
    top = lse.max(2, keepdims=True)
    weights = np.exp(lse - np.where(np.isfinite(top), top, 0))
    total = weights.sum(2)
    with np.errstate(divide="ignore"):
        own = np.log(total) + top[:, :, 0]
    return (weights[..., None] * out).sum(2) / np.where(total == 0, 1, total)[..., None], own


def check(found, out, lse, tolerance=1e-6):
    for x, expected in zip(found, joined(out, lse), strict=True):
        np.testing.assert_allclose(np.asarray(x), expected, rtol=tolerance, atol=tolerance)


def test_by_triton_interpreted(module, tmp_path):
    pytest.importorskip("torch")  # Triton's interpreter takes its tensors
    given = dict(zip(NAMES, map(parts_of, SHAPES), strict=True))
    given = {f"{name} {part}": x for name, both in given.items() for part, x in enumerate(both)}
    np.savez(tmp_path / "parts.npz", **given)
    # Whether Triton interprets is decided for a whole process, when it is imported.
    command = [sys.executable, "-c", INTERPRETED, *map(str, (tmp_path / "parts.npz", *NAMES))]
    run = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=Path(__file__).parents[2],
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = np.load(tmp_path / "parts.npz")
    for name, shape in zip(NAMES, SHAPES, strict=True):
        check((found[f"{name} 0"], found[f"{name} 1"]), *parts_of(shape))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_triton_compiles_it_for_an_h200(module, dtype):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    static = module.sizes((1, 8, 64, 4, 128))
    pointers = {"part_out": "*fp32", "part_lse": "*fp32", "out": f"*{dtype}", "lse": "*fp32"}
    signature = pointers | dict.fromkeys(static, "constexpr")
    source = ASTSource(fn=module.join_kernel, signature=signature, constexprs=static)
    target = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target, options=module.OPTIONS)
    assert ".target sm_90" in compiled.asm["ptx"] and compiled.asm["cubin"]


def test_triton_compiles_what_pallas_writes(module, tmp_path):
    # So what JAX would take away with its lowering is the way from a body to this text.
    import triton
    from triton.backends.compiler import GPUTarget

    out, lse = map(jnp.asarray, parts_of(SHAPES[0]))
    join = functools.partial(_join, dtype=jnp.bfloat16, interpret=False)
    path = tmp_path / "join.ttir"
    path.write_text(triton_of_kernel(join, out, lse))
    compiled = triton.compile(str(path), target=GPUTarget("cuda", 90, 32), options=module.OPTIONS)
    assert "join_parts" in compiled.asm["ptx"] and compiled.asm["cubin"]


@pytest.mark.xfail(
    jax.__version_info__ >= (0, 12), raises=TypeError, strict=True,
    reason="jax-triton 0.4.1 does not know how JAX 0.12 calls its rule for unused results",
)  # fmt: skip
def test_jax_triton_lowers_it(module):
    pytest.importorskip("jax_triton")
    pytest.importorskip("jax_cuda13_plugin")  # which writes the call
    out, lse = map(jnp.asarray, parts_of(SHAPES[0]))
    text = lower_for_cuda(lambda *x: module.join_by_jax_triton(*x, jnp.bfloat16), out, lse)
    assert "triton_kernel_call_ffi" in text and "tensor<1x2x3x16xbf16>" in text


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_gpu_both_are_the_same(module, shape):
    pytest.importorskip("jax_triton")
    out, lse = parts_of(shape)
    args = jnp.asarray(out), jnp.asarray(lse)
    check(_join(*args, jnp.float32, interpret=False), out, lse)
    check(module.join_by_jax_triton(*args, jnp.float32), out, lse)
