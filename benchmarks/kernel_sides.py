"""What `kernels.py` measures: each operation, by each implementation that can run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from kernel_shapes import (
    GROUP,
    MAX_NEW,
    RESERVES,
    Inputs,
    Shape,
    centroids,
    cluster_ranges,
    clustered_cache,
    encoded,
    lists,
    page_bounds,
    references,
)

import kvjax
from pallas_kernels import (
    Turn,
    build_indices,
    codebook_attention,
    decode_attention,
    gather_attention,
    host_rows,
    page_scores,
    quantise_groups,
    quantise_slots,
    quantized_attention,
    rank_clusters,
)

STEPS = 16  # of a cache in one call
SPARE = 16  # slots
HOST_ROWS = 1024  # per head, that come from host memory
Run = Callable[[], Any]  # makes all calls of a measurement, waits, and gives what the last one gave


@dataclass(frozen=True)
class Side:
    """One row of the result.

    Args:
      operation, implementation: what runs.
      bytes: that a call must move.
      make: compiles a loop of so many calls.
      options: what else tells it from others of the operation.
      over: whose bandwidth its own is given over: `"copy"`, or `"link"` to host memory.
      threads: whether it can be compiled beside others.
      calls: of a measurement, where that is not free.
    """

    operation: str
    implementation: str
    bytes: int
    make: Callable[[int], Run]
    options: dict[str, object] = field(default_factory=dict)
    over: str = "copy"
    threads: bool = True
    calls: int | None = None

    @property
    def compared(self) -> tuple:
        """Equal for those that compute the same."""
        return self.operation, *sorted(self.options.items())


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
                return x + _nothing_of(out, x), out

            out = jax.eval_shape(function, x, *args)
            none = jax.tree.map(lambda o: jnp.zeros(o.shape, o.dtype), out)
            return jax.lax.fori_loop(0, calls, once, (x, none))[1]

        compiled = jax.jit(all_calls).lower(x, *args).compile()
        return lambda: jax.block_until_ready(compiled(x, *args))

    return make


def _nothing_of(out: Any, x: jax.Array) -> jax.Array:
    """0, computed from the first array of `out`: XLA does not know that no number is infinite."""
    first = jax.tree.leaves(out)[0].astype(jnp.float32)
    return (0.0 * (first if first.shape == x.shape else first.max())).astype(x.dtype)


def copy(size: int) -> Side:
    """Reads and writes `size` bytes, the measure of all others."""
    x = jax.random.normal(jax.random.key(9, impl="unsafe_rbg"), (size // 2,), jnp.bfloat16)

    def make(calls: int) -> Run:
        run = jax.jit(lambda x: jax.lax.fori_loop(0, calls, lambda _, x: -x, x), donate_argnums=0)
        compiled, held = run.lower(x).compile(), {"x": x + 0}

        def again():
            held["x"] = jax.block_until_ready(compiled(held["x"]))

        return again

    return Side("copy", "xla", 2 * size, make)


def both(
    implementations: tuple[str, ...],
    operation: str,
    size: int,
    function: Callable,
    *args,
    **options,
) -> Iterator[Side]:
    """A side for each implementation of a function that takes `implementation=`."""
    for name in implementations:
        call = functools.partial(function, implementation=name)
        yield Side(operation, name, size, loop(call, *args), options)


# --- attention ------------------------------------------------------------------------------------


def attention(operation: Callable, **options) -> Callable:
    """The output alone of an operation that reads all slots, of a query and what it reads."""

    def call(q, *args, implementation):
        return operation(
            q, *args, scale=q.shape[-1] ** -0.5, probabilities=False,
            implementation=implementation, **options,
        )[0]  # fmt: skip

    return call


def with_used(operation: Callable, **options) -> Callable:
    """The same, with the number of slots as a cache knows it."""

    def call(q, k, v, bias, query, position, used, implementation):
        own = attention(operation, used=used, **options)
        return own(q, k, v, bias, query, position, implementation=implementation)

    return call


def dense_sides(shape: Shape, x: Inputs, names: tuple[str, ...]) -> Iterator[Side]:
    """Attention to all slots, and to lists of them."""
    yield from decode_sides(shape, x, names)
    attend = attention(gather_attention)
    for rows in (1024, 2048, 4096) if shape.tokens == 32_768 else (2048,):
        rows = min(rows, shape.tokens // 4)

        def call(q, index, k, v, *slots, implementation):
            # The list depends on what came before, as that of a step does.
            index = index + (0 * q.max()).astype(index.dtype)
            return attend(q, k, v, index, *slots, implementation=implementation)

        args = (x.q, lists(shape, rows), x.k, x.v, x.bias, x.query, x.position)
        size = shape.gather_bytes(rows)
        yield from both(names, "gather_attention", size, call, *args, rows=rows)


def decode_sides(shape: Shape, x: Inputs, names: tuple[str, ...]) -> Iterator[Side]:
    """Attention to all slots."""
    call = with_used(decode_attention)
    yield from both(names, "decode_attention", shape.decode_bytes(), call, *x)


def eight_bit_sides(shape: Shape, x: Inputs, names: tuple[str, ...]) -> Iterator[Side]:
    """Attention to numbers of 8 bits."""
    kinds = {"int8": jnp.int8, "float8": jnp.float8_e4m3fn}
    call = with_used(quantized_attention)
    for form, dtype in kinds.items():
        encode = functools.partial(quantise_slots, dtype=dtype)
        k, v = (encoded(rows, encode) for rows in (x.k, x.v))
        size = shape.quantized_bytes(8)
        slots = (spare(x.bias, -jnp.inf), x.query, spare(x.position, -1), x.used)
        args = (x.q, spare(k), spare(v), *slots)
        yield from both(names, "quantized_attention", size, call, *args, form=form)


@jax.jit
def spare(tree, fill: float = 0):
    """Arrays with room for some new tokens, as a cache has it.

    It also takes the largest shape past what the kernels cannot address: see
    `pallas_kernels.base.dispatch`.
    """

    def widen(x: jax.Array) -> jax.Array:
        pad = [(0, SPARE if axis == 2 else 0) for axis in range(x.ndim)]
        return jnp.pad(x, pad, constant_values=jnp.asarray(fill, x.dtype))

    return jax.tree.map(widen, tree)


def four_bit_sides(shape: Shape, x: Inputs, names: tuple[str, ...]) -> Iterator[Side]:
    """Attention to numbers of 4 bits."""
    group = min(GROUP, shape.model.channels)
    v = encoded(x.v, functools.partial(quantise_groups, group=group))
    for axis in ("token", "channel"):
        k = encoded(x.k, functools.partial(quantise_groups, group=group, axis=axis))
        call = with_used(quantized_attention, key_axis=axis)
        size, form = shape.quantized_bytes(4), f"4 bits per {axis}"
        yield from both(names, "quantized_attention", size, call, x.q, k, v, *x[3:], form=form)


def codebook_sides(shape: Shape, x: Inputs, names: tuple[str, ...]) -> Iterator[Side]:
    """Attention to references, keys turned inside; and to all slots of the full cache."""
    yield from decode_sides(shape, x, names[:1])
    half = shape.model.channels // 2
    frequency = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32)[None] / half)

    def call(q, k, v, bias, query, position, used, frequency, implementation):
        turned = with_used(codebook_attention, turn=Turn(frequency, position))
        return turned(q, k, v, bias, query, position, used, implementation=implementation)

    for kept, each in RESERVES:
        k, v = (references(shape, kept, seed) for seed in (11, 13))
        slots = k.index.shape[2]
        own = x.bias[..., :slots], x.query, x.position[..., :slots], jnp.minimum(x.used, slots)
        size, options = shape.codebook_bytes(kept), {"kept": kept, "entries_per_kept": each}
        args = (x.q, k, v, *own, frequency)
        yield from both(names, "codebook_attention", size, call, *args, **options)


# --- selection ------------------------------------------------------------------------------------


def selection_sides(shape: Shape, x: Inputs, names: tuple[str, ...]) -> Iterator[Side]:
    """What decides which slots are read."""
    q = x.q[..., 0, :]
    middle, (sizes, starts) = centroids(shape), cluster_ranges(shape)
    count = jnp.full(shape.store[:2], shape.budget, jnp.int32)
    order = jax.jit(functools.partial(rank_clusters, implementation="xla"))(q, middle, sizes)
    size = shape.rank_bytes()
    yield from both(names, "rank_clusters", size, rank_clusters, q, middle, sizes)

    def build(q, order, sizes, starts, count, *, implementation):
        order = order + (0 * q.max()).astype(order.dtype)  # lists depend on what came before
        return build_indices(
            order, sizes, starts, count, shape.budget, implementation=implementation
        )

    args = (order, sizes, starts, count)
    yield from both(names, "build_indices", shape.build_bytes(), build, q, *args)
    size, bounds = shape.page_bytes(), page_bounds(shape)
    yield from both(names, "page_scores", size, page_scores, q, *bounds)


def choose(q, middle, sizes, starts, count, *, length: int, implementation: str) -> jax.Array:
    """Ranking and indexing, as a step of ClusterKV does it."""
    order = rank_clusters(q, middle, sizes, implementation=implementation)
    return build_indices(order, sizes, starts, count, length, implementation=implementation)


def step_sides(shape: Shape, x: Inputs, names: tuple[str, ...]) -> Iterator[Side]:
    """A whole step of ClusterKV through `kvjax.attend`, and the choice that is a part of it."""
    q = x.q[..., 0, :]
    count = jnp.full(shape.store[:2], shape.budget, jnp.int32)
    call = functools.partial(choose, length=shape.budget)
    size = shape.rank_bytes() + shape.build_bytes()
    args = (q, centroids(shape), *cluster_ranges(shape), count)
    yield from both(names, "choosing", size, call, *args)
    transform = kvjax.ClusterKV(shape.budget, clusters=shape.clusters, dense_layers=())
    size += shape.gather_bytes(shape.budget + transform.interval)
    for name in names:
        make = functools.partial(steps, transform, shape, x, name)
        options = {"budget": shape.budget, "clusters": shape.clusters}
        yield Side("clusterkv step", name, size, make, options, calls=STEPS)


def steps(transform, shape: Shape, x: Inputs, implementation: str, calls: int) -> Run:
    """More steps with each call, of a cache that is donated."""
    q = x.q.reshape(shape.batch, shape.model.query_heads, 1, -1)
    k = v = x.k[:, :, :1]

    def all_calls(cache, q, k, v, position):
        def step(_, carry):
            cache, out, position = carry
            out, cache = kvjax.attend(
                transform, cache, q + 0 * out, k, v, position, phase="decode",
                implementation=implementation,
            )  # fmt: skip
            return cache, out, position + 1

        return jax.lax.fori_loop(0, calls, step, (cache, jnp.zeros_like(q), position))

    cache = clustered_cache(transform, shape, x.k, x.v)
    position = jnp.full((shape.batch, 1), shape.tokens, jnp.int32)
    compiled = jax.jit(all_calls, donate_argnums=0).lower(cache, q, k, v, position).compile()
    held = {"cache": cache, "position": position}
    del cache

    def run():
        held["cache"], out, held["position"] = compiled(held["cache"], q, k, v, held["position"])
        return jax.block_until_ready(out)

    return run


def host_sides(shape: Shape, x: Inputs, names: tuple[str, ...]) -> Iterator[Side]:
    """Rows of a store in host memory, in runs as long as clusters; and a copy of all rows."""
    rows = min(HOST_ROWS, shape.tokens // 4)
    on_host = x.k.sharding.with_memory_kind("pinned_host")
    store = tuple(jax.device_put(rows, on_host) for rows in (x.k, x.v))
    run = min(80, rows // 2)
    index = lists(shape, rows, run)
    missing = jnp.ones(index.shape, bool)
    into = tuple(jnp.zeros((*index.shape, shape.model.channels), shape.dtype) for _ in range(2))
    size = index.size * shape.row

    def fetch(k_rows, v_rows, k, v, index, missing, implementation):
        # The list depends on what came before, or all fetches were one.
        index = index + (0 * k_rows.max()).astype(index.dtype)
        into = (k_rows, v_rows)
        return host_rows((k, v), into, index, missing, implementation=implementation)

    def link(calls: int) -> Run:
        def copies():
            for _ in range(calls):
                jax.block_until_ready(jax.device_put(store, x.k.sharding))

        return copies

    args = (*into, *store, index, missing)
    for side in both(names, "host_rows", size, fetch, *args, rows=rows, run=run):
        yield Side(**{**vars(side), "over": "link"})
    yield Side("link", "xla", shape.dense, link, over="link")


GROUPS = {
    "dense": dense_sides,
    "8 bits": eight_bit_sides,
    "4 bits": four_bit_sides,
    "codebook": codebook_sides,
    "selection": selection_sides,
    "step": step_sides,
    "host": host_sides,
}
ROOM = MAX_NEW // STEPS  # calls of a step that fit
