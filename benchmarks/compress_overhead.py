"""What compressing a prompt costs, as a share of the prompt pass of one layer.

    python benchmarks/compress_overhead.py --out benchmarks/results/compress_overhead_cpu.json

One decoder layer of Llama-3.1-8B's shape reads a prompt: norms, projections, attention and MLP,
with random weights. What each method then does with the layer's cache (choosing, merging, moving
what is left together) is timed by itself, and so is a decode step through what it leaves. A plain
matrix product of the same run says how fast the layer could have been. Column sums of the attention
matrix, which H2O, KVMerger and CaM need, belong to the prompt pass and are given apart; the full
cache's "compression" is a copy.

Clustering is measured after a long prompt too: ClusterKV with 16 tokens a cluster, in chunks, and
k-means with 400 clusters over all keys at once, as `recall_step.py` measures it. Keys are those of
random weights. `limits` are the shares that are not to be exceeded, each with what was measured.
"""

from __future__ import annotations

import argparse
import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from common import interleaved_medians, write
from decode_step import KV_HEADS, STEPS, decode_side
from decode_step import tokens as random_tokens
from flax import nnx

import kvjax
from kvjax.decisions import carry_out
from kvjax.models import DecoderConfig, RopeConfig
from kvjax.models.blocks import DecoderLayer
from pallas_kernels import kmeans

PROMPT, LONG_PROMPT = 8192, 32_768
CLUSTERS, PER_CLUSTER = 400, 16
# Per cent of the prompt pass: what is measured, after a prompt of how many tokens, at most so much.
LIMITS = (
    ("snapkv", PROMPT, 0.3), ("kvcrush beyond snapkv", PROMPT, 0.1), ("chelsea", PROMPT, 1.0),
    ("kvmerger", PROMPT, 0.5), ("clusterkv", PROMPT, 5.0), ("clusterkv", LONG_PROMPT, 5.0),
    ("kmeans", LONG_PROMPT, 3.0),
)  # fmt: skip
LAYER = DecoderConfig(
    vocab_size=2, hidden_size=4096, intermediate_size=14_336, num_layers=1, query_heads=32,
    kv_heads=8, head_dim=128, rope=RopeConfig(rotary_dim=128, theta=500_000.0),
    max_positions=131_072,
)  # fmt: skip


def methods(budget: float) -> dict[str, kvjax.KVTransform]:
    """What is measured. KVCrush's base has what its representatives leave of the budget."""
    snapkv = kvjax.SnapKV(budget)
    return {
        "full": kvjax.Full(),
        "streaming_llm": kvjax.StreamingLLM(budget),
        "h2o": kvjax.H2O(budget),
        "snapkv": snapkv,
        "pyramidinfer": kvjax.PyramidInfer(budget).for_layer(0, 32),
        "chelsea": kvjax.Chelsea(budget),
        "kvmerger": kvjax.KVMerger(budget),
        "kvcrush": kvjax.KVCrush(snapkv, share=0.25),
        "cam": kvjax.CaM(kvjax.StreamingLLM(budget)),
        "clusterkv": clusterkv(budget),
    }


def clusterkv(budget: float) -> kvjax.ClusterKV:
    """Clusters of a given size, whatever the budget."""
    return kvjax.ClusterKV(budget, tokens_per_cluster=PER_CLUSTER, dense_layers=())


@dataclass(frozen=True)
class Uncompressed(kvjax.KVTransform):
    """Leaves what a method would have compressed, and what it would have been told."""

    base: kvjax.KVTransform

    needs = property(lambda self: self.base.needs)

    def init(self, cache: kvjax.KVCache, layer: int) -> tuple[kvjax.KVCache, object]:
        """The method's columns and state."""
        return self.base.init(cache, layer)

    def on_prompt(self, cache, state, step) -> tuple[None, object]:
        """Nothing is compressed; the state is the method's own and the step."""
        return None, (state, step)


def empty_cache(transform: kvjax.KVTransform, tokens: int) -> kvjax.LayerCache:
    """Of the layer."""
    return kvjax.init_cache(
        transform, batch=1, kv_heads=LAYER.kv_heads, query_heads=LAYER.query_heads,
        head_dim=LAYER.head_dim, max_prompt=tokens, max_new=0, dtype=jnp.float32,
        layer=0,
    )  # fmt: skip


def prompt_side(transform: kvjax.KVTransform, tokens: int, weights) -> Callable[[], Any]:
    """The layer's whole prompt pass, without compression."""
    graph, state = weights
    held = Uncompressed(transform)
    positions = jnp.arange(tokens)[None]
    x = jax.random.normal(jax.random.key(0), (1, tokens, LAYER.hidden_size))

    @jax.jit
    def read(state, x):
        cache = empty_cache(held, tokens)
        layer = nnx.merge(graph, state)
        return layer(x, positions, cache, layer=held, phase="prompt", last=True)

    return functools.partial(read, state, x)


def compress_side(
    transform: kvjax.KVTransform, tokens: int, cache: kvjax.LayerCache
) -> Callable[[], object]:
    """A method's compression of a layer's cache."""
    capacity = empty_cache(transform, tokens).kv.capacity

    @jax.jit
    def compress(cache):
        state, step = cache.state
        decision, _ = transform.on_prompt(cache.kv, state, step)
        kv = cache.kv if decision is None else carry_out(decision, cache.kv, step)
        return kv if kv.slots == capacity else kvjax.compact(kv, capacity)

    return functools.partial(compress, cache)


def kmeans_side(clusters: int, rounds: int, prompt: int) -> Callable[[], object]:
    """k-means over the keys of a prompt, which are random: it takes all its rounds."""
    _, keys, _ = jax.block_until_ready(random_tokens(prompt, 0))
    members = jnp.ones(keys.shape[:3], bool)
    there = jnp.ones((1, KV_HEADS, clusters), bool)
    run = jax.jit(functools.partial(kmeans, metric="cosine", rounds=rounds))
    return functools.partial(run, keys, members, keys[:, :, :clusters], there)


def clustering(tokens: int, budget: float, rounds: int, prompt_rounds: int, weights) -> dict:
    """What clustering costs after a long prompt."""
    prompt = interleaved_medians(
        {"pass": prompt_side(kvjax.Full(), tokens, weights)}, prompt_rounds
    )["pass"]
    transform = clusterkv(budget)
    _, cache = prompt_side(transform, tokens, weights)()
    gc.collect()  # the hidden states of the prompt passes
    clusters = min(CLUSTERS, tokens)
    sides = {
        "clusterkv": compress_side(transform, tokens, cache),
        "kmeans": kmeans_side(clusters, transform.iterations, tokens),
    }
    seconds = interleaved_medians(sides, rounds)
    return {
        "prompt_tokens": tokens, "tokens_per_cluster": PER_CLUSTER, "kmeans_clusters": clusters,
        "iterations": transform.iterations, "prompt_pass_seconds": round(prompt, 3),
        "compress_milliseconds": {name: round(1e3 * s, 2) for name, s in seconds.items()},
        "compress_percent_of_prompt_pass": {
            name: round(100 * s / prompt, 3) for name, s in seconds.items()
        },
    }  # fmt: skip


def limits(shares: dict[int, dict[str, float]]) -> list[dict]:
    """`LIMITS` that were measured, of shares by length of the prompt and name."""
    return [
        {
            "what": what, "prompt_tokens": tokens, "most_percent": most,
            "percent": shares[tokens][what], "met": shares[tokens][what] <= most,
        }
        for what, tokens, most in LIMITS
        if what in shares.get(tokens, {})
    ]  # fmt: skip


def operations(tokens: int) -> float:
    """Multiplications and additions of a prompt pass's matrix products; attention is causal."""
    attention = LAYER.hidden_size * LAYER.head_dim * 2 * (LAYER.query_heads + LAYER.kv_heads)
    mlp = 3 * LAYER.hidden_size * LAYER.intermediate_size
    pairs = tokens * (tokens + 1) / 2
    return 2 * tokens * (attention + mlp) + 4 * pairs * LAYER.query_heads * LAYER.head_dim


def matmul_side() -> tuple[Callable[[], object], float]:
    """A plain matrix product of the MLP's shape, and its operations."""
    rows, inner, columns = 2048, LAYER.hidden_size, LAYER.intermediate_size
    a, b = (
        jax.random.normal(jax.random.key(i), s)
        for i, s in ((0, (rows, inner)), (1, (inner, columns)))
    )
    return functools.partial(jax.jit(jnp.matmul), a, b), 2.0 * rows * inner * columns


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT)
    parser.add_argument("--long-prompt-tokens", type=int, default=LONG_PROMPT)
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--prompt-rounds", type=int, default=2)
    parser.add_argument("--long-rounds", type=int, default=3, help="after the long prompt")
    parser.add_argument("--methods", nargs="+", choices=methods(0.2))
    parser.add_argument("--out")
    args = parser.parse_args()
    tokens, chosen = args.prompt_tokens, methods(args.budget)
    chosen = {name: chosen[name] for name in args.methods or chosen}
    weights = nnx.split(DecoderLayer(LAYER, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    matmul, matmul_operations = matmul_side()
    passes = {"full": prompt_side(kvjax.Full(), tokens, weights), "matmul": matmul}
    passes["with_column_sums"] = prompt_side(kvjax.H2O(args.budget), tokens, weights)
    seconds = interleaved_medians(passes, args.prompt_rounds)
    prompt = seconds["full"]
    rates = operations(tokens) / prompt, matmul_operations / seconds["matmul"]

    sides = {}
    for name, transform in chosen.items():
        _, cache = prompt_side(transform, tokens, weights)()
        sides[name] = compress_side(transform, tokens, cache)
    compress = interleaved_medians(sides, args.rounds)
    sides, cache_bytes = {}, {}
    for name, transform in chosen.items():
        sides[name], cache_bytes[name] = decode_side(transform, tokens)
    decode = {name: s / STEPS for name, s in interleaved_medians(sides, args.rounds).items()}

    def percent(part: float) -> float:
        return round(100 * part / prompt, 3)

    share = {name: percent(s) for name, s in compress.items()}
    if {"kvcrush", "snapkv"} <= share.keys():
        share["kvcrush beyond snapkv"] = percent(compress["kvcrush"] - compress["snapkv"])
    long = clustering(args.long_prompt_tokens, args.budget, args.long_rounds, 1, weights)
    shares = {long["prompt_tokens"]: long["compress_percent_of_prompt_pass"], tokens: share}
    write(
        args.out,
        {
            "benchmark": "compress_overhead",
            "shape": {
                "prompt_tokens": tokens, "hidden": LAYER.hidden_size,
                "intermediate": LAYER.intermediate_size, "query_heads": LAYER.query_heads,
                "kv_heads": LAYER.kv_heads, "head_dim": LAYER.head_dim, "dtype": "float32",
                "budget": args.budget,
            },
            "rounds": args.rounds,
            "prompt_pass_seconds": round(prompt, 3),
            "prompt_pass_gflops": round(rates[0] / 1e9, 1),
            "matmul_gflops": round(rates[1] / 1e9, 1),
            "prompt_pass_over_matmul_rate": round(rates[0] / rates[1], 3),
            "column_sums_percent": percent(seconds["with_column_sums"] - prompt),
            "compress_milliseconds": {name: round(1e3 * s, 2) for name, s in compress.items()},
            "compress_percent_of_prompt_pass": share,
            "after_a_long_prompt": long,
            "limits": limits(shares),
            "decode_milliseconds": {name: round(1e3 * s, 3) for name, s in decode.items()},
            "cache_bytes": cache_bytes,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
