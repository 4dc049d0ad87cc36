"""`attend`: the one call that an attention layer makes."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention.layer import Cache, LayerCache, QueryWindow, check_groups
from kvjax.budgets.budgets import check_count
from kvjax.cache.payload import Dense, take_slots
from kvjax.cache.slots import KVCache, append, append_to_tail, compact, settle, widen
from kvjax.compose.wrappers import HeadGroups
from kvjax.protocol import (
    KVTransform,
    Needs,
    Phase,
    Step,
    View,
    check_transform,
)
from kvjax.rope import Rope, Rotation
from kvjax.storage.encoded_attention import Seen, encoded_attention
from pallas_kernels import (
    column_sums,
    decode_attention,
    gather_attention,
    prompt_attention,
)
from pallas_kernels.base.dispatch import check_implementation


def attend(
    transform: KVTransform,
    cache: Cache,
    q: Float[Array, "B Q T D"],
    k: Float[Array, "B H T D"],
    v: Float[Array, "B H T D"],
    positions: Int[Array, "B T"],
    *,
    phase: Phase,
    last: bool = True,
    rope: Rope | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    predicted_query: Float[Array, "B Q T D"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B Q T D"], Cache]:
    """Adds new tokens to a cache, attends over it, and lets the transform compress it.

    In order: append, read, attention, update; when a prompt is complete, the cache is compacted to
    its capacity. Attention is exact over what is live: `softmax(scale · q·k + log_mass) v`, each
    query seeing the positions up to its own.

    Args:
      transform: the layer's transform, the one that the cache was made for.
      cache: from `init_cache` or the call before. Donate it.
      q, k, v: of the new tokens, query head h belonging to KV head `h // (Q / H)`. Rotated, unless
        `rope` is given.
      positions: token positions, counted from 0; -1 marks padding, which is not stored and gives 0.
      phase: `"prompt"` or `"decode"` (static). The number of tokens never decides.
      last: whether this chunk completes the prompt (static; ignored while decoding). Until then
        nothing is compressed, and the cache that comes back has room for the whole prompt:
        chunks of one size share one compiled function from the second on.
      rope: rotates q and k here. Needed by transforms that keep keys unrotated.
      scale: of the logits; `D ** -0.5` by default.
      window: sliding window: a query sees the newest `window` positions. None: all.
      soft_cap: bounds logits, `c · tanh(logit / c)`. None: no.
      predicted_query: the layer's query weights times the input of the previous layer's attention,
        rotated or not as `q` is, for transforms that choose slots before the layer's own query is
        there (`transform.needs.predicted_query`). None: they use `q`. Ignored in a prompt.
      implementation: of the operations in `pallas_kernels` that a decode step makes: "pallas",
        "interpret" (their kernels, interpreted), "xla", or None, the best that can run. A prompt
        has XLA alone. Kernels see the arrays of one device: of arrays divided among several, None
        takes XLA unless inside `shard_map`. They round queries to the dtype of what is stored.

    Returns:
      Attention output `[B, Q, T, D]` in the dtype of `q`, and the new cache.

    Raises:
      TypeError, ValueError: at trace time, with what was given and what was expected.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> tx = kvjax.StreamingLLM(budget=8)
      >>> cache = kvjax.init_cache(tx, batch=1, kv_heads=2, query_heads=4, head_dim=16,
      ...                          max_prompt=32, max_new=4)
      >>> q, kv = jnp.ones((1, 4, 32, 16)), jnp.ones((1, 2, 32, 16))
      >>> out, cache = kvjax.attend(tx, cache, q, kv, kv, jnp.arange(32)[None], phase="prompt")
      >>> out.shape, int(cache.kv.live[0, 0].sum())
      ((1, 4, 32, 16), 8)
    """
    check_transform(transform, "attend")
    options = _Options(phase, last, rope, scale, window, soft_cap, predicted_query, implementation)
    if isinstance(transform, HeadGroups):
        return _attend_groups(transform, cache, q, k, v, positions, options)
    _check(transform, cache, q, k, v, positions, options)
    positions = positions.astype(jnp.int32)
    if scale is None:
        options = options._replace(scale=q.shape[-1] ** -0.5)
    return _attend(transform, cache, q, k, v, positions, options)


class _Options(NamedTuple):
    phase: Phase
    last: bool
    rope: Rope | None
    scale: float | None
    window: int | None
    soft_cap: float | None
    predicted_query: Array | None
    implementation: str | None

    @property
    def logits(self) -> dict:
        return {"scale": self.scale, "window": self.window, "soft_cap": self.soft_cap}


def _attend(transform, cache, q, k, v, positions, options: _Options):
    needs, kv, rope = transform.needs, cache.kv, options.rope
    prompt = options.phase == "prompt"
    predicted = options.predicted_query if needs.predicted_query and not prompt else None
    if rope is not None and not needs.unrotated_keys:
        q, k = rope.rotate(q, positions), rope.rotate(k, positions)
        predicted = None if predicted is None else rope.rotate(predicted, positions)
    if kv.unfolded > 1:
        k, v = (jnp.repeat(x, kv.unfolded, axis=1) for x in (k, v))
    if prompt:
        kv = _open(kv)
        kv = widen(kv, _working_slots(kv, k.shape[2], options.last))
    to_tail = kv.tail is not None and not prompt
    kv, slots = (append_to_tail if to_tail else append)(kv, k, v, positions)
    view = View(kv, predicted=predicted, implementation=options.implementation)
    state = cache.state
    if not prompt:
        view, state = transform.read(view, state, q)
    kv = view.cache
    keys = values = rotate = None
    if not _listed(view):
        keys, values = view.read()
    if needs.unrotated_keys:
        own, others = _late_positions(needs, view, slots, positions)
        q, keys = rope.rotate(q, own), rope.rotate(keys, others)
        rotate = Rotation(rope, others, kv.max_tokens)
    out, mass = _attention(needs, view, q, keys, values, rotate, positions, options)
    if not prompt and transform.merges and transform.frees_while_decoding:
        kv = _after(kv, out)
    if needs.accumulated_attention:
        kv = _accumulate(kv, mass)
    window = _last_queries(needs, cache, q, positions, options)
    step = Step(
        slots=slots,
        mass=mass,
        keys=keys if view.index is None else None,
        query=None if window is None else window.query,
        query_position=None if window is None else window.position,
        rope=rope,
        phase=options.phase,
        last=options.last,
        implementation=options.implementation,
        **options.logits,
    )
    kv, state = transform.update(kv, state, step)
    if prompt and options.last and (kv.slots != kv.capacity or kv.tail is not None):
        kv = compact(kv, kv.capacity)
    if prompt and options.last:
        kv = _close(kv)
    elif to_tail:
        kv = settle(kv, after=_finite(out))
    if prompt and options.last and not needs.decode_queries:
        window = None
    reading = prompt and not options.last
    return out.astype(q.dtype), LayerCache(kv, state, window, transform, reading)


def _working_slots(kv: KVCache, tokens: int, last: bool) -> int:
    """Slots while a prompt is read: what is there and the new tokens, never more than can come."""
    if kv.slots > kv.capacity:  # an earlier chunk has made room for the whole prompt
        return kv.slots
    wanted = kv.slots + (tokens if last else kv.max_prompt)
    return max(kv.slots, min(wanted, kv.max_tokens))


def _open(kv: KVCache) -> KVCache:
    """The cache for the time that a prompt is read: all keys and values at hand."""
    return kv.replace(k=kv.k.open(), v=kv.v.open())


def _close(kv: KVCache) -> KVCache:
    """The cache as it is between prompts."""
    tail = jnp.zeros((), jnp.int32) if kv.tail is None else kv.tail.start
    return kv.replace(k=kv.k.close(tail), v=kv.v.close(tail))


def _listed(view: View) -> bool:
    """Whether attention takes the rows of a selection from the store itself."""
    dense = isinstance(view.cache.k, Dense) and isinstance(view.cache.v, Dense)
    return view.index is not None and view.rows is None and dense


def _attention(needs: Needs, view: View, q, keys, values, rotate, positions, options: _Options):
    """Output and, where needed, the probability that each slot received per query head."""
    kv = view.cache
    batch, lists = len(q), kv.shape[1] if view.index is None else view.index.shape[1]
    grouped = q.reshape(batch, lists, -1, *q.shape[2:])
    kind = {**options.logits, "implementation": options.implementation}
    wants_mass = needs.attention_mass or needs.accumulated_attention
    wants_mass |= needs.decode_mass and options.phase == "decode"
    bias = view.per_slot(kv.log_mass, -jnp.inf)
    key_position = view.per_slot(kv.position, -1)
    mass = probabilities = None
    if options.phase == "prompt":
        check_implementation(options.implementation, offered=("xla",))
        rows, own = (positions, key_position), options.logits
        out, lse = prompt_attention(grouped, keys, values, bias, *rows, **own)
        if wants_mass:
            mass = column_sums(grouped, keys, bias, lse, *rows, **own)
    elif _listed(view):
        out, _, probabilities = gather_attention(
            grouped, kv.k.data, kv.v.data, view.index, kv.log_mass, positions, kv.position,
            probabilities=wants_mass, **kind,
        )  # fmt: skip
    elif view.index is None and hasattr(kv.k, "logits"):
        # An encoded payload is attended to as it is; XLA then drops the decoded rows unless an
        # update uses the keys.
        seen = Seen(bias, key_position, kv.used, rotate)
        out, probabilities = encoded_attention(
            grouped, kv.k, kv.v, seen, positions, wants_mass=wants_mass, **kind
        )
    else:
        out, _, probabilities = decode_attention(
            grouped, keys, values, bias, positions, key_position,
            used=kv.used if view.index is None else None, probabilities=wants_mass, **kind,
        )  # fmt: skip
    if wants_mass and mass is None:
        mass = view.to_slots(probabilities.sum(3))
    if mass is not None:
        mass = mass.reshape(batch, -1, mass.shape[-1])
    return out.reshape(q.shape), mass


def _after(kv: KVCache, out: Float[Array, "B Q T D"]) -> KVCache:
    """The same cache, computed after `out`: a merge may then write keys and values in place.

    XLA goes by data alone. What attention reads and a conditional may overwrite, in no order that
    the data tells, it copies at every step: both stores, whether anything is merged or not.
    """
    return kv.replace(log_mass=jnp.where(_finite(out), kv.log_mass, -jnp.inf))


def _finite(out: Float[Array, "B Q T D"]) -> Bool[Array, ""]:
    """True, computed from `out`: no number is above infinity, and XLA does not know."""
    return ~(out.max() > jnp.inf)


def _accumulate(kv: KVCache, mass: Float[Array, "B Q S"]) -> KVCache:
    """Adds a call's attention to the column of what every slot received so far."""
    per_group = mass.reshape(*kv.shape[:2], kv.group, -1)
    return kv.with_column("attention", kv.column("attention") + jnp.moveaxis(per_group, 2, -1))


def _late_positions(needs: Needs, view: View, slots, positions):
    """What new queries and stored keys are rotated at: their position, or their rank there."""
    kv = view.cache
    if not needs.reposition:
        return positions, view.per_slot(kv.position, -1)
    order = jnp.argsort(jnp.where(kv.live, kv.position, jnp.iinfo(jnp.int32).max), axis=-1)
    rank = jnp.argsort(order, axis=-1).astype(jnp.int32)
    own = take_slots(rank, jnp.minimum(slots, kv.slots - 1))
    own = jnp.repeat(own, kv.group, axis=1)
    return own, view.per_slot(rank, -1)


def _last_queries(
    needs: Needs, cache: LayerCache, q, positions, options: _Options
) -> QueryWindow | None:
    """Each row's last queries of the prompt (and of decoding, where needed) after this call."""
    size = needs.queries(cache.kv.max_prompt)
    if not size or (options.phase == "decode" and not needs.decode_queries):
        return None
    window = cache.window
    if window is None:
        batch, query_heads, _, head_dim = q.shape
        dtype = cache.kv.k.dtype
        window = QueryWindow.empty(batch, query_heads, size, head_dim, dtype)
    return window.add(q, positions)


def _attend_groups(transform: HeadGroups, cache, q, k, v, positions, options: _Options):
    """Every head group on its own rectangle; heads come back in their order."""
    _check_tokens(q, k, v, positions)
    check_groups(transform, k.shape[1])
    if not isinstance(cache, tuple) or len(cache) != len(transform.groups):
        given = f"{len(cache)} of them" if isinstance(cache, tuple) else type(cache).__name__
        raise ValueError(
            f"{transform!r} needs a tuple of {len(transform.groups)} caches, one per head group, "
            f"got {given}"
        )
    group = q.shape[1] // k.shape[1]
    outs, caches, order = [], [], []
    named, predicted = options._asdict(), options.predicted_query
    for (heads, tx), own in zip(transform.groups, cache, strict=True):
        kv_index = jnp.array(heads)
        q_heads = [head * group + g for head in heads for g in range(group)]
        q_index = jnp.array(q_heads)
        if predicted is not None:
            named["predicted_query"] = predicted[:, q_index]
        out, own = attend(
            tx, own, q[:, q_index], k[:, kv_index], v[:, kv_index], positions, **named
        )
        outs.append(out)
        caches.append(own)
        order.extend(q_heads)
    back = jnp.argsort(jnp.array(order))
    return jnp.concatenate(outs, axis=1)[:, back], tuple(caches)


def _check_tokens(q, k, v, positions) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, heads, T, D], got shape {x.shape}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating, got {x.dtype}")
    batch, query_heads, tokens, head_dim = q.shape
    kv_heads = k.shape[1]
    if k.shape != (batch, kv_heads, tokens, head_dim) or v.shape != k.shape:
        raise ValueError(
            "k and v must be [B, H, T, D] with the B, T and D of q, got "
            f"q {q.shape}, k {k.shape}, v {v.shape}"
        )
    if query_heads % kv_heads:
        raise ValueError(
            f"query heads must be a multiple of KV heads, got {query_heads} and {kv_heads}"
        )
    if tokens < 1:
        raise ValueError("attend needs at least one token, got T = 0")
    if positions.shape != (batch, tokens):
        raise ValueError(f"positions must be [B, T] = {(batch, tokens)}, got {positions.shape}")
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"positions must be integers, got {positions.dtype}")


def _check(transform, cache, q, k, v, positions, options: _Options) -> None:
    _check_tokens(q, k, v, positions)
    if options.phase not in ("prompt", "decode"):
        raise ValueError(f"phase must be 'prompt' or 'decode', got {options.phase!r}")
    if not isinstance(cache, LayerCache):
        raise TypeError(f"attend takes a cache from init_cache, got {type(cache).__name__}")
    if cache.transform != transform:
        raise ValueError(f"the cache was made for {cache.transform!r}, got {transform!r}")
    kv = cache.kv
    batch, lists, _ = kv.shape
    kv_heads, query_heads = lists // kv.unfolded, lists * kv.group
    if k.shape[:2] != (batch, kv_heads) or q.shape[1] != query_heads:
        raise ValueError(
            f"the cache holds {batch} rows, {kv_heads} KV heads and {query_heads} query heads, "
            f"got q {q.shape} and k {k.shape}"
        )
    if k.shape[3] != kv.k.shape[3]:
        raise ValueError(f"the cache was made for head_dim {kv.k.shape[3]}, got {k.shape[3]}")
    if transform.needs.unrotated_keys and options.rope is None:
        raise ValueError(
            f"{transform!r} keeps keys unrotated: give attend rope= and unrotated q, k"
        )
    if options.phase == "decode" and cache.reading:
        raise ValueError(
            "the prompt is not complete: give its last chunk with last=True before decoding, "
            f"got phase={options.phase!r} after last=False"
        )
    if options.phase == "decode" and transform.frees_while_decoding and q.shape[2] != 1:
        raise ValueError(
            f"{transform!r} compresses while decoding: give it one token a step, got {q.shape[2]}"
        )
    if options.phase == "decode" and kv.tail is not None and q.shape[2] != 1:
        raise ValueError(
            f"{transform!r} adds to its tail while decoding: give it one token a step, "
            f"got {q.shape[2]}"
        )
    if options.predicted_query is not None and options.predicted_query.shape != q.shape:
        raise ValueError(
            f"predicted_query must have the shape of q, {q.shape}, got "
            f"{options.predicted_query.shape}"
        )
    if options.window is not None:
        check_count("window", options.window, 1)
    if options.soft_cap is not None and not options.soft_cap > 0:
        raise ValueError(f"soft_cap must be above 0, got {options.soft_cap}")
    if options.rope is not None and 2 * options.rope.inv_freq.shape[-1] > q.shape[3]:
        raise ValueError(
            f"rope rotates {2 * options.rope.inv_freq.shape[-1]} channels, got head_dim "
            f"{q.shape[3]}"
        )
