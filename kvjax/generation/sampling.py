"""How the next token is chosen from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.budgets.budgets import check_count, check_number

_ALL = 2**31 - 1  # a `top_k` that cuts nothing


@dataclass(frozen=True)
class Sampling:
    """Greedy, or a draw from the softmax of `logits / temperature` with the tail cut off.

    The cuts apply in this order, each to what the one before it left: `top_k`, `top_p`, `min_p`.
    A token that is exactly as likely as the last one kept is kept too.

    Args:
      temperature: 0 (the default) takes the most likely token, and so does any that is 0 in
        float32.
      top_k: only the k most likely tokens.
      top_p: only the smallest set of most likely tokens whose probability reaches `top_p`.
      min_p: only tokens at least `min_p` times as likely as the most likely one.

    Raises:
      TypeError: `top_k` is not an int.
      ValueError: a number out of its range, or a cut at temperature 0.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from kvjax import Sampling
      >>> logits = jnp.array([[0.0, 3.0, 1.0]])
      >>> Sampling().choose(logits, jax.random.split(jax.random.key(0), 1)).tolist()
      [1]
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        if self.top_k is not None:
            check_count("top_k", self.top_k, 1)
        for name in ("top_p", "min_p"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0, most=1)
        cuts = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]
        if self.temperature == 0 and cuts:
            raise ValueError(f"{cuts[0]} needs a temperature above 0; at 0 the choice is greedy")

    @property
    def numbers(self) -> Numbers:
        """The same as arrays, so that other numbers compile nothing."""
        cuts = any(x is not None for x in (self.top_k, self.top_p, self.min_p))
        return Numbers(
            temperature=np.float32(self.temperature),
            cuts=np.bool_(cuts),
            top_k=np.int32(min(self.top_k or _ALL, _ALL)),
            top_p=np.float32(1.0 if self.top_p is None else self.top_p),
            min_p=np.float32(self.min_p or 0.0),
        )

    def choose(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        """One token per row, drawn with that row's key."""
        return self.numbers.choose(logits, keys)

    def cut(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """The logits with everything that may not be drawn at -inf."""
        return self.numbers.cut(logits)


class Numbers(NamedTuple):
    """`Sampling` as arrays: one program for all of them.

    Args:
      temperature: 0 is greedy.
      cuts: whether one of the following cuts anything.
      top_k, top_p, min_p: as in `Sampling`; the largest int32, 1 and 0 cut nothing.
    """

    temperature: Float[Array, ""]
    cuts: Bool[Array, ""]
    top_k: Int[Array, ""]
    top_p: Float[Array, ""]
    min_p: Float[Array, ""]

    def choose(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        """One token per row, drawn with that row's key; the most likely one at temperature 0."""
        logits = logits.astype(jnp.float32)
        return jax.lax.cond(
            self.temperature > 0,
            lambda: self._draw(logits, keys),
            lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32),
        )

    def _draw(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        # Differences to the highest logit: divided by a tiny temperature they are 0 or -inf.
        logits = (logits - logits.max(-1, keepdims=True)) / self.temperature
        logits = jax.lax.cond(self.cuts, self.cut, lambda x: x, logits)
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)

    def cut(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """The logits with everything that may not be drawn at -inf."""
        count = logits.shape[-1]
        ordered = jnp.sort(logits, axis=-1, descending=True)
        last = jnp.clip(self.top_k, 1, count) - 1
        limit = jax.lax.dynamic_slice_in_dim(ordered, last, 1, axis=1)
        logits = jnp.where(logits < limit, -jnp.inf, logits)
        ordered = jnp.where(ordered < limit, -jnp.inf, ordered)
        share = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(share, axis=-1) - share  # probability of the tokens ranked before
        reached = (before >= self.top_p) & (self.top_p < 1)  # rounding could cut at 1
        limit = jnp.where(reached, jnp.inf, ordered).min(-1, keepdims=True)
        logits = jnp.where(logits < limit, -jnp.inf, logits)
        limit = logits.max(-1, keepdims=True) + jnp.log(self.min_p)
        return jnp.where(logits < limit, -jnp.inf, logits)
