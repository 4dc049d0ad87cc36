"""What encoded payloads share: recent rows beside their body, and attention over both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import Dense, Seen, Slots
from kvjax.storage.recent import Recent
from pallas_kernels.attention.call import beside_sinks, join_attention, stored_attention
from pallas_kernels.attention.decode import attention_by_products
from pallas_kernels.attention.forms import Rows, dense_rows
from pallas_kernels.attention.rotation import Turn
from pallas_kernels.attention.tpu_forms import reads
from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.logits import products
from pallas_kernels.base.mixing import mix_rows


class EncodedPayload(ABC):
    """A body of encoded rows, and the newest rows as they came where it is not written row by row.

    The body's rows may be in another basis than queries, recent rows and outputs: see `_basis`.
    Where they are, products with its keys may lack something that is the same for all of them: see
    `_offset`.

    Class attributes:
      operation: of `pallas_kernels`, whose tile sizes attention takes.
    """

    operation: ClassVar[str]
    recent: Recent | None
    dtype: Any  # of the dense rows
    room = property(lambda self: None if self.recent is None else self.recent.room)

    @abstractmethod
    def read(self, index: Int[Array, "B K N"] | None = None) -> Float[Array, "B K N D"]:
        """Dense rows: all slots, or those of `index`."""

    @abstractmethod
    def _rows(self) -> Rows:
        """The body as the kernel takes it."""

    @abstractmethod
    def _logits(self, q: Float[Array, "B H R D"], turn: Turn | None) -> Float[Array, "B H R S"]:
        """Products of the body's keys, turned or not, with q in float32."""

    @abstractmethod
    def _mix(
        self, weights: Float[Array, "B H R S"], live: Bool[Array, "B H S"]
    ) -> Float[Array, "B H R D"]:
        """Weighted sums of the body's values in float32; weights are 0 where a slot is not live."""

    def _unchanged(self, rows: Float[Array, "B H S D"], slots: Slots) -> Int[Array, "B H S"]:
        """The slot of this payload whose row each slot still has at a prompt's end; -1: none's."""
        if slots.source is None:
            return jnp.full(rows.shape[:3], -1, jnp.int32)
        same = self._equal(rows, self.read(jnp.maximum(slots.source, 0)))
        return jnp.where(same & slots.live, slots.source, -1)

    def _equal(
        self, rows: Float[Array, "B K N D"], stored: Float[Array, "B K N D"]
    ) -> Bool[Array, "B K N"]:
        """Whether rows are those that were read, of which two readings differ in the last digit."""
        stored = stored.astype(jnp.float32)
        size = jnp.abs(stored)
        digit = float(jnp.finfo(self.dtype).eps) * size + 1e-5 * size.max(-1, keepdims=True)
        return (jnp.abs(rows.astype(jnp.float32) - stored) <= digit).all(-1)

    def _selected(self, index: Int[Array, "B K N"]) -> Float[Array, "B K N D"]:
        """Decoded rows of the slots of `index`, in the basis of the body."""
        return self.read(index)

    def _basis(self, x: Float[Array, "B K *G D"]) -> Float[Array, "B K *G D"]:
        """Queries in the basis of the body's rows, or outputs from there back."""
        return x

    def _offset(self, q: Float[Array, "B K *G D"]) -> Float[Array, "B K *G"] | None:
        """What products of queries with keys of the body lack; None: nothing."""
        return None

    def attention(
        self,
        values: EncodedPayload,
        q: Float[Array, "B K G T D"],
        seen: Seen,
        positions: Int[Array, "B T"],
        *,
        index: Int[Array, "B K N"] | None = None,
        probabilities: bool,
        implementation: str | None,
        sinks: Float[Array, " Q"] | None = None,
        **logits,
    ) -> tuple[Float[Array, "B K G T D"], Float[Array, "B K G T N"] | None]:
        """The output and, where asked for, each slot's probability.

        Over all slots the body is read as it is encoded. The rows of a selection are gathered and
        decoded, and stay in the basis of the body: queries and outputs change theirs, and no row.
        What all products with keys lack changes no softmax, so that only a soft cap and sinks,
        which are beside them, ask for it.
        """
        absolute = logits["soft_cap"] is not None or sinks is not None
        shift = self._offset(q) if absolute else None
        if index is not None:
            slots = jnp.maximum(index, 0)  # an entry of -1 is hidden by its bias
            if shift is None:
                keys, q = Dense(self._selected(slots)), self._basis(q)
            else:
                keys = Dense(self.read(slots))
            own = Dense(values._selected(slots))
            options = {"probabilities": probabilities, "implementation": implementation}
            out, found = keys.attention(
                own, q, seen.of(index), positions, sinks=sinks, **options, **logits
            )
            return values._basis(out).astype(values.dtype), found
        recent, rotate = self.recent, seen.rotate
        chosen = choose_implementation(
            implementation, *jax.tree.leaves((self, values)),
            for_tpu=rotate is None and reads(self._rows(), values._rows()),
        )  # fmt: skip
        pieces = [seen]
        if recent is not None:  # the body without their slots, and they
            hide = jax.vmap(jax.vmap(lambda x, at: x.at[at].set(-jnp.inf, mode="drop")))
            bias = jnp.where(recent.there, recent.of_slots(seen.bias), -jnp.inf)
            if rotate is not None:
                rotate = rotate.at(recent.of_slots(rotate.position))
            new = Seen(bias, recent.of_slots(seen.position), None, rotate)
            pieces = [seen._replace(bias=hide(seen.bias, recent.slots)), new]
        if chosen == "xla":
            out, lse, found = self._by_products(values, q, shift, pieces, positions, **logits)
        else:
            kind = {"probabilities": probabilities, "chosen": chosen}
            out, lse, found = self._by_kernel(values, q, shift, pieces, positions, **kind, **logits)
        _, out, *found = beside_sinks(sinks, lse, out, *found)
        if not probabilities:
            return out, None
        total, *own = found
        if own:
            add = jax.vmap(jax.vmap(lambda x, at, p: x.at[..., at].add(p, mode="drop")))
            total = add(total, recent.slots, own[0])
        return out, total

    def _by_products(
        self,
        values: EncodedPayload,
        q: Array,
        shift: Array | None,
        pieces: list[Seen],
        positions: Array,
        **kind,
    ) -> tuple[Array, Array, list[Array]]:
        """By XLA, with one softmax over all pieces: outputs, log-sum-exps and probabilities."""
        slots = pieces[0].bias.shape[2]

        def multiply(rows: Array) -> Array:
            found = self._logits(self._basis(rows), pieces[0].rotate)
            if shift is not None:
                found += shift.reshape(*found.shape[:3], 1)
            if self.recent is None:
                return found
            keys, turn = self.recent.rows, pieces[1].rotate
            new = products(rows, keys if turn is None else turn.rotate(keys))
            return jnp.concatenate((found, new), axis=-1)

        def mix(weights: Array, live: Array) -> Array:
            out = values._basis(values._mix(weights[..., :slots], live[..., :slots]))
            if self.recent is None:
                return out
            return out + mix_rows(weights[..., slots:], values.recent.rows)

        bias = jnp.concatenate([piece.bias for piece in pieces], axis=2)
        position = jnp.concatenate([piece.position for piece in pieces], axis=2)
        out, lse, found = attention_by_products(
            q, multiply, mix, bias, positions, position, dtype=values.dtype, **kind
        )
        return out, lse, jnp.split(found, (slots,), axis=-1)[: len(pieces)]

    def _by_kernel(
        self,
        values: EncodedPayload,
        q: Array,
        shift: Array | None,
        pieces: list[Seen],
        positions: Array,
        **kind,
    ) -> tuple[Array, Array, list[Array]]:
        """By the kernel, piece by piece, and joined: outputs, log-sum-exps and probabilities."""
        rows = [(self._basis(q), shift, self._rows(), values._rows())]
        if self.recent is not None:
            rows.append((q, None, dense_rows(self.recent.rows), dense_rows(values.recent.rows)))
        found = [
            stored_attention(
                self.operation, own, k, v, seen.bias, positions, seen.position, end=seen.used,
                turn=seen.rotate, shift=own_shift, dtype=jnp.float32, **kind,
            )
            for (own, own_shift, k, v), seen in zip(rows, pieces, strict=True)
        ]  # fmt: skip
        (body, lse, _), *new = found
        parts = [(values._basis(body), lse), *((out, lse) for out, lse, _ in new)]
        out, total, weights = join_attention(parts)
        out = out.astype(values.dtype)
        if not kind["probabilities"]:
            return out, total, []
        parts = zip(found, weights, strict=True)
        return out, total, [p * weight[..., None] for (_, _, p), weight in parts]
