"""An attention that stays as it is, with its cache in kvjax: the low-level functions.

    python examples/foreign_attention.py

Where a layer must compute attention itself, `kvjax.attend` is not needed. This one is in the manner
of Gemma 2: it rotates neighbouring channels by a RoPE of its own, and bounds its logits by a soft
cap. What it takes from kvjax are functions of a cache: `append` puts new tokens into free slots,
`evict` frees slots, `compact` moves what is left to the front of a smaller cache. It keeps three
promises: `position` says where a slot's key came from, `log_mass` is added to the logits (a free
slot has minus infinity), and every array has one shape for the whole text. What is kept is up to
the three functions of METHODS.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kvjax

VOCABULARY, WIDTH, LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 128, 64, 2, 4, 2, 16
ROWS, PROMPT, NEW, BUDGET, SINKS, CAP = 4, 48, 12, 16, 2, 20.0
SCALE = HEAD_DIM**-0.5
SHAPES = {"q": (WIDTH, QUERY_HEADS, HEAD_DIM), "k": (WIDTH, KV_HEADS, HEAD_DIM),
          "v": (WIDTH, KV_HEADS, HEAD_DIM), "out": (QUERY_HEADS, HEAD_DIM, WIDTH)}  # fmt: skip

Keep = Callable[[kvjax.kit.KVCache, jax.Array], jax.Array]
"""A cache and the attention that each slot received, `[rows, KV heads, slots]` → what stays."""


def keep_all(cache: kvjax.kit.KVCache, received: jax.Array) -> jax.Array:
    """Everything."""
    return cache.live


def keep_newest(cache: kvjax.kit.KVCache, received: jax.Array) -> jax.Array:
    """The first tokens and the newest ones, BUDGET together."""
    newest = cache.position >= (cache.length - (BUDGET - SINKS))[:, None, None]
    return cache.live & (newest | (cache.position < SINKS))


def keep_heaviest(cache: kvjax.kit.KVCache, received: jax.Array) -> jax.Array:
    """The BUDGET tokens that received the most attention."""
    count = jnp.full((ROWS,), BUDGET)
    return kvjax.kit.keep_best(received, cache.live, cache.position, count)


METHODS: dict[str, Keep] = {"full": keep_all, "newest": keep_newest, "heaviest": keep_heaviest}


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """This attention's own RoPE: neighbouring channels are a complex number that is turned."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    turns = 1000.0 ** (-jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angle = positions[:, None, :, None] * turns[None, None, None, :]
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * jnp.exp(1j * angle)
    return jnp.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def attention(
    weights: dict, x: jax.Array, positions: jax.Array, cache: kvjax.kit.KVCache
) -> tuple[jax.Array, kvjax.kit.KVCache, jax.Array]:
    """What attention adds, the cache with the new tokens, and what its slots received."""
    q, k, v = (jnp.einsum("btc,chd->bhtd", x, weights[name]) for name in "qkv")
    q, k = rotate(q, positions), rotate(k, positions)
    cache, _ = kvjax.kit.append(cache, k, v, positions)
    q = q.reshape(ROWS, KV_HEADS, -1, *q.shape[2:])  # the query heads of each KV head
    logits = jnp.einsum("bhgtd,bhsd->bhgts", q, cache.k.read()) * SCALE
    logits = CAP * jnp.tanh(logits / CAP) + cache.log_mass[:, :, None, None, :]
    seen = cache.position[:, :, None, None, :] <= positions[:, None, None, :, None]
    probability = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
    out = jnp.einsum("bhgts,bhsd->bhgtd", probability, cache.v.read())
    out = out.reshape(ROWS, QUERY_HEADS, *out.shape[3:])
    return jnp.einsum("bhtd,hdc->btc", out, weights["out"]), cache, probability.sum((2, 3))


def forward(
    weights: dict, tokens: jax.Array, positions: jax.Array, caches: list, keep: Keep, slots: int
) -> tuple[jax.Array, list]:
    """The next tokens `[ROWS, 1]`; `slots` is the size of the caches that come back."""
    x, written = weights["embed"][tokens], []
    for layer, cache in zip(weights["layers"], caches, strict=True):
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))
        added, cache, received = attention(layer, normed, positions, cache)
        cache = kvjax.kit.evict(cache, keep(cache, received))
        if cache.slots != slots:  # once, behind the prompt; a step finds a slot that is free
            cache = kvjax.kit.compact(cache, slots)
        x = x + added
        written.append(cache)
    return (x[:, -1:] @ weights["embed"].T).argmax(-1), written


def random_weights(mesh: Mesh | None = None) -> dict:
    """Weights; a mesh gets those of heads divided over `tensor`."""
    keys = iter(jax.random.split(jax.random.key(0), 1 + LAYERS * len(SHAPES)))

    def weight(name: str, shape: tuple[int, ...]) -> jax.Array:
        spec = {"out": ("tensor",), "embed": ()}.get(name, (None, "tensor"))
        values = 0.3 * jax.random.normal(next(keys), shape)
        return values if mesh is None else jax.device_put(
            values, NamedSharding(mesh, PartitionSpec(*spec))
        )  # fmt: skip

    layers = [{name: weight(name, shape) for name, shape in SHAPES.items()} for _ in range(LAYERS)]
    return {"embed": weight("embed", (VOCABULARY, WIDTH)), "layers": layers}


def generate(weights: dict, tokens: jax.Array, keep: Keep, mesh: Mesh | None = None) -> jax.Array:
    """Greedy text, `[ROWS, NEW]`."""
    slots = PROMPT + NEW if keep is keep_all else BUDGET + 1  # one for the token of a step
    positions = jnp.broadcast_to(jnp.arange(PROMPT), tokens.shape)
    if mesh is not None:
        by_row = NamedSharding(mesh, PartitionSpec("data"))
        tokens, positions = jax.device_put((tokens, positions), by_row)
    how = functools.partial(forward, keep=keep, slots=slots)
    read, step = jax.jit(how), jax.jit(how, donate_argnums=3)  # a step updates its caches in place
    made = functools.partial(
        kvjax.init_cache, kvjax.Full(), batch=ROWS, kv_heads=KV_HEADS, query_heads=QUERY_HEADS,
        head_dim=HEAD_DIM, max_prompt=PROMPT, max_new=NEW, dtype=jnp.float32,
    )  # fmt: skip
    caches = [made().kv for _ in range(LAYERS)]  # pyright: ignore[reportAttributeAccessIssue]
    token, caches = read(weights, tokens, positions, caches)
    text = [token]
    for number in range(NEW - 1):
        position = positions[:, -1:] + 1 + number
        token, caches = step(weights, token, position, caches)
        text.append(token)
    return jnp.concatenate(text, axis=1)


def main(mesh: Mesh | None = None) -> dict[str, list[list[int]]]:
    """Text by every method, printed and returned."""
    mesh = None if mesh is None else Mesh(mesh.devices, mesh.axis_names)  # XLA divides products
    with jax.set_mesh(mesh):
        weights = random_weights(mesh)
        tokens = jax.random.randint(jax.random.key(1), (ROWS, PROMPT), 0, VOCABULARY)
        made = {name: generate(weights, tokens, keep, mesh) for name, keep in METHODS.items()}
    texts = {name: text.tolist() for name, text in made.items()}
    for name, text in texts.items():
        print(f"{name:9}", *text[0])
    return texts


if __name__ == "__main__":
    main()
