"""Budgets of the heads of a group, which differ from head to head and from layer to layer."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.serialization import static_value

ROUNDING = 1e-9  # added before a floor: a product that rounding has left just below an integer


def slots_of_shares(
    shares: Float[np.ndarray, "*N"] | float, tokens: Int[np.ndarray, "*N"] | int, minimum: int
) -> Int[np.ndarray, "*N"]:
    """Returns `max(⌊share · tokens⌋, minimum)`: the slots of heads that keep shares of the tokens.

    Example:
      >>> import numpy as np
      >>> from kvjax.budgets.heads import slots_of_shares
      >>> slots_of_shares(np.array([0.29, 0.01]), 100, minimum=5).tolist()
      [29, 5]
    """
    slots = np.floor(np.asarray(shares) * tokens + ROUNDING).astype(np.int64)
    return np.maximum(slots, minimum)


@static_value
@dataclass(frozen=True)
class HeadShares:
    """The share of its tokens that each head of a group keeps, for several layers.

    The capacity of a cache is static: that of the largest share. The shares of one layer are part
    of its transform's state, so that these layers are equal values and share compiled code.

    Args:
      shares: for each of the layers, the share of each head, in [0, 1].
      layers: the layers.
      minimum: slots that every head has at least, unless it has fewer tokens.

    Example:
      >>> import numpy as np
      >>> from kvjax.budgets.heads import HeadShares
      >>> shares = (0.5, 0.25), (0.1, 0.4)
      >>> budget = HeadShares(shares, layers=(0, 3), minimum=4)
      >>> budget(np.array([100, 3])).tolist()
      [50, 3]
    """

    shares: tuple[tuple[float, ...], ...]
    layers: tuple[int, ...]
    minimum: int

    def __call__(self, lengths: Int[np.ndarray, " L"]) -> Int[np.ndarray, " L"]:
        """Returns the most slots that a head needs, for prompts of these lengths."""
        lengths, most = np.asarray(lengths), max(map(max, self.shares))
        return np.minimum(lengths, slots_of_shares(most, lengths, self.minimum))

    def of_layer(self, layer: int) -> Float[Array, " H"]:
        """Returns the shares of the heads of one layer."""
        return jnp.asarray(self.shares[self.layers.index(layer)], jnp.float32)

    def slots(
        self, shares: Float[Array, " H"], length: Int[Array, " B"], max_length: int
    ) -> Int[Array, "B H"]:
        """Returns the slots of each row and head, of rows with `max_length` tokens at most."""
        length = jnp.minimum(length, max_length)[:, None]
        exact = shares[None] * length.astype(jnp.float32)
        slots = jnp.maximum(jnp.floor(exact + 1e-3), self.minimum).astype(jnp.int32)
        # float32 may round a product up to the next number, which has no slot.
        most = jnp.asarray(self(np.arange(max_length + 1)), jnp.int32)
        return jnp.minimum(slots, most[length])
