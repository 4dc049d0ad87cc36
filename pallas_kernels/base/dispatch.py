"""What all operations share: gathers, the masked logit, the choice of an implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Bool, Float, Int

NEG_INF = float("-inf")
IMPLEMENTATIONS = ("xla",)
# Of operations that have a kernel: compiled for a GPU, or run by the interpreter on any device.
WITH_KERNEL = ("xla", "pallas", "interpret")
OLDEST_GPU = (8, 0)  # the compute capability that kernels need
BLOCK = 1024  # slots that are decoded at a time: on CPU, what stays in its caches

# `product(q, keys, start)`: what takes the place of `q · k` for a block of decoded keys
# `[B, H, N, D]`, whose first slot it is given; linear in the keys. None: the product as it is.
Product = Callable[[Array, Array, Array | int], Array]
T = TypeVar("T")

# Rows of every (row, head): `x [B, H, S, ...]` and `index [B, H, N]` to `[B, H, N, ...]`. Mapped,
# and not indexed by iota, which brings collectives when a cache is sharded over rows or heads.
take_rows = jax.vmap(jax.vmap(lambda x, index: x[index]))


def take_shared(x: Float[Array, "#B N D"], index: Int[Array, "B *I"]) -> Float[Array, "B *I D"]:  # noqa: UP037
    """Rows of each row's own array, or of one that all share; every index is below N."""

    def take(x: Array, index: Array) -> Array:
        return x.at[index].get(mode="promise_in_bounds")

    if len(x) == 1:  # on CPU a gather with a batch axis takes longer
        return take(x[0], index)
    return jax.vmap(take)(x, index)


def check_implementation(
    implementation: str | None, offered: tuple[str, ...] = IMPLEMENTATIONS
) -> None:
    """Raises ValueError for a name that is not offered: a named one never falls back silently."""
    if implementation is not None and implementation not in offered:
        raise ValueError(f"implementation must be None or one of {offered}, got {implementation!r}")


def choose_implementation(implementation: str | None, *stores: Array | None) -> str:
    """What runs of an operation with a kernel: what is named, else the best that can run here.

    Naming `"pallas"` on a machine without a GPU is no error by itself, since code can be lowered
    for another machine; Pallas refuses it when it comes to compiling for a CPU.

    A kernel sees the arrays of one device. Where arrays are divided among several automatically,
    the best is XLA, which divides its own operations; inside `shard_map` it is the kernel.

    Args:
      implementation: as given by the caller.
      stores: arrays that the kernel reads where they are.

    Raises:
      ValueError: an unknown name; `"pallas"` on a GPU that is too old for it, or for a store that
        it cannot address.
    """
    check_implementation(implementation, WITH_KERNEL)
    capability = gpu_capability()
    able = capability is not None and capability >= OLDEST_GPU
    if implementation == "pallas" and capability is not None and not able:
        raise ValueError(
            f"implementation='pallas' needs a CUDA GPU of compute capability "
            f"{OLDEST_GPU[0]}.{OLDEST_GPU[1]} or newer, got {capability[0]}.{capability[1]}"
        )
    stores = [x for x in stores if x is not None]
    too_large = [x.shape for x in stores if _is_unaddressable(x)]
    if implementation == "pallas" and too_large:
        raise ValueError(
            "implementation='pallas' takes no arrays of 2 to 4 GiB whose elements are bytes, got "
            f"shape {too_large[0]}"
        )
    able &= not too_large and not any(map(_is_divided, stores))
    return implementation or ("pallas" if able else "xla")


def _is_unaddressable(x: Array) -> bool:
    """Pallas counts elements in 32 bits, with a sign, wherever 32 bits can count the bytes."""
    return x.dtype.itemsize == 1 and 2**31 <= x.size <= 2**32


def _is_divided(x: Array) -> bool:
    """Whether it may lie on several devices, by a mesh whose axes XLA or JAX looks after."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and kind != AxisType.Manual for size, kind in kinds)


def gpu_capability() -> tuple[int, int] | None:
    """Compute capability of the default device; None unless it is a CUDA GPU."""
    device = default_device()
    # A plugin's version begins with "PJRT C API", the built-in client's with "cuda".
    if device is None or "cuda" not in device.client.platform_version:
        return None
    major, _, minor = str(device.compute_capability).partition(".")
    return int(major), int(minor or 0)


def default_device() -> jax.Device | None:
    """The GPU that computation goes to by default; None where that is no GPU."""
    device = jax.config.jax_default_device  # None, a device, or the name of a platform
    if isinstance(device, str):
        device = jax.devices(device)[0]
    if device is None:
        device = jax.devices()[0]
    return device if device.platform == "gpu" else None


def over_blocks(slots: int, block: int, add: Callable[[Array | int, int, T], T], carry: T) -> T:
    """`add(start, count, carry)` for one block of slots after the other; the last has the rest."""
    blocks, rest = divmod(slots, block)
    if blocks:
        carry = jax.lax.fori_loop(0, blocks, lambda i, c: add(i * block, block, c), carry)
    return add(blocks * block, rest, carry) if rest else carry


def products(q: Float[Array, "B H R D"], k: Float[Array, "B H S D"]) -> Float[Array, "B H R S"]:
    """Float32 `q · k`."""
    # In the dtype of the keys: the other way round, a bfloat16 cache would be widened every step.
    return jnp.einsum("bhrd,bhsd->bhrs", q.astype(k.dtype), k, preferred_element_type=jnp.float32)


def masked_logits(
    q: Float[Array, "B H R D"],
    k: Float[Array, "B H S D"],
    bias: Float[Array, "B H S"],
    key_position: Int[Array, "B H S"],
    query_position: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "B H R S"]:
    """Float32 attention logits, `-inf` where a query does not see a slot.

    The R query rows of a KV head are its G query heads times the T tokens, tokens fastest. Masking
    uses `where`, so that nothing that stands in a free slot's key reaches the result.
    """
    kind = {"scale": scale, "window": window, "soft_cap": soft_cap}
    return mask_products(products(q, k), bias, key_position, query_position, **kind)


def mask_products(
    products: Float[Array, "B H R S"],
    bias: Float[Array, "B H S"],
    key_position: Int[Array, "B H S"],
    query_position: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "B H R S"]:
    """`masked_logits` of products `q·k` that are there already."""
    rows, tokens = products.shape[2], query_position.shape[1]
    logits = products * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    visible = visible_slots(bias, key_position, query_position, window)
    logits = logits + bias[:, :, None, :]
    grouped = logits.reshape(*logits.shape[:2], rows // tokens, tokens, -1)
    return jnp.where(visible[:, :, None], grouped, NEG_INF).reshape(logits.shape)


def visible_slots(
    bias: Float[Array, "B H S"],
    key_position: Int[Array, "B H S"],
    query_position: Int[Array, "B T"],
    window: int | None,
) -> Bool[Array, "B H T S"]:
    """Whether a query sees a slot: a live one, not newer than the query, and in its window."""
    q_pos, k_pos = query_position[:, None, :, None], key_position[:, :, None, :]
    visible = (k_pos <= q_pos) & live_slots(bias, key_position)[:, :, None, :]
    return visible if window is None else visible & (k_pos > q_pos - window)


def live_slots(
    bias: Float[Array, "B H S"], key_position: Int[Array, "B H S"]
) -> Bool[Array, "B H S"]:
    """Slots that hold a token."""
    return (bias > NEG_INF) & (key_position >= 0)
