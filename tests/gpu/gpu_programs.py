"""What is compiled for GPUs that are not there: every kernel, and the loop of decode steps.

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
from pallas_kernels.formats.bits import quantise_groups, quantise_slots

SLOTS, LISTED = 32_768, 2048
CLUSTERS, PAGE = 400, 16
MAX_NEW, STEPS = 512, 64
OPTIONS = {"scale": 0.1, "implementation": "pallas"}


@dataclass(frozen=True)
class GPUProgram:
    """A function and the shapes that it is compiled for.

    Args:
      name: in the report.
      function, args: what is compiled; args are avals, whose memory space counts.
      stores: the arrays whose bytes are what compression saves: none may be copied or decoded.
      decoded_bytes: of keys and values, if the stores were decoded.
      kernel: the name of the kernel that must be in it.
      donated: whether the first argument is, and all stores are in it.
      to_host: whether rows may go to host memory, as an offloaded cache's do now and then.
    """

    name: str
    function: Callable
    args: tuple
    stores: tuple
    decoded_bytes: int
    kernel: str
    donated: bool = False
    to_host: bool = False

    @property
    def store_bytes(self) -> int:
        """Of all stores."""
        return bytes_of(*self.stores)

    @property
    def store_elements(self) -> int:
        """Of the smallest store: as large an array is a copy, or what one decodes to."""
        return min(math.prod(x.shape) for x in self.stores)


def programs() -> Iterator[GPUProgram]:
    """All of them."""
    yield from kernels()
    yield from loops()


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


def kernels() -> Iterator[GPUProgram]:
    """Every kernel by itself."""
    for heads in HEADS:
        yield from _dense(heads)
        yield from _encoded(heads)
        yield from _selecting(heads)


def struct(shape: tuple[int, ...], dtype, host: bool = False) -> jax.core.ShapedArray:
    """An array that need not be there."""
    space = jax.memory.Space.Host if host else jax.memory.Space.Device
    return jax.core.ShapedArray(shape, jnp.dtype(dtype), memory_space=space)


def _query(heads: Heads):
    return struct((1, heads.kv, heads.group, 1, heads.dim), heads.dtype)


def _slots(heads: Heads) -> tuple:
    """Bias, query position and position of the slots."""
    slots = (1, heads.kv, SLOTS)
    return struct(slots, "float32"), struct((1, 1), "int32"), struct(slots, "int32")


def _dense(heads: Heads) -> Iterator[GPUProgram]:
    store = struct((1, heads.kv, SLOTS, heads.dim), heads.dtype)
    used = struct((1, heads.kv), "int32")
    index = struct((1, heads.kv, LISTED), "int32")
    q, rest = _query(heads), _slots(heads)

    def decode(q, k, v, bias, query, position, used, **options):
        return ops.decode_attention(q, k, v, bias, query, position, used=used, **options, **OPTIONS)

    def program(name, function, *more):
        args = (q, store, store, *more)
        return GPUProgram(
            f"{name}, {heads}", function, args, (store, store), 2 * bytes_of(store),
            "split_attention",
        )  # fmt: skip

    plain = functools.partial(decode, probabilities=False)
    yield program("decode", plain, *rest, used)
    yield program("decode with probabilities", decode, *rest, used)
    yield program("decode in a window", functools.partial(plain, window=4096), *rest, used)
    gather = functools.partial(ops.gather_attention, probabilities=False, **OPTIONS)
    yield program("gather", gather, index, *rest)
    with_all = functools.partial(ops.gather_attention, **OPTIONS)
    yield program("gather with probabilities", with_all, index, *rest)


def _encoded(heads: Heads) -> Iterator[GPUProgram]:
    q, rest = _query(heads), _slots(heads)
    numbers = struct((1, heads.kv, SLOTS, heads.dim), heads.dtype)
    plain = {"probabilities": False, **OPTIONS}

    def program(name, function, args, stores):
        return GPUProgram(
            f"{name}, {heads}", function, args, stores, 2 * bytes_of(numbers), "split_attention"
        )

    def form(encode, **options):
        return ops.Encoded(*jax.eval_shape(functools.partial(encode, **options), numbers))

    forms = {
        "int8": (form(quantise_slots),) * 2,
        "float8": (form(quantise_slots, dtype=jnp.float8_e4m3fn),) * 2,
        "4 bits per token": (form(quantise_groups, group=32),) * 2,
        "4 bits per channel": (
            form(quantise_groups, group=32, axis="channel"), form(quantise_groups, group=32)
        ),
    }  # fmt: skip
    for name, (k, v) in forms.items():
        axis = "channel" if "channel" in name else "token"
        call = functools.partial(ops.quantized_attention, key_axis=axis, **plain)
        stores = (k.values, v.values)
        yield program(f"quantized {name}", call, _avals((q, k, v, *rest)), stores)
    book = (1, 1, heads.kv * SLOTS // 4, heads.dim)
    own = (1, heads.kv, SLOTS)
    k = v = ops.References(
        struct(book, heads.dtype), struct(own, "uint32"), struct(own, heads.dtype)
    )
    frequency = struct((1, heads.dim // 2), "float32")

    def turned(q, k, v, bias, query, position, frequency):
        turn = ops.Turn(frequency, position)
        return ops.codebook_attention(q, k, v, bias, query, position, turn=turn, **plain)

    args, stores = (q, k, v, *rest), (k.entries, v.entries)
    call = functools.partial(ops.codebook_attention, **plain)
    yield program("codebook", call, args, stores)
    args = (*args, frequency)
    yield program("codebook with RoPE", turned, args, stores)


def _selecting(heads: Heads) -> Iterator[GPUProgram]:
    """Choosing what is read, and reading it from host memory."""
    grouped = struct((1, heads.kv, heads.group, heads.dim), heads.dtype)
    centroids = struct((1, heads.kv, CLUSTERS, heads.dim), "float32")
    sizes = order = struct((1, heads.kv, CLUSTERS), "int32")
    bounds = struct((1, heads.kv, SLOTS // PAGE, heads.dim), heads.dtype)
    store = struct((1, heads.kv, SLOTS, heads.dim), heads.dtype, host=True)
    rows = struct((1, heads.kv, LISTED, heads.dim), heads.dtype)
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
    ):
        function = functools.partial(call, implementation="pallas")
        size, kernel = bytes_of(*stores), name.split()[0]
        yield GPUProgram(f"{name}, {heads}", function, args, stores, size, kernel)


# --- the loop -------------------------------------------------------------------------------------


def loops() -> Iterator[GPUProgram]:
    """Steps of decoding with a donated cache, by every kind of cache."""
    clusters = kvjax.ClusterKV(1024, clusters=CLUSTERS, dense_layers=())
    methods = {
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
    for name, transform in methods.items():
        yield loop(f"loop of {name}", transform, Heads(8, 4, 128, "bfloat16"))


def loop(name: str, transform: kvjax.KVTransform, heads: Heads) -> GPUProgram:
    """A loop of steps of one layer."""
    made = functools.partial(
        kvjax.init_cache, transform, batch=1, kv_heads=heads.kv,
        query_heads=heads.kv * heads.group, head_dim=heads.dim, max_prompt=SLOTS, max_new=MAX_NEW,
        dtype=heads.dtype,
    )  # fmt: skip
    cache = _avals(jax.eval_shape(made))
    rope = kvjax.Rope(10_000.0 ** (-np.arange(heads.dim // 2, dtype=np.float32) / heads.dim * 2))
    q = struct((1, heads.kv * heads.group, 1, heads.dim), heads.dtype)
    k = struct((1, heads.kv, 1, heads.dim), heads.dtype)

    def steps(cache, q, k, v, position):
        def step(_, carry):
            cache, out, position = carry
            out, cache = kvjax.attend(
                transform, cache, q + out, k, v, position, phase="decode", rope=rope,
                implementation="pallas",
            )  # fmt: skip
            return cache, out, position + 1

        return jax.lax.fori_loop(0, STEPS, step, (cache, jnp.zeros_like(q), position))

    stores = tuple(max(jax.tree.leaves(x), key=_size) for x in (cache.kv.k, cache.kv.v))
    decoded = 2 * math.prod(cache.kv.k.shape) * jnp.dtype(heads.dtype).itemsize
    args = (cache, q, k, k, struct((1, 1), "int32"))
    return GPUProgram(
        name, steps, args, stores, decoded, "split_attention",
        donated=True, to_host=any(on_host(x) for x in stores),
    )  # fmt: skip


def on_host(x: Any) -> bool:
    """Whether an aval is of an array in host memory."""
    return x.memory_space == jax.memory.Space.Host


def bytes_of(*arrays: Any) -> int:
    """Of some arrays."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def _size(x: Any) -> int:
    return math.prod(x.shape)


def _avals(tree: Any) -> Any:
    def aval(x: Any) -> jax.core.ShapedArray:
        return x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)

    return jax.tree.map(aval, tree)
