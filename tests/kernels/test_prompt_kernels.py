"""Attention of prompts, column sums and column maxima by XLA and by kernels, against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from pallas_kernels import (
    Mask,
    Queries,
    Seen,
    column_maxima,
    column_sums,
    prompt_attention,
    prompt_attention_and_maxima,
    prompt_attention_and_sums,
)
from pallas_kernels.attention import prompt_blocks
from pallas_kernels.base import tiles
from pallas_kernels.base.seen_blocks import first_run, hull, meets, sees_all
from tests.references.column_maxima import column_maxima as reference
from tests.support import attention_cases
from tests.support.attention_cases import Case, Shape, use_small_tiles
from tests.support.implementations import EVERY, KERNELS, each_way
from tests.support.marks import slow
from tests.support.tolerances import close


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 queries and slots for kernels; blocks of 4 queries and 8 slots for XLA."""
    use_small_tiles(monkeypatch)
    monkeypatch.setattr(prompt_blocks, "QUERY_BLOCK", 4)
    monkeypatch.setattr(prompt_blocks, "KEY_BLOCK", 8)


@pytest.fixture
def one_part(monkeypatch, small_tiles):
    """Small tiles, and no slots shared among programs: nothing is joined."""
    monkeypatch.setattr(tiles, "BLOCKS_PER_SPLIT", 99)


SHAPES = [
    Shape(group=1, tokens=40),
    Shape(group=2, dim=80, tokens=37, dtype="bfloat16"),
    Shape(group=3, dim=96, tokens=20, options={"window": 6}),
    Shape(group=4, dim=128, tokens=33, dtype="bfloat16", options={"window": 9, "soft_cap": 1.7}),
    Shape(group=7, dim=96, tokens=9, dtype="float16", options={"soft_cap": 0.9}),
    Shape(group=16, dim=64, tokens=5),
    Shape(group=2, dim=256, tokens=17, options={"window": 1}),
    Shape(group=1, dim=8, slots=1),
    Shape(group=2, dim=8, tokens=3, slots=5),  # fewer than a block
    Shape(group=1, dim=8, tokens=8, slots=16),  # multiples of the blocks
    Shape(group=2, dim=8, tokens=17, slots=37, options={"window": 5}, shuffled=False),
]


def run(operation, args, **options):
    """Traced anew: what was traced before knows the tiles of another test."""
    return attention_cases.run(functools.partial(operation), args, **options)


REDUCED = {column_sums: np.sum, column_maxima: np.max}


def columns(operation, case, lse, implementation):
    """What an operation makes of the columns, given the log-sum-exps that are right."""
    args = (case.queries, case.k, case.seen, jnp.asarray(lse, jnp.float32))
    return run(operation, args, **case.options, implementation=implementation)


def check(case, implementation):
    """Output, log-sum-exps with and without values, and reduced columns against float64."""
    expected = case.expected()
    call = functools.partial(run, prompt_attention, **case.options, implementation=implementation)
    out, lse = call(case.args)
    none, alone = call((case.queries, case.k, None, case.seen))
    assert out.dtype == case.v.dtype and lse.dtype == jnp.float32
    close(out, expected[0], case.kind, "output")
    close(lse, expected[1], case.kind, "log-sum-exp")
    assert none is None
    close(alone, lse, "rounding", "log-sum-exp without values")
    blind = expected[2].sum(-1) == 0
    assert (np.asarray(out, np.float32)[blind] == 0).all()
    assert (np.asarray(lse)[blind] == -np.inf).all()
    unseen = expected[2].sum(3) == 0
    for operation, reduce in REDUCED.items():
        found = columns(operation, case, expected[1], implementation)
        assert found.dtype == jnp.float32
        close(found, reduce(expected[2], axis=3), case.kind, operation.__name__)
        assert (np.asarray(found)[unseen] == 0).all(), "what nobody sees gets exactly nothing"
    check_joined(case, implementation, expected)


def check_joined(case, implementation, expected):
    """Attention with sums, and with maxima, by one operation, against float64.

    With and without columns besides the slots: sinks of the heads, or any columns of each query.
    """
    rng, (out, lse, probabilities) = np.random.default_rng(1), expected
    heads = case.q.shape[1:3]
    sinks = rng.normal(0, 3, heads)
    columns = rng.normal(0, 3, lse.shape)
    columns[rng.random(lse.shape) < 0.2] = -np.inf
    for operation, reduce, given, others in (
        (prompt_attention_and_sums, np.sum, {"sinks": None}, np.full((*heads, 1), -np.inf)),
        (prompt_attention_and_sums, np.sum, {"sinks": sinks.reshape(-1)}, sinks[..., None]),
        (prompt_attention_and_maxima, np.max, {}, np.full_like(lse, -np.inf)),
        (prompt_attention_and_maxima, np.max, {}, columns),
    ):
        total = np.logaddexp(lse, others)
        share = np.exp(lse - np.where(total > -np.inf, total, 0))[..., None]
        args = [*case.args]
        if operation is prompt_attention_and_maxima:
            args.append(jnp.asarray(others, jnp.float32))
        given = {name: x if x is None else jnp.asarray(x, jnp.float32) for name, x in given.items()}
        call = functools.partial(operation, **given)
        found = run(call, args, **case.options, implementation=implementation)
        assert [x.dtype for x in found] == [case.v.dtype, jnp.float32, jnp.float32]
        close(found[0], out * share, case.kind, "joined output")
        close(found[1], total, case.kind, "joined log-sum-exp")
        columns_of = reduce(probabilities * share, axis=3)
        close(found[2], columns_of, case.kind, f"columns of {operation.__name__}")
        assert (np.asarray(found[2])[probabilities.sum(3) == 0] == 0).all()


NAMED = {str(shape): (shape,) for shape in SHAPES}


@pytest.mark.parametrize(
    ("shape", "implementation"),
    each_way(NAMED, fast=["G4 D128 T33 bfloat16 window soft_cap", "G16 D64 T5 float32"]),
)
def test_prompts(shape, implementation, small_tiles):
    check(Case(shape), implementation)


def mostly_seen(options):
    """A prompt in order, without biases; a head has a free slot and a bias among its first ones."""
    case = Case(Shape(group=2, dim=16, tokens=48, slots=96, options=options, shuffled=False))
    rng = np.random.default_rng(5)
    k, v = (jnp.asarray(rng.normal(size=case.k.shape), jnp.float32) for _ in range(2))
    case.free = np.zeros_like(case.free)
    case.free[1, 0, 20] = True
    case.k, case.v = (x.at[1, 0, 20].set(jnp.nan) for x in (k, v))
    case.bias = jnp.where(case.free, -jnp.inf, 0.0).at[1, 0, 3].set(2.0)
    case.position = jnp.broadcast_to(jnp.arange(96, dtype=jnp.int32), case.position.shape)
    return case


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("options", [{"window": 50}, *slow({}, {"soft_cap": 1.5})], ids=str)
def test_tiles_that_need_no_mask(options, implementation, one_part):
    """The kernels compute them by a loop of their own, for all heads, before the others."""
    case = mostly_seen(options)
    plain = sees_all(case.query, case.seen, options.get("window"), 16, 16)
    first, end = first_run(plain, 3)
    count = np.asarray(jnp.maximum(end - first, 0))
    assert (count > 0).mean() > 0.5 and (count < 6).all()
    check(case, implementation)


def test_a_prompt_in_blocks_as_large_as_they_are():
    check(Case(Shape(group=2, dim=8, tokens=150, slots=300)), "xla")


def test_blocks_of_few_queries_where_logits_of_all_slots_are_many(monkeypatch):
    monkeypatch.setattr(prompt_blocks, "MOST_HELD", 1)
    monkeypatch.setattr(prompt_blocks, "LEAST_ROWS", 1)  # 8 queries at a time, the fewest
    check(Case(Shape(group=2, dim=8, tokens=150, slots=300)), "xla")


@pytest.mark.parametrize("implementation", EVERY)
def test_queries_in_any_order_and_padding_between_them(implementation, one_part):
    case, rng = Case(Shape(group=2, tokens=40, options={"window": 11})), np.random.default_rng(5)
    query = rng.permuted(np.asarray(case.query), axis=1)
    query[0, 3:21] = -1  # a whole tile, and more
    query[1] = -1  # and a row without a token
    case.query = jnp.asarray(query)
    check(case, implementation)


@pytest.mark.parametrize("implementation", EVERY)
def test_maxima_of_some_columns_of_a_larger_softmax(implementation, one_part):
    """A document's slots, looked up by a repetition that sees itself, too, in two chunks.

    The log-sum-exps over all columns are given, or those over the columns besides the document's.
    """
    case, document = Case(Shape(group=2, tokens=30, options={"soft_cap": 2.0})), 19
    whole, lse, _ = case.expected()
    part = [np.asarray(x)[:, :, :document] for x in (case.k, case.bias, case.position)]
    k, bias, position = part
    seen = Seen(bias, position)
    found, joined = [], []
    options = {**case.options, "implementation": implementation}
    for chunk in (slice(0, 13), slice(13, None)):
        queries = Queries(case.q[..., chunk, :], case.query[:, chunk])
        args = (queries, k, seen, jnp.asarray(lse[..., chunk], jnp.float32))
        found.append(run(column_maxima, args, **options))
        rest = [x[:, :, document:] for x in (case.k, case.v, case.bias, case.position)]
        of_rest, others = run(prompt_attention, (queries, *rest[:2], Seen(*rest[2:])), **options)
        args = (queries, k, case.v[:, :, :document], seen, others)
        out, total, maxima = run(prompt_attention_and_maxima, args, **options)
        joined.append(maxima)
        close(total, lse[..., chunk], case.kind)
        share = np.exp(others - np.where(total > -np.inf, total, 0))[..., None]
        close(out + share * of_rest, whole[..., chunk, :], case.kind)
    expected = [
        [
            reference(
                case.q[b, h], np.nan_to_num(k[b, h]), lse[b, h], np.asarray(case.query)[b],
                position[b, h], bias[b, h], **case.logits,
            )
            for h in range(2)
        ]
        for b in range(2)
    ]  # fmt: skip
    close(np.maximum(*found), np.array(expected), "reference")
    close(np.maximum(*joined), np.array(expected), "reference")


def test_a_causal_prompt_meets_half_of_its_blocks():
    """Slots in the order of positions, and a capacity of which most is free."""
    place = jnp.arange(64, dtype=jnp.int32)
    key = jnp.where(place < 32, place, -1)[None, None]
    seen = Seen(jnp.where(key < 0, -jnp.inf, 0.0), key)
    first, end = hull(meets(place[None, :32], seen, None, 8, 8), 3)
    assert (first[0, 0].tolist(), end[0, 0].tolist()) == ([0, 0, 0, 0], [1, 2, 3, 4])
    first, end = hull(meets(place[None, :32], seen, 8, 8, 8), 3)
    assert (first[0, 0].tolist(), end[0, 0].tolist()) == ([0, 0, 1, 2], [1, 2, 3, 4])
    first, end = hull(meets(place[None, :32], seen, 8, 8, 8), 2)
    assert (first[0, 0, :4].tolist(), end[0, 0].tolist()) == (
        [0, 1, 2, 3], [2, 3, 4, 4, 0, 0, 0, 0],
    )  # fmt: skip


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_large_logits_do_not_overflow(implementation, one_part):
    case = Case(Shape(group=2, tokens=17))
    case.q = case.q * np.float32(1e3)
    expected = case.expected()
    options = {**case.options, "implementation": implementation}
    out, lse = run(prompt_attention, case.args, **options)
    close(out, expected[0], "bfloat16")  # the logits themselves carry a rounding of 1e-7 · 1e4
    args = (case.queries, case.k, case.seen, lse)
    for operation, reduce in REDUCED.items():
        close(run(operation, args, **options), reduce(expected[2], axis=3), "bfloat16")
    out, _, found = run(prompt_attention_and_sums, case.args, **options)
    close(out, expected[0], "bfloat16")
    close(found, expected[2].sum(3), "bfloat16")
    none = jnp.full(lse.shape, -jnp.inf)
    args = (*case.args, none)
    out, _, found = run(prompt_attention_and_maxima, args, **options)
    close(out, expected[0], "bfloat16")
    close(found, expected[2].max(3), "bfloat16")


@pytest.mark.parametrize("shape", [(0, 2, 1, 3, 0), (1, 2, 1, 3, 0), (1, 2, 1, 0, 5)], ids=str)
@pytest.mark.parametrize("implementation", KERNELS)
def test_without_rows_queries_or_slots_there_is_nothing(shape, implementation):
    batch, heads, group, tokens, slots = shape
    q, k = jnp.zeros((batch, heads, group, tokens, 8)), jnp.zeros((batch, heads, slots, 8))
    bias, position = jnp.zeros((batch, heads, slots)), jnp.zeros((batch, heads, slots), jnp.int32)
    queries, seen = Queries(q, jnp.zeros((batch, tokens), jnp.int32)), Seen(bias, position)
    options = {"mask": Mask(1.0), "implementation": implementation}
    out, lse = run(prompt_attention, (queries, k, k, seen), **options)
    assert out.shape == q.shape and lse.shape == q.shape[:-1] and (out == 0).all()
    none, lse = run(prompt_attention, (queries, k, None, seen), **options)
    assert none is None and (lse == -np.inf).all()
    for operation in REDUCED:
        found = run(operation, (queries, k, seen, lse), **options)
        assert found.shape == (batch, heads, group, slots) and (found == 0).all()
    for operation, args in (
        (prompt_attention_and_sums, (queries, k, k, seen)),
        (prompt_attention_and_maxima, (queries, k, k, seen, lse)),
    ):
        out, _, found = run(operation, args, **options)
        assert out.shape == q.shape and found.shape == (batch, heads, group, slots)
        assert (out == 0).all() and (found == 0).all()


# --- as compiled ----------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [kvjax.H2O(budget=1024), kvjax.SnapKV(budget=1024)], ids=repr)
def test_a_long_prompts_scores_take_little_memory(transform):
    """The attention matrix of 16,384 tokens and 8 heads would take 8 GiB."""
    length, kv_heads = 16_384, 2
    sizes = {"batch": 1, "query_heads": 8, "head_dim": 64, "dtype": jnp.float32}
    cache = jax.eval_shape(
        lambda: kvjax.init_cache(
            transform, kv_heads=kv_heads, max_prompt=length, max_new=64, **sizes
        )
    )
    q, k = (jax.ShapeDtypeStruct((1, heads, length, 64), jnp.float32) for heads in (8, kv_heads))
    positions = jax.ShapeDtypeStruct((1, length), jnp.int32)
    call = jax.jit(lambda cache, *x: kvjax.attend(cache, *x, phase="prompt"), donate_argnums=0)
    compiled = call.lower(cache, q, k, k, positions).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**29
