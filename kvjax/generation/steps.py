"""Decode steps in a compiled loop, with the flushes between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.attention.attend import flush, flush_interval

Carry, Caches = Any, Any


def scan_steps(
    step: Callable[[Carry, Caches, Any], tuple[Carry, Caches, Any]],
    carry: Carry,
    caches: Caches,
    xs: Any,
) -> tuple[Carry, Caches, Any]:
    """As `jax.lax.scan` over decode steps, with a `flush` after every M of them.

    Args:
      step: `(carry, caches, x) -> (carry, caches, y)`, one decode step.
      carry: what else goes from step to step.
      caches: after a prompt.
      xs: arrays whose leading axis counts the steps.

    Returns:
      The carry and the caches after the last step, and what the steps returned, stacked.
    """

    def one(state, x):
        carry, caches, y = step(*state, x)
        return (carry, caches), y

    def period(state, xs):
        state, ys = jax.lax.scan(one, state, xs)
        return (state[0], flush(state[1], interval)), ys

    steps = len(jax.tree.leaves(xs)[0])
    interval = flush_interval(caches)
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
