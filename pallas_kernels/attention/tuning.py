"""Calls of the attention kernels that `pallas_kernels.tune` measures."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention.forms import Rows, codebook_rows, dense_rows, quantized_rows
from pallas_kernels.attention.kernel import split_attention
from pallas_kernels.attention.prompt_kernel import attention_by_kernel, columns_by_kernel
from pallas_kernels.base.logits import Mask, Queries, Seen
from pallas_kernels.base.rotation import Turn
from pallas_kernels.base.tiles import Launch, Tile
from pallas_kernels.formats.bits import Encoded
from pallas_kernels.formats.codebook import References

GROUP = 32  # 4-bit values of a group


class Attention(NamedTuple):
    """A measured call: 8 KV heads of 128 channels by default, with four query heads each.

    Args:
      rows: rows of a batch.
      slots: slots of each head.
      form: form of keys and values: "dense", "int8", "4 bits" or "codebook".
      listed: number of slots that are gathered; None: all are read.
      queries: number of queries, at the newest positions; more than one are a prompt's.
      columns: the operation on columns that is measured instead of a prompt's attention:
        "column_sums" or "column_maxima".
      heads, group, channels, dtype: KV heads, query heads of each, channels and dtype of rows.
    """

    rows: int
    slots: int
    form: str = "dense"
    listed: int | None = None
    queries: int = 1
    columns: str | None = None
    heads: int = 8
    group: int = 4
    channels: int = 128
    dtype: str = "bfloat16"

    @property
    def tried(self) -> dict[str, tuple[int, ...]]:
        """Values to try by field of `Tile`, besides tile sizes, warps and stages."""
        if self.queries == 1:
            return {"programs": (1, 2, 3, 4)}
        return {"programs": (2,), "query_bytes": (16_384, 32_768)}

    @property
    def bytes(self) -> int:
        """Bytes that must be read: keys, values, and bias, position and entry of each place."""
        places = self.rows * self.heads * (self.listed or self.slots)
        per_place = 8 if self.listed is None else 12
        stored = jax.eval_shape(lambda: self.operands()[1])
        # A list reads its share of the store; a codebook's entries are read once.
        share = 1 if self.listed is None else self.listed / self.slots
        return places * per_place + int(
            2 * share * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(stored))
        )

    def operands(self) -> tuple[Any, ...]:
        """Makes random arguments of `call`."""
        keys = jax.random.split(jax.random.key(0), 4)
        store = (self.rows, self.heads, self.slots, self.channels)
        q = jax.random.normal(keys[0], (*store[:2], self.group, self.queries, self.channels))
        k, v = (self._stored(key, store) for key in keys[1:3])
        bias = jnp.zeros(store[:3], jnp.float32)
        position = jnp.broadcast_to(jnp.arange(self.slots, dtype=jnp.int32)[None, None], store[:3])
        places, index = self.slots, None
        if self.listed is not None:
            places = self.listed
            index = jax.random.randint(keys[3], (*store[:2], places), 0, self.slots, jnp.int32)
        end = jnp.full(store[:2], places, jnp.int32)
        query = jnp.arange(self.slots - self.queries, self.slots, dtype=jnp.int32)[None]
        query = jnp.broadcast_to(query, (self.rows, self.queries))
        turn = None
        if self.form == "codebook":  # its keys are stored unrotated
            pair = jnp.arange(0, self.channels, 2) / self.channels
            turn = Turn(1 / 500_000.0 ** pair[None], position)
        seen = Seen(bias, position, end, index=index, turn=turn)
        return q.astype(self.dtype), k, v, seen, query

    def _stored(self, key: jax.Array, store: tuple[int, ...]) -> jax.Array | Encoded | References:
        """Makes random keys or values in the form."""
        if self.form == "dense":
            return jax.random.normal(key, store, self.dtype)
        if self.form == "int8":
            values = jax.random.randint(key, store, -127, 128, jnp.int8)
            return Encoded(values, jnp.full(store[:3], 0.01, jnp.float32))
        if self.form == "4 bits":
            half, groups = ((*store[:3], store[3] // n) for n in (2, GROUP))
            values = jax.random.randint(key, half, 0, 256, jnp.uint8)
            return Encoded(values, *(jnp.full(groups, x, self.dtype) for x in (0.1, -0.7)))
        entries = min(self.heads * self.slots // 4, 2**16)
        book = jax.random.normal(key, (self.rows, 1, entries, self.channels), self.dtype)
        index = jax.random.randint(key, store[:3], 0, entries, jnp.int32).astype(jnp.uint16)
        return References(book, index, jnp.ones(store[:3], self.dtype))

    def call(
        self, q: jax.Array, k, v, seen: Seen, query, *, tile: Tile, interpret: bool = False
    ) -> jax.Array:
        """Returns outputs, or what columns are reduced to, `[B, H, G, S]`."""
        queries, mask = Queries(q, query), Mask(q.shape[-1] ** -0.5)
        launch = Launch(tile, interpret)
        if self.columns is not None:  # their time does not depend on the log-sum-exps
            lse = jnp.zeros(q.shape[:-1], jnp.float32)
            return columns_by_kernel(self.columns, queries, k, seen, lse, mask, launch)
        if self.queries > 1:
            return attention_by_kernel(queries, k, v, seen, mask, launch)[0]
        if seen.turn is not None:  # so that the kernel loads the positions once
            seen = seen._replace(turn=seen.turn.at(seen.position))
        return split_attention(
            queries, _rows(k, q.dtype), _rows(v, q.dtype), seen, mask, launch, with_logits=False,
            dtype=q.dtype,
        )[0]  # fmt: skip


def _rows(x: jax.Array | Encoded | References, dtype: jnp.dtype) -> Rows:
    if isinstance(x, Encoded):
        return quantized_rows(x, dtype)
    return codebook_rows(x) if isinstance(x, References) else dense_rows(x)
