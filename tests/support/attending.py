"""How the tests drive `kvjax.attend`: tokens, layouts of ragged rows, and what must come out."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.attention.layer import Reading, layer_caches
from kvjax.compose.wrappers import by_head_groups
from kvjax.storage.quantize.payload import Quantized
from tests.references.attention import softmax_attention
from tests.references.rope import rope as rotate

KV_HEADS, QUERY_HEADS, HEAD_DIM = 2, 4, 8
MAX_PROMPT, MAX_NEW = 32, 12
INV_FREQ = 1.0 / 100.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
GARBAGE = 1e4  # what stands in padding: it must not reach anything

STATIC = ("phase", "last", "scale", "window", "soft_cap", "implementation")
begin_document = jax.jit(kvjax.begin_document)
attend = jax.jit(kvjax.attend, static_argnames=STATIC)
OPTIONS = ("scale", "window", "soft_cap")  # of an attention: `init_cache` and `attend` take them
SIZES = ("batch", "kv_heads", "query_heads", "head_dim", "max_prompt", "max_new", "dtype", "layer")
init_cache = jax.jit(kvjax.init_cache, static_argnums=0, static_argnames=(*SIZES, *OPTIONS))


flush = jax.jit(kvjax.flush, static_argnums=1)


def flushed(cache, steps: int):
    """The cache after so many decode steps: flushed where they are a whole number of intervals."""
    interval = kvjax.flush_interval(cache)
    return cache if interval is None or steps % interval else flush(cache, interval)


def the_rope() -> kvjax.Rope:
    return kvjax.Rope(jnp.asarray(INV_FREQ, jnp.float32))


class Tokens(NamedTuple):
    """Unrotated queries, keys and values of all tokens that rows may ever get."""

    q: np.ndarray  # [R, Q, L, D]
    k: np.ndarray  # [R, H, L, D]
    v: np.ndarray

    @classmethod
    def random(
        cls, rows=3, length=64, kv_heads=KV_HEADS, query_heads=QUERY_HEADS, head_dim=HEAD_DIM,
        seed=0,
    ) -> Tokens:  # fmt: skip
        rng = np.random.default_rng(seed)
        shapes = [(rows, heads, length, head_dim) for heads in (query_heads, kv_heads, kv_heads)]
        return cls(*(rng.normal(size=shape).astype(np.float32) for shape in shapes))

    def rows(self, index) -> Tokens:
        return Tokens(*(x[np.asarray(index)] for x in self))

    def at(self, positions: np.ndarray, dtype=jnp.float32):
        """q, k, v, positions of the tokens `positions [B, T]`, garbage where it is -1."""
        positions = np.asarray(positions, np.int32)
        index = np.maximum(positions, 0)[:, None, :, None]
        pad = (positions < 0)[:, None, :, None]
        picked = (np.where(pad, GARBAGE, np.take_along_axis(x, index, axis=2)) for x in self)
        return *(jnp.asarray(x, dtype) for x in picked), jnp.asarray(positions)


def right(starts, counts, width: int) -> np.ndarray:
    """Positions of rows that get `counts[b]` tokens from `starts[b]` on, padded at the right."""
    offset = np.arange(width)[None]
    starts, counts = np.asarray(starts)[:, None], np.asarray(counts)[:, None]
    return np.where(offset < counts, starts + offset, -1)


def left(counts, width: int) -> np.ndarray:
    """As `right`, from position 0, padded at the left."""
    rows = right([0] * len(counts), counts, width)
    return np.stack([np.roll(row, width - n) for row, n in zip(rows, counts, strict=True)])


def middle(counts, width: int) -> np.ndarray:
    """As `right`, from position 0, with the padding scattered between the tokens."""
    rng = np.random.default_rng(7)
    out = np.full((len(counts), width), -1)
    for row, count in zip(out, counts, strict=True):
        row[np.sort(rng.permutation(width)[:count])] = np.arange(count)
    return out


def one_layer(transform: kvjax.KVTransform, layer: int = 1, num_layers: int = 3):
    return kvjax.bind(transform, num_layers)[layer]


SIZE = {
    "batch": 3, "kv_heads": KV_HEADS, "query_heads": QUERY_HEADS, "head_dim": HEAD_DIM,
    "max_prompt": MAX_PROMPT, "max_new": MAX_NEW, "dtype": jnp.float32,
}  # fmt: skip


def new_cache(transform, batch=3, **changes):
    """An empty cache, by one compiled function for all its arrays instead of one for each."""
    return init_cache(transform, **{**SIZE, "batch": batch, **changes})


def has_probe(transform) -> bool:
    return any(tx.needs.probe for tx in by_head_groups(transform))


LOOKING = 6  # tokens that look at a prompt for methods with a probe


def prompt(transform, cache, tokens: Tokens, positions, last=True, dtype=jnp.float32, **options):
    """A chunk of a prompt, which is a document that some tokens look at if a method has a probe."""
    looks = last and has_probe(transform)
    if has_probe(transform) and not isinstance(layer_caches(cache)[0], Reading):
        cache = begin_document(cache)
    options.setdefault("rope", the_rope())
    out, cache = attend(
        cache, *tokens.at(positions, dtype), phase="prompt", last=last and not looks,
        **options,
    )  # fmt: skip
    if looks:
        reading = layer_caches(cache)[0]
        counts = jnp.where(reading.rows, LOOKING, 0)
        where = right(reading.kv.length, counts, LOOKING)
        new = tokens.at(where, dtype)
        _, cache = attend(cache, *new, phase="probe", **options)
    return out, cache


def decode(transform, cache, tokens: Tokens, positions, dtype=jnp.float32, **options):
    positions = np.asarray(positions).reshape(len(tokens.q), -1)
    return attend(cache, *tokens.at(positions, dtype), phase="decode", rope=the_rope(), **options)


class Run(NamedTuple):
    """A prompt and some decoding: outputs and the cache after each call."""

    prompt_out: np.ndarray
    prompt_cache: object
    outs: list
    caches: list

    @property
    def all_caches(self) -> list:
        return [self.prompt_cache, *self.caches]


def run(transform, tokens: Tokens, positions, steps: int, **options) -> Run:
    """One prompt of `positions [B, T]`, and `steps` tokens after it, flushed as the cache asks for.

    A row without a prompt gets no token at all.
    """
    dtype = options.get("dtype", jnp.float32)
    sizes = {k: options.pop(k) for k in list(options) if k not in (*STATIC, "sinks", "dtype")}
    of_logits = {name: options[name] for name in OPTIONS if name in options}
    cache = new_cache(transform, len(positions), **sizes, **of_logits, dtype=dtype)
    out, cache = prompt(transform, cache, tokens, positions, **options)
    lengths = np.max(positions, 1) + 1
    return Run(
        np.asarray(out), cache, *decoded(transform, cache, tokens, lengths, steps, **options)
    )


def decoded(transform, cache, tokens: Tokens, lengths, steps: int, **options) -> tuple[list, list]:
    """Outputs and caches of `steps` tokens after prompts of `lengths [B]` tokens."""
    outs, caches = [], [cache]
    for step in range(steps):
        now = np.where(lengths > 0, lengths + step, -1)
        step_out, step_cache = decode(transform, caches[-1], tokens, now, **options)
        outs.append(np.asarray(step_out))
        caches.append(flushed(step_cache, step + 1))
    return outs, caches[1:]


class Shapes(NamedTuple):
    """Shapes and dtypes of what a prompt and a decode step give; the caches before and after."""

    prompt_out: jax.ShapeDtypeStruct
    out: jax.ShapeDtypeStruct
    caches: tuple


def shapes_of_run(transform, tokens: Tokens, positions, dtype=jnp.float32, **sizes) -> Shapes:
    """As `run` with one step, traced and not compiled."""

    now = np.max(positions, 1, keepdims=True) + 1

    def calls():
        step = functools.partial(kvjax.attend, rope=the_rope())
        empty = new_cache(transform, len(positions), dtype=dtype, **sizes)
        looks = has_probe(transform)
        new = tokens.at(positions, dtype)
        begun = kvjax.begin_document(empty) if looks else empty
        prompt_out, cache = step(begun, *new, phase="prompt", last=not looks)
        if looks:
            _, cache = step(cache, *tokens.at(now, dtype), phase="probe")
        out, after = step(cache, *tokens.at(now, dtype), phase="decode")
        return Shapes(prompt_out, out, (empty, cache, after))

    return jax.eval_shape(calls)


class Part(NamedTuple):
    """A head group of a layer's cache: its KV heads, transform and cache."""

    heads: tuple[int, ...]
    transform: kvjax.KVTransform
    cache: kvjax.LayerCache

    @property
    def extent(self) -> kvjax.kit.Extent:
        kv = self.cache.kv
        return self.transform.extent(kvjax.kit.Extent(kv.max_prompt, kv.max_new))


def parts(transform, cache) -> list[Part]:
    """The head groups of a layer's cache; a cache without groups is one."""
    if isinstance(transform, kvjax.HeadGroups):
        heads = [tuple(np.asarray(numbers).tolist()) for numbers in transform.heads_in(cache)]
        by_group = zip(heads, by_head_groups(transform), cache, strict=True)
        return [Part(*group) for group in by_group]
    return [Part(tuple(range(cache.kv.shape[1])), transform, cache)]


def live_count(cache) -> np.ndarray:
    """Live slots per row and head of one group."""
    return (np.asarray(cache.kv.log_mass) > -np.inf).sum(-1)


def slots_of(cache, row: int, head: int, columns: bool = True) -> dict[str, np.ndarray]:
    """The live slots of one row and head in position order: wherever they stand, they compare."""
    kv = cache.kv
    found = {"position": kv.position, "log_mass": kv.log_mass, "k": kv.k.read(), "v": kv.v.read()}
    if columns:
        found |= {name: kv.column(name) for name in kv.columns}
    found = {name: np.asarray(x)[row, head] for name, x in found.items()}
    live = np.flatnonzero(found["log_mass"] > -np.inf)
    order = live[np.argsort(found["position"][live], kind="stable")]
    return {name: x[order] for name, x in found.items()}


def stored(payload, row: int, head: int, rows: np.ndarray) -> np.ndarray:
    """New rows [T, D] as a decode step finds them in a payload, which may keep recent ones."""
    if not isinstance(payload, Quantized) or payload.recent is not None:
        return rows
    own = slice(row, row + 1), slice(head, head + 1)
    channels = jax.tree.map(lambda x: x[own], payload.channels)
    encoded = payload.form.encode(jnp.asarray(rows, jnp.float32)[None, None], channels)
    return np.asarray(payload.form.decode(encoded, channels))[0, 0]


def attended(
    transform, before, tokens: Tokens, positions, queries_alone=False, **options
) -> np.ndarray:
    """What a call must give, [B, Q, T, D]: dense attention over what is live and the new tokens.

    Queries alone attend to what is live.

    Written over the cache from before the call, slot by slot, in float64. One token a row is a
    decode step, which reads what it has stored; a prompt is read as it is.
    """
    q, k, v, positions = (np.asarray(x) for x in tokens.at(positions))
    is_step = positions.shape[1] == 1 and not queries_alone
    out = np.zeros(q.shape)
    for part in parts(transform, before):
        late, kv = part.transform.needs.reposition, part.cache.kv
        options.setdefault("window", part.cache.options.window)
        for row in range(len(q)):
            for own, head in enumerate(part.heads):

                def own_rows(payload, rows, row=row, own=own):
                    return stored(payload, row, own, rows) if is_step else rows

                heads = slice(head * kv.group, (head + 1) * kv.group)
                new = (positions[row] >= 0) & (not queries_alone)
                old = slots_of(part.cache, row, own, columns=False)
                where = positions[row]
                place = np.concatenate([old["position"], where[new]])
                log_mass = np.concatenate([old["log_mass"], np.zeros(new.sum())])
                values = np.concatenate(
                    [old["v"], own_rows(kv.v, v[row, head // kv.unfolded][new])]
                )
                if late:
                    ranks = np.argsort(np.argsort(place))
                    keys = np.concatenate([old["k"], own_rows(kv.k, k[row, head][new])])
                    keys = rotate(keys, ranks, INV_FREQ)
                    own_rank = (place < where[:, None]).sum(1)
                    queries = rotate(q[row, heads], own_rank, INV_FREQ)
                elif part.transform.needs.unrotated_keys:
                    keys = np.concatenate([old["k"], k[row, head // kv.unfolded][new]])
                    keys = rotate(keys, place, INV_FREQ)
                    queries = rotate(q[row, heads], where, INV_FREQ)
                else:
                    turned = rotate(k[row, head][new], where[new], INV_FREQ)
                    keys = np.concatenate([old["k"], own_rows(kv.k, turned)])
                    queries = rotate(q[row, heads], where, INV_FREQ)
                out[row, heads], _ = softmax_attention(
                    queries, keys, values, where, place, log_mass, **of_heads(options, heads)
                )
    return out


def of_heads(options: dict, heads: slice) -> dict:
    """The options of attention for some of the query heads."""
    if options.get("sinks") is None:
        return options
    return {**options, "sinks": options["sinks"][heads]}


def numbers(x) -> np.ndarray:
    """Returns the numbers of an array, which may be one of random keys."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def same_arrays(caches, other) -> None:
    """Two pytrees have one structure and the same arrays, bit for bit, in the same memories."""
    assert jax.tree.structure(caches) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(caches), jax.tree.leaves(other), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert x.sharding.memory_kind == y.sharding.memory_kind
        np.testing.assert_array_equal(numbers(x), numbers(y))


def structure(cache) -> tuple:
    """Everything about a cache that must not change between calls."""
    leaves, tree = jax.tree.flatten(cache)
    return tree, tuple((x.shape, x.dtype, getattr(x, "weak_type", False)) for x in leaves)


@dataclasses.dataclass(frozen=True)
class Pin(kvjax.KVTransform):
    """Pins some positions at the prompt's end, as KVCrush pins representatives."""

    positions: tuple[int, ...]

    def extent(self, extent):
        return extent.pin(len(self.positions))

    def on_prompt(self, cache, state, step) -> tuple[kvjax.kit.Retain, tuple]:
        pinned = jnp.isin(cache.position, jnp.array(self.positions)) & cache.live
        return kvjax.kit.Retain(cache.live, pinned=pinned), state
