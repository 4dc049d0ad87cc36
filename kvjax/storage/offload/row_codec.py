"""Rows of fewer bits as bytes: all that a row is decoded from lies in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from kvjax.serialization import pytree_node
from kvjax.storage.quantize.channels import Channels
from kvjax.storage.quantize.payload import Form, Quantized
from pallas_kernels.formats.bits import Encoded


@pytree_node
@dataclass(frozen=True)
class RowCodec:
    """Encodes rows one by one, each as W bytes: its numbers, its scales, its lows.

    Args:
      channels: as in `Quantized`.
      form: encoding of the rows, each by itself (static).
      head_dim: D (static).
      dtype: dtype of dense rows (static).

    Example:
      >>> import jax.numpy as jnp
      >>> from kvjax.storage.offload.row_codec import RowCodec
      >>> from kvjax.storage.quantize.payload import Form
      >>> codec = RowCodec.of(Form(8).empty((1, 1, 4, 64), jnp.float32))
      >>> rows = codec.encode(jnp.full((1, 1, 2, 64), 0.5))
      >>> rows.shape, float(codec.decode(rows).mean())
      ((1, 1, 2, 68), 0.5)
    """

    channels: Channels | None
    form: Form = field(metadata={"static": True})
    head_dim: int = field(metadata={"static": True})
    dtype: jnp.dtype = field(metadata={"static": True})

    @classmethod
    def of(cls, payload: Quantized) -> RowCodec:
        """Returns the codec of a payload whose rows are encoded one by one."""
        return cls(payload.channels, payload.form, payload.shape[3], payload.dtype)

    @property
    def width(self) -> int:
        """Bytes W of a row."""
        return sum(math.prod(x.shape[3:]) * x.dtype.itemsize for x in self._arrays)

    @property
    def _arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the arrays that a row is encoded in."""
        row = jax.ShapeDtypeStruct((1, 1, 1, self.head_dim), self.dtype)
        return tuple(jax.tree.leaves(jax.eval_shape(lambda x: self.form.encode(x), row)))

    def encode(self, rows: Float[Array, "B H N D"]) -> UInt8[Array, "B H N W"]:
        """Encodes dense rows."""
        return self.held(self.form.encode(rows.astype(self.dtype), self.channels))

    def decode(self, rows: UInt8[Array, "B K N W"]) -> Float[Array, "B K N D"]:
        """Returns dense rows; K = H, or a multiple of it."""
        return self.form.decode(self._encoded(rows), self.channels).astype(self.dtype)

    def payload(self, rows: UInt8[Array, "B H S W"]) -> Quantized:
        """Returns the payload whose slots are encoded like this."""
        encoded, slots = self._encoded(rows), rows.shape[2]
        return Quantized(encoded, None, self.channels, self.form, slots, self.dtype)

    def held(self, encoded: Encoded) -> UInt8[Array, "B H N W"]:
        """Returns encoded rows as bytes."""

        def as_bytes(x: Array) -> Array:
            return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:3], -1)

        return jnp.concatenate([as_bytes(x) for x in jax.tree.leaves(encoded)], axis=3)

    def _encoded(self, rows: UInt8[Array, "B K N W"]) -> Encoded:
        arrays: list[Any] = []
        start = 0
        for like in self._arrays:
            size = like.dtype.itemsize
            width = math.prod(like.shape[3:]) * size
            part = rows[..., start : start + width]
            shape = (*rows.shape[:3], *like.shape[3:])
            part = part.reshape(*shape, *(size,) * (size > 1))
            arrays.append(jax.lax.bitcast_convert_type(part, like.dtype))
            start += width
        return Encoded(*arrays)
