"""Prunes hidden states: drops the states of some prompt tokens between layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.attention.layer import Cache, Reading, layer_caches
from kvjax.protocol import Extent, KVTransform


def whole_prompt(caches: tuple[Cache, ...], phase: str, last: bool) -> bool:
    """Returns whether a call reads a prompt as a whole and not in chunks.

    Only then does it know which tokens each layer passes on.
    """
    parts = layer_caches(caches)
    later_chunk = any(isinstance(part, Reading) and part.phase for part in parts)
    return phase == "prompt" and last and not later_chunk


def drops_tokens(layer: KVTransform, cache: Cache) -> bool:
    """Returns whether a layer's transform passes only some prompt tokens to the next layer.

    `HeadGroups` pass on all: each group would pass on other tokens.
    """
    kv = layer_caches(cache)[0].kv
    return layer.extent(Extent(kv.max_prompt, kv.max_new)).passed is not None


def pass_on(
    x: Float[Array, "B T C"], positions: Int[Array, "B T"], kept: Int[Array, "B K"]
) -> tuple[Float[Array, "B N C"], Int[Array, "B N"]]:
    """Returns the states and positions of the tokens that go on to the next layer.

    Args:
      x, positions: states and positions of the tokens that came to this layer; -1 for padding.
      kept: positions that go on, from `kvjax.kept_tokens`; those of earlier prompts are ignored.

    Returns:
      N = min(T, K) tokens in the order of positions, padded with -1 in front.

    Example:
      >>> import jax.numpy as jnp
      >>> from kvjax.generation.pruning import pass_on
      >>> x, positions = jnp.array([[[0.0], [0.4], [0.5], [0.6]]]), jnp.array([[-1, 4, 5, 6]])
      >>> x, positions = pass_on(x, positions, kept=jnp.array([[1, 4, 6]]))
      >>> x[0, 1:, 0].tolist(), positions.tolist()
      ([0.4000000059604645, 0.6000000238418579], [[-1, 4, 6]])
    """
    tokens = positions.shape[1]
    # Kept tokens of earlier prompts are not here and become -1, which sorts to the front.
    going = jnp.where(_find(positions, kept) < tokens, kept, -1)
    going = jnp.sort(going, axis=1)[:, -tokens:]
    return states_at(x, positions, going), going


def states_at(
    x: Float[Array, "B T C"], positions: Int[Array, "B T"], wanted: Int[Array, "B N"]
) -> Float[Array, "B N C"]:
    """Returns the states of the tokens at the `wanted` positions; 0 where there is no token."""
    index = _find(positions, wanted)[:, :, None]
    return jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=0)


def _find(positions: Int[Array, "B T"], wanted: Int[Array, "B N"]) -> Int[Array, "B N"]:
    """Returns the index of each wanted position in its row; T if it is not there, or is -1."""
    tokens = positions.shape[1]
    order = jnp.argsort(positions, axis=1)
    ordered = jnp.take_along_axis(positions, order, axis=1)
    place = jnp.minimum(jax.vmap(jnp.searchsorted)(ordered, wanted), tokens - 1)
    there = (jnp.take_along_axis(ordered, place, axis=1) == wanted) & (wanted >= 0)
    return jnp.where(there, jnp.take_along_axis(order, place, axis=1), tokens)
