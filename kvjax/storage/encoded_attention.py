"""Base class of encoded payloads: recent rows beside an encoded body, and attention over both.

The body is read as it is encoded: by XLA with products of a format (`pallas_kernels/formats`), on
GPUs and TPUs by `stored_attention`, whose kernels know the form by the `Rows` of the payload.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import Dense, Slots, equal_rows
from kvjax.storage.recent import Recent
from pallas_kernels.attention.call import (
    join_attention,
    join_sinks,
    stored_attention,
)
from pallas_kernels.attention.decode import attention_by_products
from pallas_kernels.attention.forms import Rows, dense_rows
from pallas_kernels.attention.tpu_forms import reads
from pallas_kernels.base.annotations import NoneElsewhere
from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.logits import Mask, Queries, Seen
from pallas_kernels.base.mixing import mix_rows
from pallas_kernels.base.products import products
from pallas_kernels.base.rotation import Turn
from pallas_kernels.base.tiles import launch_of


class EncodedPayload(ABC):
    """Body of encoded rows, with the newest rows unencoded beside it if it encodes rows in groups.

    The body's rows may be in another basis than queries, recent rows and outputs: see `_basis`.
    Products of queries with its keys may then lack a term that is the same for all keys: see
    `_offset`.

    Class attributes:
      operation: name of the operation in `pallas_kernels` whose tile sizes attention uses.
    """

    operation: ClassVar[str]
    dtype: Any  # dtype of dense rows
    at_rest = awake = property(lambda self: self)
    room = property(lambda self: None if self.recent is None else self.recent.room)
    beside = property(lambda self: 0 if self.recent is None else self.recent.size)
    beside_taken = property(lambda self: 0 if self.recent is None else self.recent.count.max())

    if TYPE_CHECKING:

        @property
        def recent(self) -> Recent | NoneElsewhere:
            """Newest rows, unencoded; None where rows are encoded at once."""
            ...

    @abstractmethod
    def read(self, index: Int[Array, "B K N"] | None = None) -> Float[Array, "B K N D"]:
        """Returns dense rows: all slots, or those of `index`."""

    @abstractmethod
    def _rows(self) -> Rows:
        """Returns the body in the form that the kernel takes."""

    @abstractmethod
    def _logits(self, q: Float[Array, "B H R D"], turn: Turn | None) -> Float[Array, "B H R S"]:
        """Multiplies the body's keys, rotated by `turn` if given, with q; in float32."""

    @abstractmethod
    def _mix(
        self, weights: Float[Array, "B H R S"], live: Bool[Array, "B H S"]
    ) -> Float[Array, "B H R D"]:
        """Sums the body's values by weights, in float32; weights are 0 where a slot is not live."""

    def _unchanged(self, rows: Float[Array, "B H S D"], slots: Slots) -> Int[Array, "B H S"]:
        """Returns the slot that held each row, unchanged, before the prompt; -1: none did."""
        if slots.source is None:
            return jnp.full(rows.shape[:3], -1, jnp.int32)
        same = equal_rows(rows, self.read(jnp.maximum(slots.source, 0)), self.dtype)
        return jnp.where(same & slots.live, slots.source, -1)

    def _selected(self, index: Int[Array, "B K N"]) -> Float[Array, "B K N D"]:
        """Returns decoded rows of the slots of `index`, in the basis of the body."""
        return self.read(index)

    def _basis(self, x: Float[Array, "B K *G D"]) -> Float[Array, "B K *G D"]:
        """Brings queries into the basis of the body's rows, or outputs back from there."""
        return x

    def _offset(self, q: Float[Array, "B K *G D"]) -> Float[Array, "B K *G"] | None:
        """Returns what must be added to products of queries and keys; None: nothing."""
        return None

    def attention(
        self,
        values: EncodedPayload,
        queries: Queries,
        seen: Seen,
        mask: Mask,
        *,
        sinks: Float[Array, " Q"] | None = None,
        probabilities: bool,
        implementation: str | None,
    ) -> tuple[Float[Array, "B K G T D"], Float[Array, "B K G T N"] | NoneElsewhere]:
        """Attends in a decode step; returns the output and, if `probabilities`, each slot's.

        Attention over all slots reads the body as it is encoded. The rows of a selection are
        gathered and decoded, but stay in the basis of the body: only queries and outputs change
        their basis. A term that all products with keys lack does not change a softmax. It is
        computed only for a soft cap and for sinks, which depend on the logits themselves.
        """
        absolute = mask.soft_cap is not None or sinks is not None
        shift = self._offset(queries.q) if absolute else None
        if seen.index is not None:
            slots = jnp.maximum(seen.index, 0)  # an entry of -1 is hidden by its bias
            if shift is None:
                keys = Dense(self._selected(slots))
                queries = queries._replace(q=self._basis(queries.q))
            else:
                keys = Dense(self.read(slots))
            out, probability = keys.attention(
                Dense(values._selected(slots)), queries, seen.listed(), mask,
                sinks=sinks, probabilities=probabilities, implementation=implementation,
            )  # fmt: skip
            return values._basis(out).astype(values.dtype), probability
        queries, recent, turn = queries._replace(shift=shift), self.recent, seen.turn
        chosen = choose_implementation(
            implementation, *jax.tree.leaves((self, values)),
            for_tpu=turn is None and reads(self._rows(), values._rows()),
        )  # fmt: skip
        pieces = [seen]
        if recent is not None:
            # The body holds no valid rows of the recent slots: they are hidden there, and make a
            # piece of their own.
            hide = jax.vmap(jax.vmap(lambda x, slot: x.at[slot].set(-jnp.inf, mode="drop")))
            bias = jnp.where(recent.there, recent.of_slots(seen.bias), -jnp.inf)
            if turn is not None:
                turn = turn.at(recent.of_slots(turn.position))
            recent_piece = Seen(bias, recent.of_slots(seen.position), turn=turn)
            pieces = [seen._replace(bias=hide(seen.bias, recent.slots)), recent_piece]
        if chosen == "xla":
            out, lse, by_piece = self._by_products(values, queries, pieces, mask)
        else:
            launch = None if chosen == "tpu" else launch_of(self.operation, chosen)
            attend = functools.partial(
                stored_attention, mask=mask, launch=launch, probabilities=probabilities,
                dtype=jnp.float32,
            )  # fmt: skip
            out, lse, by_piece = self._by_kernel(values, queries, pieces, attend)
        _, out, *by_piece = join_sinks(sinks, lse, out, *by_piece)
        if not probabilities:
            return out, None
        total = by_piece[0]
        if recent is not None:
            add = jax.vmap(jax.vmap(lambda x, slot, p: x.at[..., slot].add(p, mode="drop")))
            total = add(total, recent.slots, by_piece[1])
        return out, total

    def _by_products(
        self, values: EncodedPayload, queries: Queries, pieces: list[Seen], mask: Mask
    ) -> tuple[Array, Array, list[Array]]:
        """Attends by XLA, with one softmax over all pieces.

        Returns outputs, log-sum-exps, and the probabilities of each piece.
        """
        slots = pieces[0].bias.shape[2]

        def multiply(q: Array) -> Array:
            body_logits = self._logits(self._basis(q), pieces[0].turn)
            if queries.shift is not None:
                body_logits += queries.shift.reshape(*body_logits.shape[:3], 1)
            if self.recent is None:
                return body_logits
            recent_logits = products(q, pieces[1].turned(self.recent.rows))
            return jnp.concatenate((body_logits, recent_logits), axis=-1)

        def mix(weights: Array, live: Array) -> Array:
            out = values._basis(values._mix(weights[..., :slots], live[..., :slots]))
            if self.recent is None:
                return out
            return out + mix_rows(weights[..., slots:], values.recent.rows)

        bias = jnp.concatenate([piece.bias for piece in pieces], axis=2)
        position = jnp.concatenate([piece.position for piece in pieces], axis=2)
        out, lse, probability = attention_by_products(
            queries, multiply, mix, Seen(bias, position), mask, values.dtype
        )
        return out, lse, jnp.split(probability, (slots,), axis=-1)[: len(pieces)]

    def _by_kernel(
        self,
        values: EncodedPayload,
        queries: Queries,
        pieces: list[Seen],
        attend: Callable[..., tuple[Array, Array, Array | None]],
    ) -> tuple[Array, Array, list[Array]]:
        """Attends by the kernel to each piece, and joins the results by their log-sum-exps.

        Returns outputs, log-sum-exps, and the probabilities of each piece.
        """
        of_body = queries._replace(q=self._basis(queries.q))
        results = [attend(of_body, self._rows(), values._rows(), pieces[0])]
        if self.recent is not None:
            rows = dense_rows(self.recent.rows), dense_rows(values.recent.rows)
            results.append(attend(queries._replace(shift=None), *rows, pieces[1]))
        (body, lse, _), *of_recent = results
        parts = [(values._basis(body), lse), *((out, lse) for out, lse, _ in of_recent)]
        out, total, weights = join_attention(parts)
        # A piece's probabilities are relative to the piece; its weight makes them absolute.
        pairs = ((p, weight) for (_, _, p), weight in zip(results, weights, strict=True))
        by_piece = [p * weight[..., None] for p, weight in pairs if p is not None]
        return out.astype(values.dtype), total, by_piece
