"""A decode step over a codebook, and over keys and values in fewer bits, against the full cache.

    python benchmarks/payload_step.py --out benchmarks/results/payload_step_cpu.json

One attention layer of Llama-3.1-8B's shape. Keys and values have a true codebook: each is one of
many random directions and a little noise, of random length. There are as many directions as leave
SpindleKV, which keeps half of the tokens, 0.8 entries for each vector it keeps, and 0.5 where it
keeps 0.8 of them. Loops of 32 steps, so that each encodes what is new once, are timed in turn and
the medians per step compared. Beside the time stand the bytes that a step reads once at least: of
the payloads as they are stored, positions and masses.

Then what a cover takes of all vectors of the layer, keys and values, against the prompt pass of
the whole decoder layer over as many tokens: at the first setting's directions, and where all
directions are random and nothing is near anything.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from common import interleaved_medians, write
from compress_overhead import LAYER, prompt_side
from decode_step import GROUP, HEAD_DIM, KV_HEADS, MAX_NEW, decode_side
from decode_step import tokens as random_tokens
from flax import nnx

import kvjax
from kvjax.models.blocks import DecoderLayer
from kvjax.models.rope_scaling import make_rope
from kvjax.storage.references import CodebookPayload
from pallas_kernels import greedy_cover

STEPS = 32  # the codebook's interval
# (kept share, entries per kept vector): the directions of the data, per kept vector, that leave as
# many. With x vectors a direction, (1 - exp(-x)) / x of them are the first of theirs.
SETTINGS = {(0.5, 0.8): 2.155, (0.8, 0.5): 0.6275}


def alike_tokens(directions: int, count: int, seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Random q; k and v near some of `directions` directions, of random lengths."""

    def near(key: jax.Array, centers: jax.Array) -> jax.Array:
        which, noise, length = jax.random.split(key, 3)
        chosen = jax.random.randint(which, (1, KV_HEADS, count), 0, directions)
        shape = (*chosen.shape, HEAD_DIM)
        rows = centers[chosen] + 0.05 * jax.random.normal(noise, shape)
        return rows * jax.random.uniform(length, (*chosen.shape, 1), minval=0.5, maxval=1.5)

    @jax.jit
    def make(seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(jax.random.key(seed), 2)
        names = jax.random.split(jax.random.key(0), 2)  # one set of directions for every seed
        return tuple(
            near(key, jax.random.normal(name, (directions, HEAD_DIM)))
            for key, name in zip(keys, names, strict=True)
        )

    return random_tokens(count, seed)[0], *make(seed)


def described(cache: kvjax.LayerCache) -> dict[str, object]:
    """Bytes of a cache after the prompt, and what a codebook found."""
    kv = cache.kv
    kept = int(kv.live.sum())
    said = {
        "cache_bytes": kvjax.nbytes(cache),
        "read_bytes": kvjax.nbytes((kv.k, kv.v, kv.position, kv.log_mass)),
        "kept_share": round(kept / (KV_HEADS * int(kv.length.sum())), 4),
    }
    if isinstance(kv.k, CodebookPayload) and isinstance(kv.v, CodebookPayload):
        found = kvjax.reserve_ratio([cache], kv.length)
        said |= {
            "entries_per_kept_vector": [round(int(x.count.sum()) / kept, 4) for x in (kv.k, kv.v)],
            "reserve": {name: round(value, 4) for name, value in vars(found).items()},
        }
    return said


def cover_side(directions: int | None, prompt: int) -> Callable[[], object]:
    """Covers of all keys and all values of the layer; directions: None: all random."""
    make = random_tokens if directions is None else functools.partial(alike_tokens, directions)
    _, k, v = jax.block_until_ready(make(prompt, 0))
    k, v = (x.swapaxes(1, 2).reshape(1, -1, HEAD_DIM) for x in (k, v))
    ones = jnp.ones(k.shape[:2], jnp.int32)
    run = jax.jit(functools.partial(greedy_cover, capacity=k.shape[1]), static_argnames="theta")

    def side() -> object:
        keys = jax.block_until_ready(run(k, ones > 0, ones, theta=0.98))
        return keys, run(v, ones > 0, ones, theta=0.95)

    return side


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-tokens", type=int, default=32_768)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--prompt-rounds", type=int, default=1)
    parser.add_argument("--out")
    args = parser.parse_args()
    if (args.rounds + 1) * STEPS > MAX_NEW:
        parser.error(f"--rounds must be below {MAX_NEW // STEPS}")
    count, vectors = args.prompt_tokens, KV_HEADS * args.prompt_tokens
    rope = make_rope(LAYER.rope, count)
    side = functools.partial(decode_side, steps_per_call=STEPS, rope=rope, describe=described)
    sides, said = {}, {}
    fewer_bits = {
        "int8": kvjax.Quantize(8),
        "4 bits, token": kvjax.Quantize(4, key_axis="token"),
        "4 bits, channel": kvjax.Quantize(4),
    }
    for name, transform in {"full": kvjax.Full(), **fewer_bits}.items():
        sides[name], said[name] = side(transform, count)
    for (kept, entries), directions in SETTINGS.items():
        name = f"spindlekv {kept} x {entries}"
        # A few more: how many there are is a matter of chance.
        transform = kvjax.SpindleKV(kept, capacity=int(1.01 * kept * entries * vectors))
        made = functools.partial(alike_tokens, round(directions * kept * vectors))
        sides[name], said[name] = side(kvjax.bind(transform, 1)[0], count, tokens=made)
    seconds = interleaved_medians(sides, args.rounds)
    step = {name: s / STEPS for name, s in seconds.items()}
    sides.clear()

    weights = nnx.split(DecoderLayer(LAYER, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    (kept, _), directions = next(iter(SETTINGS.items()))
    passes = {
        "prompt pass": prompt_side(kvjax.Full(), count, weights),
        "cover": cover_side(round(directions * kept * vectors), count),
        "cover, nothing alike": cover_side(None, count),
    }
    passes = interleaved_medians(passes, args.prompt_rounds)
    write(
        args.out,
        {
            "benchmark": "payload_step",
            "shape": {
                "prompt_tokens": count, "kv_heads": KV_HEADS, "group": GROUP,
                "head_dim": HEAD_DIM, "dtype": "float32",
            },
            "rounds": args.rounds,
            "steps_per_round": STEPS,
            "milliseconds": {name: round(1e3 * s, 3) for name, s in step.items()},
            "times_as_long_as_full": {
                name: round(s / step["full"], 3) for name, s in step.items()
            },
            "caches": said,
            "cover_vectors": vectors,
            "seconds": {name: round(s, 2) for name, s in passes.items()},
            "cover_over_prompt_pass": {
                name: round(s / passes["prompt pass"], 3)
                for name, s in passes.items()
                if name.startswith("cover")
            },
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
