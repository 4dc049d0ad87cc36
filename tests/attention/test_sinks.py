"""A learned sink of each query head, in every path of attention, against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from pallas_kernels import Mask, Queries, Seen, decode_attention
from pallas_kernels.attention.call import join_sinks
from tests.references.attention import softmax_attention
from tests.support import attending
from tests.support.attending import (
    HEAD_DIM,
    INV_FREQ,
    KV_HEADS,
    OPTIONS,
    QUERY_HEADS,
    Tokens,
    attended,
    decoded,
    new_cache,
    prompt,
    right,
)
from tests.support.cases import CASES, COVERING, selects
from tests.support.marks import slow, some_slow
from tests.support.tolerances import close

SINKS = np.array([0.7, 6.0, -2.5, 3.0])  # the second head's takes nearly all of its attention
COUNTS = ((12, 6, 0), (10, 0, 5))  # tokens of each row in the chunks of a prompt
LENGTHS, STEPS = np.sum(COUNTS, axis=0), 4

# Budgets that cover everything where attention is to a selection.
PATHS = {name: (COVERING if selects(name) else CASES)[name] for name in CASES}
# Dense rows, head groups, 8 bits and a selection.
# Further kinds that run with the slow tests; all others run before a release.
SOME = {"h2o", "chelsea", "snapkv_quantize_channel", "clusterkv_offload"}
LIKE_OTHERS = [("quest", "float32", "interpret"), ("quantize", "bfloat16", "interpret")]
FAST = [(name, "float32", "xla") for name in ("full", "head_groups", "quantize", "quest")]


def sinks(dtype="float32") -> jax.Array:
    return jnp.asarray(SINKS, dtype)


@functools.cache
def tokens() -> Tokens:
    return Tokens.random(rows=len(LENGTHS), length=64)


def read_and_write(transform, dtype: str, **options):
    """For each call the cache before it, its positions and output: two chunks and some steps."""
    of_logits = {name: x for name, x in options.items() if name in OPTIONS}
    cache, calls = new_cache(transform, dtype=jnp.dtype(dtype), **of_logits), []
    start = np.zeros(3, int)
    for number, counts in enumerate(COUNTS):
        positions = right(start, counts, max(counts))
        out, after = prompt(
            transform, cache, tokens(), positions, last=number == 1, dtype=dtype, **options
        )
        calls.append((cache, positions, out))
        cache, start = after, start + counts
    outs, caches = decoded(transform, cache, tokens(), LENGTHS, STEPS, dtype=dtype, **options)
    now = [(LENGTHS + step)[:, None] for step in range(STEPS)]
    return calls + list(zip([cache, *caches], now, outs, strict=False))


@pytest.mark.parametrize(
    ("name", "dtype", "implementation"),
    [
        *some_slow(
            [(name, "float32", "xla") for name in PATHS], *FAST,
            exhaustive=[(name, "float32", "xla") for name in {*PATHS} - SOME],
        ),
        ("full", "bfloat16", "xla"), ("quantize", "float32", "interpret"),
        *some_slow(
            [
                ("clusterkv", "float32", "interpret"), ("h2o_codebook", "float32", "interpret"),
                ("full", "float16", "interpret"), ("h2o_codebook", "bfloat16", "xla"),
                *LIKE_OTHERS,
            ],
            exhaustive=LIKE_OTHERS,
        ),
    ],
)  # fmt: skip
def test_outputs(name, dtype, implementation):
    """Chunks, ragged rows and steps; padding and a row without tokens give 0."""
    options = {"implementation": implementation, "sinks": sinks(dtype)}
    for before, positions, out in read_and_write(PATHS[name], dtype, **options):
        assert out.dtype == dtype
        expected = attended(PATHS[name], before, tokens(), positions, sinks=SINKS)
        close(out, expected, "bfloat16" if "16" in dtype else "float32")
        assert not np.asarray(out)[np.broadcast_to(positions[:, None] < 0, out.shape[:3])].any()


@pytest.mark.parametrize("name", ["full", "quantize"])
def test_windows_and_soft_caps(name):
    """A sink is in every window, and neither scaled nor capped."""
    options = {"scale": 0.9, "window": 5, "soft_cap": 0.8}
    for before, positions, out in read_and_write(PATHS[name], "float32", sinks=sinks(), **options):
        close(out, attended(PATHS[name], before, tokens(), positions, sinks=SINKS, **options))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sink", [-np.inf, -40.0, 5.0, 15.0])
def test_a_sink_takes_no_digits(sink, dtype):
    """A large sink costs no digits of what it leaves, and -inf is like none."""
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=8), rng.normal(size=(64, 8)), 100 * rng.random((64, 8))
    q, k, v = (jnp.asarray(x, dtype).reshape(1, 1, -1, 8) for x in (q, k, v))
    at = jnp.arange(64, dtype=jnp.int32)[None, None]
    lse, out, p = join_sinks(
        jnp.array([sink], dtype),
        *weighed(Queries(q[:, :, None], at[0, :, -1:]), k, v, Seen(jnp.zeros(at.shape), at)),
    )
    assert out.dtype == dtype and lse.dtype == p.dtype == jnp.float32
    q, k, v = (np.asarray(x, np.float64)[0, 0] for x in (q, k, v))
    expected, weights = softmax_attention(
        q[None], k, v, [63], np.arange(64), scale=0.4, sinks=[sink]
    )
    share, kind = weights.sum(), "float32" if dtype == "float32" else "bfloat16"
    close(np.asarray(out, np.float64)[0, 0] / share / 100, expected / share / 100, kind)
    close(np.asarray(p)[0, 0] / share, weights / share, kind)


@jax.jit
def weighed(*args):
    """Log-sum-exps, outputs and probabilities."""
    out, lse, p = decode_attention(*args, Mask(0.4))
    return lse, out, p


def test_a_query_that_sees_nothing_gives_nothing():
    lse, out = jnp.full((1, 1, 1, 3), -jnp.inf), jnp.zeros((1, 1, 1, 3, 2))
    for sink in (0.0, -np.inf, np.inf):
        after, rows = join_sinks(jnp.full(1, sink), lse, out)
        assert not rows.any() and (after == sink).all()


# --- what methods see -----------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "implementation"), [(3, "xla"), *slow((3, "interpret"))])
def test_attention_that_slots_received(steps, implementation):
    """Column sums of a prompt and probabilities of steps: with a sink's own they add up to 1."""
    transform, now = kvjax.H2O(budget=64), right([0, 0, 0], LENGTHS, max(LENGTHS))
    options = {"implementation": implementation, "sinks": sinks()}
    _, cache = prompt(transform, new_cache(transform), tokens(), now, **options)
    _, caches = decoded(transform, cache, tokens(), LENGTHS, steps, **options)
    kv = (caches or [cache])[-1].kv
    for row, head in np.ndindex(3, KV_HEADS):
        count = LENGTHS[row] + steps
        at, heads = np.arange(count), slice(2 * head, 2 * head + 2)
        q, k = (
            attending.rotate(x[row, which, :count], at, INV_FREQ)
            for x, which in ((tokens().q, heads), (tokens().k, head))
        )
        _, p = softmax_attention(q, k, k, at, at, sinks=SINKS[heads])
        order = np.argsort(np.where(kv.live[row, head], kv.position[row, head], 999))[:count]
        close(kv.column("attention")[row, head][order], p.sum(1).T, "accumulated")


# --- what goes with a cache -----------------------------------------------------------------------


def test_a_cache_keeps_a_copy_for_its_flushes():
    """The model's own array must not go with a cache that is donated."""
    transform = kvjax.Every(kvjax.SnapKV(8, window=4), steps=2)

    def kept(sinks):
        cache, given = new_cache(transform), tokens().at(right([0, 0, 0], LENGTHS, max(LENGTHS)))
        return kvjax.attend(cache, *given, phase="prompt", sinks=sinks)[1].options.sinks

    jaxpr = jax.make_jaxpr(kept)(sinks()).jaxpr
    assert jaxpr.outvars[0].aval.shape == SINKS.shape and jaxpr.outvars[0] not in jaxpr.invars


@pytest.mark.slow
def test_as_gpt_oss_in_transformers():
    import torch
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    class Layer:
        num_key_value_groups = QUERY_HEADS // KV_HEADS
        sinks = torch.tensor(SINKS, dtype=torch.float32)
        training = False

    row, at = tokens().rows([0]), np.arange(20)
    q, k, v, positions = row.at(at[None])
    mask = np.where((at <= at[:, None]) & (at > at[:, None] - 7), 0, -1e30).astype(np.float32)
    theirs, _ = eager_attention_forward(
        Layer, *(torch.tensor(np.asarray(x)) for x in (q, k, v)), torch.tensor(mask)[None, None],
        scaling=HEAD_DIM**-0.5,
    )  # fmt: skip
    cache = new_cache(kvjax.Full(), batch=1, window=7)
    ours, _ = attending.attend(cache, q, k, v, positions, phase="prompt", sinks=sinks())
    close(ours, theirs.numpy().transpose(0, 2, 1, 3))
