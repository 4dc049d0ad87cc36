"""Methods that merge: by XLA as by kernels, and equal keys without a change of attention."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.decisions import carry_out
from kvjax.protocol import Logits
from tests.support.attending import Tokens, attend, flushed, live_count, new_cache, right
from tests.support.tolerances import close

TOKENS = 96
METHODS = {
    "KVMerger": kvjax.KVMerger(40, recent=8, heavy=4),
    "KVMerger against anchors": kvjax.KVMerger(epsilon=0.2, against="anchor", recent=8, heavy=4),
    "Chelsea": kvjax.Chelsea(40, sinks=2, recent=8, chunk=16),
    "CaM": kvjax.CaM(kvjax.StreamingLLM(40), prompt=True, expected=True, merge_tokens=5),
}


def full_cache(transform: kvjax.KVTransform) -> kvjax.LayerCache:
    """A prompt of smooth keys that has been read, and not been compressed."""
    rng = np.random.default_rng(0)
    cache = kvjax.init_cache(
        transform, batch=1, kv_heads=2, query_heads=4, head_dim=16, max_prompt=TOKENS, max_new=0
    )
    k = np.cumsum(rng.normal(size=(1, 2, TOKENS, 16)), axis=2)
    v = rng.normal(size=k.shape)
    kv = kvjax.cache.slots.widen(cache.kv, TOKENS)
    k, v = (jnp.asarray(x, jnp.float32) for x in (k, v))
    kv, _ = kvjax.append(kv, k, v, jnp.arange(TOKENS, dtype=jnp.int32)[None])
    if "attention" in kv.columns:
        kv = kv.with_column("attention", jnp.asarray(rng.random((1, 2, TOKENS, 2)), jnp.float32))
    return dataclasses.replace(cache, kv=kv)


def compressed(name: str, implementation: str) -> tuple[kvjax.KVCache, str]:
    """The cache that the method leaves, and what was computed."""
    transform = METHODS[name]
    cache = full_cache(transform)

    def compress(kv, state):
        step = kvjax.Step(
            rows=jnp.ones(1, bool), keys=kv.k.read(), moment="prompt", logits=Logits(0.25),
            implementation=implementation,
        )  # fmt: skip
        decision, _ = transform.on_prompt(kv, state, step)
        return carry_out(decision, kv, step)

    args = cache.kv, cache.state
    return jax.jit(compress)(*args), str(jax.make_jaxpr(compress)(*args))


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x != "KVMerger")) for x in METHODS]
)
def test_kernels_decide_and_merge_as_xla_does(name):
    expected, by_xla = compressed(name, "xla")
    found, by_kernels = compressed(name, "interpret")
    assert "pallas_call" not in by_xla
    assert ("segment_sum" if name == "CaM" else "segment_merge") in by_kernels
    np.testing.assert_array_equal(found.position, expected.position)
    live = np.asarray(expected.live)
    assert 0 < live.sum() < live.size
    for x, y in ((found.k, expected.k), (found.v, expected.v)):
        close(np.asarray(x.read())[live], np.asarray(y.read())[live], "float32")
    close(np.asarray(found.log_mass)[live], np.asarray(expected.log_mass)[live], "float32")
    for column, own in expected.columns.items():
        close(np.asarray(found.column(column))[live], np.asarray(own.values)[live], "float32")


@pytest.mark.parametrize(
    ("transform", "kinds"),
    [
        (kvjax.KVMerger(epsilon=0.999, recent=3, heavy=2), 4),
        (kvjax.KVMerger(epsilon=0.999, recent=3, heavy=2, sigma=5.0), 4),
        (kvjax.Chelsea(9, chunk=8, sinks=2, recent=6, interval=1), 1),
    ],
    ids=["KVMerger", "KVMerger, sigma", "Chelsea"],
)
@pytest.mark.slow
def test_merging_equal_keys_changes_nothing(transform, kinds):
    """Runs of equal keys with different values, merged twice: attention is what it was."""
    rng, tokens = np.random.default_rng(9), Tokens.random(length=40, seed=9)
    of_token = np.sort(rng.integers(0, kinds, (3, 2, 40)), axis=2)
    keys = rng.normal(size=(3, 2, kinds, 8)).astype(np.float32)
    tokens = tokens._replace(k=np.take_along_axis(keys, of_token[..., None], axis=2))
    full, merged = new_cache(kvjax.Full()), new_cache(transform)

    def step(full, merged, positions, phase):
        given = tokens.at(positions)
        expected, full = attend(kvjax.Full(), full, *given, phase=phase)
        out, merged = attend(transform, merged, *given, phase=phase)
        close(out, expected, "rounding", phase)
        return full, flushed(merged, 1) if phase == "decode" else merged

    starts, counts = np.zeros(3, int), np.array([24, 17, 5])
    for more in ((8, 6, 1), (0, 0, 0)):
        full, merged = step(full, merged, right(starts, counts, 24), "prompt")
        starts, counts = starts + counts, np.array(more)
        assert live_count(merged)[0].max() < live_count(full)[0].min() - 8
        full, merged = step(full, merged, starts[:, None], "decode")
        starts = starts + 1
