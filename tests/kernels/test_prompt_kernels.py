"""The kernels of a prompt: interpreted, lowered for CUDA, and run on a GPU."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import column_sums, prompt_attention
from pallas_kernels.base import tiles
from pallas_kernels.base.seen_blocks import hull, meets
from tests.support import attention_cases
from tests.support.attention_cases import KERNELS, SLOTS, Case, Shape, use_small_tiles
from tests.support.lowering import KERNEL, lower_for_cuda
from tests.support.tolerances import close


@pytest.fixture
def small_tiles(monkeypatch):
    use_small_tiles(monkeypatch)


@pytest.fixture
def one_part(monkeypatch):
    """Small tiles, and no slots shared among programs: nothing is joined."""
    use_small_tiles(monkeypatch)
    monkeypatch.setattr(tiles, "BLOCKS_PER_SPLIT", 99)


SHAPES = [
    Shape(group=1, tokens=40),
    Shape(group=2, dim=80, tokens=37, dtype="bfloat16"),
    Shape(group=3, dim=96, tokens=20, options={"window": 6}),
    Shape(group=4, dim=128, tokens=33, dtype="bfloat16", options={"window": 9, "soft_cap": 1.7}),
    Shape(group=7, dim=96, tokens=9, dtype="float16", options={"soft_cap": 0.9}),
    Shape(group=16, dim=64, tokens=5),
    Shape(group=2, dim=256, tokens=17, options={"window": 1}),
]


def run(operation, args, **options):
    """Traced anew: what was traced before knows the tiles of another test."""
    return attention_cases.run(functools.partial(operation), args, **options)


def sums(case, expected, implementation):
    """Column sums, given the log-sum-exps that are right."""
    lse = jnp.asarray(expected[1], jnp.float32)
    args = (case.q, case.k, case.bias, lse, case.query, case.position)
    return run(column_sums, args, **case.options, implementation=implementation)


def check(case, implementation):
    """Output, log-sum-exps with and without values, and column sums against float64."""
    expected = case.expected()
    call = functools.partial(run, prompt_attention, **case.options, implementation=implementation)
    out, lse = call(case.args)
    none, alone = call((case.q, case.k, None, *case.args[3:]))
    found = sums(case, expected, implementation)
    assert out.dtype == case.v.dtype and lse.dtype == found.dtype == jnp.float32
    close(out, expected[0], case.kind, "output")
    close(lse, expected[1], case.kind, "log-sum-exp")
    assert none is None
    close(alone, lse, "rounding", "log-sum-exp without values")
    close(found, expected[2].sum(3), case.kind, "column sums")
    blind = expected[2].sum(-1) == 0
    assert (np.asarray(out, np.float32)[blind] == 0).all()
    assert (np.asarray(lse)[blind] == -np.inf).all()
    unseen = expected[2].sum(3) == 0
    assert (np.asarray(found)[unseen] == 0).all(), "what nobody sees gets exactly nothing"


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.fast_cases(
    "G4 D128 T33 bfloat16 window soft_cap-interpret", "G16 D64 T5 float32-interpret"
)
def test_prompts(shape, implementation, small_tiles):
    check(Case(shape), implementation)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.fast_cases("G3 D96 T20 float32 window-interpret")
def test_prompts_whose_slots_are_not_shared(shape, implementation, one_part):
    check(Case(shape), implementation)


@pytest.mark.parametrize("implementation", KERNELS)
def test_queries_in_any_order_and_padding_between_them(implementation, one_part):
    case, rng = Case(Shape(group=2, tokens=40, options={"window": 11})), np.random.default_rng(5)
    query = rng.permuted(np.asarray(case.query), axis=1)
    query[0, 3:21] = -1  # a whole tile, and more
    query[1] = -1  # and a row without a token
    case.query = jnp.asarray(query)
    check(case, implementation)


@pytest.mark.parametrize("implementation", KERNELS)
def test_chunks_of_a_prompt_are_the_whole_prompt(implementation, one_part):
    case = Case(Shape(group=2, tokens=40))
    call = functools.partial(run, prompt_attention, **case.options, implementation=implementation)
    out, lse = call(case.args)
    parts = [slice(0, 7), slice(7, 24), slice(24, 40)]
    chunks = [call((case.q[:, :, :, p], *case.args[1:4], case.query[:, p], case.position))
              for p in parts]  # fmt: skip
    close(jnp.concatenate([x for x, _ in chunks], 3), out, "rounding")
    close(jnp.concatenate([x for _, x in chunks], 3), lse, "rounding")


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(-1, 30), min_size=20, max_size=20),
    st.lists(st.integers(-1, 30), min_size=33, max_size=33),
    st.sampled_from([None, 1, 5]),
)
def test_tiles_and_blocks_that_meet_are_those_with_a_pair(queries, keys, window):
    query, key = np.array([queries]), np.array([[keys]])
    bias = np.where(np.arange(33) % 7 == 0, -np.inf, 0.0)[None, None]
    sees = (key[0, 0] >= 0) & (bias[0, 0] == 0) & (key[0, 0] <= query[0][:, None])
    if window is not None:
        sees &= key[0, 0] > query[0][:, None] - window
    found = np.asarray(_meets(query, bias, key, window))[0, 0]
    assert found.shape == (3, 5)
    for i, j in np.ndindex(found.shape):
        pairs = sees[i * 8 : i * 8 + 8, j * 8 : j * 8 + 8]
        assert found[i, j] or not pairs.any(), "a pair would be left out"
        # Without a window, what meets has a pair: the newest query and the oldest key.
        assert window is not None or found[i, j] == pairs.any()


@functools.partial(jax.jit, static_argnums=3)
def _meets(query, bias, key, window):
    return meets(query, bias, key, window, 8, 8)


def test_a_causal_prompt_meets_half_of_its_blocks():
    """Slots in the order of positions, and a capacity of which most is free."""
    place = jnp.arange(64, dtype=jnp.int32)
    key = jnp.where(place < 32, place, -1)[None, None]
    bias = jnp.where(key < 0, -jnp.inf, 0.0)
    first, end = hull(meets(place[None, :32], bias, key, None, 8, 8), 3)
    assert (first[0, 0].tolist(), end[0, 0].tolist()) == ([0, 0, 0, 0], [1, 2, 3, 4])
    first, end = hull(meets(place[None, :32], bias, key, 8, 8, 8), 3)
    assert (first[0, 0].tolist(), end[0, 0].tolist()) == ([0, 0, 1, 2], [1, 2, 3, 4])
    first, end = hull(meets(place[None, :32], bias, key, 8, 8, 8), 2)
    assert (first[0, 0, :4].tolist(), end[0, 0].tolist()) == (
        [0, 1, 2, 3], [2, 3, 4, 4, 0, 0, 0, 0],
    )  # fmt: skip


def test_ranges_are_where_reading_ends(one_part, monkeypatch):
    """A slot behind a tile's range would be seen by anybody who looked there."""
    case = Case(Shape(group=1, tokens=40))
    monkeypatch.setattr("pallas_kernels.attention.prompt_kernel.hull", _nothing_met)
    call = functools.partial(run, prompt_attention, **case.options, implementation="interpret")
    out, lse = call(case.args)
    assert (np.asarray(out) == 0).all() and (np.asarray(lse) == -np.inf).all()
    assert (np.asarray(sums(case, case.expected(), "interpret")) == 0).all()


def _nothing_met(met, axis):
    none = jnp.zeros(met.any(axis).shape, jnp.int32)
    return none, none


def test_large_logits_do_not_overflow(one_part):
    case = Case(Shape(group=2, tokens=17))
    case.q = case.q * np.float32(1e3)
    expected = case.expected()
    options = {**case.options, "implementation": "interpret"}
    out, lse = run(prompt_attention, case.args, **options)
    close(out, expected[0], "bfloat16")  # the logits themselves carry a rounding of 1e-7 · 1e4
    args = (case.q, case.k, case.bias, lse, case.query, case.position)
    close(run(column_sums, args, **options), expected[2].sum(3), "bfloat16")


@pytest.mark.parametrize("shape", [(0, 2, 1, 3, 0), (1, 2, 1, 3, 0), (1, 2, 1, 0, 5)], ids=str)
@pytest.mark.parametrize("implementation", KERNELS)
def test_without_rows_queries_or_slots_there_is_nothing(shape, implementation):
    batch, heads, group, tokens, slots = shape
    q, k = jnp.zeros((batch, heads, group, tokens, 8)), jnp.zeros((batch, heads, slots, 8))
    bias, position = jnp.zeros((batch, heads, slots)), jnp.zeros((batch, heads, slots), jnp.int32)
    query = jnp.zeros((batch, tokens), jnp.int32)
    options = {"scale": 1.0, "implementation": implementation}
    out, lse = run(prompt_attention, (q, k, k, bias, query, position), **options)
    assert out.shape == q.shape and lse.shape == q.shape[:-1] and (out == 0).all()
    none, lse = run(prompt_attention, (q, k, None, bias, query, position), **options)
    assert none is None and (lse == -np.inf).all()
    found = run(column_sums, (q, k, bias, lse, query, position), **options)
    assert found.shape == (batch, heads, group, slots) and (found == 0).all()


# --- as compiled ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("group", "dim", "tokens"), [(1, 64, 300), (4, 128, 16), (7, 80, 1025)])
@pytest.mark.fast_cases("4-128-16-bfloat16", "7-80-1025-float16")
def test_they_lower_for_cuda_and_take_the_keys_as_they_are(group, dim, tokens, dtype):
    heads, slots = 8, 4099
    struct = jax.ShapeDtypeStruct
    store = struct((2, heads, slots, dim), dtype)
    q = struct((2, heads, group, tokens, dim), dtype)
    lse = struct(q.shape[:-1], jnp.float32)
    bias, position = (struct((2, heads, slots), x) for x in (jnp.float32, jnp.int32))
    query = struct((2, tokens), jnp.int32)
    kind = {"scale": 0.1, "window": 100, "soft_cap": 3.0, "implementation": "pallas"}
    attend = functools.partial(prompt_attention, **kind)
    calls = {
        "prompt": (attend, (q, store, store, bias, query, position)),
        "alone": (lambda *x: attend(*x[:2], None, *x[2:]), (q, store, bias, query, position)),
        "sums": (functools.partial(column_sums, **kind), (q, store, bias, lse, query, position)),
    }
    for name, (function, args) in calls.items():
        text = lower_for_cuda(function, *args)
        assert 1 <= text.count(KERNEL) <= 2, name
        assert "stablehlo.while" not in text, "a loop whose length the device knows alone"
        taken = re.findall(rf".*tensor<2x{heads}x{slots}x{dim}x.*", text)
        others = [line for line in taken if KERNEL not in line and "func.func" not in line]
        assert len(taken) > len(others) == 0, others


def test_xla_multiplies_nothing_with_values_that_nobody_asked_for():
    case = Case(Shape(group=2, tokens=40))

    def products(v):
        args = (case.q, case.k, v, *case.args[3:])
        call = jax.jit(functools.partial(prompt_attention, scale=0.3, implementation="xla"))
        return len(re.findall(r" dot\(", call.lower(*args).compile().as_text()))

    assert (products(case.v), products(None)) == (2, 1)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the kernel runs there")
def test_a_named_kernel_does_not_fall_back():
    case = Case(Shape(tokens=3))
    with pytest.raises(ValueError, match="interpret"):
        jax.block_until_ready(prompt_attention(*case.args, scale=1.0, implementation="pallas"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": (2, 2, SLOTS, 32)}, r"k must have shape \(2, 2, 45, 64\), got"),
        ({"v": (2, 2, 44, 64)}, r"v must have shape \(2, 2, 45, 64\), got \(2, 2, 44, 64\)"),
        ({"k": (2, 1, SLOTS, 64)}, r"bias must have shape \(2, 1, 45\), got \(2, 2, 45\)"),
        ({"query_position": (2, 4)}, r"\(2, 3\), got \(2, 4\)"),
        ({"q": (2, 2, 3, 64)}, r"q must be \[B, H, G, T, D\]"),
        ({"implementation": "cuda"}, r"\('xla', 'pallas', 'interpret'\), got 'cuda'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_bad_arguments_are_refused(changes, message, implementation):
    case = Case(Shape(tokens=3))
    names = ("q", "k", "v", "bias", "query_position", "key_position")
    arrays = dict(zip(names, case.args, strict=True))
    shaped = {n: jnp.zeros(s, arrays[n].dtype) for n, s in changes.items() if n in arrays}
    given = {"implementation": implementation, **arrays, **changes, **shaped}
    with pytest.raises(ValueError, match=message):
        prompt_attention(**given, scale=1.0)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_sums_refuse_what_does_not_fit(implementation):
    case = Case(Shape(group=2, tokens=3))
    q, k, _, bias, query, position = case.args
    kind = {"scale": 1.0, "implementation": implementation}
    with pytest.raises(ValueError, match=r"lse must have shape \(2, 2, 2, 3\), got \(2, 2, 2\)"):
        column_sums(q, k, bias, jnp.zeros((2, 2, 2)), query, position, **kind)
    lse = jnp.zeros((2, 4, 2, 3))
    with pytest.raises(ValueError, match=r"grouped under the 2 heads of k, got \(2, 4, 2, 3, 64\)"):
        column_sums(jnp.zeros((2, 4, 2, 3, 64)), k, bias, lse, query, position, **kind)
