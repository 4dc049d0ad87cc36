"""What encoded payloads share: recent rows beside their body, and attention over both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.payload import Seen
from kvjax.storage.recent import Recent
from pallas_kernels.attention.call import join_attention, stored_attention
from pallas_kernels.attention.decode import attention_by_products
from pallas_kernels.attention.forms import Rows, dense_rows
from pallas_kernels.attention.rotation import Turn
from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.logits import products


class EncodedPayload(ABC):
    """A body of encoded rows, and the newest rows as they came where it is not written row by row.

    Class attributes:
      operation: of `pallas_kernels`, whose tile sizes attention takes.
    """

    operation: ClassVar[str]
    recent: Recent | None
    room = property(lambda self: None if self.recent is None else self.recent.room)

    @abstractmethod
    def _rows(self) -> Rows:
        """The body as the kernel takes it."""

    @abstractmethod
    def _logits(self, q: Float[Array, "B H R D"], turn: Turn | None) -> Float[Array, "B H R S"]:
        """Products of the body's keys, turned or not, with q in float32."""

    @abstractmethod
    def _mix(self, weights: Float[Array, "B H R S"]) -> Float[Array, "B H R D"]:
        """Weighted sums of the body's values in float32."""

    def attention(
        self,
        values: EncodedPayload,
        q: Float[Array, "B H G T D"],
        seen: Seen,
        positions: Int[Array, "B T"],
        *,
        probabilities: bool,
        implementation: str | None,
        **logits,
    ) -> tuple[Float[Array, "B H G T D"], Float[Array, "B H G T S"] | None]:
        """Attention to all slots: the output and, where asked for, each slot's probability."""
        chosen = choose_implementation(implementation, *jax.tree.leaves((self, values)))
        if chosen != "xla":
            return self._by_kernel(
                values, q, seen, positions, probabilities, chosen == "interpret", **logits
            )
        turn, recent = seen.rotate, self.recent

        def multiply(rows: Array) -> Array:
            found = self._logits(rows, turn)
            if recent is None:
                return found
            keys = recent.rows
            if turn is not None:
                keys = turn.at(recent.of_slots(turn.position)).rotate(keys)
            return recent.put(found, products(rows, keys))

        def mix(weights: Array) -> Array:
            if values.recent is None:
                return values._mix(weights)
            body, own = values.recent.cut(weights)
            rows = values.recent.rows
            new = jnp.einsum(
                "bhrn,bhnd->bhrd", own.astype(rows.dtype), rows, preferred_element_type=jnp.float32
            )
            return new + values._mix(body)

        out, _, found = attention_by_products(
            q, multiply, mix, seen.bias, positions, seen.position, dtype=values.dtype, **logits
        )
        return out, found if probabilities else None

    def _by_kernel(self, values, q, seen, positions, probabilities: bool, interpret: bool, **kind):
        """The same in two pieces, the body and the recent rows; each slot is in one."""
        recent, turn = self.recent, seen.rotate

        def attend(k: Rows, v: Rows, bias, position, turn: Turn | None, end):
            return stored_attention(
                self.operation, q, k, v, bias, positions, position, end=end, turn=turn,
                dtype=jnp.float32, probabilities=probabilities, interpret=interpret, **kind,
            )  # fmt: skip

        bias = seen.bias
        if recent is not None:
            hide = jax.vmap(jax.vmap(lambda x, at: x.at[at].set(-jnp.inf, mode="drop")))
            bias = hide(bias, recent.slots)
        found = [attend(self._rows(), values._rows(), bias, seen.position, turn, seen.used)]
        if recent is not None:
            k, v = dense_rows(recent.rows), dense_rows(values.recent.rows)
            bias = jnp.where(recent.there, recent.of_slots(seen.bias), -jnp.inf)
            if turn is not None:
                turn = turn.at(recent.of_slots(turn.position))
            found.append(attend(k, v, bias, recent.of_slots(seen.position), turn, None))
        out, _, weights = join_attention([(out, lse) for out, lse, _ in found])
        out = out.astype(values.dtype)
        if not probabilities:
            return out, None
        total, *new = (p * w[..., None] for (_, _, p), w in zip(found, weights, strict=True))
        if new:
            add = jax.vmap(jax.vmap(lambda x, at, p: x.at[..., at].add(p, mode="drop")))
            total = add(total, recent.slots, new[0])
        return out, total
