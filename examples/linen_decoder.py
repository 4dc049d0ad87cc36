"""A Flax Linen decoder of one's own whose attention is kvjax, and a loop of one's own around it.

    python examples/linen_decoder.py

A Linen module is a function of its parameters, and a cache is a value that goes in and comes out:
nothing here is a mutable collection. The prompts have different lengths: -1 as a position marks
padding, and each row has its own budget. On a mesh with the axes `data` and `tensor`, rows are
divided over `data` and heads over `tensor`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kvjax

VOCABULARY, WIDTH, LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 128, 64, 2, 4, 2, 16
LENGTHS, PROMPT, NEW = (48, 31, 40, 9), 48, 12
LARGE = linen.initializers.normal(0.3)  # with usual random weights a token would repeat itself
Dense = functools.partial(linen.Dense, kernel_init=LARGE)
ROPE = kvjax.Rope(inv_freq=1.0 / 1000.0 ** (jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM))
METHODS = {
    "full": kvjax.Full(),
    "streaming_llm": kvjax.StreamingLLM(budget=16, sinks=2),
    "snapkv, 8 bits": kvjax.chain(kvjax.SnapKV(budget=0.5, window=8), kvjax.Quantize(8)),
}


class Attention(linen.Module):
    """Projections around one call of `kvjax.attend`."""

    @linen.compact
    def __call__(self, x, positions, cache, phase):
        """What attention adds, and the cache with the new tokens."""

        def heads(name: str, count: int) -> jax.Array:
            y = Dense(count * HEAD_DIM, use_bias=False, name=name)(x)
            return y.reshape(*y.shape[:2], count, HEAD_DIM)

        qkv = heads("q", QUERY_HEADS), heads("k", KV_HEADS), heads("v", KV_HEADS)
        out, cache = kvjax.attend(cache, *qkv, positions, phase=phase, rope=ROPE, layout="BTHD")
        return Dense(WIDTH, use_bias=False, name="out")(out.reshape(*x.shape[:2], -1)), cache


class Decoder(linen.Module):
    """Token ids to logits, and caches to caches."""

    @linen.compact
    def __call__(self, tokens, positions, caches, phase):
        """Logits of every token, and the new caches."""
        embed = linen.Embed(VOCABULARY, WIDTH, name="embed")
        x, written = embed(jnp.where(positions >= 0, tokens, 0)), []
        for i, cache in enumerate(caches):
            y = linen.RMSNorm(name=f"attention_norm_{i}")(x)
            attention = Attention(name=f"attention_{i}")
            added, cache = attention(y, positions, cache, phase)
            x, y = x + added, linen.RMSNorm(name=f"mlp_norm_{i}")(x + added)
            y = jax.nn.gelu(Dense(4 * WIDTH, name=f"up_{i}")(y))
            x = x + Dense(WIDTH, name=f"down_{i}")(y)
            written.append(cache)
        return embed.attend(linen.RMSNorm(name="norm")(x)), tuple(written)


def empty_caches(method: kvjax.KVTransform, mesh: Mesh | None = None) -> tuple:
    """A cache for each layer, which flushes itself where its method wants that."""
    return kvjax.self_flushing(kvjax.init_caches(
        method, num_layers=LAYERS, batch=len(LENGTHS), kv_heads=KV_HEADS, query_heads=QUERY_HEADS,
        head_dim=HEAD_DIM, max_prompt=PROMPT, max_new=NEW, dtype=jnp.float32, mesh=mesh,
    ))  # fmt: skip


def padded_positions() -> jax.Array:
    """Positions `[rows, PROMPT]`: 0, 1, ... and -1 behind the end of a row."""
    return kvjax.positions_of(jnp.arange(PROMPT)[None] < jnp.array(LENGTHS)[:, None])


def random_parameters(mesh: Mesh | None = None) -> Mapping[str, Any]:
    """Parameters, of which a mesh gets those with heads or MLP channels divided over `tensor`."""
    one = jnp.zeros((len(LENGTHS), 1), jnp.int32)
    model = functools.partial(Decoder().init, phase="prompt")
    params = model(jax.random.key(0), one, one, empty_caches(kvjax.Full()))
    if mesh is None:
        return params
    specs = {"q": (None, "tensor"), "k": (None, "tensor"), "v": (None, "tensor"),
             "up": (None, "tensor"), "out": ("tensor",), "down": ("tensor",)}  # fmt: skip

    def place(path: tuple, leaf: jax.Array) -> jax.Array:
        layer = path[-2].key.split("_")[0] if path[-1].key == "kernel" else ""
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*specs.get(layer, ()))))

    return jax.tree_util.tree_map_with_path(place, params)


def generate(
    params: Mapping[str, Any], tokens: jax.Array, method: kvjax.KVTransform, mesh=None
) -> jax.Array:
    """Greedy text, `[rows, NEW]`: the prompt in one call, and all steps in another one."""
    positions = padded_positions()
    if mesh is not None:
        by_row = NamedSharding(mesh, PartitionSpec("data"))
        tokens, positions = jax.device_put((tokens, positions), by_row)
    model = Decoder().apply

    @jax.jit
    def read(params, tokens, positions):
        caches = empty_caches(method, mesh)
        logits, caches = model(params, tokens, positions, caches, phase="prompt")
        last = positions.argmax(axis=1)[:, None, None]  # each row's own last token
        return jnp.take_along_axis(logits, last, axis=1).argmax(-1), caches

    @functools.partial(jax.jit, donate_argnames="caches")
    def write(params, token, position, caches):
        def step(carry, _):
            token, position, caches = carry
            logits, caches = model(params, token, position, caches, phase="decode")
            return (logits.argmax(-1), position + 1, caches), token[:, 0]

        (_, _, caches), text = jax.lax.scan(step, (token, position, caches), length=NEW)
        return text.T, caches

    token, caches = read(params, tokens, positions)
    text, caches = write(params, token, positions.max(axis=1, keepdims=True) + 1, caches)
    kvjax.check_dropped(caches)
    return text


def main(mesh: Mesh | None = None) -> dict[str, list[list[int]]]:
    """Text by every method, printed and returned."""
    mesh = None if mesh is None else Mesh(mesh.devices, mesh.axis_names)  # XLA divides products
    with jax.set_mesh(mesh):
        params = random_parameters(mesh)
        tokens = jax.random.randint(jax.random.key(1), (len(LENGTHS), PROMPT), 0, VOCABULARY)
        texts = {name: generate(params, tokens, tx, mesh).tolist() for name, tx in METHODS.items()}
    for name, text in texts.items():
        print(f"{name:14}", *text[0])
    return texts


if __name__ == "__main__":
    main()
