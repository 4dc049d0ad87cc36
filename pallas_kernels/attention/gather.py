"""Attention of a few new tokens over the slots of a list, read where they are stored."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention.call import probabilities_of
from pallas_kernels.attention.decode import check_rows, decode_attention
from pallas_kernels.attention.forms import dense_rows, resident_rows
from pallas_kernels.attention.kernel import Slots, split_attention
from pallas_kernels.base.dispatch import NEG_INF, choose_implementation, take_rows, visible_slots
from pallas_kernels.base.tiles import tile_of
from pallas_kernels.recall.host_rows import host_rows


class ResidentRows(NamedTuple):
    """Rows of a list that are on the device.

    Args:
      k, v: anything where there is none.
      held: which of the list's entries they are.
    """

    k: Float[Array, "B K N D"]
    v: Float[Array, "B K N D"]
    held: Bool[Array, "B K N"]

    @property
    def rows(self) -> tuple[Array, Array]:
        """Keys and values."""
        return self.k, self.v


def gather_attention(
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B H S D"],
    v: Float[Array, "B H S D"],
    index: Int[Array, "B K N"],
    bias: Float[Array, "B H S"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B H S"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    resident: ResidentRows | None = None,
    probabilities: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "B K G T D"], Float[Array, "B K G T"], Float[Array, "B K G T N"] | None]:
    """`decode_attention` over the listed slots alone, as if there were no others.

    The reference gathers the rows and attends to the copy; the kernel reads them from the store,
    and the bias and position of the slots with them. The store may be in host memory: then only the
    listed rows cross, and of those only what is not resident.

    Args:
      q: queries, grouped under their list. K = H, or a multiple of it (K = H · G, and one query
        head per list): list k reads head `k // (K / H)`.
      k, v: of all slots of the store, in device or in host memory.
      bias, key_position: of all slots, in device memory.
      index: the slots of each list, below S, in any order; -1: none. A slot that is listed twice
        counts twice.
      query_position: token position per query, -1 = padding (such a row gives 0).
      scale, window, soft_cap, implementation: as in `decode_attention`.
      resident: rows of the list that are on the device already; None: none.
      probabilities: whether to return them (static).

    Returns:
      Outputs in the dtype of `v`, float32 log-sum-exps, float32 probabilities of each entry of the
      list, or None.

    Raises:
      ValueError: shapes that do not fit each other; an unknown implementation, or one that the
        GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import gather_attention
      >>> q, k = jnp.zeros((1, 1, 1, 1, 2)), jnp.zeros((1, 1, 3, 2))
      >>> v = jnp.array([[[[1.0, 2.0], [3.0, 6.0], [9.0, 9.0]]]])
      >>> position, index = jnp.array([[[0, 1, 2]]]), jnp.array([[[2, 0, -1]]])
      >>> out, _, p = gather_attention(q, k, v, index, jnp.zeros((1, 1, 3)), position[0, :, 2:],
      ...                              position, scale=1.0)
      >>> out.tolist(), p.tolist()
      ([[[[[5.0, 5.5]]]]], [[[[[0.5, 0.5, 0.0]]]]])
    """
    chosen = choose_implementation(implementation, k, v)
    check_rows(q, k, v, bias, query_position, key_position, q.shape[1])
    if index.ndim != 3 or index.shape[:2] != q.shape[:2]:
        raise ValueError(f"index must be [B, K, N] with B, K = {q.shape[:2]}, got {index.shape}")
    if resident is not None:
        _check_resident(resident, index, k.shape[3])
    kind = {"scale": scale, "window": window, "soft_cap": soft_cap}
    index = index.astype(jnp.int32)
    if chosen == "xla":
        rows = _rows((k, v), index, resident)
        own = _own(bias, key_position, index)
        return decode_attention(
            q, *rows, own[0], query_position, own[1],
            probabilities=probabilities, implementation="xla", **kind,
        )  # fmt: skip
    if chosen == "interpret":  # not on every version of JAX does it take what is in host memory
        k, v = (jax.device_put(x, jax.memory.Space.Device) for x in (k, v))
    if resident is None:
        k_rows, v_rows = dense_rows(k), dense_rows(v)
    else:
        pairs = zip((k, v), resident.rows, strict=True)
        k_rows, v_rows = (resident_rows(*pair, resident.held) for pair in pairs)
    out, lse, logits = split_attention(
        q, k_rows, v_rows, Slots(bias, key_position, _end(index), index=index), query_position,
        tile=tile_of("gather_attention"), with_logits=probabilities,
        interpret=chosen == "interpret", dtype=v.dtype, **kind,
    )  # fmt: skip
    if not probabilities:
        return out, lse, None
    visible = visible_slots(*_own(bias, key_position, index), query_position, window)
    return out, lse, probabilities_of(logits, lse, visible)


def _check_resident(resident: ResidentRows, index: Array, head_dim: int) -> None:
    rows = (*index.shape, head_dim)
    for name, shape in (("k", rows), ("v", rows), ("held", index.shape)):
        given = getattr(resident, name).shape
        if given != shape:
            raise ValueError(f"resident.{name} must have shape {shape}, got {given}")


def _rows(
    stores: tuple[Array, Array], index: Int[Array, "B K N"], resident: ResidentRows | None
) -> tuple[Array, Array]:
    """Keys and values of the listed slots; anything where there is none."""
    if jax.typeof(stores[0]).memory_space != jax.memory.Space.Host:
        found = (_take(x, index) for x in stores)
        if resident is None:
            return tuple(found)
        held = resident.held[..., None]
        pairs = zip(resident.rows, found, strict=True)
        return tuple(jnp.where(held, near, x.astype(near.dtype)) for near, x in pairs)
    missing = index >= 0
    if resident is None:
        shape = (*index.shape, stores[0].shape[3])
        near = tuple(jnp.zeros(shape, x.dtype) for x in stores)
    else:
        near, missing = resident.rows, missing & ~resident.held
    return host_rows(stores, near, jnp.maximum(index, 0), missing, implementation="xla")


def _end(index: Int[Array, "B K N"]) -> Int[Array, "B K"]:
    """One after the last place that names a slot: lists end in -1, mostly."""
    place = jnp.arange(index.shape[2], dtype=jnp.int32)[None, None]
    return jnp.where(index >= 0, place + 1, 0).max(2, initial=0)


def _own(bias, key_position, index) -> tuple[Float[Array, "B K N"], Int[Array, "B K N"]]:
    """The bias and position of the listed slots; free where there is none."""
    named = index >= 0
    return (
        jnp.where(named, _take(bias, index), NEG_INF),
        jnp.where(named, _take(key_position, index), -1),
    )


def _take(x: Array, index: Int[Array, "B K N"]) -> Array:
    """`x [B, H, S, ...]` at the slots of each list, `[B, K, N, ...]`; slot 0 for none."""
    heads = x.shape[1]
    by_head = jnp.maximum(index, 0).reshape(index.shape[0], heads, -1)
    return take_rows(x, by_head).reshape(*index.shape, *x.shape[3:])
