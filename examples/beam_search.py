"""Beam search with any method: the rows of a batch are the beams.

    python examples/beam_search.py

After each step the best continuations of all beams together go on, several of one beam or none of
another: `kvjax.take_rows` gives each new beam the caches of the one that it continues, whatever a
method keeps and however it is stored. The model is one of attention alone, with random weights.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import kvjax

VOCABULARY, WIDTH, LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 64, 32, 2, 4, 2, 8
BEAMS, PROMPT, NEW = 4, 24, 8
SHAPES = {"q": (WIDTH, QUERY_HEADS, HEAD_DIM), "k": (WIDTH, KV_HEADS, HEAD_DIM),
          "v": (WIDTH, KV_HEADS, HEAD_DIM), "out": (QUERY_HEADS, HEAD_DIM, WIDTH)}  # fmt: skip
METHODS = {
    "full": kvjax.Full(),
    "snapkv": kvjax.SnapKV(budget=12, window=4),
    "h2o in 8 bits": kvjax.chain(kvjax.H2O(budget=12), kvjax.Quantize(8)),
    "chelsea": kvjax.Chelsea(budget=12, chunk=8, sinks=2, recent=4, interval=3),
}


def random_weights() -> dict:
    """Weights of the model."""
    keys = iter(jax.random.split(jax.random.key(0), 1 + LAYERS * len(SHAPES)))

    def weight(shape: tuple[int, ...]) -> jax.Array:
        return 0.3 * jax.random.normal(next(keys), shape)

    layers = [{name: weight(shape) for name, shape in SHAPES.items()} for _ in range(LAYERS)]
    return {"embed": weight((VOCABULARY, WIDTH)), "layers": layers}


def forward(weights: dict, tokens, positions, caches: tuple, phase):
    """Logs of the probabilities of each row's next token, `[rows, VOCABULARY]`, and the caches."""
    x, written = weights["embed"][tokens], []
    rope = kvjax.Rope(1.0 / 1000.0 ** (jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    for own, cache in zip(weights["layers"], caches, strict=True):
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))
        q, k, v = (jnp.einsum("btc,chd->bhtd", normed, own[name]) for name in "qkv")
        out, cache = kvjax.attend(cache, q, k, v, positions, phase=phase, rope=rope)
        x = x + jnp.einsum("bhtd,hdc->btc", out, own["out"])
        written.append(cache)
    return jax.nn.log_softmax(x[:, -1] @ weights["embed"].T * 4), tuple(written)


@functools.partial(jax.jit, donate_argnames="caches")
def step(weights: dict, parents, tokens, position, caches: tuple):
    """A step of the beams that `tokens` continue, those of `parents`."""
    caches = kvjax.take_rows(caches, parents)
    positions = jnp.full((BEAMS, 1), position)
    return forward(weights, tokens[:, None], positions, caches, "decode")


flush = jax.jit(kvjax.flush, donate_argnums=0)


def read(weights: dict, prompt, method: kvjax.KVTransform):
    """Reads a prompt of one row: probabilities of the next token, and caches for each beam."""
    caches = kvjax.init_caches(
        method, num_layers=LAYERS, batch=1, kv_heads=KV_HEADS, query_heads=QUERY_HEADS,
        head_dim=HEAD_DIM, max_prompt=PROMPT, max_new=NEW, dtype=jnp.float32,
    )  # fmt: skip
    run = jax.jit(forward, static_argnames="phase")
    positions = jnp.arange(PROMPT)[None]
    found, caches = run(weights, prompt, positions, caches, phase="prompt")
    return found, kvjax.take_rows(caches, [0] * BEAMS)


def search(weights: dict, prompt, method: kvjax.KVTransform):
    """The best texts, `[BEAMS, NEW]`, the logs of their probabilities, and their caches."""
    found, caches = read(weights, prompt, method)
    interval = kvjax.flush_interval(caches)
    score, token = jax.lax.top_k(found[0], BEAMS)
    texts, parents = token[:, None], jnp.arange(BEAMS)
    for number in range(1, NEW):
        found, caches = step(weights, parents, token, PROMPT + number - 1, caches)
        if interval is not None and number % interval == 0:
            caches = flush(caches)
        score, best = jax.lax.top_k((score[:, None] + found).reshape(-1), BEAMS)
        parents, token = best // VOCABULARY, best % VOCABULARY
        texts = jnp.concatenate((texts[parents], token[:, None]), axis=1)
    kvjax.check_dropped(caches)
    return texts, score, kvjax.take_rows(caches, parents)


def main() -> dict[str, list[list[int]]]:
    """The texts of each method, printed and returned."""
    weights = random_weights()
    prompt = jax.random.randint(jax.random.key(1), (1, PROMPT), 0, VOCABULARY)
    texts = {}
    for name, method in METHODS.items():
        found, score, _ = search(weights, prompt, method)
        texts[name] = found.tolist()
        print(f"{name:14} {score[0]:7.3f} ", *texts[name][0])
    return texts


if __name__ == "__main__":
    main()
