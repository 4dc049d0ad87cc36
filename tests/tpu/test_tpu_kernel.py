"""The attention kernel for TPUs: interpreted, against float64, and when it is chosen."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from pallas_kernels import Mask, Queries, Seen, decode_attention, gather_attention
from pallas_kernels.attention import tpu_kernel
from pallas_kernels.attention.forms import dense_rows, quantized_rows
from pallas_kernels.attention.tpu_forms import reads, tpu_rows
from pallas_kernels.base import dispatch
from tests.kernels.test_encoded_kernels import EncodedCase, Form
from tests.support.attention_cases import Case, Shape, check, run
from tests.support.tolerances import close
from tests.support.tpu import interpreted


def first_fast(cases: list) -> list:
    """Interpreting takes seconds: all but the first run with the slow tests."""
    return [cases[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in cases[1:])]


# Of 16 cores, four are for each of the four heads.
SHAPES = [
    (Shape(group=3, dim=96, tokens=5, slots=300, options={"window": 6}), 1, "nan"),
    (Shape(group=1, slots=300), 1, "nan"),
    (Shape(group=4, dim=128, dtype="bfloat16", slots=300, options={"window": 150, "soft_cap": 1.7}),
     16, "zero"),
    (Shape(group=16, dim=128), 16, "zero"),
    (Shape(group=2, dim=256, dtype="bfloat16", slots=256), 1, "nan"),
    (Shape(group=2, dim=80, tokens=3, dtype="bfloat16", slots=300, options={"soft_cap": 0.9}),
     16, "zero"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "cores", "unwritten"), first_fast(SHAPES), ids=str)
def test_decode(shape, cores, unwritten, monkeypatch):
    case = Case(shape)
    with interpreted(monkeypatch, cores=cores, unwritten=unwritten):
        actual = run(decode_attention, case.args, **case.options)
        check(case, actual, case.expected())


ENCODED = [
    (Form("4 bits", 32, "channel"), Shape(group=4, dim=128, dtype="bfloat16", slots=320)),
    (Form("int8"), Shape(group=4, dim=128, dtype="bfloat16", slots=300, options={"window": 150})),
    (Form("int8"), Shape(group=3, dim=96, tokens=5, slots=300, options={"soft_cap": 2.0})),
    (Form("4 bits", 32), Shape(group=4, dim=128, dtype="bfloat16", slots=300)),
    (Form("4 bits", 16), Shape(group=3, dim=80, tokens=3, slots=300)),  # a group of both halves
    (Form("4 bits", 16, "channel"), Shape(group=16, dim=96, slots=320, options={"window": 150})),
]


@pytest.mark.parametrize(("form", "shape"), first_fast(ENCODED), ids=str)
def test_encoded(form, shape, monkeypatch):
    case = EncodedCase(shape, form, None)
    with interpreted(monkeypatch, cores=8, block=256):
        check(case, case.attention("pallas"), case.expected(rows=case.rows))


def test_a_live_number_that_is_none_stays_one(monkeypatch):
    case = Case(Shape(group=1, slots=300))
    live = np.argwhere(~case.free[1, 0])[0][0]
    case.v = case.v.at[1, 0, live, 3].set(jnp.nan)
    with interpreted(monkeypatch):
        out, _, _ = run(decode_attention, case.args, **case.options)
        bad = np.isnan(np.asarray(out))
    assert bad[1, 0, ..., 3].all() and bad.sum() == bad[1, 0, ..., 3].size


@pytest.mark.parametrize(("form", "unit"), [("dense", 128), ("int8", 128), ("4 bits", 256)])
def test_blocks_are_cut_where_arrays_can_be(form, unit):
    x = np.zeros((1, 1, 32_768, 128), np.float32)
    if form == "dense":
        k = v = dense_rows(jnp.asarray(x, jnp.bfloat16))
    else:
        encode = Form(form, 32, "channel").encode
        free = np.zeros(x.shape[:3], bool)
        k = quantized_rows(encode(x, free, "channel")[0], jnp.bfloat16, "channel")
        v = quantized_rows(encode(x, free)[0], jnp.bfloat16)
    keys, values = tpu_rows(k, v)
    for rows in (1, 4, 320):
        block = tpu_kernel._block([*keys.arrays.values(), *values.arrays.values()], rows)
        assert block % unit == 0
        assert block * rows * 4 <= 2**20 and block * 64 <= 2**19
        assert block * 4 * max(rows, 8) > 2**18 or block * 256 > 2**18, "not too small either"


# --- what is chosen -------------------------------------------------------------------------------


@pytest.fixture
def on_tpu(monkeypatch):
    monkeypatch.setattr(dispatch, "on_tpu", lambda: True)


@pytest.mark.parametrize(
    ("implementation", "for_tpu", "chosen"),
    [(None, True, "tpu"), (None, False, "xla"), ("pallas", True, "tpu"), ("xla", True, "xla"),
     ("interpret", True, "interpret")],
)  # fmt: skip
def test_a_tpu_has_a_kernel_of_its_own(implementation, for_tpu, chosen, on_tpu):
    assert dispatch.choose_implementation(implementation, for_tpu=for_tpu) == chosen


def test_a_named_kernel_that_there_is_not_is_refused(on_tpu):
    case = Case(Shape())
    with pytest.raises(ValueError, match="needs a kernel for TPUs, and this operation has none"):
        gather_attention(
            *case.args[:3], case.seen._replace(index=jnp.zeros((2, 2, 3), jnp.int32)), Mask(1.0),
            implementation="pallas",
        )  # fmt: skip


def test_a_described_device_is_asked_before_the_default_one():
    assert not dispatch.on_tpu() or jax.default_backend() == "tpu"
    for kind in ("TPU v5 lite", "cpu"):
        platform = kind.split()[0].lower()
        device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=2, platform=platform)
        mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            assert dispatch.on_tpu() == (platform == "tpu")
            assert dispatch.tpu_cores() == 2


def test_the_kernel_reads_what_lies_in_rows():
    def dense(heads, slots, dtype="bfloat16"):
        rows = dense_rows(jax.ShapeDtypeStruct((1, heads, slots, 128), dtype))
        return reads(rows, rows)

    assert dense(8, 7064) and dense(2, 7065) and dense(8, 7064, "float32")
    assert not dense(8, 7065) and not dense(8, 7064, "float16")


def test_the_kernel_does_not_read_float8():
    form = Form("float8")
    stored, _ = form.encode(np.zeros((1, 1, 8, 64), np.float32), np.zeros((1, 1, 8), bool))
    rows = quantized_rows(stored, jnp.bfloat16)
    assert not reads(rows, rows)
    with pytest.raises(ValueError, match="reads no bfloat16 rows"):
        tpu_kernel.tpu_attention(
            Queries(jnp.zeros((1, 1, 1, 1, 64)), jnp.zeros((1, 1), jnp.int32)), rows, rows,
            Seen(jnp.zeros((1, 1, 8)), jnp.zeros((1, 1, 8), jnp.int32), jnp.zeros((1, 1), int)),
            Mask(1.0), with_logits=False, dtype=jnp.bfloat16,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "soft_cap"), [(8, None), (8, 2.0), (4, None)])
def test_a_step_of_a_compressed_cache_takes_it(bits, soft_cap, monkeypatch):
    """4 bits have rows that wait beside what is encoded; both are read by the kernel."""
    tx = kvjax.Quantize(bits)
    sizes = {"batch": 1, "kv_heads": 2, "head_dim": 32, "max_prompt": 72, "max_new": 8}
    cache = kvjax.init_cache(tx, query_heads=4, soft_cap=soft_cap, **sizes)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(2 + rng.normal(size=(1, n, 73, 32)), jnp.float32) for n in (4, 2, 2))
    at = jnp.arange(73, dtype=jnp.int32)[None]
    _, cache = kvjax.attend(cache, *(x[:, :, :72] for x in (q, k, v)), at[:, :72],
                            phase="prompt")  # fmt: skip
    step = functools.partial(
        kvjax.attend, cache, *(x[:, :, 72:] for x in (q, k, v)), at[:, 72:], phase="decode",
        soft_cap=soft_cap,
    )  # fmt: skip
    expected, _ = step(implementation="xla")
    with interpreted(monkeypatch):
        out, _ = step()
        close(out, expected)
