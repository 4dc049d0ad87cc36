"""Finds out what a method will decide before anything is computed."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.budgets.layers import layers_of
from kvjax.cache.rearrange import decoded
from kvjax.cache.slots import empty_cache
from kvjax.calibration import Learner
from kvjax.decisions import Decision, Mark, made_by
from kvjax.protocol import (
    AttentionOptions,
    Extent,
    KVTransform,
    Moment,
    Stage,
    Step,
    on_request,
    takes_part,
)

MAX_PROMPT, MAX_NEW, HEAD_DIM = 16, 8, 8  # of a cache that is never made


@functools.lru_cache(maxsize=128)
def foreseen(transform: KVTransform, moment: Moment) -> Decision | None:
    """Returns a transform's decision at a moment by abstract evaluation: its arrays are shapes.

    It is evaluated over a cache of one row and one KV head, with 8 channels and few slots, so that
    budgets that cover a short prompt alone are not an error.

    Example:
      >>> import kvjax
      >>> from kvjax.compose.foreseen import foreseen
      >>> foreseen(kvjax.SnapKV(budget=64), "prompt").score.shape
      (1, 1, 24)
      >>> foreseen(kvjax.StreamingLLM(budget=64), "prompt").score is None
      True
    """
    if not takes_part(transform, moment):
        return None
    layer = (layers_of(transform) or (0,))[0]
    transform = _planned(transform, layer)
    extent, needs = transform.extent(Extent(MAX_PROMPT, MAX_NEW)), transform.needs
    prompt, step = moment == "prompt", moment == "step"
    window = needs.queries(MAX_PROMPT) if prompt or needs.decode_queries else 0

    def decide() -> Decision | None:
        cache = empty_cache(
            1, 1, HEAD_DIM, extent.total, max_prompt=MAX_PROMPT, max_new=MAX_NEW,
            dtype=jnp.float32, interval=extent.interval,
        )  # fmt: skip
        if needs.accumulated_attention:
            cache = cache.with_column("attention", jnp.zeros((*cache.shape, 1)))
        cache, state = transform.init(cache, layer)
        if prompt:
            cache, _ = decoded(cache)
        now = Step(
            rows=jnp.ones(1, bool),
            keys=None if step else jnp.zeros((*cache.shape, HEAD_DIM)),
            length_before=jnp.zeros(1, jnp.int32) if prompt else None,
            moment=moment,
            options=AttentionOptions(1.0),
            room=1 if moment == "flush" else 0,
            requested=on_request(
                mass=jnp.zeros(cache.shape) if step else None,
                query=jnp.zeros((1, 1, window, HEAD_DIM)) if window else None,
                query_position=jnp.zeros((1, window), jnp.int32) if window else None,
                record=None if needs.probe is None or not prompt else needs.probe.empty(cache),
            ),
        )
        return made_by(transform, cache, state, now)[0]

    try:
        return jax.eval_shape(decide)
    except Exception as error:
        error.add_note(f"{transform!r} was evaluated over one KV head of {HEAD_DIM} channels")
        raise


def _planned(transform: Any, layer: int) -> Any:
    """Replaces methods that learn by their stand-ins for plans of one head."""
    if isinstance(transform, Learner):
        sizes = {"num_layers": layer + 1, "kv_heads": 1, "head_dim": HEAD_DIM, "windows": ()}
        return transform.planned(SimpleNamespace(**sizes))
    if hasattr(transform, "base"):
        return dataclasses.replace(transform, base=_planned(transform.base, layer))
    if hasattr(transform, "parts"):
        parts = tuple(_planned(part, layer) for part in transform.parts)
        return dataclasses.replace(transform, parts=parts)
    return transform


def rewrites(transform: KVTransform, *moments: Moment) -> bool:
    """Tells whether a transform merges or moves slots, or changes values, at these moments."""
    decisions = [foreseen(transform, moment) for moment in moments]
    return any(decision.rewrites for decision in decisions if decision is not None)


def frees_while_decoding(transform: KVTransform) -> bool:
    """Tells whether it evicts or merges slots between prompts: an index would go stale."""
    return _frees(transform, "flush", "step")


def frees_at_prompts_end(transform: KVTransform) -> bool:
    """Tells whether a prompt's end evicts or merges slots, of earlier prompts too."""
    return _frees(transform, "prompt")


def _frees(transform: KVTransform, *moments: Moment) -> bool:
    return transform.stage == Stage.EVICT and any(
        not isinstance(foreseen(transform, moment), Mark | None) for moment in moments
    )
