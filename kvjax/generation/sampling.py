"""How the next token is chosen from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from kvjax.budgets.budgets import check_count, check_number


@dataclass(frozen=True)
class Sampling:
    """Greedy, or a draw from the softmax of `logits / temperature` with the tail cut off.

    The cuts apply in this order, each to what the one before it left: `top_k`, `top_p`, `min_p`.
    A token that is exactly as likely as the last one kept is kept too.

    Args:
      temperature: 0 (the default) takes the most likely token.
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

    def choose(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        """One token per row, drawn with that row's key."""
        logits = logits.astype(jnp.float32)
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = self.cut(logits / self.temperature)
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)

    def cut(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """The logits with everything that may not be drawn at -inf."""
        if self.top_k is not None:
            k = min(self.top_k, logits.shape[-1])
            limit = jax.lax.top_k(logits, k)[0][:, -1:]
            logits = jnp.where(logits < limit, -jnp.inf, logits)
        if self.top_p is not None and self.top_p < 1:  # rounding could cut at 1
            ordered = jnp.sort(logits, axis=-1, descending=True)
            share = jax.nn.softmax(ordered, axis=-1)
            before = jnp.cumsum(share, axis=-1) - share  # probability of the tokens ranked before
            limit = jnp.where(before < self.top_p, ordered, jnp.inf).min(-1, keepdims=True)
            logits = jnp.where(logits < limit, -jnp.inf, logits)
        if self.min_p is not None:
            limit = logits.max(-1, keepdims=True) + jnp.log(self.min_p)
            logits = jnp.where(logits < limit, -jnp.inf, logits)
        return logits
