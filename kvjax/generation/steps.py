"""Calls a model as all programs do: on a padded prompt, and on decode steps with flushes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.attention.flush import flush, flush_interval
from kvjax.attention.layer import Cache
from kvjax.generation.model import FunctionalModel, logits_of_one
from kvjax.protocol import KVTransform

Carry: TypeAlias = Any
Caches: TypeAlias = Any


def pad(
    prompts: Sequence[Sequence[int] | np.ndarray], size: int | None = None
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"]]:
    """Returns tokens and positions of prompts, padded on the right to `size` tokens.

    By default they are padded to the longest prompt. Padding has position -1.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    place = np.arange(lengths.max() if size is None else size, dtype=np.int32)
    positions = np.where(place < lengths[:, None], place, -1)
    tokens = np.zeros_like(positions)
    tokens[positions >= 0] = np.concatenate(prompts)
    return tokens, positions


def decode_step(
    model: FunctionalModel,
    layers: tuple[KVTransform, ...],
    caches: tuple[Cache, ...],
    token: Int[Array, " B"],
    position: Int[Array, " B"],
) -> tuple[Float[Array, "B V"], tuple[Cache, ...]]:
    """Returns the logits after one more token of each row, and the new caches.

    A row whose position is -1 takes no part: its cache stays, and its logits mean nothing.
    """
    logits, caches = model.apply(
        model.params, token[:, None], position[:, None], caches,
        layers=layers, phase="decode", last=True, logits_at=None,
    )  # fmt: skip
    # A list of caches is as good, and a loop's carry has to keep its type.
    return logits_of_one(logits, model.vocab_size, tokens=1), tuple(caches)


def scan_steps(
    step: Callable[[Carry, Caches, Any], tuple[Carry, Caches, Any]],
    carry: Carry,
    caches: Caches,
    xs: Any,
    interval: int | None = None,
) -> tuple[Carry, Caches, Any]:
    """Scans over decode steps as `jax.lax.scan` does, with a `flush` after every M of them.

    Args:
      step: `(carry, caches, x) -> (carry, caches, y)`, one decode step.
      carry: whatever else goes from step to step.
      caches: the caches after a prompt.
      xs: arrays whose leading axis counts the steps.
      interval: M; None: the `flush_interval` of these caches. A caller with only some layers of a
        model gives the interval of all of them, since all layers are flushed together.

    Returns:
      The carry and the caches after the last step, and the results of all steps, stacked.
    """

    def scan_step(state, x):
        carry, caches, y = step(state[0], state[1], x)
        return (carry, caches), y

    def scan_period(state, xs):
        state, ys = jax.lax.scan(scan_step, state, xs)
        return (state[0], flush(state[1], interval)), ys

    steps = len(jax.tree.leaves(xs)[0])
    interval = flush_interval(caches) if interval is None else interval
    periods = 0 if interval is None else steps // interval
    state, results = (carry, caches), []
    if periods:
        count = periods * interval  # pyright: ignore[reportOperatorIssue]  # without an interval there are no periods
        split = jax.tree.map(lambda x: x[:count].reshape(periods, interval, *x.shape[1:]), xs)
        state, ys = jax.lax.scan(scan_period, state, split)
        results.append(jax.tree.map(lambda y: y.reshape(count, *y.shape[2:]), ys))
        xs = jax.tree.map(lambda x: x[count:], xs)
        steps -= count
    # The remaining steps do not fill a period, so that no flush follows them.
    if steps or not results:
        state, ys = jax.lax.scan(scan_step, state, xs)
        results.append(ys)
    carry, caches = state
    return carry, caches, jax.tree.map(lambda *ys: jnp.concatenate(ys), *results)
