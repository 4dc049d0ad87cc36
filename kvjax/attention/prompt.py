"""A prompt: read into dense slots, chunk by chunk, and compressed once it is complete."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.attention.call import (
    Call,
    Tokens,
    add_attention,
    held_query_positions,
    key_positions,
    query_positions,
)
from kvjax.attention.layer import LayerCache, Part, QueryWindow, Reading, kept_rope, map_parts
from kvjax.cache.rearrange import compact, decoded, encoded, widen
from kvjax.cache.record import Record
from kvjax.cache.slots import append
from kvjax.compose.chain import parts_of, state_of_parts, states_of_parts
from kvjax.decisions import decide
from kvjax.protocol import Chunk, KVTransform, Stage, Step, on_request
from pallas_kernels import (
    Queries,
    Seen,
    prompt_attention,
    prompt_attention_and_maxima,
    prompt_attention_and_sums,
)
from pallas_kernels.attention.call import join_sinks


def begin(
    caches: Any, *, empty: bool = False, document: Int[Array, " B"] | bool | None = None
) -> Any:
    """Makes readings of caches, with keys and values decoded, for a prompt that is to come.

    Args:
      caches: of one layer or of several. Donate them. Readings stay as they are.
      empty: whether they are known to hold nothing. Then nothing is decoded, or brought from host
        memory.
      document: tokens of the whole document of each row, of which the prompt may be a piece, or
        True: those of the prompt. The transform's probe makes a record of a document. None: the
        prompt is not one.
    """
    return map_parts(functools.partial(_begin, empty=empty, document=document), caches)


def _begin(cache: Part, empty: bool, document: Int[Array, " B"] | bool | None) -> Reading:
    if isinstance(cache, Reading):
        return cache
    kv, stored = decoded(cache.kv, empty=empty)
    batch, heads, _ = kv.shape
    queries, size = cache.window, cache.transform.needs.queries(kv.max_prompt)
    if size and queries is None:
        queries = QueryWindow.empty(batch, heads * kv.group, size, kv.k.shape[3], kv.k.dtype)
    cache, rows = dataclasses.replace(cache, kv=kv, window=None), jnp.zeros(batch, bool)
    record = None if document is None else _empty_record(cache)
    whole = None if isinstance(document, bool) else document
    return Reading(
        cache, stored, rows, kv.length + 0, whole, queries, record, rope=None,
        options=cache.options,
    )  # fmt: skip


def _empty_record(cache: LayerCache) -> Record | None:
    probe = cache.transform.needs.probe
    return None if probe is None else probe.empty(cache.kv)


def read(reading: Reading, tokens: Tokens, call: Call) -> tuple[Float[Array, "B Q T D"], Reading]:
    """Reads a chunk of a prompt: its tokens go to free slots and attend to everything up to them.

    Returns:
      The output, `[B, Q, T, D]` in the dtype of q, and the reading with the chunk in it.
    """
    kv, needs, positions = reading.kv, reading.transform.needs, tokens.positions
    if not needs.unrotated_keys:
        tokens = tokens.rotated(call.rope)
    q = tokens.q
    if kv.slots <= kv.capacity:  # no earlier chunk has made room for the whole prompt
        kv = widen(kv, min(kv.slots + (q.shape[2] if call.last else kv.max_prompt), kv.max_tokens))
    kv, slots = append(kv, kv.unfold(tokens.k), kv.unfold(tokens.v), positions)
    keys = kv.k.read()
    if needs.unrotated_keys:
        keys = call.rope.rotate(keys, key_positions(needs, kv))
        q = call.rope.rotate(q, query_positions(needs, kv, slots, positions))
    grouped = q.reshape(q.shape[0], kv.shape[1], -1, *q.shape[2:])
    seen, sinks, options = Seen(kv.log_mass, kv.position), call.options.sinks, call.kernel_options
    args = Queries(grouped, positions), keys, kv.v.read(), seen
    record, sums = reading.record, None
    notes_sums = record is not None and needs.probe.received
    if needs.accumulated_attention or notes_sums:
        out, _, sums = prompt_attention_and_sums(*args, sinks=sinks, **options)
        if needs.accumulated_attention:
            kv = add_attention(kv, sums.reshape(q.shape[0], -1, kv.slots))
    else:
        out, lse = prompt_attention(*args, **options)
        _, out = join_sinks(sinks, lse, out)
    queries = reading.queries
    if queries is not None:
        queries = queries.add(q, positions)
    if record is not None:
        chunk = Chunk(q, positions, slots, tokens.inputs, sums if notes_sums else None)
        record = needs.probe.read(record.with_slots(kv.slots), chunk)
    reading = dataclasses.replace(
        reading, cache=dataclasses.replace(reading.cache, kv=kv), queries=queries, record=record,
        rope=call.rope, rows=reading.rows | (positions >= 0).any(1), options=call.options,
        phase="prompt",
    )  # fmt: skip
    return out.reshape(q.shape).astype(q.dtype), reading


def read_only(reading: Reading, tokens: Tokens, call: Call) -> Float[Array, "B Q T D"]:
    """Attends to the prompt so far: queries alone, of which the transform takes no notice."""
    kv, needs, positions = reading.kv, reading.transform.needs, tokens.positions
    if not needs.unrotated_keys:
        tokens = tokens.rotated(call.rope)
    q, keys = tokens.q, kv.k.read()
    if needs.unrotated_keys:
        keys = call.rope.rotate(keys, key_positions(needs, kv))
        q = call.rope.rotate(q, held_query_positions(needs, kv, positions))
    grouped = q.reshape(q.shape[0], kv.shape[1], -1, *q.shape[2:])
    out, lse = prompt_attention(
        Queries(grouped, positions), keys, kv.v.read(), Seen(kv.log_mass, kv.position),
        **call.kernel_options,
    )  # fmt: skip
    _, out = join_sinks(call.options.sinks, lse, out)
    return out.reshape(q.shape).astype(q.dtype)


def before_look(caches: Any) -> Any:
    """Makes readings ready for a loop over pieces that look, whose carry has one type."""

    def ready(reading: Reading) -> Reading:
        record = _empty_record(reading.cache) if reading.record is None else reading.record
        if record is not None:
            record = record.with_slots(reading.kv.slots)
        return dataclasses.replace(reading, record=record, phase="probe")

    return map_parts(ready, caches)


def look(reading: Reading, tokens: Tokens, call: Call) -> tuple[Float[Array, "B Q T D"], Reading]:
    """Lets tokens attend to the prompt and to each other, and stores none of them.

    They are a piece of the tokens with which the transform's probe looks. Their positions go on
    behind the prompt. Each piece sees the prompt and itself, and no other piece.

    Returns:
      The output, `[B, Q, T, D]` in the dtype of q, and the reading, in whose record the probe has
      noted what the slots received.
    """
    reading = before_look(reading)
    kv, positions, options = reading.kv, tokens.positions, call.kernel_options
    tokens = tokens.rotated(call.rope)
    k, v = kv.unfold(tokens.k), kv.unfold(tokens.v)
    q = tokens.q.reshape(tokens.q.shape[0], kv.shape[1], -1, *tokens.q.shape[2:])
    keys = kv.k.read()
    if kv.unrotated_keys:
        keys = call.rope.rotate(keys, kv.position)
    at = jnp.broadcast_to(positions[:, None], k.shape[:3])
    mass = jnp.where(at >= 0, 0.0, -jnp.inf)
    # The piece and the sinks are one part of each query's softmax, and the prompt is the other.
    queries = Queries(q, positions)
    out, lse = prompt_attention(queries, k, v, Seen(mass, at), **options)
    elsewhere, out = join_sinks(call.options.sinks, lse, out)
    of_prompt, lse, received = prompt_attention_and_maxima(
        queries, keys, kv.v.read(), Seen(kv.log_mass, kv.position), elsewhere, **options
    )
    share = jnp.where(elsewhere > -jnp.inf, jnp.exp(elsewhere - lse), 0.0)[..., None]
    out = of_prompt.astype(jnp.float32) + share * out.astype(jnp.float32)
    record, probe = reading.record, reading.transform.needs.probe
    if probe is not None:
        record = probe.look(record, received)
    reading = dataclasses.replace(reading, record=record, rope=call.rope)
    return out.reshape(tokens.q.shape).astype(tokens.q.dtype), reading


def step_of(reading: Reading, implementation: str | None = None) -> Step:
    """Returns the account of a whole prompt, by which its transform decides."""
    kv, needs, rope, keys = reading.kv, reading.transform.needs, reading.rope, reading.kv.k.read()
    if needs.unrotated_keys:
        keys = rope.rotate(keys, key_positions(needs, kv))
    query, query_position = reading.queries or (None, None)
    requested = on_request(query=query, query_position=query_position, record=reading.record)
    return Step(
        rows=reading.rows, keys=keys, length_before=reading.length_before,
        document_length=reading.document_length, rope=rope, moment="prompt",
        options=reading.options, implementation=implementation, requested=requested,
    )  # fmt: skip


def compress(reading: Reading, implementation: str | None = None) -> LayerCache:
    """Ends a prompt: carries out the transform's decisions, and gives the layer's cache back.

    Parts that evict or merge come first. The slots are then brought to the cache's capacity, other
    parts see them so, and keys and values are stored in their form again.

    Args:
      reading: of the whole prompt. Donate it.
      implementation: of the operations in `pallas_kernels`, as in `attend` (static).
    """
    return stored(evicted(reading, implementation), implementation)


def evicted(
    reading: Reading, implementation: str | None = None, *, to_front: bool = False
) -> Reading:
    """Carries out the decisions of parts that evict or merge: the first half of `compress`.

    Args:
      to_front: whether the slots that stay become the first ones in any case. Otherwise they stay
        where they are if there are as many slots as the capacity, and no other part.
    """
    cache, kv, transform = reading.cache, reading.kv, reading.transform
    parts, states = parts_of(transform), states_of_parts(transform, cache.state)
    first = _evicting(parts)
    step = step_of(reading, implementation)
    kv, evicting, _ = decide(parts[:first], kv, states[:first], step)
    if to_front or kv.slots != kv.capacity or first < len(parts):
        kv = compact(kv, kv.capacity, step.rows)
    state = state_of_parts(transform, (*evicting, *states[first:]))
    cache = dataclasses.replace(cache, kv=kv, state=state)
    # Keys and what slots received are those before slots were freed: an index reads the cache.
    return dataclasses.replace(reading, cache=cache, record=None)


def stored(reading: Reading, implementation: str | None = None) -> LayerCache:
    """Carries out what all other parts decide, and stores the slots: the rest of `compress`."""
    cache, kv, transform, rope = reading.cache, reading.kv, reading.transform, reading.rope
    parts, states = parts_of(transform), states_of_parts(transform, cache.state)
    first = _evicting(parts)
    step = dataclasses.replace(step_of(reading, implementation), keys=None)
    kv, others, _ = decide(parts[first:], kv, states[first:], step)
    kv = encoded(kv, reading.stored, step.rows, rope if kv.unrotated_keys else None)
    if kv.interval is not None:  # what a flush has to know of this attention
        sinks = reading.options.sinks
        if sinks is None:
            sinks = jnp.full_like(cache.options.sinks, -jnp.inf)
        options = dataclasses.replace(reading.options, sinks=sinks)
        cache = dataclasses.replace(cache, options=options, rope=kept_rope(transform, rope))
    return dataclasses.replace(
        cache, kv=kv, state=state_of_parts(transform, (*states[:first], *others)),
        window=reading.queries if transform.needs.decode_queries else None,
    )  # fmt: skip


def _evicting(parts: Sequence[KVTransform]) -> int:
    """Returns how many parts of a chain evict or merge; they come first."""
    return sum(part.stage == Stage.EVICT for part in parts)
