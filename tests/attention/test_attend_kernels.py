"""`kvjax.attend` with kernels: the same steps and prompts as by XLA, interpreted and on a GPU."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.attention.layer import layer_caches
from kvjax.testing import control_flow
from tests.support.attending import OPTIONS, Tokens, attend, new_cache, right
from tests.support.attention_cases import KERNELS, use_small_tiles
from tests.support.lowering import KERNEL, lower_for_cuda
from tests.support.marks import slow, some_slow
from tests.support.tolerances import close

PLACEMENT = {"annotate_device_placement", "Sharding", "mhlo.topk"}  # of a device's own

PROMPTS, STEPS, DIM = (20, 7), 4, 16
SIZE = {"batch": 2, "head_dim": DIM, "max_prompt": max(PROMPTS), "max_new": STEPS}
ROPE = kvjax.Rope(jnp.asarray(1.0 / 50.0 ** (np.arange(0, DIM, 2) / DIM), jnp.float32))
FOUR_BITS = {"bits": 4, "group": 8}
TRANSFORMS = [
    kvjax.Full(),
    kvjax.H2O(budget=16),
    kvjax.Every(kvjax.SnapKV(8, window=4), steps=2),
    kvjax.Quantize(),
    kvjax.Quantize(bits="float8"),
    kvjax.Quantize(**FOUR_BITS, key_axis="token"),
    kvjax.Quantize(**FOUR_BITS, residual=8),
    kvjax.Quantize(**FOUR_BITS, key_bits=8),
    kvjax.chain(kvjax.StreamingLLM(12, sinks=2, reposition=True), kvjax.Quantize()),
    kvjax.Codebook(0.6, 0.6, interval=3),
    kvjax.chain(kvjax.H2O(budget=12), kvjax.Codebook(0.6, 0.6, interval=2, magnitude=False)),
    kvjax.ClusterKV(8, sinks=2, clusters=3, interval=3, new_clusters=2, dense_layers=()),
    kvjax.ClusterKV(8, sinks=2, clusters=3, per_query_head=True, dense_layers=()),
    kvjax.Quest(12, page=4, dense_layers=()),
    kvjax.chain(kvjax.ClusterKV(8, sinks=2, clusters=3, dense_layers=()), kvjax.Offload()),
    kvjax.chain(kvjax.Quest(12, page=4, per_query_head=True, dense_layers=()), kvjax.Offload()),
    kvjax.Quantize(rotate=False),
    kvjax.chain(kvjax.Quantize(), kvjax.Quest(12, page=4, dense_layers=())),
    kvjax.chain(
        kvjax.Quantize(**FOUR_BITS, residual=8),
        kvjax.Quest(12, page=4, per_query_head=True, dense_layers=()),
    ),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    use_small_tiles(monkeypatch)


def decode(transform, implementation):
    """Outputs of some steps after a ragged prompt, and the cache after them."""
    tokens = Tokens.random(rows=2, length=max(PROMPTS) + STEPS, head_dim=DIM)
    cache = new_cache(transform, **SIZE)
    prompt = tokens.at(right([0, 0], PROMPTS, max(PROMPTS)))
    _, cache = attend(cache, *prompt, phase="prompt", rope=ROPE)
    outs = []
    for step in range(STEPS):
        token = tokens.at(np.reshape(PROMPTS, (2, 1)) + step)
        out, cache = attend(cache, *token, phase="decode", rope=ROPE, implementation=implementation)
        outs.append(out)
    return jnp.stack(outs), cache


# The others show nearly the same, and run with the slow tests.
SOME_SLOW = some_slow(TRANSFORMS, *(TRANSFORMS[number] for number in (1, 6, 7, 11)))


def held(cache):
    """Returns what is left of the slots, their content, and the attention that they received."""
    kept = []
    for kv in (x.kv for x in layer_caches(cache)):
        rows = (jnp.where(kv.live[..., None], x.read(), 0) for x in (kv.k, kv.v))
        kept += [kv.columns, kv.position, kv.log_mass, *rows]
    return jax.tree.leaves(kept)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("transform", SOME_SLOW, ids=repr)
def test_steps_are_those_of_xla(transform, implementation):
    (expected, after), (outs, cache) = (decode(transform, x) for x in ("xla", implementation))
    close(outs, expected)
    for x, y in zip(held(after), held(cache), strict=True):
        close(y, x, what="attention that slots received, and what is left")


@pytest.mark.parametrize("transform", SOME_SLOW, ids=repr)
def test_a_loop_of_steps_lowers_for_cuda_and_never_waits_for_the_host(transform):
    tokens = Tokens.random(rows=2, head_dim=DIM)

    def loop(cache, q, k, v):
        def step(i, carry):
            cache, out = carry
            position = jnp.full((2, 1), i, jnp.int32)
            out, cache = kvjax.attend(
                cache, q + out, k, v, position, phase="decode", rope=ROPE,
                implementation="pallas",
            )  # fmt: skip
            return cache, out

        return jax.lax.fori_loop(0, STEPS, step, (cache, jnp.zeros_like(q)))

    cache = new_cache(transform, **SIZE)
    text = lower_for_cuda(loop, cache, *tokens.at(np.zeros((2, 1), int))[:3])
    assert KERNEL in text
    calls = set(re.findall(r"custom_call @(\S+?)\(", text)) - {KERNEL, *PLACEMENT}
    assert not calls, f"{calls} may wait for the host"
    assert not re.findall(r"stablehlo\.(infeed|outfeed|send|recv)", text)


# --- prompts --------------------------------------------------------------------------------------

CHUNKS = ((12, 7), (8, 0))  # tokens of each row
READERS = {
    "full": kvjax.Full(),
    "h2o": kvjax.H2O(budget=12),
    "snapkv": kvjax.SnapKV(8, window=4),
    "pyramidinfer": kvjax.bind(kvjax.PyramidInfer(0.8, 0.6), 4)[2],
    "snapkv, h2o, quantize": kvjax.chain(
        kvjax.SnapKV(14, window=4), kvjax.H2O(budget=12), kvjax.Quantize()
    ),
    "unrotated keys": kvjax.StreamingLLM(12, sinks=2, reposition=True),
    "head groups": kvjax.HeadGroups(
        (((0,), kvjax.H2O(budget=12)), ((1,), kvjax.SnapKV(8, window=4)))
    ),
    "kvmerger": kvjax.KVMerger(10, recent=4, heavy=2),
    "kvmerger, anchors": kvjax.KVMerger(epsilon=0.2, against="anchor", recent=4, heavy=2),
    "chelsea": kvjax.Chelsea(12, sinks=2, recent=4, chunk=8, interval=4),
    "chelsea, whole": kvjax.Chelsea(12, sinks=2, recent=4, chunk="whole", interval=4),
    "cam": kvjax.CaM(kvjax.StreamingLLM(10), prompt=True, expected=True, merge_tokens=5),
    "clusterkv": kvjax.ClusterKV(8, sinks=3, chunk=8, tokens_per_cluster=3, dense_layers=()),
    "clusterkv, l2": kvjax.ClusterKV(8, sinks=3, clusters=4, metric="l2", dense_layers=()),
    "kvcrush": kvjax.KVCrush(kvjax.StreamingLLM(8, sinks=2), 6, kmeans=True),
}
LOGITS = {
    "plain": {}, "window and soft cap": {"window": 9, "soft_cap": 2.0},
    "sinks": {"sinks": np.array([0.5, 6.0, -2.0, 3.0], np.float32)},
}  # fmt: skip


def read(transform, implementation, **logits):
    """Outputs of a ragged prompt in two chunks, and the cache after them."""
    tokens = Tokens.random(rows=2, length=max(PROMPTS), head_dim=DIM)
    of_logits = {name: x for name, x in logits.items() if name in OPTIONS}
    cache = new_cache(transform, **SIZE, **of_logits)
    outs, start = [], np.zeros(2, int)
    for number, counts in enumerate(CHUNKS):
        chunk = tokens.at(right(start, counts, max(counts)))
        out, cache = attend(
            cache, *chunk, phase="prompt", last=number == 1, rope=ROPE,
            implementation=implementation, **logits,
        )  # fmt: skip
        outs.append(out)
        start += counts
    return jnp.concatenate(outs, axis=2), cache


# Options of methods that are read otherwise, and compositions of those that are not.
OPTIONAL = {"kvmerger, anchors", "chelsea, whole", "clusterkv, l2", "snapkv, h2o, quantize"}


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize(
    ("name", "logits"),
    some_slow(
        [
            *((name, "plain") for name in READERS),
            ("snapkv", "window and soft cap"), ("head groups", "window and soft cap"),
            ("full", "sinks"), ("h2o", "sinks"), ("pyramidinfer", "sinks"),
        ],
        ("h2o", "plain"),
        exhaustive=[
            *((name, "plain") for name in OPTIONAL), ("head groups", "window and soft cap")
        ],
    ),
)  # fmt: skip
def test_prompts_are_those_of_xla(name, logits, implementation):
    (expected, after), (out, cache) = (
        read(READERS[name], x, **LOGITS[logits]) for x in ("xla", implementation)
    )
    close(out, expected)
    for x, y in zip(held(after), held(cache), strict=True):
        close(y, x, what="attention that slots received, and what is left")


@pytest.mark.parametrize("implementation", KERNELS)
def test_a_flush_takes_the_implementation_that_it_is_given(implementation):
    transform, caches = kvjax.Every(kvjax.SnapKV(8, window=4), steps=2), []
    flush = jax.jit(kvjax.flush, static_argnames=("steps", "implementation"))
    for name in ("xla", implementation):
        _, cache = decode(transform, name)
        caches.append(flush(cache, implementation=name))
    for x, y in zip(*map(held, caches), strict=True):
        close(y, x)
    with pytest.raises(ValueError, match=r"'xla'.*'cuda'"):
        flush(caches[0], implementation="cuda")


@pytest.mark.parametrize(
    "name", ["snapkv, h2o, quantize", *slow("full", "pyramidinfer", "head groups")]
)
def test_a_prompt_lowers_for_cuda_without_a_loop_of_attention(name):
    tokens, transform = Tokens.random(rows=2, length=20, head_dim=DIM), READERS[name]

    def prompt(cache, *tokens):
        return kvjax.attend(cache, *tokens, phase="prompt", rope=ROPE, implementation="pallas")

    cache = new_cache(transform, **SIZE)
    chunk = tokens.at(np.tile(np.arange(20), (2, 1)))
    found = control_flow(jax.make_jaxpr(prompt)(cache, *chunk).jaxpr)
    assert "while" not in found, "a loop whose length the device knows alone"
    assert KERNEL in lower_for_cuda(prompt, cache, *chunk)
