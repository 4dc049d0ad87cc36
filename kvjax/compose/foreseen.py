"""What a method will decide, found out before anything is computed."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.budgets.layers import layers_of
from kvjax.cache.slots import empty_cache
from kvjax.protocol import Extent, KVTransform, Logits, Moment, Step

MAX_PROMPT, MAX_NEW, HEAD_DIM = 256, 64, 8  # of a cache that is never made


class Foreseen(NamedTuple):
    """What is known of a decision without the numbers in it.

    Args:
      kind: its type; None where there is no decision.
      score: whether it has a score for every token.
      newest: whether it says how many of the newest tokens always stay.
    """

    kind: type | None
    score: bool
    newest: bool


@functools.lru_cache(maxsize=128)
def foreseen(transform: KVTransform, moment: Moment) -> Foreseen:
    """What kind of decision a transform makes at a moment, by abstract evaluation.

    Example:
      >>> import kvjax
      >>> from kvjax.compose.foreseen import foreseen
      >>> foreseen(kvjax.SnapKV(budget=64), "prompt").score
      True
      >>> foreseen(kvjax.StreamingLLM(budget=64), "prompt").score
      False
    """
    found = []

    def decide() -> None:
        extent, needs = transform.extent(Extent(MAX_PROMPT, MAX_NEW)), transform.needs
        cache = empty_cache(
            1, 1, HEAD_DIM, extent.total, max_prompt=MAX_PROMPT, max_new=MAX_NEW,
            dtype=jnp.float32, interval=extent.interval,
        )  # fmt: skip
        if needs.accumulated_attention:
            cache = cache.with_column("attention", jnp.zeros((*cache.shape, 1)))
        cache, state = transform.init(cache, (layers_of(transform) or (0,))[0])
        step, flush = moment == "step", moment == "flush"
        mass = needs.attention_mass or needs.accumulated_attention or (needs.decode_mass and step)
        window = needs.queries(MAX_PROMPT) if moment == "prompt" or needs.decode_queries else 0
        made, _ = getattr(transform, f"on_{moment}")(
            cache,
            state,
            Step(
                rows=jnp.ones(1, bool),
                slots=None if flush else jnp.zeros((1, 1, 1), jnp.int32),
                mass=jnp.zeros(cache.shape) if mass and not flush else None,
                keys=None if step else jnp.zeros((*cache.shape, HEAD_DIM)),
                query=jnp.zeros((1, 1, window, HEAD_DIM)) if window else None,
                query_position=jnp.zeros((1, window), jnp.int32) if window else None,
                rope=None,
                moment=moment,
                logits=Logits(1.0),
                room=1 if flush else 0,
            ),
        )
        score, newest = (getattr(made, name, None) is not None for name in ("score", "newest"))
        found.append(Foreseen(None if made is None else type(made), score, newest))

    jax.eval_shape(decide)
    return found[0]
