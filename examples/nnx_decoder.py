"""A Flax NNX decoder of one's own whose attention is kvjax, and a loop of one's own around it.

    python examples/nnx_decoder.py

The model is written by hand and knows kvjax in three places: its attention layer calls
`kvjax.attend`, the loop calls `kvjax.flush` between the steps, and caches come from
`kvjax.init_caches`. Weights are random. On a mesh with the axes `data` and `tensor`, which
`init_caches` is given, the same code runs divided, rows over `data` and heads over `tensor`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kvjax

VOCABULARY, WIDTH, LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 128, 64, 2, 4, 2, 16
ROWS, PROMPT, NEW = 4, 48, 12
LARGE = nnx.initializers.normal(0.3)  # with usual random weights a token would repeat itself
ROPE = kvjax.Rope(inv_freq=1.0 / 1000.0 ** (jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM))
METHODS = {
    "full": kvjax.Full(),
    "snapkv": kvjax.SnapKV(budget=16, window=8),
    "every(snapkv)": kvjax.Every(kvjax.SnapKV(budget=16, window=8), steps=4),
}


class Attention(nnx.Module):
    """Projections around one call of `kvjax.attend`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        linear = functools.partial(nnx.Linear, use_bias=False, kernel_init=LARGE, rngs=rngs)
        self.q = linear(WIDTH, QUERY_HEADS * HEAD_DIM)
        self.k = linear(WIDTH, KV_HEADS * HEAD_DIM)
        self.v = linear(WIDTH, KV_HEADS * HEAD_DIM)
        self.out = linear(QUERY_HEADS * HEAD_DIM, WIDTH)

    def heads(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, `[rows, heads, tokens, HEAD_DIM]`."""
        flat = (self.q(x), self.k(x), self.v(x))
        q, k, v = (y.reshape(*y.shape[:2], -1, HEAD_DIM).swapaxes(1, 2) for y in flat)
        return q, k, v

    def __call__(self, x, positions, cache, phase):
        """What attention adds, and the cache with the new tokens."""
        q, k, v = self.heads(x)
        out, cache = kvjax.attend(cache, q, k, v, positions, phase=phase, rope=ROPE)
        return self.out(out.swapaxes(1, 2).reshape(*x.shape[:2], -1)), cache


class Block(nnx.Module):
    """Attention and an MLP, each behind a norm and added to the residual stream."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention_norm, self.mlp_norm = (nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.attention = Attention(rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, kernel_init=LARGE, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, kernel_init=LARGE, rngs=rngs)

    def __call__(self, x, positions, cache, phase):
        """The residual stream after the block, and its cache."""
        added, cache = self.attention(self.attention_norm(x), positions, cache, phase)
        x = x + added
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x)))), cache


class Decoder(nnx.Module):
    """Token ids to logits, and caches to caches."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens, positions, caches, phase):
        """Logits of every token, and the new caches."""
        x, written = self.embed(tokens), []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block(x, positions, cache, phase)
            written.append(cache)
        return self.norm(x) @ self.embed.embedding[...].T, tuple(written)


def divide(model: Decoder, mesh: Mesh) -> None:
    """Places the weights on a mesh: what has heads or MLP channels is divided over `tensor`."""
    columns, rows = PartitionSpec(None, "tensor"), PartitionSpec("tensor", None)
    places = {"q": columns, "k": columns, "v": columns, "up": columns, "out": rows, "down": rows}

    def place(path: tuple, leaf: nnx.Variable) -> nnx.Variable:
        spec = places.get(path[-2], PartitionSpec()) if path[-1] == "kernel" else PartitionSpec()
        return leaf.replace(jax.device_put(leaf.get_value(), NamedSharding(mesh, spec)))

    nnx.update(model, nnx.map_state(place, nnx.state(model)))


def generate(model: Decoder, tokens: jax.Array, method: kvjax.KVTransform, mesh=None) -> jax.Array:
    """Greedy text, `[ROWS, NEW]`: the prompt in one call, then M steps and a flush in one each."""
    graph, weights = nnx.split(model)
    positions = jnp.broadcast_to(jnp.arange(PROMPT), tokens.shape)
    if mesh is not None:
        by_row = NamedSharding(mesh, PartitionSpec("data"))
        tokens, positions = jax.device_put((tokens, positions), by_row)

    @jax.jit
    def read(weights, tokens, positions):
        caches = kvjax.init_caches(
            method, num_layers=LAYERS, batch=ROWS, kv_heads=KV_HEADS, query_heads=QUERY_HEADS,
            head_dim=HEAD_DIM, max_prompt=PROMPT, max_new=NEW, dtype=jnp.float32, mesh=mesh,
        )  # fmt: skip
        model = nnx.merge(graph, weights)
        logits, caches = model(tokens, positions, caches, "prompt")
        return logits[:, -1].argmax(-1)[:, None], caches

    @functools.partial(jax.jit, static_argnames="steps", donate_argnames="caches")
    def period(weights, token, position, caches, *, steps):
        model = nnx.merge(graph, weights)

        def step(carry, _):
            token, position, caches = carry
            logits, caches = model(token, position, caches, "decode")
            return (logits.argmax(-1), position + 1, caches), token[:, 0]

        carry = (token, position, caches)
        (token, position, caches), written = jax.lax.scan(step, carry, length=steps)
        return written.T, token, position, kvjax.flush(caches)

    token, caches = read(weights, tokens, positions)
    position, text = positions[:, -1:] + 1, []
    interval = kvjax.flush_interval(caches) or NEW  # M: what a method does now and then comes after
    for _ in range(0, NEW, interval):
        written, token, position, caches = period(weights, token, position, caches, steps=interval)
        text.append(written)
    kvjax.check_dropped(caches)
    return jnp.concatenate(text, axis=1)[:, :NEW]


def main(mesh: Mesh | None = None) -> dict[str, list[list[int]]]:
    """Text by every method, printed and returned."""
    mesh = None if mesh is None else Mesh(mesh.devices, mesh.axis_names)  # XLA divides products
    with jax.set_mesh(mesh):
        model = Decoder(nnx.Rngs(0))
        if mesh is not None:
            divide(model, mesh)
        tokens = jax.random.randint(jax.random.key(1), (ROWS, PROMPT), 0, VOCABULARY)
        texts = {name: generate(model, tokens, tx, mesh).tolist() for name, tx in METHODS.items()}
    for name, text in texts.items():
        print(f"{name:13}", *text[0])
    return texts


if __name__ == "__main__":
    main()
