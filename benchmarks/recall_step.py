"""A decode step that recalls clusters against a step over the full cache, one attention layer.

    python benchmarks/recall_step.py --out benchmarks/results/recall_step_cpu.json

Both sides read the same prompt; then compiled loops of a few steps of each are timed in turn, and
the medians per step are compared. Choosing the slots (ranking the clusters and making the list) is
timed by itself too, in the same rounds. What k-means over the prompt costs is given as a share of
the prompt pass of one decoder layer of Llama-3.1-8B's shape, of as many tokens. Keys are random, so
that k-means takes all its rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from common import interleaved_medians, write
from compress_overhead import LAYER, kmeans_side, prompt_side
from decode_step import GROUP, HEAD_DIM, KV_HEADS, MAX_NEW, STEPS, decode_side, einsum_side, tokens
from flax import nnx

import kvjax
from kvjax.models.blocks import DecoderLayer

CHOICES = 64  # per timed loop: one alone is too short


def choose_side(transform: kvjax.ClusterKV, prompt: int) -> Callable[[], object]:
    """Choosing the slots of a step, again and again."""
    cache = kvjax.init_cache(
        transform, batch=1, kv_heads=KV_HEADS, query_heads=KV_HEADS * GROUP, head_dim=HEAD_DIM,
        max_prompt=prompt, max_new=MAX_NEW, dtype=jnp.float32,
    )  # fmt: skip
    read = jax.jit(functools.partial(kvjax.attend, transform, phase="prompt"), donate_argnums=0)
    _, cache = jax.block_until_ready(read(cache, *tokens(prompt, 0), jnp.arange(prompt)[None]))
    q, _, _ = tokens(1, 1)
    none = jnp.full((1, KV_HEADS, 1), cache.kv.slots, jnp.int32)  # no new token

    @jax.jit
    def choose(cache, q):
        def once(_, q):
            view, _ = transform.select(kvjax.View(cache.kv, none), cache.state, q)
            return q + 1e-12 * view.index.sum()  # the next choice waits for this one

        return jax.lax.fori_loop(0, CHOICES, once, q)

    return functools.partial(choose, cache, q)


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-tokens", type=int, default=32_768)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--clusters", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--prompt-rounds", type=int, default=1)
    parser.add_argument("--out")
    args = parser.parse_args()
    if (args.rounds + 1) * STEPS > MAX_NEW:
        parser.error(f"--rounds must be below {MAX_NEW // STEPS}")
    count, methods = args.prompt_tokens, {"full": kvjax.Full()}
    # It is flushed once while the rounds run.
    cluster = kvjax.ClusterKV(
        args.budget, clusters=args.clusters, interval=MAX_NEW // 2, dense_layers=()
    )
    methods["clusterkv"] = cluster
    methods["clusterkv per query head"] = dataclasses.replace(cluster, per_query_head=True)
    methods["quest"] = kvjax.Quest(args.budget, dense_layers=())
    sides, cache_bytes = {"einsum": einsum_side(count + MAX_NEW)}, {}
    for name, transform in methods.items():
        sides[name], cache_bytes[name] = decode_side(transform, count)
    sides["choosing"] = choose_side(cluster, count)
    seconds = interleaved_medians(sides, args.rounds)
    choosing = seconds.pop("choosing") / CHOICES
    step = {name: s / STEPS for name, s in seconds.items()}
    sides.clear()

    weights = nnx.split(DecoderLayer(LAYER, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    passes = {
        "prompt pass": prompt_side(kvjax.Full(), count, weights),
        "kmeans": kmeans_side(args.clusters, cluster.iterations, count),
    }
    seconds = interleaved_medians(passes, args.prompt_rounds)
    write(
        args.out,
        {
            "benchmark": "recall_step",
            "shape": {
                "prompt_tokens": count, "kv_heads": KV_HEADS, "group": GROUP,
                "head_dim": HEAD_DIM, "dtype": "float32", "budget": args.budget,
                "clusters": args.clusters, "interval": cluster.interval,
            },
            "rounds": args.rounds,
            "milliseconds": {name: round(1e3 * s, 3) for name, s in step.items()},
            "times_as_fast_as_full": {
                name: round(step["full"] / step[name], 2) for name in methods
            },
            "choosing_milliseconds": round(1e3 * choosing, 3),
            "choosing_percent_of_step": round(100 * choosing / step["clusterkv"], 2),
            "choosing_percent_of_full_step": round(100 * choosing / step["full"], 2),
            "prompt_pass_seconds": round(seconds["prompt pass"], 2),
            "kmeans_seconds": round(seconds["kmeans"], 3),
            "kmeans_percent_of_prompt_pass": round(
                100 * seconds["kmeans"] / seconds["prompt pass"], 2
            ),
            "cache_bytes": cache_bytes,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
