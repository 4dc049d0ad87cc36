"""What `device.py` measures of one layer: steps of methods that read a selection."""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from device_models import NEW, shape
from kernel_shapes import normal

import kvjax
from kvjax.attention.layer import Cache

STEPS, ROUNDS = 16, 3  # a round is a loop on the device; one more warms up
LAYERS = 3  # the first two are dense where a method selects


def selections(methods: list[str], tokens: int, rows: int, tiny: bool) -> dict[str, Any]:
    """Times a step of one layer by each method, over caches that `tokens` tokens fill.

    A step appends a token, chooses what is read, and attends. Methods take turns, so that they meet
    the device in the same state.
    """
    runs = {method: prepared(method, tokens - NEW, rows, tiny) for method in methods}
    times: dict[str, list[float]] = {method: [] for method in methods}
    for number in range(1 + ROUNDS):
        for method, (loop, cache, position) in runs.items():
            begin = time.perf_counter()
            cache, _ = jax.block_until_ready(loop(cache, position))
            if number:
                times[method].append(1e6 * (time.perf_counter() - begin) / STEPS)
            runs[method] = loop, cache, position + STEPS
    medians = {method: statistics.median(each) for method, each in times.items()}
    full = medians[methods[0]]
    return {
        "rows": [
            {"method": method, "microseconds": time, "each": times[method], "of_full": time / full}
            for method, time in medians.items()
        ]
    }


def prepared(method: str, prompt: int, rows: int, tiny: bool) -> tuple[Any, Any, jax.Array]:
    """A compiled loop of steps, a cache that a prompt of random tokens fills, and its length."""
    config = shape(tiny)
    layer = kvjax.bind(kvjax.parse(method), LAYERS)[-1]
    heads = config.query_heads, config.kv_heads, config.kv_heads

    def new(seed: jax.Array | int, rows: int, count: int) -> tuple[jax.Array, ...]:
        return tuple(
            normal(seed + n, (rows, each, count, config.head_dim), "bfloat16")
            for n, each in enumerate(heads)
        )

    def read() -> Cache:
        cache = kvjax.init_cache(
            layer, batch=rows, kv_heads=config.kv_heads, query_heads=config.query_heads,
            head_dim=config.head_dim, max_prompt=prompt, max_new=NEW, dtype="bfloat16",
        )  # fmt: skip
        positions = jnp.broadcast_to(jnp.arange(prompt, dtype=jnp.int32), (rows, prompt))
        q, k, v = new(1, rows, prompt)
        return kvjax.attend(cache, q, k, v, positions, phase="prompt")[1]

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(cache: kvjax.LayerCache, position: jax.Array) -> tuple[kvjax.LayerCache, jax.Array]:
        def step(n, carry):
            cache, out = carry
            q, k, v = new(100 + 3 * n, rows, 1)
            positions = jnp.full((rows, 1), position + n, jnp.int32)
            # The query depends on the step before, as in a model.
            out, cache = kvjax.attend(cache, q + 0 * out, k, v, positions, phase="decode")
            return cache, out

        none = jnp.zeros((rows, config.query_heads, 1, config.head_dim), "bfloat16")
        return jax.lax.fori_loop(0, STEPS, step, (cache, none))

    return loop, jax.block_until_ready(jax.jit(read)()), jnp.int32(prompt)
