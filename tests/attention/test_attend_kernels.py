"""`kvjax.attend` with kernels: the same steps as by XLA, interpreted and on a GPU."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.support.attending import Tokens, attend, right
from tests.support.attention_cases import KERNELS, use_small_tiles
from tests.support.lowering import KERNEL, lower_for_cuda
from tests.support.tolerances import close

PLACEMENT = {"annotate_device_placement", "Sharding", "mhlo.topk"}  # of a device's own

PROMPTS, STEPS, DIM = (20, 7), 4, 16
ROPE = kvjax.Rope(jnp.asarray(1.0 / 50.0 ** (np.arange(0, DIM, 2) / DIM), jnp.float32))
FOUR_BITS = {"bits": 4, "group": 8}
TRANSFORMS = [
    kvjax.Full(),
    kvjax.H2O(budget=16),
    kvjax.Every(kvjax.SnapKV(8, window=4), steps=2),
    kvjax.CaM(kvjax.StreamingLLM(12, sinks=2)),
    kvjax.Quantize(),
    kvjax.Quantize(bits="float8"),
    kvjax.Quantize(**FOUR_BITS, key_axis="token"),
    kvjax.Quantize(**FOUR_BITS, residual=8),
    kvjax.chain(kvjax.StreamingLLM(12, sinks=2, reposition=True), kvjax.Quantize()),
    kvjax.chain(kvjax.H2O(budget=12), kvjax.Quantize()),
    kvjax.Codebook(0.6, 0.6, interval=3),
    kvjax.chain(kvjax.H2O(budget=12), kvjax.Codebook(0.6, 0.6, interval=2, magnitude=False)),
    kvjax.ClusterKV(8, sinks=2, clusters=3, interval=3, new_clusters=2, dense_layers=()),
    kvjax.ClusterKV(8, sinks=2, clusters=3, per_query_head=True, dense_layers=()),
    kvjax.Quest(12, page=4, dense_layers=()),
    kvjax.chain(kvjax.ClusterKV(8, sinks=2, clusters=3, dense_layers=()), kvjax.Offload()),
    kvjax.chain(kvjax.Quest(12, page=4, per_query_head=True, dense_layers=()), kvjax.Offload()),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    use_small_tiles(monkeypatch)


def decode(transform, implementation):
    """Outputs of some steps after a ragged prompt, and the cache after them."""
    tokens = Tokens.random(rows=2, length=max(PROMPTS) + STEPS, head_dim=DIM)
    cache = kvjax.init_cache(
        transform, batch=2, kv_heads=2, query_heads=4, head_dim=DIM,
        max_prompt=max(PROMPTS), max_new=STEPS,
    )  # fmt: skip
    prompt = tokens.at(right([0, 0], PROMPTS, max(PROMPTS)))
    _, cache = attend(transform, cache, *prompt, phase="prompt", rope=ROPE)
    outs = []
    for step in range(STEPS):
        token = tokens.at(np.reshape(PROMPTS, (2, 1)) + step)
        out, cache = attend(
            transform, cache, *token, phase="decode", rope=ROPE, implementation=implementation
        )
        outs.append(out)
    return jnp.stack(outs), cache


# The others show nearly the same, and run with the slow tests.
FAST = {1, 7, 10, 11, 12}
SOME_SLOW = [
    pytest.param(tx, marks=[pytest.mark.slow] * (n not in FAST)) for n, tx in enumerate(TRANSFORMS)
]


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("transform", SOME_SLOW, ids=repr)
def test_steps_are_those_of_xla(transform, implementation):
    (expected, after), (outs, cache) = (decode(transform, x) for x in ("xla", implementation))
    close(outs, expected)
    leaves = [jax.tree.leaves((x.kv.columns, x.kv.position)) for x in (after, cache)]
    for one, other in zip(*leaves, strict=True):
        close(other, one, what="attention that slots received, and what is left")


@pytest.mark.parametrize("transform", SOME_SLOW, ids=repr)
def test_a_loop_of_steps_lowers_for_cuda_and_never_waits_for_the_host(transform):
    tokens = Tokens.random(rows=2, head_dim=DIM)

    def loop(cache, q, k, v):
        def step(i, carry):
            cache, out = carry
            position = jnp.full((2, 1), i, jnp.int32)
            out, cache = kvjax.attend(
                transform, cache, q + out, k, v, position, phase="decode", rope=ROPE,
                implementation="pallas",
            )  # fmt: skip
            return cache, out

        return jax.lax.fori_loop(0, STEPS, step, (cache, jnp.zeros_like(q)))

    cache = kvjax.init_cache(
        transform, batch=2, kv_heads=2, query_heads=4, head_dim=DIM, max_prompt=20, max_new=STEPS
    )
    text = lower_for_cuda(loop, cache, *tokens.at(np.zeros((2, 1), int))[:3])
    assert KERNEL in text
    calls = set(re.findall(r"custom_call @(\S+?)\(", text)) - {KERNEL, *PLACEMENT}
    assert not calls, f"{calls} may wait for the host"
    assert not re.findall(r"stablehlo\.(infeed|outfeed|send|recv)", text)


def test_a_prompt_has_no_kernel():
    cache = kvjax.init_cache(
        kvjax.Full(), batch=1, kv_heads=2, head_dim=DIM, max_prompt=4, max_new=1
    )
    token = Tokens.random(rows=1, query_heads=2, head_dim=DIM).at(np.arange(4)[None])
    with pytest.raises(ValueError, match=r"got 'pallas'"):
        kvjax.attend(kvjax.Full(), cache, *token, phase="prompt", implementation="pallas")
