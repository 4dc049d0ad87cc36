"""Methods that merge, cluster or match keys: by kernels as by XLA."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.slots import opened, widen
from kvjax.decisions import carry_out
from kvjax.protocol import AttentionOptions
from tests.support.attending import (
    Tokens,
    new_cache,
    right,
    the_rope,
)
from tests.support.tolerances import close

TOKENS, LENGTHS = 96, (96, 37, 9)
KERNELS = ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
METHODS = {
    "KVMerger": kvjax.KVMerger(40, recent=8, heavy=4),
    "KVMerger against anchors": kvjax.KVMerger(epsilon=0.2, against="anchor", recent=8, heavy=4),
    "Chelsea": kvjax.Chelsea(30, sinks=2, recent=8, chunk=16),
    "Chelsea, whole": kvjax.Chelsea(30, sinks=2, recent=8, chunk="whole"),
    "CaM": kvjax.CaM(kvjax.StreamingLLM(40), prompt=True, expected=True, merge_tokens=5),
    "ClusterKV": kvjax.ClusterKV(24, sinks=3, chunk=16, dense_layers=(), interval=12),
    "ClusterKV, l2": kvjax.ClusterKV(24, sinks=3, clusters=7, metric="l2", dense_layers=()),
    "KVCrush": kvjax.KVCrush(kvjax.StreamingLLM(20, sinks=2), 6, kmeans=True),
}


def full_cache(transform: kvjax.KVTransform) -> kvjax.LayerCache:
    """Prompts of smooth keys that have been read, and not been compressed."""
    tokens = Tokens.random(length=TOKENS, head_dim=16)
    cache = new_cache(transform, head_dim=16, max_prompt=TOKENS, max_new=0)
    _, k, v, positions = tokens._replace(k=np.cumsum(tokens.k, axis=2)).at(
        right([0] * 3, LENGTHS, TOKENS)
    )
    kv, _ = opened(cache.kv)
    kv, _ = kvjax.kit.append(widen(kv, TOKENS), k, v, positions)
    if "attention" in kv.columns:
        received = np.random.default_rng(0).random(kv.column("attention").shape)
        kv = kv.with_column("attention", jnp.asarray(received, jnp.float32))
    return dataclasses.replace(cache, kv=kv)


def compressed(name: str, implementation: str, moment: str = "prompt"):
    """A function of a cache and a state that gives both as the method leaves them."""

    def compress(kv, state):
        step = kvjax.kit.Step(
            rows=jnp.array([True, True, False]), keys=kv.k.read(), rope=the_rope(), moment=moment,
            options=AttentionOptions(0.25), room=12 * (moment == "flush"),
            implementation=implementation,
        )  # fmt: skip
        decision, state = getattr(METHODS[name], f"on_{moment}")(kv, state, step)
        return carry_out(decision, kv, step), state

    return compress


def numbers(x) -> jax.Array:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.slow] * (x in list(METHODS)[1::2])) for x in METHODS],
)
def test_kernels_decide_and_merge_as_xla_does(name, implementation):
    cache = full_cache(METHODS[name])
    given = cache.kv, cache.state
    by_kernels, by_xla = (compressed(name, each) for each in (implementation, "xla"))
    assert "pallas_call" not in str(jax.make_jaxpr(by_xla)(*given))
    program = str(jax.make_jaxpr(by_kernels)(*given))
    if name.startswith(("KVMerger", "Chelsea", "CaM")):
        assert ("segment_sum" if name == "CaM" else "segment_merge") in program
    (found, state), (expected, of_xla) = (jax.jit(each)(*given) for each in (by_kernels, by_xla))
    np.testing.assert_array_equal(found.position, expected.position)
    live = np.asarray(expected.live)
    pairs = [(found.k.read(), expected.k.read()), (found.v.read(), expected.v.read())]
    pairs += [(found.log_mass, expected.log_mass)]
    pairs += [(found.column(column), expected.column(column)) for column in expected.columns]
    for actual, own in pairs:
        close(np.asarray(actual)[live], np.asarray(own)[live], "float32")
    for actual, own in zip(*map(jax.tree.leaves, (state, of_xla)), strict=True):
        close(numbers(actual), numbers(own), "rounding")


@pytest.mark.parametrize("name", ["ClusterKV", "Chelsea"])
def test_a_flush_is_decided_by_the_named_implementation(name):
    cache = full_cache(METHODS[name])

    def kernels(implementation: str) -> int:
        compress = compressed(name, implementation, "flush")
        return str(jax.make_jaxpr(compress)(cache.kv, cache.state)).count("pallas_call")

    assert kernels("interpret") >= 1 and kernels("xla") == 0
