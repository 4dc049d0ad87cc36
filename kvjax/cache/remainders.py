"""Keeps the remainders of rounding for values that a method writes again and again.

In 16 bits, adding a five-hundredth of a value to it changes nothing: the sum rounds back to the
value. Added a thousand times, it may be lost a thousand times. A column therefore holds what
rounding has left out, as in Kahan's sum, and adds it before a value is changed the next time.
Attention reads values as they are stored, which are then one rounding off at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.payload import Dense, Payload, take_slots

if TYPE_CHECKING:
    from kvjax.cache.slots import KVCache

REMAINDERS = "remainders"  # the column, `[B, H, S, D]`


def with_remainders(cache: KVCache) -> KVCache:
    """Adds the column, 2 · D bytes per slot, unless the values are stored as dense float32.

    Remainders are bfloat16, which has the range of float32, whatever the dtype of the values.
    """
    if isinstance(cache.v, Dense) and cache.v.dtype.itemsize >= 4:
        return cache
    return cache.with_column(REMAINDERS, jnp.zeros(cache.v.shape, jnp.bfloat16), merge="keep")


def exact_values(cache: KVCache, index: Int[Array, "B K N"] | None = None) -> Array:
    """Returns values with their remainders: those of all slots, or those of `index`.

    Returns:
      `[B, H, S, D]` float32 where the cache has the column, else in the dtype of its values.
    """
    if REMAINDERS not in cache.columns:
        return cache.v.read(index)
    left_out = cache.column(REMAINDERS)
    left_out = left_out if index is None else take_slots(left_out, index)
    return _stored(cache.v, index) + left_out.astype(jnp.float32)


def write_values(cache: KVCache, values: Float[Array, "B H S D"]) -> KVCache:
    """Writes values of all slots; values that equal `exact_values` stay as they are stored.

    A float32 value that float16 cannot hold becomes the largest one that it can.
    """
    if cache.v.dtype == jnp.float16 and values.dtype == jnp.float32:
        largest = float(jnp.finfo(jnp.float16).max)
        values = jnp.clip(values, -largest, largest)
    if REMAINDERS not in cache.columns:
        return cache.replace(v=cache.v.write(None, values))
    # Encoding a value again could round it to another one.
    rows = jnp.where(values != exact_values(cache), values, _stored(cache.v))
    return replace_values(cache, cache.v.write(None, rows), values)


def replace_values(
    cache: KVCache, payload: Payload, values: Float[Array, "B H S D"] | None = None
) -> KVCache:
    """Replaces the payload of a cache's values, and the remainders with it.

    Args:
      values: the exact values that the payload stores; by default the `exact_values` of the cache.
    """
    replaced = cache.replace(v=payload)
    if REMAINDERS not in cache.columns:
        return replaced
    values = exact_values(cache) if values is None else values
    return replaced.with_column(REMAINDERS, (values - _stored(payload)).astype(jnp.bfloat16))


def _stored(payload: Payload, index: Int[Array, "B K N"] | None = None) -> Float[Array, "B K N D"]:
    """Returns values as they are stored, in float32."""
    rows, dtype_info = payload.read(index), jnp.finfo(payload.dtype)
    wide = rows.astype(jnp.float32)
    if dtype_info.bits >= 32:
        return wide
    # XLA may leave out a conversion to 16 bits and back, but not this rounding.
    rounded = jax.lax.reduce_precision(wide, dtype_info.nexp, dtype_info.nmant)
    if dtype_info.dtype == jnp.float16:  # `reduce_precision` makes 0 of subnormal numbers
        least = float(dtype_info.smallest_subnormal)
        rounded = jnp.where(
            jnp.abs(wide) < float(dtype_info.smallest_normal),
            jnp.round(wide / least) * least,
            rounded,
        )
    return rounded
