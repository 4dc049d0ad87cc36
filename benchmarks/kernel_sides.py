"""What `kernels.py` measures: the operations, their operands, and what runs them.

A new operation is a line `yield from both(names, NAME, function, *arguments)` in a function of
`GROUPS`: a side by the kernel and one by XLA. A call waits for the one before it by its first
argument, an array of numbers on which all that is measured must depend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from kernel_shapes import Inputs, Shape, clusters, lists, normal, queries, references

import pallas_kernels as pk

MOST_PROMPT_TOKENS = 32_768  # of all rows: XLA takes minutes for more
Names = tuple[str, ...]
Run = Callable[[], Any]  # makes all calls of a measurement, waits, and gives what the last one gave


class Side(NamedTuple):
    """One row of the result.

    Args:
      operation, implementation: what runs.
      bytes: what a call must move.
      make: compiles a loop of so many calls.
      aim: of a kernel, at least this share of a copy's bandwidth, where calls are large.
      beside: the operation of the group over whose time its own is given; it is to be at most the
        aim then.
      options: what else tells it from others of the operation.
      operations: multiplications and additions of a call, where these are what takes its time.
    """

    operation: str
    implementation: str
    bytes: int
    make: Callable[[int], Run]
    aim: float | None = None
    beside: str | None = None
    options: Mapping[str, object] = MappingProxyType({})
    operations: int = 0


def both(
    names: Names, operation: str, function: Callable, *args, size: int | None = None,
    aim: float | None = None, beside: str | None = None, operations: int = 0, **options,
) -> Iterator[Side]:  # fmt: skip
    """A side for each implementation of `function(*args, implementation=...)`.

    Args:
      size: bytes that must move. None: those of all arguments and of what is returned.
      aim, beside, operations, options: of `Side`.
    """
    if size is None:
        out = jax.eval_shape(functools.partial(function, implementation="xla"), *args)
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((args, out)))
    for name in names:
        call = functools.partial(function, implementation=name)
        yield Side(operation, name, size, loop(call, *args), aim, beside, options, operations)


def loop(function: Callable, x: jax.Array, *args) -> Callable[[int], Run]:
    """What makes a compiled loop of `function(x, *args)`.

    In a loop on the device, since a launch from Python takes as long as a call. Each call's x
    depends on the call before: none is left out, none overtakes.
    """

    def make(calls: int) -> Run:
        def all_calls(x, *args):
            def once(_, carry):
                x, _ = carry
                out = function(x, *args)
                return x + nothing_of(out, x), out

            out = jax.eval_shape(function, x, *args)
            none = jax.tree.map(lambda o: jnp.zeros(o.shape, o.dtype), out)
            return jax.lax.fori_loop(0, calls, once, (x, none))[1]

        compiled = jax.jit(all_calls).lower(x, *args).compile()
        return lambda: jax.block_until_ready(compiled(x, *args))

    return make


def nothing_of(out: Any, x: jax.Array) -> jax.Array:
    """0, computed from the first array of `out`: XLA does not know that no number is infinite."""
    first = jax.tree.leaves(out)[0].astype(jnp.float32)
    return (0.0 * (first if first.shape == x.shape else first.max())).astype(x.dtype)


def after(index: jax.Array, x: jax.Array) -> jax.Array:
    """The same integers, which wait for x as those of a step wait for its query."""
    return index + (0 * x.max()).astype(index.dtype)


def copy(size: int) -> Side:
    """Reads and writes `size` bytes, the measure of all others."""

    def make(calls: int) -> Run:
        held = [normal(9, (size // 2,), "bfloat16")]
        run = jax.jit(lambda x: jax.lax.fori_loop(0, calls, lambda _, x: -x, x), donate_argnums=0)
        compiled = run.lower(held[0]).compile()

        def again():
            held[0] = jax.block_until_ready(compiled(held[0]))

        return again

    return Side("copy", "xla", 2 * size, make)


# --- attention ------------------------------------------------------------------------------------


def attention(operation: Callable, **options) -> Callable:
    """The output alone of an operation that reads all slots, called as a cache calls it."""

    def call(q, k, v, bias, query, position, used, *, turn=None, implementation):
        seen = pk.Seen(bias, position, used, turn=turn)
        return operation(
            pk.Queries(q, query), k, v, seen, pk.Mask(q.shape[-1] ** -0.5), probabilities=False,
            implementation=implementation, **options,
        )[0]  # fmt: skip

    return call


def dense(shape: Shape, x: Inputs, names: Names) -> Iterator[Side]:
    """Attention to all slots."""
    yield from both(names, "decode_attention", attention(pk.decode_attention), *x, aim=0.85)


def others(shape: Shape, x: Inputs, names: Names) -> Iterator[Side]:
    """The same, and by `jax.nn`, without bias and positions: by XLA, and by cuDNN."""
    yield from dense(shape, x, names)
    size = x.k.nbytes + x.v.nbytes + 2 * x.q.nbytes
    ways: dict[str, Literal["xla", "cudnn"]] = {"jax.nn": "xla"}
    if shape.dtype == "bfloat16":
        ways["cudnn"] = "cudnn"
    for name, way in ways.items():
        yield Side("decode_attention", name, size, functools.partial(by_jax, x, way))


def by_jax(x: Inputs, way: Literal["xla", "cudnn"], calls: int) -> Run:
    """`jax.nn.dot_product_attention`, over keys and values as it takes them, `[B, S, H, D]`."""

    def call(q, k, v):
        rows = q.reshape(q.shape[0], 1, -1, q.shape[-1])
        return jax.nn.dot_product_attention(rows, k, v, implementation=way).reshape(q.shape)

    return loop(call, x.q, *(jnp.swapaxes(rows, 1, 2) for rows in (x.k, x.v)))(calls)


def listed(shape: Shape, x: Inputs, names: Names) -> Iterator[Side]:
    """Attention to lists of slots: of each, its entry, bias, position, key and value are read."""

    def call(q, index, k, v, bias, query, position, *, implementation):
        seen = pk.Seen(bias, position, index=after(index, q))
        return pk.gather_attention(
            pk.Queries(q, query), k, v, seen, pk.Mask(q.shape[-1] ** -0.5), probabilities=False,
            implementation=implementation,
        )[0]  # fmt: skip

    for rows in (1024, 2048, 4096) if shape.tokens == 32_768 else (2048,):
        index = lists(shape, min(rows, shape.tokens // 4))
        size = index.size * (shape.row + 12) + 2 * x.q.nbytes
        options = {"size": size, "aim": 0.6, "rows": index.shape[2]}
        yield from both(names, "gather_attention", call, x.q, index, *x[1:6], **options)


def eight_bits(shape: Shape, x: Inputs, names: Names) -> Iterator[Side]:
    """Attention to numbers of 8 bits."""
    call = attention(pk.quantized_attention)
    for form, dtype, aim in (("int8", jnp.int8, 0.75), ("float8", jnp.float8_e4m3fn, None)):
        encode = jax.jit(functools.partial(pk.quantise_slots, dtype=dtype))
        k, v = (pk.Encoded(*encode(rows)) for rows in (x.k, x.v))
        yield from both(names, "quantized_attention", call, x.q, k, v, *x[3:], aim=aim, form=form)


def four_bits(shape: Shape, x: Inputs, names: Names) -> Iterator[Side]:
    """Attention to numbers of 4 bits in groups of 32."""
    encode = jax.jit(pk.quantise_groups, static_argnames=("group", "axis"))
    group = min(32, shape.channels)
    v = pk.Encoded(*encode(x.v, group=group))
    for axis in ("token", "channel"):
        k = pk.Encoded(*encode(x.k, group=group, axis=axis))
        call, form = attention(pk.quantized_attention, key_axis=axis), f"4 bits per {axis}"
        yield from both(names, "quantized_attention", call, x.q, k, v, *x[3:], form=form)


def codebook(shape: Shape, x: Inputs, names: Names) -> Iterator[Side]:
    """Attention to references, keys turned inside; and to all slots of the full cache."""
    yield from dense(shape, x, names[:1])
    half = shape.channels // 2
    frequency = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32)[None] / half)

    def call(q, frequency, k, v, bias, query, position, used, *, implementation):
        options = {"turn": pk.Turn(frequency, position), "implementation": implementation}
        return attention(pk.codebook_attention)(q, k, v, bias, query, position, used, **options)

    # SpindleKV at 40 % of the full cache's bytes: tokens that are kept, entries per kept vector.
    for kept, each in ((0.5, 0.8), (0.8, 0.5)):
        k, v = (references(shape, kept, each, seed) for seed in (11, 13))
        slots = k.index.shape[2]
        own = x.bias[..., :slots], x.query, x.position[..., :slots], jnp.minimum(x.used, slots)
        yield from both(
            names, "codebook_attention", call, x.q, frequency, k, v, *own, aim=1.0,
            beside="decode_attention", kept=kept, entries_per_kept=each,
        )  # fmt: skip


# --- prompts and what compresses them -------------------------------------------------------------


def prompt(shape: Shape, x: Inputs, names: Names) -> Iterator[Side]:
    """Attention of a prompt's newest queries, sums and maxima of columns; by cuDNN if all query."""
    if shape.batch * shape.tokens > MOST_PROMPT_TOKENS:
        return
    q, position = queries(shape)
    tokens, mask = q.shape[3], pk.Mask(shape.channels**-0.5)
    pairs = tokens * (shape.tokens - tokens) + tokens * (tokens + 1) // 2
    work = 2 * shape.batch * shape.query_heads * shape.channels * pairs  # of one product

    def operands(q, bias, query, position):
        return pk.Queries(q, query), pk.Seen(bias, position)

    def attend(q, k, v, *places, implementation):
        rows, seen = operands(q, *places)
        return pk.prompt_attention(rows, k, v, seen, mask, implementation=implementation)[0]

    def and_sums(q, k, v, *places, implementation):
        rows, seen = operands(q, *places)
        return pk.prompt_attention_and_sums(
            rows, k, v, seen, mask, implementation=implementation
        )[::2]  # fmt: skip

    def and_maxima(q, k, v, *places, implementation):
        (rows, seen), elsewhere = operands(q, *places), jnp.zeros(q.shape[:-1], jnp.float32)
        return pk.prompt_attention_and_maxima(
            rows, k, v, seen, elsewhere, mask, implementation=implementation
        )[::2]  # fmt: skip

    places = x.bias, position, x.position
    given, options = (q, x.k, x.v, *places), {"queries": tokens}
    yield from both(names, "prompt_attention", attend, *given, operations=2 * work, **options)
    for name, joined in ("sums", and_sums), ("maxima", and_maxima):
        name = f"prompt_attention_and_{name}"
        yield from both(names, name, joined, *given, operations=3 * work, **options)
    if shape.dtype == "bfloat16" and tokens == shape.tokens:
        size = x.k.nbytes + x.v.nbytes + 2 * q.nbytes
        make = functools.partial(causal, q, x)
        yield Side("prompt_attention", "cudnn", size, make, options=options, operations=2 * work)
    known = {"mask": mask, "implementation": names[0]}
    rows, seen = operands(q, *places)
    lse = jax.jit(functools.partial(pk.prompt_attention, **known))(rows, x.k, x.v, seen)[1]

    def columns(operation, q, k, lse, *places, implementation):
        rows, seen = operands(q, *places)
        return operation(rows, k, seen, lse, mask, implementation=implementation)

    for operation in (pk.column_sums, pk.column_maxima):
        call, name = functools.partial(columns, operation), operation.__name__
        yield from both(names, name, call, q, x.k, lse, *places, operations=work, **options)


def causal(q: jax.Array, x: Inputs, calls: int) -> Run:
    """A whole prompt by `jax.nn.dot_product_attention`, which takes `[B, T, heads, D]`."""

    def call(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    rows = q.reshape(q.shape[0], -1, *q.shape[3:])
    run = loop(call, *(jnp.swapaxes(each, 1, 2) for each in (rows, x.k, x.v)))(calls)
    # In the order of the other sides' outputs, to be compared with them: once for all calls.
    return lambda: jax.block_until_ready(jnp.swapaxes(run(), 1, 2))


def grouping(shape: Shape, x: Inputs, names: Names) -> Iterator[Side]:
    """ClusterKV's k-means in chunks of 1,024 tokens, 16 a cluster, and Chelsea's matching."""
    chunk, rounds = min(1024, shape.tokens), 10
    lists = (shape.batch, shape.kv_heads * shape.tokens // chunk)
    keys = x.k.reshape(*lists, chunk, shape.channels)
    start = keys[:, :, ::16].astype(jnp.float32)
    products = 2 * shape.batch * shape.kv_heads * shape.tokens * shape.channels

    def cluster(start, keys, *, implementation):
        every, there = (jnp.ones(x.shape[:3], bool) for x in (keys, start))
        how = {"rounds": rounds, "implementation": implementation}
        return pk.kmeans(keys, every, start, there, **how)[1]

    def match(keys, used, *, implementation):
        edges, _ = pk.soft_matching(keys, used, chunk=256, implementation=implementation)
        return jnp.where(edges > -jnp.inf, edges, 0.0)

    work = products * start.shape[2] * (rounds + 1)
    yield from both(names, "kmeans", cluster, start, keys, operations=work, iterations=rounds)
    yield from both(names, "soft_matching", match, x.k, x.used, operations=products * 64)


def merging(shape: Shape, x: Inputs, names: Names) -> Iterator[Side]:
    """Every five neighbours become one, and each key is compared with the next one."""
    slot = jnp.broadcast_to(jnp.arange(shape.tokens, dtype=jnp.int32), shape.store)
    into, following = slot - slot % 5, jnp.minimum(slot + 1, shape.tokens - 1)

    def merge(weights, rows, into, *, implementation):
        return pk.segment_merge(rows, into, weights, implementation=implementation)

    def join(keys, order, pairs, *, implementation):
        return pk.join_anchors(keys, order, pairs, 0.05, implementation=implementation)

    yield from both(names, "segment_merge", merge, jnp.ones(shape.store), x.k, into)
    yield from both(names, "segment_sum", pk.segment_sum, jnp.ones(shape.store), into)
    for name, compare in (("pair_cosine", pk.pair_cosine), ("pair_distance", pk.pair_distance)):
        yield from both(names, name, compare, x.k, slot, following)
    order = slot[..., :2048]  # by XLA, each takes a step of a loop
    size = order.size * (shape.row // 2 + 9)
    last = order.shape[2] - 1
    yield from both(names, "join_anchors", join, x.k, order, order < last, size=size)


def covering(shape: Shape, x: Inputs, names: Names) -> Iterator[Side]:
    """Vectors of a row around few directions: a cover of them, and their nearest entries."""
    vectors = min(8192, shape.tokens)
    number = jnp.arange(vectors, dtype=jnp.int32)
    near = x.k[:1, 0, :vectors]
    near = near[:, number - number % 64] + 0.2 * near
    weights, count = jnp.ones((1, vectors), jnp.int32), jnp.full((1,), vectors, jnp.int32)

    def cover(vectors, weights, *, implementation):
        return pk.greedy_cover(
            vectors, weights > 0, weights, theta=0.9, capacity=vectors.shape[1],
            implementation=implementation,
        )  # fmt: skip

    def nearest(vectors, entries, count, *, implementation):
        return pk.nearest_entries(vectors, entries, count, implementation=implementation)

    size = near.nbytes + vectors**2 // 4  # a bit of each pair, written and read
    yield from both(names, "greedy_cover", cover, near, weights, size=size, vectors=vectors)
    entries = x.k[:1, -1, :vectors]
    yield from both(names, "nearest_entries", nearest, near, entries, count, vectors=vectors)


# --- selection ------------------------------------------------------------------------------------


def selection(shape: Shape, x: Inputs, names: Names) -> Iterator[Side]:
    """What decides which slots are read, beside attention to all of them."""
    yield from dense(shape, x, names[:1])
    q, (middle, sizes, starts) = x.q[..., 0, :], clusters(shape)
    budget = min(1024, shape.tokens // 2)
    count = jnp.full(shape.store[:2], budget, jnp.int32)
    order = jax.jit(functools.partial(pk.rank_clusters, implementation="xla"))(q, middle, sizes)

    def build(q, order, sizes, starts, *, implementation):
        order = after(order, q)
        return pk.build_indices(order, sizes, starts, count, budget, implementation=implementation)

    def choose(q, middle, sizes, starts, *, implementation):
        order = pk.rank_clusters(q, middle, sizes, implementation=implementation)
        return build(q, order, sizes, starts, implementation=implementation)

    yield from both(names, "rank_clusters", pk.rank_clusters, q, middle, sizes)
    yield from both(names, "build_indices", build, q, order, sizes, starts)
    yield from both(
        names, "choosing", choose, q, middle, sizes, starts, aim=0.1, beside="decode_attention"
    )
    bounds = jax.jit(pk.page_bounds, static_argnums=(3, 4))
    pages = bounds(x.k, x.position, x.used, 16, shape.tokens // 16)
    yield from both(names, "page_scores", pk.page_scores, q, *pages)


def host(shape: Shape, x: Inputs, names: Names) -> Iterator[Side]:
    """Rows of a store in host memory, beside a copy of as many from there."""
    if shape.batch > 2:
        return
    index = lists(shape, min(1024, shape.tokens // 4))
    rows = tuple(jnp.zeros((*index.shape, shape.channels), shape.dtype) for _ in range(2))
    on_host = x.k.sharding.with_memory_kind("pinned_host")
    store, together = jax.device_put(((x.k, x.v), rows), on_host)

    def fetch(k_rows, v_rows, k, v, index, missing, *, implementation):
        rows, index = (k_rows, v_rows), after(index, k_rows)
        return pk.host_rows((k, v), rows, index, missing, implementation=implementation)

    def copies(calls: int) -> None:
        for _ in range(calls):
            jax.block_until_ready(jax.device_put(together, x.k.sharding))

    args, size = (*rows, *store, index, jnp.ones(index.shape, bool)), index.size * shape.row
    yield from both(names, "host_rows", fetch, *args, size=size, beside="link")
    yield Side("link", "xla", size, lambda calls: functools.partial(copies, calls))


GROUPS = {
    "dense": others, "listed": listed, "8 bits": eight_bits, "4 bits": four_bits,
    "codebook": codebook, "prompt": prompt, "grouping": grouping, "merging": merging,
    "covering": covering, "selection": selection, "host": host,
}  # fmt: skip
