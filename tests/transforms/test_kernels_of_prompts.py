"""Methods that cluster or match keys decide by the kernels what they decide by XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.cache.slots import KVCache
from kvjax.protocol import Logits, Step
from tests.support.attending import Tokens, new_cache, prompt, right, the_rope
from tests.support.tolerances import close

KERNELS = ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
LENGTHS = (60, 37, 9)
METHODS = {
    "ClusterKV": kvjax.ClusterKV(24, sinks=3, chunk=16, dense_layers=(), interval=12),
    "ClusterKV, l2": kvjax.ClusterKV(24, sinks=3, clusters=7, metric="l2", dense_layers=()),
    "Chelsea": kvjax.Chelsea(14, chunk=8, sinks=2, recent=5),
    "Chelsea, whole": kvjax.Chelsea(20, chunk="whole", sinks=2, recent=5),
    "KVCrush": kvjax.KVCrush(kvjax.StreamingLLM(20, sinks=2), 6, kmeans=True),
}


def full_cache() -> KVCache:
    """Rows of different lengths that keep every token."""
    tokens = Tokens.random(rows=3, length=64, seed=3)
    cache = new_cache(kvjax.Full(), max_prompt=64)
    return prompt(kvjax.Full(), cache, tokens, right([0] * 3, LENGTHS, 64))[1].kv


def decide(transform, kv: KVCache, implementation: str, moment: str = "prompt", room: int = 0):
    """What a method decides about a cache that keeps everything."""

    def decision(kv: KVCache):
        cache, state = transform.init(kv, 1)
        step = Step(
            rows=jnp.array([True, True, False]), keys=cache.k.read(), rope=the_rope(),
            moment=moment, logits=Logits(0.3), room=room, implementation=implementation,
        )  # fmt: skip
        return getattr(transform, f"on_{moment}")(cache, state, step)

    return decision


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.fast_cases("ClusterKV-interpret", "Chelsea-interpret", "KVCrush-interpret")
def test_a_prompt_is_compressed_alike(name, implementation):
    kv = full_cache()
    mine, other = (jax.jit(decide(METHODS[name], kv, each))(kv) for each in (implementation, "xla"))
    assert jax.tree.structure(mine) == jax.tree.structure(other)
    for one, expected in zip(*map(jax.tree.leaves, (mine, other)), strict=True):
        close(*(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
                for x in (one, expected)), "rounding")  # fmt: skip


@pytest.mark.parametrize("name", ["ClusterKV", "Chelsea"])
def test_a_flush_is_decided_by_the_named_implementation(name):
    kv = full_cache()

    def kernels(implementation: str) -> int:
        decision = decide(METHODS[name], kv, implementation, "flush", room=12)
        return str(jax.make_jaxpr(lambda kv: jax.tree.leaves(decision(kv)))(kv)).count(
            "pallas_call"
        )

    assert kernels("interpret") >= 1 and kernels("xla") == 0
