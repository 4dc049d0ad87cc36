"""What is compiled for GPUs that are not there: every kernel, loops of decode steps, and prompts.

Arguments are shapes alone, so that no size is too large.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
import pallas_kernels as ops
from kvjax.cache.rearrange import widen
from kvjax.decisions import carry_out
from kvjax.protocol import AttentionOptions, on_request
from pallas_kernels.formats.bits import quantise_groups, quantise_slots
from tests.support.ahead_of_time import Program, on_host

SLOTS, LISTED, QUERIES = 32_768, 2048, 8192
CLUSTERS, PAGE, CHUNK = 400, 16, 1024
MAX_NEW, STEPS = 512, 64
OPTIONS = {"mask": ops.Mask(0.1), "implementation": "pallas"}


def programs() -> Iterator[Program]:
    """All of them."""
    for heads in HEADS:
        yield from kernels(heads)
    heads = HEADS[0]
    yield _kmeans("by l2", heads, CHUNK, CHUNK // PAGE, "l2")
    yield _kmeans("all at once", heads, SLOTS, CLUSTERS, "cosine")
    yield _matching(SLOTS, heads)
    yield from merging(heads)
    yield from at_prompts_end(heads)
    yield from loops(heads)
    yield from prompts(heads)


@dataclass(frozen=True)
class Heads:
    """KV heads, query heads of each, channels, and the dtype of keys and values."""

    kv: int
    group: int
    dim: int
    dtype: str

    def __str__(self):
        return f"{self.dtype} {self.kv} x {self.group} x {self.dim}"


HEADS = [
    Heads(kv, group, dim, dtype)
    for dtype in ("bfloat16", "float32")
    for kv, group, dim in ((8, 4, 128), (8, 4, 96), (2, 16, 128), (2, 16, 96), (1, 64, 256))
]


def kernels(heads: Heads) -> Iterator[Program]:
    """Kernels of attention, selection, k-means and matching, each by itself."""
    yield from _dense(heads)
    yield from _encoded(heads)
    yield from _selecting(heads)
    yield from _prompt_kernels(heads)
    yield _kmeans(f"in chunks of {CHUNK}", heads, CHUNK, CHUNK // PAGE, "cosine")
    yield _matching(256, heads)


def struct(shape: tuple[int, ...], dtype, host: bool = False) -> jax.core.ShapedArray:
    """An array that need not be there."""
    space = jax.memory.Space.Host if host else jax.memory.Space.Device
    return jax.core.ShapedArray(shape, jnp.dtype(dtype), memory_space=space)


def _queries(heads: Heads, tokens: int = 1) -> ops.Queries:
    q = struct((1, heads.kv, heads.group, tokens, heads.dim), heads.dtype)
    return ops.Queries(q, struct((1, tokens), "int32"))


def _seen(heads: Heads, listed: int | None = None) -> ops.Seen:
    slots = (1, heads.kv, SLOTS)
    index = None if listed is None else struct((1, heads.kv, listed), "int32")
    return ops.Seen(struct(slots, "float32"), struct(slots, "int32"), index=index)


def _dense(heads: Heads) -> Iterator[Program]:
    store = struct((1, heads.kv, SLOTS, heads.dim), heads.dtype)
    used = struct((1, heads.kv), "int32")
    queries, seen = _queries(heads), _seen(heads)._replace(end=used)

    def program(name, function, seen, **options):
        args, options = (queries, store, store, seen), {**OPTIONS, **options}
        return Program(
            f"{name}, {heads}", functools.partial(function, **options), args, (store, store),
            2 * bytes_of(store), "split_attention",
        )  # fmt: skip

    plain, window = {"probabilities": False}, ops.Mask(0.1, window=4096)
    yield program("decode", ops.decode_attention, seen, **plain)
    yield program("decode with probabilities", ops.decode_attention, seen)
    yield program("decode in a window", ops.decode_attention, seen, mask=window, **plain)
    listed = _seen(heads, LISTED)
    yield program("gather", ops.gather_attention, listed, **plain)
    yield program("gather with probabilities", ops.gather_attention, listed)


def _encoded(heads: Heads) -> Iterator[Program]:
    queries, seen = _queries(heads), _seen(heads)
    numbers = struct((1, heads.kv, SLOTS, heads.dim), heads.dtype)
    plain = {"probabilities": False, **OPTIONS}

    def program(name, function, args, stores):
        return Program(
            f"{name}, {heads}", function, args, stores, 2 * bytes_of(numbers), "split_attention"
        )

    def form(encode, **options):
        return ops.Encoded(*jax.eval_shape(functools.partial(encode, **options), numbers))

    group = math.gcd(32, heads.dim)
    forms = {
        "int8": (form(quantise_slots),) * 2,
        "float8": (form(quantise_slots, dtype=jnp.float8_e4m3fn),) * 2,
        "4 bits per token": (form(quantise_groups, group=group),) * 2,
        "4 bits per channel": (
            form(quantise_groups, group=group, axis="channel"), form(quantise_groups, group=group)
        ),
        "int8 keys, values in 4 bits": (form(quantise_slots), form(quantise_groups, group=group)),
    }  # fmt: skip
    for name, (k, v) in forms.items():
        axis = "channel" if "channel" in name else "token"
        call = functools.partial(ops.quantized_attention, key_axis=axis, **plain)
        stores = (k.values, v.values)
        yield program(f"quantized {name}", call, _avals((queries, k, v, seen)), stores)
    book = (1, 1, heads.kv * SLOTS // 4, heads.dim)
    own = (1, heads.kv, SLOTS)
    k = v = ops.References(
        struct(book, heads.dtype), struct(own, "uint32"), struct(own, heads.dtype)
    )
    frequency = struct((1, heads.dim // 2), "float32")

    def turned(queries, k, v, seen, frequency):
        seen = seen._replace(turn=ops.Turn(frequency, seen.position))
        return ops.codebook_attention(queries, k, v, seen, **plain)

    args, stores = (queries, k, v, seen), (k.entries, v.entries)
    call = functools.partial(ops.codebook_attention, **plain)
    yield program("codebook", call, args, stores)
    args = (*args, frequency)
    yield program("codebook with RoPE", turned, args, stores)


def _selecting(heads: Heads) -> Iterator[Program]:
    """Choosing what is read, and reading it from host memory."""
    grouped = struct((1, heads.kv, heads.group, heads.dim), heads.dtype)
    centroids = struct((1, heads.kv, CLUSTERS, heads.dim), "float32")
    sizes = order = struct((1, heads.kv, CLUSTERS), "int32")
    bounds = struct((1, heads.kv, SLOTS // PAGE, heads.dim), heads.dtype)
    store = struct((1, heads.kv, SLOTS, heads.dim), heads.dtype, host=True)
    rows = struct((1, heads.kv, LISTED, heads.dim), heads.dtype)
    # Bytes of a row that is encoded in 8 bits, with its scale.
    as_bytes = struct((*store.shape[:3], heads.dim + 4), "uint8", host=True)
    byte_rows = struct((*rows.shape[:3], heads.dim + 4), "uint8")
    index = struct((1, heads.kv, LISTED), "int32")
    missing = struct(index.shape, "bool")
    count = struct((1, heads.kv), "int32")
    build = functools.partial(ops.build_indices, length=LISTED)

    def fetch(k, v, k_rows, v_rows, index, missing, implementation):
        return ops.host_rows((k, v), (k_rows, v_rows), index, missing,
                             implementation=implementation)  # fmt: skip

    each = functools.partial(ops.rank_clusters, per_query_head=True)
    chosen_by = grouped, centroids, sizes
    for name, call, args, stores in (
        ("rank_clusters", ops.rank_clusters, chosen_by, (centroids,)),
        ("rank_clusters per query head", each, chosen_by, (centroids,)),
        ("build_indices", build, (order, sizes, sizes, count), (store,)),
        ("page_scores", ops.page_scores, (grouped, bounds, bounds), (bounds, bounds)),
        ("host_rows", fetch, (store, store, rows, rows, index, missing), (store, store)),
        (
            "host_rows of bytes",
            fetch,
            (as_bytes, as_bytes, byte_rows, byte_rows, index, missing),
            (as_bytes, as_bytes),
        ),
    ):
        function = functools.partial(call, implementation="pallas")
        size, kernel = bytes_of(*stores), name.split()[0]
        yield Program(f"{name}, {heads}", function, args, stores, size, kernel)


def _kmeans(name: str, heads: Heads, chunk: int, clusters: int, metric: str) -> Program:
    """Chunks are lists of their own, as `ClusterKV` has them."""
    lists = (1, heads.kv * SLOTS // chunk)
    keys = struct((*lists, chunk, heads.dim), heads.dtype)
    start = struct((*lists, clusters, heads.dim), heads.dtype)
    members, there = (struct((*lists, n), "bool") for n in (chunk, clusters))
    call = functools.partial(ops.kmeans, metric=metric, rounds=20, implementation="pallas")
    return Program(
        f"kmeans {name}, {heads}", call, (keys, members, start, there), (keys,), bytes_of(keys),
        "best_match", waits=False,
    )  # fmt: skip


def _matching(chunk: int, heads: Heads) -> Program:
    keys = struct((1, heads.kv, SLOTS, heads.dim), heads.dtype)
    call = functools.partial(ops.soft_matching, chunk=chunk, implementation="pallas")
    return Program(
        f"soft_matching in {chunk}, {heads}", call, (keys, struct((1, heads.kv), "int32")),
        (keys,), bytes_of(keys), "best_match", waits=False,
    )  # fmt: skip


# --- merging and grouping at a prompt's end -------------------------------------------------------


def merging(heads: Heads) -> Iterator[Program]:
    """Operations of methods that merge, and of those that look for representatives."""
    rows = struct((1, heads.kv, SLOTS, heads.dim), heads.dtype)
    slots, flags, numbers = (struct(rows.shape[:3], x) for x in ("int32", "bool", "float32"))
    anchors = functools.partial(ops.join_anchors, threshold=0.75)
    vectors, nodes, entries = (
        struct((2, heads.kv * count, heads.dim), heads.dtype)
        for count in (512, SLOTS // 2, SLOTS // 4)
    )
    count, members, weights = (
        struct(shape, dtype)
        for shape, dtype in (((2,), "int32"), (nodes.shape[:2], "bool"), (nodes.shape[:2], "int32"))
    )
    cover = functools.partial(ops.greedy_cover, theta=0.9, capacity=entries.shape[1])
    for name, operation, args, kernel in (
        ("segment_merge", ops.segment_merge, (rows, slots, numbers), "segment_merge"),
        ("segment_sum", ops.segment_sum, (numbers, slots), "segment_sum"),
        ("pair_cosine", ops.pair_cosine, (rows, slots, slots), "slot_pairs"),
        ("pair_distance", ops.pair_distance, (rows, slots, slots), "slot_pairs"),
        ("join_anchors", anchors, (rows, slots, flags), "join_anchors"),
        ("nearest_entries", ops.nearest_entries, (vectors, entries, count), "nearest_entries"),
        ("greedy_cover", cover, (nodes, members, weights), "cover_graph"),
    ):
        for implementation, named in (("pallas", kernel), ("xla", None)):
            yield Program(
                f"{name}{'' if named else ' by XLA'}, {heads}",
                functools.partial(operation, implementation=implementation), args, (rows,),
                2 * bytes_of(rows), named, rewrites=name == "greedy_cover",
            )  # fmt: skip


def at_prompts_end(heads: Heads) -> Iterator[Program]:
    """What methods do when a prompt has been read, by kernels and by XLA."""
    rows = struct((1, heads.kv, SLOTS, heads.dim), heads.dtype)
    bits = struct((1, SLOTS, heads.kv * heads.group), "bool")

    def distance(bits, anchor):
        return ops.hamming_distance(ops.pack_bits(bits), ops.pack_bits(anchor)[:, None])

    yield Program(
        f"hamming_distance by XLA, {heads}", distance, (bits, struct(bits.shape[::2], "bool")),
        (rows,), 2 * bytes_of(rows), None,
    )  # fmt: skip
    methods = {
        "KVMerger": (kvjax.KVMerger(0.2), "segment_merge"),
        "KVMerger against anchors": (
            kvjax.KVMerger(epsilon=0.75, against="anchor"), "segment_merge"
        ),
        "Chelsea": (kvjax.Chelsea(0.2), "segment_merge"),
        "CaM": (kvjax.CaM(kvjax.StreamingLLM(0.2), prompt=True), "segment_sum"),
        "KVCrush": (kvjax.KVCrush(kvjax.SnapKV(0.2)), "column_sums"),
        "SnapKV": (kvjax.SnapKV(0.2), "column_sums"),
    }  # fmt: skip
    for name, (transform, kernel) in methods.items():
        for named in (kernel, None):
            by = "" if named else " by XLA"
            yield compression(f"{name} at a prompt's end{by}", transform, heads, named)


def compression(
    name: str, transform: kvjax.KVTransform, heads: Heads, kernel: str | None = None
) -> Program:
    """What a method does with a layer's cache when a prompt of so many tokens has been read."""

    def full():
        cache = new_cache(transform, heads, SLOTS)
        return widen(cache.kv, SLOTS), cache.state

    def compress(kv, state, keys, query, position):
        step = kvjax.kit.Step(
            rows=jnp.ones(1, bool), keys=keys, moment="prompt", options=AttentionOptions(0.1),
            implementation="pallas" if kernel else "xla",
            requested=on_request(query=query, query_position=position),
        )  # fmt: skip
        decision, state = transform.on_prompt(kv, state, step)
        kv = carry_out(decision, kv, step)
        return kvjax.kit.compact(kv, kv.capacity), state

    kv, state = jax.eval_shape(full)
    keys = struct((1, heads.kv, SLOTS, heads.dim), heads.dtype)
    window = max(transform.needs.queries(SLOTS), 1)
    query = struct((1, heads.kv * heads.group, window, heads.dim), heads.dtype)
    args = (*_avals((kv, state)), keys, query, struct((1, window), "int32"))
    return Program(name, compress, args, (keys, keys), 2 * bytes_of(keys), kernel, rewrites=True)


# --- the loop -------------------------------------------------------------------------------------


def loops(heads: Heads) -> Iterator[Program]:
    """Steps of decoding with a donated cache, by every kind of cache."""
    for name, transform in methods().items():
        yield loop(f"loop of {name}", transform, heads)
    for name in ("Full", "H2O", "Quantize 4, channel", "ClusterKV"):
        yield loop(f"loop of {name} beside sinks", methods()[name], heads, sinks=True)


def methods() -> dict[str, kvjax.KVTransform]:
    """A method for each kind of cache."""
    clusters = kvjax.ClusterKV(1024, clusters=CLUSTERS, dense_layers=())
    return {
        "Full": kvjax.Full(),
        "SnapKV": kvjax.SnapKV(0.2),
        "H2O": kvjax.H2O(0.2),
        "ClusterKV": clusters,
        "ClusterKV per query head": kvjax.ClusterKV(
            1024, clusters=CLUSTERS, dense_layers=(), per_query_head=True
        ),
        "Quest": kvjax.Quest(1024, dense_layers=()),
        "Quantize 8": kvjax.Quantize(8),
        "Quantize 4, token": kvjax.Quantize(4, key_axis="token"),
        "Quantize 4, channel": kvjax.Quantize(4),
        "Codebook": kvjax.Codebook(),
        "SpindleKV": kvjax.bind(kvjax.SpindleKV(0.5), 1)[0],
        "ClusterKV, Offload": kvjax.chain(clusters, kvjax.Offload()),
    }


def loop(name: str, transform: kvjax.KVTransform, heads: Heads, sinks: bool = False) -> Program:
    """A loop of steps of one layer."""
    step, args = layer_call(transform, heads, "decode", SLOTS, 1, "pallas", sinks)
    stores = stores_of(args[0])
    return Program(
        name, repeated(step), args, stores, decoded_bytes(args[0], heads), "split_attention",
        donated=True, to_host=any(on_host(x) for x in stores),
    )  # fmt: skip


def repeated(step: Callable) -> Callable:
    """Many steps of a layer, one after the other; the output of each is added to the next query."""

    def steps(cache, q, k, v, position):
        def again(_, carry):
            cache, out, position = carry
            out, cache = step(cache, q + out, k, v, position)
            return cache, out, position + 1

        return jax.lax.fori_loop(0, STEPS, again, (cache, jnp.zeros_like(q), position))

    return steps


def layer_call(
    transform: kvjax.KVTransform,
    heads: Heads,
    phase: str,
    max_prompt: int,
    tokens: int,
    implementation: str | None,
    sinks: bool = False,
) -> tuple[Callable, tuple]:
    """A call of one layer, and what it takes: a cache, and q, k, v and positions of new tokens.

    sinks: whether a learned one of each query head is one more column of the softmax.
    """
    cache = _avals(jax.eval_shape(lambda: new_cache(transform, heads, max_prompt)))
    rope = kvjax.Rope(10_000.0 ** (-np.arange(heads.dim // 2, dtype=np.float32) / heads.dim * 2))

    def call(cache, q, k, v, position):
        return kvjax.attend(
            cache, q, k, v, position, phase=phase, rope=rope,
            sinks=_learned(q) if sinks else None, implementation=implementation,
        )  # fmt: skip

    return call, (cache, *new_tokens(heads, tokens))


def new_cache(transform: kvjax.KVTransform, heads: Heads, max_prompt: int) -> kvjax.LayerCache:
    """A cache of one layer and one row."""
    return kvjax.init_cache(  # pyright: ignore[reportReturnType]  # there are no head groups
        transform, batch=1, kv_heads=heads.kv, query_heads=heads.kv * heads.group,
        head_dim=heads.dim, max_prompt=max_prompt, max_new=MAX_NEW, dtype=heads.dtype,
    )  # fmt: skip


def new_tokens(heads: Heads, tokens: int) -> tuple:
    """q, k, v and positions of new tokens."""
    q = struct((1, heads.kv * heads.group, tokens, heads.dim), heads.dtype)
    k = struct((1, heads.kv, tokens, heads.dim), heads.dtype)
    return q, k, k, struct((1, tokens), "int32")


def _learned(q: jax.Array) -> np.ndarray:
    """Learned sinks, one for each query head."""
    return np.linspace(-2, 2, q.shape[1], dtype=np.float32)


def stores_of(cache: kvjax.LayerCache) -> tuple:
    """The largest array of the keys, and of the values."""
    return tuple(max(jax.tree.leaves(x), key=_size) for x in (cache.kv.k, cache.kv.v))


def decoded_bytes(cache: kvjax.LayerCache, heads: Heads) -> int:
    """Of keys and values of all slots, dense."""
    return 2 * math.prod(cache.kv.k.shape) * jnp.dtype(heads.dtype).itemsize


# --- prompts --------------------------------------------------------------------------------------


def prompts(heads: Heads) -> Iterator[Program]:
    """Chunks of a prompt in `attend`."""
    yield chunk("a chunk of Full", kvjax.Full(), heads)
    yield chunk("a chunk of H2O", kvjax.H2O(0.2), heads)
    yield chunk("the last chunk of H2O", kvjax.H2O(0.2), heads, last=True)
    yield chunk("the last chunk of SnapKV", kvjax.SnapKV(0.2), heads, last=True)
    yield chunk(
        "the last chunk of SnapKV beside sinks", kvjax.SnapKV(0.2), heads, last=True, sinks=True
    )


def _prompt_kernels(heads: Heads) -> Iterator[Program]:
    store = struct((1, heads.kv, SLOTS, heads.dim), heads.dtype)
    seen = _seen(heads)
    fewer = SLOTS // (2 * heads.group)  # their outputs are half as large as a store: no copies
    queries, few, half = (_queries(heads, n) for n in (QUERIES, 16, fewer))
    lse, half_lse = (struct(x.q.shape[:4], "float32") for x in (queries, half))

    def alone(queries, k, seen):
        return ops.prompt_attention(queries, k, None, seen, **OPTIONS)

    def program(name, kernel, function, args):
        stores = (store, store)
        return Program(
            f"prompt's {name}, {heads}", function, args, stores, 2 * bytes_of(store), kernel,
            waits=False,
        )  # fmt: skip

    attend = functools.partial(ops.prompt_attention, **OPTIONS)
    joined = functools.partial(ops.prompt_attention_and_sums, **OPTIONS)
    yield program("attention", "split_attention", attend, (queries, store, store, seen))
    yield program("log-sum-exps", "split_attention", alone, (few, store, seen))
    for columns in (ops.column_sums, ops.column_maxima):
        name = columns.__name__
        reduce = functools.partial(columns, **OPTIONS)
        yield program(name, name, reduce, (queries, store, seen, lse))
    args = half, store, store, seen
    yield program("attention and sums", "column_sums", joined, args)
    joined = functools.partial(ops.prompt_attention_and_maxima, **OPTIONS)
    args = half, store, store, seen, half_lse
    yield program("attention and maxima", "column_maxima", joined, args)


def chunk(
    name: str, transform: kvjax.KVTransform, heads: Heads, last: bool = False, sinks: bool = False
) -> Program:
    """One of several chunks of a prompt; behind the last one it is compressed."""

    def read(cache, q, k, v, positions, last=last):
        return kvjax.attend(
            cache, q, k, v, positions, phase="prompt", last=last,
            sinks=_learned(q) if sinks else None, implementation="pallas",
        )  # fmt: skip

    tokens = new_tokens(heads, QUERIES)
    empty = _avals(jax.eval_shape(lambda: new_cache(transform, heads, SLOTS)))
    _, cache = _avals(jax.eval_shape(functools.partial(read, last=False), empty, *tokens))
    stores = stores_of(cache)
    return Program(
        name, read, (cache, *tokens), stores, bytes_of(*stores), "split_attention",
        donated=not last, waits=False, copied=len(stores) if last else 0,
    )  # fmt: skip


def bytes_of(*arrays: Any) -> int:
    """Of some arrays."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def _size(x: Any) -> int:
    return math.prod(x.shape)


def _avals(tree: Any) -> Any:
    def aval(x: Any) -> jax.core.ShapedArray:
        return x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)

    return jax.tree.map(aval, tree)
