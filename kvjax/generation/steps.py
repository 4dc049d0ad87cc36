"""A model's calls as all programs make them: a padded prompt, decode steps, flushes between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.attention.flush import flush, flush_interval
from kvjax.attention.init_cache import init_cache
from kvjax.attention.layer import Cache
from kvjax.attention.prompt import begin
from kvjax.devices import mesh_of
from kvjax.generation.model import FunctionalModel
from kvjax.protocol import KVTransform

Carry: TypeAlias = Any
Caches: TypeAlias = Any


def pad(
    prompts: Sequence[Sequence[int]], size: int | None = None
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"]]:
    """Tokens and positions, padded on the right to `size`; by default to the longest prompt."""
    lengths = np.array([len(prompt) for prompt in prompts])
    place = np.arange(lengths.max() if size is None else size, dtype=np.int32)
    positions = np.where(place < lengths[:, None], place, -1)
    tokens = np.zeros_like(positions)
    tokens[positions >= 0] = np.concatenate(prompts)
    return tokens, positions


def init_caches(
    model: FunctionalModel,
    layers: Sequence[KVTransform],
    batch: int,
    max_prompt: int,
    max_new: int,
    dtype: DTypeLike | None = None,
) -> tuple[Cache, ...]:
    """`init_cache` for every layer of a model."""
    sizes = {"kv_heads": model.kv_heads, "query_heads": model.query_heads}
    sizes |= {"head_dim": model.head_dim, "max_prompt": max_prompt, "max_new": max_new}
    sizes |= {"mesh": mesh_of(model.params)}
    return tuple(
        init_cache(
            transform,
            batch=batch,
            dtype=dtype,
            layer=layer,
            **sizes,
            **model.attention(layer).static,
        )
        for layer, transform in enumerate(layers)
    )


def read_at_once(
    model: FunctionalModel,
    layers: tuple[KVTransform, ...],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    max_new: int,
    dtype: DTypeLike | None = None,
    last: bool = True,
) -> tuple[Float[Array, "B V"], tuple[Cache, ...]]:
    """Logits of each row's last token, and new caches or readings of the prompt, by one call."""
    rows, width = tokens.shape
    caches: Any = init_caches(model, layers, rows, width, max_new, dtype)
    caches = begin(caches, empty=True)
    logits, caches = model.apply(
        model.params, tokens, positions, caches,
        layers=layers, phase="prompt", last=last, logits_at=positions.max(-1, keepdims=True),
    )  # fmt: skip
    return logits[:, -1], caches


def decode_step(
    model: FunctionalModel,
    layers: tuple[KVTransform, ...],
    caches: tuple[Cache, ...],
    token: Int[Array, " B"],
    position: Int[Array, " B"],
) -> tuple[Float[Array, "B V"], tuple[Cache, ...]]:
    """Logits after one more token of each row, none where the position is -1, and the caches."""
    logits, caches = model.apply(
        model.params, token[:, None], position[:, None], caches,
        layers=layers, phase="decode", last=True, logits_at=None,
    )  # fmt: skip
    return logits[:, -1], caches


def scan_steps(
    step: Callable[[Carry, Caches, Any], tuple[Carry, Caches, Any]],
    carry: Carry,
    caches: Caches,
    xs: Any,
    interval: int | None = None,
) -> tuple[Carry, Caches, Any]:
    """As `jax.lax.scan` over decode steps, with a `flush` after every M of them.

    Args:
      step: `(carry, caches, x) -> (carry, caches, y)`, one decode step.
      carry: what else goes from step to step.
      caches: after a prompt.
      xs: arrays whose leading axis counts the steps.
      interval: M; None: what `flush_interval` says of these caches. Another number is for some
        layers of a model, which are flushed when all are.

    Returns:
      The carry and the caches after the last step, and what the steps returned, stacked.
    """

    def one(state, x):
        carry, caches, y = step(state[0], state[1], x)
        return (carry, caches), y

    def period(state, xs):
        state, ys = jax.lax.scan(one, state, xs)
        return (state[0], flush(state[1], interval)), ys

    steps = len(jax.tree.leaves(xs)[0])
    interval = flush_interval(caches) if interval is None else interval
    whole = 0 if interval is None else steps // interval
    state, parts = (carry, caches), []
    if whole:
        count = whole * interval
        split = jax.tree.map(lambda x: x[:count].reshape(whole, interval, *x.shape[1:]), xs)
        state, ys = jax.lax.scan(period, state, split)
        parts.append(jax.tree.map(lambda y: y.reshape(count, *y.shape[2:]), ys))
        xs = jax.tree.map(lambda x: x[count:], xs)
        steps -= count
    if steps or not parts:
        state, ys = jax.lax.scan(one, state, xs)
        parts.append(ys)
    return *state, jax.tree.map(lambda *ys: jnp.concatenate(ys), *parts)
