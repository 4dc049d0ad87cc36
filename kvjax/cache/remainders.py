"""What rounding leaves out of values that a method writes again and again.

In 16 bits, a five-hundredth of a value is less than half a rounding of another: added a thousand
times, it may be lost a thousand times. A column therefore holds what rounding has left out, as in
Kahan's sum, and it is put back before a value is changed the next time. Attention reads values as
they are stored, which are then one rounding off at most.
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
    """The cache with the column, 2 · D bytes per slot, unless its values are float32 as they are.

    Remainders are bfloat16, whose range is that of float32, whatever the values are.
    """
    if isinstance(cache.v, Dense) and cache.v.dtype.itemsize >= 4:
        return cache
    return cache.with_column(REMAINDERS, jnp.zeros(cache.v.shape, jnp.bfloat16), merge="keep")


def exact_values(cache: KVCache, index: Int[Array, "B K N"] | None = None) -> Array:
    """Values of all slots, or of those of `index`, with what rounding has left out of them.

    Returns:
      `[B, H, S, D]` float32 where the cache has the column, else in the dtype of its values.
    """
    if REMAINDERS not in cache.columns:
        return cache.v.read(index)
    left_out = cache.column(REMAINDERS)
    left_out = left_out if index is None else take_slots(left_out, index)
    return _stored(cache.v, index) + left_out.astype(jnp.float32)


def write_values(cache: KVCache, values: Float[Array, "B H S D"]) -> KVCache:
    """The cache with these values of all slots; what equals `exact_values` stays as it is stored.

    A float32 value that float16 cannot hold becomes the largest that it can.
    """
    if cache.v.dtype == jnp.float16 and values.dtype == jnp.float32:
        most = float(jnp.finfo(jnp.float16).max)
        values = jnp.clip(values, -most, most)
    if REMAINDERS not in cache.columns:
        return cache.replace(v=cache.v.write(None, values))
    rows = jnp.where(values != exact_values(cache), values, _stored(cache.v))
    return replace_values(cache, cache.v.write(None, rows), values)


def replace_values(
    cache: KVCache, payload: Payload, values: Float[Array, "B H S D"] | None = None
) -> KVCache:
    """The cache with another payload of its values.

    Args:
      values: what they are; by default the `exact_values` of the cache.
    """
    new = cache.replace(v=payload)
    if REMAINDERS not in cache.columns:
        return new
    values = exact_values(cache) if values is None else values
    return new.with_column(REMAINDERS, (values - _stored(payload)).astype(jnp.bfloat16))


def _stored(payload: Payload, index: Int[Array, "B K N"] | None = None) -> Float[Array, "B K N D"]:
    """Values as they are stored, in float32."""
    rows, kind = payload.read(index), jnp.finfo(payload.dtype)
    wide = rows.astype(jnp.float32)
    if kind.bits >= 32:
        return wide
    # XLA may leave out a conversion to 16 bits and back, but not this rounding.
    rounded = jax.lax.reduce_precision(wide, kind.nexp, kind.nmant)
    if kind.dtype == jnp.float16:  # it makes 0 of subnormal numbers
        least = float(kind.smallest_subnormal)
        rounded = jnp.where(
            jnp.abs(wide) < float(kind.smallest_normal), jnp.round(wide / least) * least, rounded
        )
    return rounded
