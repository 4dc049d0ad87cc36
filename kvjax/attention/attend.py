"""`attend`: the one call that an attention layer makes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NoReturn, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from kvjax.attention.call import Call, Tokens, query_heads
from kvjax.attention.flush import flushed_before_step, flushed_behind_prompt
from kvjax.attention.layer import (
    Cache,
    Part,
    Reading,
    check_layer_cache,
    for_keeping,
    layer_caches,
    map_parts,
)
from kvjax.attention.parts import (
    cache_specs,
    divided_by,
    on_each_device,
    placement_of,
    rope_specs,
    sinks_specs,
)
from kvjax.attention.prompt import begin, compress, look, read, read_only
from kvjax.attention.step import attend_only, decode
from kvjax.cache.rope import Rope, check_rope
from kvjax.cache.slots import as_positions
from kvjax.checks import as_scale, check_array, check_choice, check_logits
from kvjax.compose.chain import parts_of
from kvjax.compose.foreseen import frees_while_decoding
from kvjax.compose.ring import Ring
from kvjax.devices import explicit_mesh, in_automatic_mode
from kvjax.protocol import AttentionOptions, Inputs, KVTransform, Phase, Probe
from pallas_kernels.base.varying import varying

Layout = Literal["BHTD", "BTHD"]


def attend(
    cache: Cache,
    q: Float[Array, "B Q T D"],
    k: Float[Array, "B H T D"] | None,
    v: Float[Array, "B H T D"] | None,
    positions: Int[Array, "B T"],
    *,
    phase: Phase | Literal["by_length"],
    last: bool = True,
    repeats: bool = False,
    layout: Layout = "BHTD",
    rope: Rope | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " Q"] | None = None,
    predicted_query: Float[Array, "B Q T D"] | None = None,
    inputs: Inputs | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B Q T D"], Cache]:
    """Adds new tokens to a cache, attends over it, and lets the transform compress it.

    In order: append, select, attention, and what the transform decides about a decode step or about
    a prompt that is complete, whose cache then has its capacity. A cache whose `kv.interval` is M
    is flushed every M decode steps, by the loop (see `flush`) or, where `self_flushing` has made
    it, by itself. Attention is exact over what is live,
    `softmax(scale · q·k + log_mass) v`, each query seeing the positions up to its own. With
    `sinks`, a slot of logit x[s] has the weight `exp(x[s]) / (exp(sinks[h]) + Σ exp(x))` for query
    head h. It is for inference alone and has no gradient.

    Args:
      cache: from `init_cache` or the call before. It knows its transform. Donate it.
      q, k, v: of the new tokens, query head h belonging to KV head `h // (Q / H)`. Rotated, unless
        `rope` is given.
        Without k and v (None), the queries attend to what the cache holds up to their positions,
        and it stays as it is: a loop's token that it holds already, or a layer that shares the keys
        and values of another one. So they do in `"prompt"`, over a prompt that is not complete, to
        which `last=True` puts an end. No method takes notice of such queries.
      positions: token positions, counted from 0, as an array or a list of lists; -1 marks padding,
        which is not stored and gives 0.
      phase: `"prompt"` or `"decode"` (static). The number of tokens decides in `"by_length"` alone,
        for loops of others that do not say which it is: one token is a decode step, and more are a
        prompt. So a prompt of one token, and the last chunk of a prompt if it is one token, are
        steps there, at which nothing is compressed. `"probe"`: the
        tokens follow a document whose chunks had `last=False`, attend to it and to each other, and
        are not stored, for methods that look at documents once more (`transform.needs.probe`). The
        last such call has `last=True`.
      last: whether this chunk completes the prompt (static; ignored while decoding). Until then
        nothing is compressed, and a `Reading` comes back in the place of the cache, with room for
        the whole prompt: chunks of one size share one compiled function from the second on.
      repeats: whether a decode step may have tokens once more, as in loops that read a prompt
        and then feed its last token (static). A token at a position below the row's length attends
        to what is there, and is not added; no method takes notice of it.
      layout: axes of q, k, v and `predicted_query`, and of the output (static): `"BHTD"`, heads
        before tokens, or `"BTHD"`, tokens before heads.
      rope: rotates q and k here. Needed by transforms that keep keys unrotated.
      scale, window, soft_cap: how logits are made, which `init_cache` was told. None: as the cache
        says; another value is an error.
      sinks: a learned logit of each query head, as in gpt-oss: one more column of the softmax,
        without a key or a value. It is neither scaled nor capped, and every window includes it.
        Probabilities that methods see are those of this softmax. None: no.
      predicted_query: the layer's query weights times the input of the previous layer's attention,
        rotated or not as `q` is, for transforms that choose slots before the layer's own query is
        there (`transform.needs.predicted_query`). None: they use `q`. Ignored in a prompt.
      inputs: what enters the layer (`kvjax.kit.Inputs`), for methods that look at it
        (`transform.needs.probe.inputs`). None: such methods raise an error.
      implementation: of the operations in `pallas_kernels`: "pallas", "interpret" (their kernels,
        interpreted), "xla", or None, the best that can run. Kernels see the arrays of one device:
        of arrays divided among several, None takes XLA unless inside `shard_map`, as with a cache
        that was made for a mesh (`init_cache(mesh=)`). They round queries to the dtype of the
        stored keys.

    Returns:
      Attention output in the layout and the dtype of `q`, and the new cache.

    Raises:
      TypeError, ValueError: at trace time, with what was given and what was expected; among them
        another mesh than that of the cache.
      TypeError: what depends on it is differentiated, in whatever mode.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> attend = jax.jit(kvjax.attend, static_argnames="phase")
      >>> cache = kvjax.init_cache(kvjax.StreamingLLM(budget=8), batch=1, kv_heads=2,
      ...                          query_heads=4, head_dim=16, max_prompt=32, max_new=4)
      >>> q, kv = jnp.ones((1, 4, 32, 16)), jnp.ones((1, 2, 32, 16))
      >>> out, cache = attend(cache, q, kv, kv, jnp.arange(32)[None], phase="prompt")
      >>> out.shape, int(cache.kv.live[0, 0].sum())
      ((1, 4, 32, 16), 8)

    References:
      OpenAI, gpt-oss-120b & gpt-oss-20b Model Card, arXiv 2508.10925, for `sinks`.
      Xiao et al., Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453, for
      why a softmax needs them.
    """
    check_layer_cache(cache, "attend")
    check_choice("phase", phase, (*get_args(Phase), "by_length"))
    check_choice("layout", layout, get_args(Layout))
    if layout == "BTHD":
        q, k, v, predicted_query = (_swapped(x) for x in (q, k, v, predicted_query))
    if phase == "by_length":
        phase = "decode" if jnp.shape(positions)[-1:] == (1,) else "prompt"
    probes = (part.transform.needs.probe for part in layer_caches(cache))
    asks = phase == "prompt" and any(probe is not None and probe.inputs for probe in probes)
    tokens = Tokens(q, k, v, as_positions(positions), predicted_query, inputs if asks else None)
    _check_tokens(tokens)
    if k is None:
        _check_queries_alone(cache, phase)
    if asks:
        _check_inputs(cache, inputs, tokens.positions.shape)
    check_rope(rope, q.shape[3])
    options = _options(cache, scale, window, soft_cap)
    if sinks is not None:
        _check_sinks(sinks, q.shape[1])
        sinks = for_keeping(jnp.asarray(sinks, jnp.float32))
    options = dataclasses.replace(options, sinks=sinks)
    call = Call(rope, options, phase, last, implementation, repeats)
    _check_cache(cache, tokens, call)
    # The cache needs none: what it holds has come from an earlier call.
    tokens, call = _without_gradient((tokens, call))
    if (mesh := explicit_mesh(tokens.q, tokens.k, tokens.v, cache)) is not None:
        out, cache = _attend_in_automatic_mode(mesh, cache, tokens, call)
    else:
        out, cache = _attend_placed(cache, tokens, call)
        # Inside a user's shard_map a loop's carry must have one type from the first call on.
        cache = varying(cache, tokens.q, tokens.k, tokens.v)
    return out if layout == "BHTD" else out.swapaxes(1, 2), cache


def _swapped(x: Any) -> Any:
    """Swaps the axes of tokens and of heads; anything but such an array is refused later."""
    return x.swapaxes(1, 2) if getattr(x, "ndim", None) == 4 else x


@jax.custom_jvp
def _without_gradient(arrays: Any) -> Any:
    """Returns the arrays, which cannot be differentiated any more."""
    return arrays


@_without_gradient.defjvp
def _refuse_gradient(primals: tuple, tangents: tuple) -> NoReturn:
    raise TypeError(
        "kvjax.attend is not differentiable: it is for inference alone. Train with an attention of "
        "your own, or stop the gradient of what attend is given (jax.lax.stop_gradient)"
    )


def _attend_in_automatic_mode(
    mesh: Any, cache: Cache, tokens: Tokens, call: Call
) -> tuple[Array, Cache]:
    """Divides the results as the cache is divided, or as `q` and `k` where that has no mesh."""
    placement = placement_of(cache)
    by_queries = tokens.q if tokens.k is None else tokens.k
    queries, keys = (jax.typeof(x).sharding.spec for x in (tokens.q, by_queries))
    rows, heads = queries[0], keys[1]
    if placement is not None:
        if placement.mesh.shape != mesh.shape:
            raise ValueError(
                f"the cache was made for a mesh of {dict(placement.mesh.shape)}, but that of "
                f"jax.set_mesh or of q, k and v is {dict(mesh.shape)}"
            )
        rows, heads = placement.rows_axis(len(tokens.q)), placement.heads_axis
        queries = PartitionSpec(rows, heads)

    def out(shapes):
        whole = None if isinstance(shapes[1], tuple) else heads
        specs = map_parts(functools.partial(divided_by, rows=rows, heads=whole), shapes[1])
        return queries, specs

    return in_automatic_mode(_attend_placed, mesh, (cache, tokens, call), out)


def _attend_placed(cache: Cache, tokens: Tokens, call: Call) -> tuple[Array, Cache]:
    """Attends to each device's rows and heads by themselves: no part of a cache moves."""
    placement = placement_of(cache)
    if placement is None:
        return _attend_layer(cache, tokens, call)
    rows, heads = placement.rows_axis(len(tokens.q)), placement.heads_axis
    by_head, by_row = PartitionSpec(rows, heads), PartitionSpec(rows)
    inputs = jax.tree.map(lambda _: by_row, tokens.inputs)
    specs = (
        cache_specs(cache),
        jax.tree.map(lambda _: by_head, tokens)._replace(positions=by_row, inputs=inputs),
        dataclasses.replace(
            call, rope=rope_specs(call.rope, rows), options=sinks_specs(call.options, heads)
        ),
    )
    return on_each_device(
        _attend_layer, placement, (cache, tokens, call), specs,
        lambda shapes: (by_head, cache_specs(shapes[1])),
    )  # fmt: skip


def begin_document(cache: Cache, length: Int[Array, " B"] | None = None) -> Cache:
    """Begins a document, as `attend` begins any prompt with its first tokens.

    Methods that note a document while it is read (`kvjax.kit.Probe.read`) know from this call that
    a prompt is one. Methods that only look at it afterwards, such as KVzip, do without.

    Args:
      cache: of a layer, from `init_cache` or from `attend` after a whole prompt. Donate it.
      length: tokens of each row's whole document, where the prompt is a piece of it that is
        compressed before the next one is read; None: the prompt is all of it.

    Returns:
      A reading, which `attend` takes with the document's first tokens in the place of the cache.

    Raises:
      TypeError: `cache` is not the cache of a layer, or `length` is not an array.
      ValueError: `attend` has read tokens of the prompt already; `length` is not of its rows.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> tx = kvjax.OwnQueries(budget=8)
      >>> cache = kvjax.init_cache(tx, batch=1, kv_heads=2, head_dim=16, max_prompt=32, max_new=4)
      >>> x, cache = jnp.ones((1, 2, 32, 16)), kvjax.begin_document(cache)
      >>> _, cache = kvjax.attend(cache, x, x, x, jnp.arange(32)[None], phase="prompt")
      >>> int(cache.kv.live[0, 0].sum())
      8
    """
    check_layer_cache(cache, "begin_document")
    if any(isinstance(part, Reading) and part.phase for part in layer_caches(cache)):
        raise ValueError("a document begins before its first tokens, which have been read already")
    if length is None:
        return _on_each_part(_begin_document, cache)
    check_array("length", length)
    rows = layer_caches(cache)[0].kv.shape[0]
    if length.shape != (rows,):
        raise ValueError(f"length must have one number for each of {rows} rows, got {length.shape}")
    return _on_each_part(_begin_document, cache, length)


def _begin_document(part: Any, length: Int[Array, " B"] | bool = True) -> Any:
    return begin(part, document=length)


def complete(cache: Cache, implementation: str | None = None) -> Cache:
    """Ends the prompt of a layer's readings, as `attend` does after the last tokens."""
    return _on_each_part(functools.partial(compress, implementation=implementation), cache)


def _on_each_part(function: Callable[..., Any], cache: Cache, *of_rows: Array) -> Cache:
    """Applies a function to each rectangle of a layer's cache, on each device's part of it.

    Args:
      of_rows: further arguments, `[B, ...]`.
    """

    def of_parts(cache: Cache, *of_rows: Array) -> Cache:
        return map_parts(lambda part: function(part, *of_rows), cache)

    placement = placement_of(cache)
    if placement is None:
        return of_parts(cache, *of_rows)
    by_row = [PartitionSpec(placement.rows_axis(len(x))) for x in of_rows]
    specs = cache_specs(cache), *by_row
    return on_each_device(of_parts, placement, (cache, *of_rows), specs, cache_specs)


def _attend_layer(cache: Cache, tokens: Tokens, call: Call) -> tuple[Array, Cache]:
    """Attends with every head group over its own rectangle of slots, and restores their order."""
    if not isinstance(cache, tuple):
        return _attend_rectangle(cache, tokens, call)
    group = tokens.q.shape[1] // _kv_heads(cache)
    outs, caches, order = [], [], []
    for part in cache:
        heads = part.group_heads if part.heads is None else part.heads
        new = tokens.of_heads(heads, group), call.of_heads(heads, group)
        out, part = _attend_rectangle(part, *new)
        outs.append(out)
        caches.append(part)
        order.append(query_heads(heads, group))
    back = jnp.argsort(jnp.concatenate(order))
    return jnp.concatenate(outs, axis=1)[:, back], tuple(caches)


def _attend_rectangle(cache: Any, tokens: Tokens, call: Call) -> tuple[Array, Part]:
    """Makes a decode step, or reads a chunk of a prompt, which the last one completes.

    Args:
      cache: of one rectangle; a reading where `tokens` and `call` are for one.
    """
    like = tokens.q, tokens.k, tokens.v
    if tokens.k is None:
        if call.phase == "decode":
            return attend_only(cache, tokens, call), cache
        out = read_only(cache, tokens, call)
        return out, compress(cache, call.implementation) if call.last else cache
    if call.phase == "decode":
        count = tokens.q.shape[2]
        if call.repeats:
            new = tokens.positions >= cache.kv.length[:, None]
            count = jnp.where(new.any(), count, 0)
        cache = flushed_before_step(cache, count, call.implementation, *like)
        return decode(cache, tokens, call)
    reading = begin(cache)
    out, reading = (read if call.phase == "prompt" else look)(reading, tokens, call)
    if call.last:
        cache = compress(reading, call.implementation)
        return out, flushed_behind_prompt(cache, reading.rows, call.implementation, *like)
    return out, dataclasses.replace(reading, rope=for_keeping(reading.rope))


def _check_tokens(tokens: Tokens) -> None:
    q, k, v, positions, predicted, _ = tokens
    if (k is None) != (v is None):
        raise TypeError("give both k and v or neither of them, got one of them")
    heads = {"q": q} if k is None else {"q": q, "k": k, "v": v}
    for name, x in heads.items():
        check_array(name, x)
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, heads, T, D], got shape {x.shape}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating, got {x.dtype}")
    batch, query_heads, count, head_dim = q.shape
    kv_heads = query_heads if k is None else k.shape[1]
    if k is not None and (k.shape != (batch, kv_heads, count, head_dim) or v.shape != k.shape):
        raise ValueError(
            "k and v must be [B, H, T, D] with the B, T and D of q, got "
            f"q {q.shape}, k {k.shape}, v {v.shape}"
        )
    if query_heads % kv_heads:
        raise ValueError(
            f"query heads must be a multiple of KV heads, got {query_heads} and {kv_heads}"
        )
    if count < 1:
        raise ValueError("attend needs at least one token, got T = 0")
    if positions.shape != (batch, count):
        raise ValueError(f"positions must be [B, T] = {(batch, count)}, got {positions.shape}")
    if predicted is not None:
        check_array("predicted_query", predicted)
        if predicted.shape != q.shape:
            raise ValueError(
                f"predicted_query must have the shape of q, {q.shape}, got {predicted.shape}"
            )


def _check_inputs(cache: Cache, inputs: Any, tokens: tuple[int, ...]) -> None:
    """Raises unless these are what entered a layer with `[B, T]` tokens."""
    if not isinstance(inputs, Inputs):
        raise TypeError(
            f"{layer_caches(cache)[0].transform!r} looks at what enters a layer: give attend "
            f"inputs=kvjax.kit.Inputs(...), got {type(inputs).__name__}"
        )
    shapes = [x.shape for x in inputs if x is not None]
    if shapes[0][:2] != tokens or len(shapes[0]) != 3 or shapes[1:] not in ([], [tokens]):
        raise ValueError(f"inputs must be [B, T, C] and [B, T] for {tokens} tokens, got {shapes}")


def _options(cache: Cache, scale, window, soft_cap) -> AttentionOptions:
    """Returns the cache's options; raises ValueError where a call of `attend` gives others."""
    part = layer_caches(cache)[0]
    check_logits(window, soft_cap)
    call_options = {
        "scale": None if scale is None else as_scale(scale), "window": window, "soft_cap": soft_cap,
    }  # fmt: skip
    for name, value in call_options.items():
        made_for = getattr(part.options, name)
        if value is not None and value != made_for:
            raise ValueError(
                f"the cache was made for {name}={made_for}, got {name}={value}: give it to "
                "init_cache, or to generate as an attribute of the model (see "
                "kvjax.models.LanguageModel)"
            )
    return part.options


def _check_sinks(sinks, query_heads: int) -> None:
    check_array("sinks", sinks)
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise TypeError(f"sinks must be floating, got {sinks.dtype}")
    if sinks.shape != (query_heads,):
        raise ValueError(f"sinks must be [Q] = {(query_heads,)}, got {sinks.shape}")


def _check_cache(cache: Cache, tokens: Tokens, call: Call) -> None:
    """Raises unless the cache is one of these heads, and ready for the call."""
    batch, query_heads, *rest = tokens.q.shape
    alone = tokens.k is None
    kv_heads = _kv_heads(cache) if alone else tokens.k.shape[1]
    if not isinstance(cache, tuple):
        _check_rectangle(cache, tokens.q.shape, (batch, kv_heads, *rest), call, alone)
        return
    numbers = [head for part in cache for head in part.group_heads or ()]
    if sorted(numbers) != list(range(kv_heads)):
        raise ValueError(
            "attend takes the cache of one layer, or under HeadGroups a tuple with one for each "
            f"group, got caches that hold the KV heads {numbers} of {kv_heads}"
        )
    group = query_heads // kv_heads
    for part in cache:
        heads = len(part.group_heads or ())
        of_part = (batch, heads * group, *rest), (batch, heads, *rest)
        _check_rectangle(part, *of_part, call, alone)


def _check_rectangle(
    cache: Any, q: tuple[int, ...], k: tuple[int, ...], call: Call, alone: bool
) -> None:
    """Raises unless a cache of one rectangle is one for these shapes."""
    transform = cache.transform
    kv = cache.kv
    batch, lists, _ = kv.shape
    kv_heads, query_heads, head_dim = lists // kv.unfolded, lists * kv.group, kv.k.shape[3]
    if (*k[:2], k[3], q[1]) != (batch, kv_heads, head_dim, query_heads):
        raise ValueError(
            f"the cache holds {batch} rows, {kv_heads} KV heads and {query_heads} query heads of "
            f"head_dim {head_dim}, got q {q} and k {k}"
        )
    if transform.needs.unrotated_keys and call.rope is None:
        raise ValueError(
            f"{transform!r} keeps keys unrotated: give attend rope= and unrotated q, k"
        )
    if call.phase == "probe":
        _check_probe(transform, cache)
    elif call.phase == "prompt" and isinstance(cache, Reading) and cache.phase == "probe":
        raise ValueError("the prompt cannot go on after phase='probe', got phase='prompt'")
    if call.phase != "decode":
        return
    if isinstance(cache, Reading):
        raise ValueError(
            "the prompt is not complete: give its last chunk with last=True before decoding, "
            "got phase='decode' after last=False"
        )
    if q[2] != 1 and (kv.lists is not None or any(map(frees_while_decoding, parts_of(transform)))):
        raise ValueError(
            f"{transform!r} compresses or selects while decoding: give it one token a step, got "
            f"{q[2]}"
        )
    rings = (part for part in parts_of(transform) if isinstance(part, Ring))
    if (call.repeats or alone) and any(ring.window == cache.options.window for ring in rings):
        raise ValueError(
            f"{transform!r} holds what the next token will see, and the last one sees one more:"
            " make the caches with kvjax.init_caches(..., repeats=True), got "
            + ("queries without k and v" if alone else "repeats=True")
        )


def _kv_heads(cache: Cache) -> int:
    """Counts the KV heads of a layer's cache."""
    kvs = [part.kv for part in layer_caches(cache)]
    return sum(kv.shape[1] // kv.unfolded for kv in kvs)


def _check_queries_alone(cache: Cache, phase: Phase) -> None:
    """Raises ValueError unless there is something that queries without keys can attend to."""
    if phase == "probe":
        raise ValueError("tokens that look at a prompt need k and v, got None for phase='probe'")
    if phase == "prompt" and not all(
        isinstance(part, Reading) and part.phase for part in layer_caches(cache)
    ):
        raise ValueError(
            "queries without k and v attend to a prompt that has been read with last=False, got "
            "phase='prompt' without one"
        )


def _check_probe(transform: KVTransform, cache: Part) -> None:
    """Raises ValueError unless tokens may look at a prompt now."""
    if transform.needs.reposition:
        raise ValueError(
            f"{transform!r} rotates keys by rank, so that no tokens can look at a prompt"
        )
    if not isinstance(cache, Reading):
        raise ValueError(
            "tokens look at a prompt that is not complete: give the prompt's last chunk with "
            "last=False, got phase='probe' without one"
        )
    probe = transform.needs.probe
    if cache.record is None and probe is not None and type(probe).read is not Probe.read:
        raise ValueError(
            f"{transform!r} notes documents while they are read: begin the prompt with "
            "kvjax.begin_document(cache), got phase='probe' behind a prompt without it"
        )
