"""A decode step: append the new token, select, attend, and let the transform decide."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.attention.call import (
    Call,
    Tokens,
    add_attention,
    held_query_positions,
    key_positions,
    query_positions,
)
from kvjax.attention.layer import LayerCache
from kvjax.cache.payload import Dense
from kvjax.cache.slots import FREE, append
from kvjax.compose.chain import decide_parts
from kvjax.protocol import Needs, Step, View, on_request, selected_by
from pallas_kernels import Queries, Seen, Turn
from pallas_kernels.base.annotations import NoneElsewhere


def decode(
    cache: LayerCache, tokens: Tokens, call: Call
) -> tuple[Float[Array, "B Q T D"], LayerCache]:
    """Appends, selects, attends, and carries out what the transform decides about the step."""
    transform, needs, positions = cache.transform, cache.transform.needs, tokens.positions
    tokens = _prepared(needs, tokens, call)
    q, added = tokens.q, positions
    if call.repeats:  # what the cache holds already attends, and is padding in all else
        added = jnp.where(positions < cache.kv.length[:, None], FREE, positions)
    kv, slots = append(cache.kv, cache.kv.unfold(tokens.k), cache.kv.unfold(tokens.v), added)
    view = View(
        kv, slots, window=call.options.window, implementation=call.implementation,
        requested=on_request(predicted=tokens.predicted),
    )  # fmt: skip
    view, state = selected_by(transform, view, cache.state, q)
    kv, rotation = view.cache, None
    if needs.unrotated_keys:
        rotation = call.rope.at(key_positions(needs, kv))
        if call.repeats:
            at = held_query_positions(needs, kv, positions)
        else:
            at = query_positions(needs, kv, slots, positions)
        q = call.rope.rotate(q, at)
    out, mass = _attention(needs, view, q, rotation, positions, call)
    if call.repeats and mass is not None:
        mass = jnp.where((added >= 0).any(1)[:, None, None], mass, 0.0)
    if needs.accumulated_attention:
        kv = add_attention(kv, mass)  # pyright: ignore[reportArgumentType]  # which is asked for
    # A method that observes queries goes on with those of decoding.
    window = None if cache.window is None else cache.window.add(q, added)
    query, query_position = window or (None, None)
    requested = on_request(mass=mass, query=query, query_position=query_position)
    step = Step(
        rows=(added >= 0).any(1), rope=call.rope, moment="step", options=call.options,
        implementation=call.implementation, output=out, requested=requested,
    )  # fmt: skip
    kv, state = decide_parts(transform, kv, state, step)
    return out.astype(q.dtype), dataclasses.replace(cache, kv=kv, state=state, window=window)


def _prepared(needs: Needs, tokens: Tokens, call: Call) -> Tokens:
    """Returns the tokens as a transform sees them: rotated, if keys are stored so."""
    if not needs.predicted_query:
        tokens = tokens._replace(predicted=None)
    if not needs.unrotated_keys:
        tokens = tokens.rotated(call.rope)
    return tokens


def attend_only(cache: LayerCache, tokens: Tokens, call: Call) -> Float[Array, "B Q T D"]:
    """Attends to the cache with queries alone, of which the transform takes no notice."""
    transform, needs, positions = cache.transform, cache.transform.needs, tokens.positions
    tokens = _prepared(needs, tokens, call)
    q, kv, rotation = tokens.q, cache.kv, None
    nowhere = jnp.full((*kv.shape[:2], q.shape[2]), kv.slots, jnp.int32)
    view = View(
        kv, nowhere, window=call.options.window, implementation=call.implementation,
        requested=on_request(predicted=tokens.predicted),
    )  # fmt: skip
    view, _ = selected_by(transform, view, cache.state, q)
    if needs.unrotated_keys:
        rotation = call.rope.at(key_positions(needs, kv))
        q = call.rope.rotate(q, held_query_positions(needs, kv, positions))
    out, _ = _attention(Needs(), view, q, rotation, positions, call)
    return out.astype(q.dtype)


def _attention(
    needs: Needs, view: View, q: Array, rotation: Turn | None, positions: Array, call: Call
) -> tuple[Float[Array, "B Q T D"], Float[Array, "B Q S"] | NoneElsewhere]:
    """Returns the output and, where needed, the probability of each slot per query head."""
    kv, index = view.cache, view.index
    lists = kv.shape[1] if index is None else index.shape[1]
    grouped = q.reshape(q.shape[0], lists, -1, *q.shape[2:])
    asked = needs.accumulated_attention or needs.decode_mass
    options = {"probabilities": asked, "sinks": call.options.sinks, **call.kernel_options}
    seen = Seen(kv.log_mass, kv.position, kv.used, index=index, turn=rotation)
    keys, values = kv.k, kv.v
    if view.rows is not None:
        (keys, values), seen = map(Dense, view.rows), seen.listed()
    out, probabilities = keys.attention(values, Queries(grouped, positions), seen, **options)  # pyright: ignore[reportArgumentType]  # both are of one kind
    mass = None
    if asked:
        mass = view.to_slots(probabilities.sum(3)).reshape(q.shape[0], -1, kv.slots)
    return out.reshape(q.shape), mass
