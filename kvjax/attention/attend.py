"""`attend`: the one call that an attention layer makes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from kvjax.attention.layer import (
    Cache,
    LayerCache,
    QueryWindow,
    as_scale,
    check_array,
    check_caches,
    check_layer_cache,
    check_logits,
    check_rope,
    kept_rope,
    layer_caches,
    looks_at_keys,
    map_parts,
)
from kvjax.attention.parts import (
    cache_specs,
    divided_by,
    on_each_device,
    placement_of,
    rope_specs,
)
from kvjax.budgets.budgets import check_choice, check_count
from kvjax.cache.payload import Dense, Seen, take_slots
from kvjax.cache.slots import (
    KVCache,
    append,
    as_positions,
    closed,
    compacted,
    opened,
    ranks,
    widen,
)
from kvjax.compose.chain import parts_of
from kvjax.compose.foreseen import frees_while_decoding
from kvjax.compose.wrappers import HeadGroups
from kvjax.decisions import decide
from kvjax.devices import explicit_mesh, in_automatic_mode
from kvjax.protocol import (
    KVTransform,
    Logits,
    Needs,
    Phase,
    Stage,
    State,
    Step,
    View,
    check_transform,
)
from kvjax.rope import Rope
from pallas_kernels import column_sums, prompt_attention
from pallas_kernels.attention.call import beside_sinks
from pallas_kernels.base.varying import varying


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
    sinks: Float[Array, " Q"] | None = None,
    predicted_query: Float[Array, "B Q T D"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B Q T D"], Cache]:
    """Adds new tokens to a cache, attends over it, and lets the transform compress it.

    In order: append, select, attention, and what the transform decides about a decode step or about
    a prompt that is complete, whose cache then has its capacity. A cache whose `kv.interval` is M
    is flushed every M decode steps: see `flush`. Attention is exact over what is live,
    `softmax(scale · q·k + log_mass) v`, each query seeing the positions up to its own. With
    `sinks`, a slot of logit x[s] has the weight `exp(x[s]) / (exp(sinks[h]) + Σ exp(x))` for query
    head h. It is for inference alone and has no gradient.

    Args:
      transform: the layer's transform, the one that the cache was made for.
      cache: from `init_cache` or the call before. Donate it.
      q, k, v: of the new tokens, query head h belonging to KV head `h // (Q / H)`. Rotated, unless
        `rope` is given.
      positions: token positions, counted from 0, as an array or a list of lists; -1 marks padding,
        which is not stored and gives 0.
      phase: `"prompt"` or `"decode"` (static). The number of tokens never decides.
      last: whether this chunk completes the prompt (static; ignored while decoding). Until then
        nothing is compressed, and the cache that comes back has room for the whole prompt:
        chunks of one size share one compiled function from the second on.
      rope: rotates q and k here. Needed by transforms that keep keys unrotated.
      scale, window, soft_cap: how logits are made, which `init_cache` was told. None: as the cache
        says; another value is an error.
      sinks: a learned logit of each query head, as in gpt-oss: one more column of the softmax,
        without a key or a value. It is neither scaled nor capped, and every window includes it.
        Probabilities that methods see are those of this softmax. None: no.
      predicted_query: the layer's query weights times the input of the previous layer's attention,
        rotated or not as `q` is, for transforms that choose slots before the layer's own query is
        there (`transform.needs.predicted_query`). None: they use `q`. Ignored in a prompt.
      implementation: of the operations in `pallas_kernels`: "pallas", "interpret" (their kernels,
        interpreted), "xla", or None, the best that can run. Kernels see the arrays of one device:
        of arrays divided among several, None takes XLA unless inside `shard_map`, as with a cache
        that was made for a mesh (`init_cache(mesh=)`). They round queries to the dtype of what is
        stored.

    Returns:
      Attention output `[B, Q, T, D]` in the dtype of `q`, and the new cache.

    Raises:
      TypeError, ValueError: at trace time, with what was given and what was expected; among them
        another mesh than that of the cache.
      TypeError: what depends on it is differentiated, in whatever mode.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> attend = jax.jit(kvjax.attend, static_argnums=0, static_argnames="phase")
      >>> tx = kvjax.StreamingLLM(budget=8)
      >>> cache = kvjax.init_cache(tx, batch=1, kv_heads=2, query_heads=4, head_dim=16,
      ...                          max_prompt=32, max_new=4)
      >>> q, kv = jnp.ones((1, 4, 32, 16)), jnp.ones((1, 2, 32, 16))
      >>> out, cache = attend(tx, cache, q, kv, kv, jnp.arange(32)[None], phase="prompt")
      >>> out.shape, int(cache.kv.live[0, 0].sum())
      ((1, 4, 32, 16), 8)

    References:
      OpenAI, gpt-oss-120b & gpt-oss-20b Model Card, arXiv 2508.10925, for `sinks`.
      Xiao et al., Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453, for
      why a softmax needs them.
    """
    check_transform(transform, "attend")
    positions = as_positions(positions)
    _check_tokens(q, k, v, positions)
    logits = _logits(cache, scale, window, soft_cap)
    logits = dataclasses.replace(logits, sinks=sinks)
    call = _Call(phase == "prompt", last, rope, logits, implementation)
    _check_options(phase, call, q, predicted_query)
    # A cache may keep the sinks and is donated: it must not get the model's own array.
    logits = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32) + 0, logits)
    # Not the cache: what it holds has come from a call before.
    given = q, k, v, predicted_query, rope, logits
    q, k, v, predicted_query, rope, logits = _without_gradient(given)
    call = call._replace(rope=rope, logits=logits)
    new = q, k, v, positions, predicted_query
    if (mesh := explicit_mesh(q, k, v, cache)) is not None:
        return _attend_in_automatic_mode(mesh, transform, cache, *new, call)
    out, cache = _attend_placed(transform, cache, *new, call)
    # In a shard_map of one's own, of one type from the first call on, as a loop's carry must be.
    return out, varying(cache, q, k, v)


@jax.custom_jvp
def _without_gradient(arrays: Any) -> Any:
    """The same arrays, which cannot be differentiated."""
    return arrays


@_without_gradient.defjvp
def _refuse_gradient(primals: tuple, tangents: tuple) -> NoReturn:
    raise TypeError(
        "kvjax.attend is not differentiable: it is for inference alone. Train with an attention of "
        "your own, or stop the gradient of what attend is given (jax.lax.stop_gradient)"
    )


class _Call(NamedTuple):
    """What a call of `attend` is given beside its arrays."""

    prompt: bool
    last: bool
    rope: Rope | None
    logits: Logits
    implementation: str | None


def _attend_in_automatic_mode(mesh, transform, cache: Cache, q, k, *others):
    """Divides what comes out as the cache is, or as `q` and `k` where that has no mesh."""
    placement = placement_of(cache)
    *others, call = others
    queries, keys = (jax.typeof(x).sharding.spec for x in (q, k))
    rows, heads = queries[0], keys[1]
    if placement is not None:
        if placement.mesh.shape != mesh.shape:
            raise ValueError(
                f"the cache was made for a mesh of {dict(placement.mesh.shape)}, but that of "
                f"jax.set_mesh or of q, k and v is {dict(mesh.shape)}"
            )
        rows, heads = placement.rows_axis(len(q)), placement.heads_axis
        queries = PartitionSpec(rows, heads)

    def attend(cache, q, k, v, positions, predicted, rope, sinks):
        logits = dataclasses.replace(call.logits, sinks=sinks)
        own = call._replace(rope=rope, logits=logits)
        return _attend_placed(transform, cache, q, k, v, positions, predicted, own)

    def out(shapes):
        own = heads if isinstance(shapes[1], LayerCache) else None
        specs = map_parts(functools.partial(divided_by, rows=rows, heads=own), shapes[1])
        return queries, specs

    args = cache, q, k, *others, call.rope, call.logits.sinks
    return in_automatic_mode(attend, mesh, args, out)


def _attend_placed(transform, cache: Cache, *new):
    attend_layer = _attend_layer if placement_of(cache) is None else _attend_on_mesh
    return attend_layer(transform, cache, *new)


def _attend_on_mesh(transform, cache: Cache, q, k, v, positions, predicted, call: _Call):
    """Every device's rows and heads by themselves: no part of a cache goes to another device."""
    placement = placement_of(cache)
    rows = placement.rows_axis(q.shape[0])
    by_head, by_row = PartitionSpec(rows, placement.heads_axis), PartitionSpec(rows)

    def own(cache, q, k, v, positions, predicted, rope, sinks):
        given = transform, cache, q, k, v, positions, predicted
        logits = dataclasses.replace(call.logits, sinks=sinks)
        return _attend_layer(*given, call._replace(rope=rope, logits=logits))

    args = cache, q, k, v, positions, predicted, call.rope, call.logits.sinks
    expected = None if predicted is None else by_head
    tokens = by_head, by_head, by_head, by_row, expected
    options = rope_specs(call.rope, rows), PartitionSpec(placement.heads_axis)
    specs = cache_specs(cache), *tokens, *options
    return on_each_device(
        own, placement, args, specs, lambda shapes: (by_head, cache_specs(shapes[1]))
    )


def _attend_layer(transform, cache: Cache, q, k, v, positions, predicted, call: _Call):
    attend_layer = _attend_groups if isinstance(transform, HeadGroups) else _attend
    return attend_layer(transform, cache, q, k, v, positions, predicted, call)


def _attend(transform, cache: LayerCache, q, k, v, positions, predicted, call: _Call):
    _check_cache(transform, cache, q, k, call)
    needs, rope, state = transform.needs, call.rope, cache.state
    if not needs.predicted_query or call.prompt:
        predicted = None
    if rope is not None and not needs.unrotated_keys:
        q, k = rope.rotate(q, positions), rope.rotate(k, positions)
        predicted = None if predicted is None else rope.rotate(predicted, positions)
    rows = (positions >= 0).any(1)
    if call.prompt and cache.reading is not None:
        rows = rows | cache.reading
    kv, slots = _appended(cache.kv, k, v, positions, call)
    seen = {"window": call.logits.window, "implementation": call.implementation}
    view = View(kv, slots, predicted=predicted, **seen)
    if not call.prompt:
        view, state = transform.select(view, state, q)
        kv = view.cache
    rotate = None
    if needs.unrotated_keys:
        rotate = rope.at(_key_positions(needs, kv))
        own = positions
        if needs.reposition:
            own = take_slots(rotate.position, jnp.minimum(slots, kv.slots - 1))
            own = jnp.repeat(own, kv.group, axis=1)
        q = rope.rotate(q, own)
    keys = None
    if call.prompt:
        keys = kv.k.read() if rotate is None else rope.rotate(kv.k.read(), rotate.position)
        out, mass = _prompt_attention(needs, kv, q, keys, positions, call)
    else:
        out, mass = _decode_attention(needs, view, q, rotate, positions, call)
    seen = _Seen(rows, slots, keys, mass, _last_queries(needs, cache, q, positions, call), out)
    return out.astype(q.dtype), _after_attention(transform, cache, kv, state, seen, call)


def _appended(kv: KVCache, k, v, positions, call: _Call) -> tuple[KVCache, Int[Array, "B H T"]]:
    """The slots with the new tokens in them, and where those are; widened while a prompt comes."""
    if kv.unfolded > 1:
        k, v = (jnp.repeat(x, kv.unfolded, axis=1) for x in (k, v))
    if call.prompt:
        kv = opened(kv)
        if kv.slots <= kv.capacity:  # no earlier chunk has made room for the whole prompt
            slots = kv.slots + (k.shape[2] if call.last else kv.max_prompt)
            kv = widen(kv, min(slots, kv.max_tokens))
    return append(kv, k, v, positions)


class _Seen(NamedTuple):
    """What a transform may be shown of an attention: the fields of a `Step` of these names.

    `window` holds the last queries, and `output` is that of the attention, None where it is over.
    """

    rows: Array
    slots: Array
    keys: Array | None
    mass: Array | None
    window: QueryWindow | None
    output: Array | None


def _after_attention(
    transform: KVTransform, cache: LayerCache, kv: KVCache, state: State, seen: _Seen, call: _Call
) -> LayerCache:
    """The cache after the attention over `kv`, with what the transform decides carried out."""
    needs, rope = transform.needs, call.rope
    if needs.accumulated_attention:
        received = jnp.moveaxis(seen.mass.reshape(*kv.shape[:2], kv.group, -1), 2, -1)
        kv = kv.with_column("attention", kv.column("attention") + received)
    query, query_position = seen.window or (None, None)
    after = dataclasses.replace(cache, kv=kv, state=state, window=seen.window, reading=None)
    if call.prompt and not call.last:
        return dataclasses.replace(after, reading=seen.rows)
    if call.prompt and kv.interval is not None:  # what a flush has to know of this attention
        sinks = call.logits.sinks
        if sinks is None:
            sinks = jnp.full_like(cache.logits.sinks, -jnp.inf)
        logits = dataclasses.replace(call.logits, sinks=sinks)
        after = dataclasses.replace(after, logits=logits, rope=kept_rope(transform, rope))
    step = Step(
        rows=seen.rows,
        slots=seen.slots,
        mass=seen.mass,
        keys=seen.keys,
        query=query,
        query_position=query_position,
        rope=rope,
        moment="prompt" if call.prompt else "step",
        logits=call.logits,
        implementation=call.implementation,
        output=None if call.prompt else seen.output,
    )
    kv, state = _decide(transform, kv, state, step)
    window = seen.window if needs.decode_queries else None
    return dataclasses.replace(after, kv=kv, state=state, window=window)


def compress_prompt(transform: KVTransform, cache: Cache, observed: LayerCache) -> Cache:
    """The cache that `attend` leaves of a whole prompt which another cache has observed.

    Nothing is attended to: what methods need of a prompt's attention is taken from `observed`.

    Args:
      transform: the layer's transform, the one that the cache was made for.
      cache: empty, from `init_cache`, for as many rows and heads. Donate it.
      observed: the layer's cache of an `Observe` whose needs serve the transform.
    """
    if not isinstance(transform, HeadGroups):
        return _compress_prompt(transform, cache, observed, list(range(observed.kv.shape[1])))
    return tuple(
        _compress_prompt(tx, own, observed, list(heads))
        for (heads, tx), own in zip(transform.groups, cache, strict=True)
    )


def _compress_prompt(
    transform: KVTransform, cache: LayerCache, observed: LayerCache, heads: list[int]
) -> LayerCache:
    """`compress_prompt` for some of the observed KV heads."""
    needs, seen, group = transform.needs, observed.state, observed.kv.group
    index = jnp.array(heads)
    query_index = jnp.array([head * group + g for head in heads for g in range(group)])
    k, v = (payload.read()[:, index] for payload in (observed.kv.k, observed.kv.v))
    positions = jnp.where(observed.kv.live[:, 0], observed.kv.position[:, 0], -1)
    if seen.rope is not None and not needs.unrotated_keys:
        k = seen.rope.rotate(k, positions)
    call = _Call(True, True, seen.rope, seen.logits.of_heads(query_index), None)
    kv, slots = _appended(cache.kv, k, v, positions, call)
    keys = kv.k.read()
    if needs.unrotated_keys:
        keys = seen.rope.rotate(keys, _key_positions(needs, kv))
    mass = None
    if needs.attention_mass or needs.accumulated_attention:
        mass = seen.mass[:, query_index]
        mass = jnp.pad(mass, ((0, 0), (0, 0), (0, kv.slots - mass.shape[2])))
    window, size = None, needs.queries(cache.kv.max_prompt)
    if size:
        query = seen.query[:, query_index, -size:].astype(cache.kv.k.dtype)
        window = QueryWindow(query, seen.query_position[:, -size:])
    attention = _Seen((positions >= 0).any(1), slots, keys, mass, window, None)
    return _after_attention(transform, cache, kv, cache.state, attention, call)


def _decide(transform: KVTransform, kv: KVCache, state: State, step: Step) -> tuple[KVCache, State]:
    """Carries out what the transform decides, part by part of a chain.

    At a prompt's end, parts that evict or merge come first. The slots are then brought to the
    cache's capacity, other parts see them so, and keys and values are encoded.
    """
    parts = parts_of(transform)
    states = state if len(parts) > 1 else (state,)
    first = sum(part.stage == Stage.EVICT for part in parts)
    kv, evicting, _ = decide(parts[:first], kv, states[:first], step)
    prompt = step.moment == "prompt"
    if prompt and (kv.slots != kv.capacity or first < len(parts)):
        kv, source = compacted(kv, kv.capacity, step.rows)
        step = dataclasses.replace(step, source=source)
    kv, others, _ = decide(parts[first:], kv, states[first:], step)
    if prompt:
        kv = closed(kv, step.rows, step.rope if kv.unrotated_keys else None)
    states = (*evicting, *others)
    return kv, states if len(parts) > 1 else states[0]


def flush(
    caches: Cache | tuple[Cache, ...],
    steps: int | None = None,
    implementation: str | None = None,
):
    """Does what is to be done with new tokens every M decode steps.

    Methods that work now and then (`Every`, `Chelsea`, `ClusterKV`, `Codebook`, ...) leave new
    tokens as they come, so that a decode step appends, selects, attends and evicts one slot at
    most. A loop calls `flush` every `flush_interval(caches)` steps. It makes room for the tokens of
    as many steps more: rows that have it are left as they are, and so is a row that got no token.
    A prompt's end does the same for the rows of the prompt. Call `flush` once after a further
    prompt for the others, which may have taken steps since the last time.

    Args:
      caches: of one layer, or of all layers of a model, in tuples. Donate them.
      steps: decode steps until the next flush (static); those of `flush_interval` by default.
      implementation: of the operations in `pallas_kernels`, as in `attend` (static).

    Returns:
      The caches. Those of methods that do nothing now and then come back as they are.

    Raises:
      TypeError: no caches.
      ValueError: caches stacked by layer, or a prompt is being read.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> attend = jax.jit(kvjax.attend, static_argnums=0, static_argnames="phase")
      >>> flush = jax.jit(kvjax.flush)
      >>> tx = kvjax.Every(kvjax.SnapKV(budget=40), steps=8)
      >>> cache = kvjax.init_cache(tx, batch=1, kv_heads=2, head_dim=16, max_prompt=64, max_new=16)
      >>> rows = jnp.ones((1, 2, 64, 16))
      >>> _, cache = attend(tx, cache, rows, rows, rows, jnp.arange(64)[None], phase="prompt")
      >>> for position in range(64, 80):
      ...     new, at = rows[:, :, :1], jnp.array([[position]])
      ...     _, cache = attend(tx, cache, new, new, new, at, phase="decode")
      ...     if (position - 63) % kvjax.flush_interval(cache) == 0:
      ...         cache = flush(cache)
      >>> int(cache.kv.live[0, 0].sum()), int(cache.kv.dropped.sum())
      (40, 0)
    """
    check_caches(caches, "flush")
    interval = flush_interval(caches)
    steps = interval if steps is None else steps
    if steps is None:
        return caches
    check_count("steps", steps, 1)
    own = functools.partial(_flush_layer, steps=steps, implementation=implementation)
    if (mesh := explicit_mesh(caches)) is None:
        return map_parts(own, caches)
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, caches)
    return in_automatic_mode(functools.partial(map_parts, own), mesh, (caches,), lambda _: specs)


def flush_interval(caches: Cache | tuple[Cache, ...]) -> int | None:
    """M: after so many decode steps the caches must be flushed; None: never.

    The least of all layers' intervals, also of caches that are stacked by layer. It is static, as
    `flush` and the loop around it need it.
    """
    check_caches(caches, "flush_interval", stacked=True)
    intervals = (cache.kv.interval for cache in layer_caches(caches))
    return min((steps for steps in intervals if steps is not None), default=None)


def _flush_layer(cache: LayerCache, steps: int, implementation: str | None) -> LayerCache:
    placement = cache.placement
    own = functools.partial(_flush, steps=steps, implementation=implementation)
    if cache.kv.interval is None:
        return cache
    if placement is None:
        return own(cache)
    return on_each_device(own, placement, (cache,), (cache_specs(cache),), cache_specs)


def _flush(cache: LayerCache, steps: int, implementation: str | None) -> LayerCache:
    kv, (query, query_position) = cache.kv, cache.window or (None, None)
    if cache.reading is not None or kv.stored is not None:
        raise ValueError("the prompt is not complete: give its last chunk before flush")
    keys = kv.k.read() if looks_at_keys(cache.transform) else None
    if keys is not None and cache.rope is not None:
        keys = cache.rope.rotate(keys, _key_positions(cache.transform.needs, kv))
    step = Step(
        rows=jnp.ones(kv.shape[0], bool),
        keys=keys,
        query=query,
        query_position=query_position,
        rope=cache.rope,
        moment="flush",
        logits=cache.logits,
        room=steps,
        implementation=implementation,
    )
    kv, state = _decide(cache.transform, kv, cache.state, step)
    kv = kv.replace(k=kv.k.flush(steps), v=kv.v.flush(steps))
    return dataclasses.replace(cache, kv=kv, state=state)


def _prompt_attention(needs: Needs, kv: KVCache, q, keys, positions, call: _Call):
    """Output and, where needed, the probability that each slot received per query head."""
    grouped = q.reshape(q.shape[0], kv.shape[1], -1, *q.shape[2:])
    rows = positions, kv.position
    kind = {**call.logits.options, "implementation": call.implementation}
    out, lse = prompt_attention(grouped, keys, kv.v.read(), kv.log_mass, *rows, **kind)
    lse, out = beside_sinks(call.logits.sinks, lse, out)
    mass = None
    if needs.attention_mass or needs.accumulated_attention:
        mass = column_sums(grouped, keys, kv.log_mass, lse, *rows, **kind)
        mass = mass.reshape(q.shape[0], -1, kv.slots)
    return out.reshape(q.shape), mass


def _decode_attention(needs: Needs, view: View, q, rotate, positions, call: _Call):
    """Output and, where needed, the probability that each slot received per query head."""
    kv, index = view.cache, view.index
    lists = kv.shape[1] if index is None else index.shape[1]
    grouped = q.reshape(q.shape[0], lists, -1, *q.shape[2:])
    wanted = needs.attention_mass or needs.accumulated_attention or needs.decode_mass
    kind = {"implementation": call.implementation, "probabilities": wanted}
    kind |= {"sinks": call.logits.sinks, **call.logits.options}
    seen = Seen(kv.log_mass, kv.position, kv.used, rotate)
    if view.rows is None:
        out, found = kv.k.attention(kv.v, grouped, seen, positions, index=index, **kind)
    else:
        keys, values = map(Dense, view.rows)
        out, found = keys.attention(values, grouped, seen.of(index), positions, **kind)
    mass = None
    if wanted:
        mass = view.to_slots(found.sum(3)).reshape(q.shape[0], -1, kv.slots)
    return out.reshape(q.shape), mass


def _key_positions(needs: Needs, kv: KVCache) -> Int[Array, "B H S"]:
    """What stored keys are rotated at: their position, or their rank among the live slots."""
    if not needs.reposition:
        return kv.position
    return ranks(kv.live, kv.position)


def _last_queries(needs: Needs, cache: LayerCache, q, positions, call: _Call) -> QueryWindow | None:
    """Each row's last queries of the prompt (and of decoding, where needed) after this call."""
    size = needs.queries(cache.kv.max_prompt)
    if not size or not (call.prompt or needs.decode_queries):
        return None
    window = cache.window or QueryWindow.empty(
        q.shape[0], q.shape[1], size, q.shape[3], cache.kv.k.dtype
    )
    return window.add(q, positions)


def _attend_groups(transform: HeadGroups, cache, q, k, v, positions, predicted, call: _Call):
    """Every head group on its own rectangle; heads come back in their order."""
    transform.check_heads(k.shape[1])
    if not isinstance(cache, tuple) or len(cache) != len(transform.groups):
        given = f"{len(cache)} of them" if isinstance(cache, tuple) else type(cache).__name__
        raise ValueError(
            f"{transform!r} needs a tuple of {len(transform.groups)} caches, one per head group, "
            f"got {given}"
        )
    group = q.shape[1] // k.shape[1]
    outs, caches, order = [], [], []
    for (heads, tx), own in zip(transform.groups, cache, strict=True):
        q_heads = [head * group + g for head in heads for g in range(group)]
        kv_index, q_index = jnp.array(heads), jnp.array(q_heads)
        new = q[:, q_index], k[:, kv_index], v[:, kv_index]
        expected = None if predicted is None else predicted[:, q_index]
        options = call._replace(logits=call.logits.of_heads(q_index))
        out, own = _attend(tx, own, *new, positions, expected, options)
        outs.append(out)
        caches.append(own)
        order.extend(q_heads)
    back = jnp.argsort(jnp.array(order))
    return jnp.concatenate(outs, axis=1)[:, back], tuple(caches)


def _check_tokens(q, k, v, positions) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_array(name, x)
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


def _check_options(phase: Phase, call: _Call, q, predicted) -> None:
    check_choice("phase", phase, ("prompt", "decode"))
    if predicted is not None:
        check_array("predicted_query", predicted)
        if predicted.shape != q.shape:
            raise ValueError(
                f"predicted_query must have the shape of q, {q.shape}, got {predicted.shape}"
            )
    if call.logits.sinks is not None:
        _check_sinks(call.logits.sinks, q.shape[1])
    check_rope(call.rope, q.shape[3])


def _logits(cache: Cache, scale, window, soft_cap) -> Logits:
    """How the cache makes logits; raises ValueError where a call of `attend` says otherwise."""
    check_layer_cache(cache, "attend")
    part = layer_caches(cache)[0]
    check_logits(window, soft_cap)
    given = {
        "scale": None if scale is None else as_scale(scale), "window": window, "soft_cap": soft_cap,
    }  # fmt: skip
    for name, value in given.items():
        made_for = getattr(part.logits, name)
        if value is not None and value != made_for:
            raise ValueError(
                f"the cache was made for {name}={made_for}, got {name}={value}: give it to "
                "init_cache, or to generate as an attribute of the model (see "
                "kvjax.LanguageModel)"
            )
    return part.logits


def _check_sinks(sinks, query_heads: int) -> None:
    check_array("sinks", sinks)
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise TypeError(f"sinks must be floating, got {sinks.dtype}")
    if sinks.shape != (query_heads,):
        raise ValueError(f"sinks must be [Q] = {(query_heads,)}, got {sinks.shape}")


def _check_cache(transform: KVTransform, cache: Cache, q, k, call: _Call) -> None:
    if not isinstance(cache, LayerCache):
        raise TypeError(f"attend takes a cache from init_cache, got {type(cache).__name__}")
    if cache.transform != transform:
        raise ValueError(f"the cache was made for {cache.transform!r}, got {transform!r}")
    kv = cache.kv
    batch, lists, _ = kv.shape
    kv_heads, query_heads, head_dim = lists // kv.unfolded, lists * kv.group, kv.k.shape[3]
    if (*k.shape[:2], k.shape[3], q.shape[1]) != (batch, kv_heads, head_dim, query_heads):
        raise ValueError(
            f"the cache holds {batch} rows, {kv_heads} KV heads and {query_heads} query heads of "
            f"head_dim {head_dim}, got q {q.shape} and k {k.shape}"
        )
    if transform.needs.unrotated_keys and call.rope is None:
        raise ValueError(
            f"{transform!r} keeps keys unrotated: give attend rope= and unrotated q, k"
        )
    if call.prompt:
        return
    if cache.reading is not None or kv.stored is not None:
        raise ValueError(
            "the prompt is not complete: give its last chunk with last=True before decoding, "
            "got phase='decode' after last=False"
        )
    if q.shape[2] != 1 and (
        kv.lists is not None or any(map(frees_while_decoding, parts_of(transform)))
    ):
        raise ValueError(
            f"{transform!r} compresses or selects while decoding: give it one token a step, got "
            f"{q.shape[2]}"
        )
