"""A decode step through a compressed cache against the full cache, one attention layer.

    python benchmarks/decode_step.py --out benchmarks/results/decode_step_cpu.json

Each method reads the same prompt; then a compiled loop of a few steps of each is timed in turn,
round after round, and the medians per step are compared. `einsum` is the floor: plain attention,
two `jnp.einsum` and a softmax, over arrays of the size of the full cache, with nothing stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from common import interleaved_medians, parser_of, write

import kvjax

KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128  # Llama-3.1-8B
MAX_NEW = 256
STEPS = 4  # per timed loop; every step's query depends on the step before


def tokens(count: int, seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Random q, k and v of `count` tokens."""
    heads = (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
    keys = jax.random.split(jax.random.key(seed), 3)
    q, k, v = (
        jax.random.normal(key, (1, n, count, HEAD_DIM)) for key, n in zip(keys, heads, strict=True)
    )
    return q, k, v


def decode_side(
    transform: kvjax.KVTransform,
    prompt: int,
    *,
    steps_per_call: int = STEPS,
    rope: kvjax.Rope | None = None,
) -> tuple[Callable[[], object], int]:
    """A function that makes some more steps after a prompt it has read, and its cache's bytes.

    Args:
      transform, prompt: the method, and how many tokens its prompt has.
      steps_per_call: how many more.
      rope: rotates queries and keys, where given.
    """
    cache = kvjax.init_cache(
        transform, batch=1, kv_heads=KV_HEADS, query_heads=KV_HEADS * GROUP, head_dim=HEAD_DIM,
        max_prompt=prompt, max_new=MAX_NEW, dtype=jnp.float32, layer=0,
    )  # fmt: skip
    attend = functools.partial(kvjax.attend, rope=rope)
    read = jax.jit(functools.partial(attend, phase="prompt"), donate_argnums=0)
    _, cache = jax.block_until_ready(read(cache, *tokens(prompt, 0), jnp.arange(prompt)[None]))
    cache_bytes = kvjax.nbytes(cache)
    q, k, v = jax.block_until_ready(tokens(1, 1))

    @functools.partial(jax.jit, donate_argnums=0)
    def steps(cache, position):
        def step(_, carry):
            cache, out, position = carry
            out, cache = attend(cache, q + out, k, v, position, phase="decode")
            return cache, out, position + 1

        return jax.lax.fori_loop(0, steps_per_call, step, (cache, jnp.zeros_like(q), position))

    held, made = {"cache": cache, "position": jnp.array([[prompt]])}, 0
    interval = kvjax.flush_interval(cache)
    flush = jax.jit(kvjax.flush, donate_argnums=0)

    def side():
        nonlocal made
        held["cache"], out, held["position"] = steps(held["cache"], held["position"])
        before, made = made, made + steps_per_call
        if interval is not None and made // interval > before // interval:
            held["cache"] = flush(held["cache"])
        return out

    return side, cache_bytes


def einsum_side(slots: int) -> Callable[[], object]:
    """Plain attention over `slots` slots."""
    q, _, _ = tokens(1, 1)
    _, k, v = jax.block_until_ready(tokens(slots, 0))

    def attention(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("bhgd,bhsd->bhgs", q, k) * HEAD_DIM**-0.5, axis=-1)
        return jnp.einsum("bhgs,bhsd->bhgd", weights, v)

    @jax.jit
    def steps(q, k, v):
        return jax.lax.fori_loop(0, STEPS, lambda _, out: attention(q + out, k, v), 0 * q)

    q = q.reshape(1, KV_HEADS, GROUP, HEAD_DIM)
    return lambda: steps(q, k, v)


def main() -> None:
    """Runs it."""
    parser = parser_of(__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=32_768)
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument("--methods", nargs="+", help="some of them, with the full cache; all")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out")
    args = parser.parse_args()
    if (args.rounds + 1) * STEPS > MAX_NEW:
        parser.error(f"--rounds must be below {MAX_NEW // STEPS}")
    methods = {
        "full": kvjax.Full(),
        "streaming_llm": kvjax.StreamingLLM(args.budget),
        "h2o": kvjax.H2O(args.budget),
        "snapkv": kvjax.SnapKV(args.budget),
        "clusterkv": kvjax.ClusterKV(args.budget, dense_layers=()),
        "quest": kvjax.Quest(args.budget, dense_layers=()),
        "quantize, 8 bits": kvjax.Quantize(8),
        "quantize, 4 bits": kvjax.Quantize(4),
    }
    if args.methods is not None:
        if unknown := set(args.methods) - set(methods):
            parser.error(f"the methods are {', '.join(methods)}, got {', '.join(unknown)}")
        methods = {name: methods[name] for name in ("full", *args.methods)}
    sides, cache_bytes = {"einsum": einsum_side(args.prompt_tokens + MAX_NEW)}, {}
    for name, transform in methods.items():
        layer = kvjax.bind(transform, 1)[0]
        sides[name], cache_bytes[name] = decode_side(layer, args.prompt_tokens)
    seconds = {name: s / STEPS for name, s in interleaved_medians(sides, args.rounds).items()}
    write(
        args.out,
        {
            "benchmark": "decode_step",
            "shape": {
                "prompt_tokens": args.prompt_tokens, "kv_heads": KV_HEADS, "group": GROUP,
                "head_dim": HEAD_DIM, "dtype": "float32", "budget": args.budget,
            },
            "rounds": args.rounds,
            "milliseconds": {name: round(1e3 * s, 3) for name, s in seconds.items()},
            "full_over_einsum": round(seconds["full"] / seconds["einsum"], 3),
            "times_as_fast_as_full": {
                name: round(seconds["full"] / seconds[name], 2) for name in methods
            },
            "cache_bytes": cache_bytes,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
