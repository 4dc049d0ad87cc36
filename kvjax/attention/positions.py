"""Token positions from the masks of padding that other libraries use: `positions_of`."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.messages import brief


def positions_of(
    mask: Bool[Array, "B T"] | Int[Array, "B T"] | np.ndarray | Sequence,
    start: Int[Array, " B"] | Sequence[int] | int = 0,
) -> Int[Array, "B T"]:
    """Returns token positions for `attend`, from a mask of tokens that are not padding.

    The tokens of a row are counted from 0, wherever padding stands: at the left, at the right or
    between them. Padding gets -1.

    Args:
      mask: True, or a number other than 0, where there is a token, as in `attention_mask` and
        `padding_mask`. Segments that other libraries pack into one row are not rows of a cache: a
        row is one text.
      start: position of each row's first token; the row's length so far in a further turn.

    Raises:
      TypeError: the mask holds something else than bools or integers.
      ValueError: it is not `[B, T]`.

    Example:
      >>> import kvjax
      >>> kvjax.positions_of([[0, 0, 1, 1], [1, 1, 1, 0]]).tolist()
      [[-1, -1, 0, 1], [0, 1, 2, -1]]
      >>> kvjax.positions_of([[1], [1]], start=[2, 3]).tolist()
      [[2], [3]]
    """
    mask = jnp.asarray(mask)
    if not (mask.dtype == bool or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise TypeError(f"mask must hold bools or integers, got {mask.dtype}: {brief(mask)}")
    if mask.ndim != 2:
        raise ValueError(f"mask must be [B, T], got shape {mask.shape}")
    there = mask.astype(bool)
    first = jnp.asarray(start, jnp.int32).reshape(-1, 1)
    return jnp.where(there, first + jnp.cumsum(there, axis=1, dtype=jnp.int32) - 1, -1)
