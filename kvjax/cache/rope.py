"""Defines rotary position embedding as a small pytree that `kvjax.attend` can apply itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.checks import check_array
from kvjax.serialization import pytree_node
from pallas_kernels.base.rotation import Turn, rotate_pairs


@pytree_node
@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864), which turns a key into a rotated key.

    Channel pair i of a vector at position p is turned by the angle `p * inv_freq[i]`. The first
    `2 * R` channels are rotated, the others pass through unchanged.

    Args:
      inv_freq: inverse frequencies, `[R]`, or `[B, R]` where they depend on the row; an array or a
        list of numbers.
      interleaved: pairs are neighbours (0,1), (2,3), ... (GLM) instead of halves (0,R), (1,R+1),
        ... (Llama, the default).
      factor: rotated channels are multiplied by it (the attention factor of YaRN and LongRoPE);
        1 by default.

    Example:
      >>> import jax.numpy as jnp
      >>> from kvjax import Rope
      >>> rope = Rope(inv_freq=1.0 / 10000.0 ** (jnp.arange(0, 8, 2) / 8))
      >>> rope.rotate(jnp.ones((1, 2, 3, 8)), jnp.array([[0, 1, 2]])).shape
      (1, 2, 3, 8)
    """

    inv_freq: Float[Array, "*B R"]
    interleaved: bool = field(default=False, metadata={"static": True})
    factor: float = field(default=1.0, metadata={"static": True})

    def __post_init__(self):
        # Lists of numbers only: in a pytree, the leaf may be anything, such as a `PartitionSpec`.
        if type(self.inv_freq) in (list, tuple):
            object.__setattr__(self, "inv_freq", jnp.asarray(self.inv_freq, jnp.float32))

    def rotate(
        self,
        x: Float[Array, "B H T D"],
        positions: Int[Array, "B T"] | Int[Array, "B H T"],
    ) -> Float[Array, "B H T D"]:
        """Turns the vectors `x [B, H, T, D]` by their `positions [B, T]` or `[B, H, T]`.

        Angles, sines and cosines are float32; the result has the dtype of `x`. A position below
        zero (padding) is rotated like any other number: nothing reads such a vector.
        """
        positions = jnp.asarray(positions)
        if positions.ndim == 2:
            positions = positions[:, None, :]
        frequencies = self.inv_freq.reshape(-1, 1, 1, self.inv_freq.shape[-1]).astype(jnp.float32)
        angle = positions[..., None].astype(jnp.float32) * frequencies
        cos, sin = jnp.cos(angle) * self.factor, jnp.sin(angle) * self.factor
        return rotate_pairs(x, cos, sin, self.interleaved)

    def at(self, positions: Int[Array, "B H S"]) -> Turn:
        """Returns how attention rotates stored keys in a decode step.

        Args:
          positions: positions of the slots.
        """
        frequencies = self.inv_freq.reshape(-1, self.inv_freq.shape[-1])
        return Turn(frequencies, positions, self.interleaved, self.factor)


def check_rope(rope: object, head_dim: int) -> None:
    """Raises unless `rope` is None or a `Rope` that rotates at most `head_dim` channels."""
    if rope is None:
        return
    if not isinstance(rope, Rope):
        raise TypeError(f"rope must be a kvjax.Rope, got {type(rope).__name__}")
    check_array("inv_freq of rope", rope.inv_freq)
    shape = rope.inv_freq.shape
    if len(shape) not in (1, 2):
        raise ValueError(f"inv_freq of rope must be [R] or [B, R], got shape {shape}")
    if 2 * shape[-1] > head_dim:
        raise ValueError(f"rope rotates {2 * shape[-1]} channels, got head_dim {head_dim}")
