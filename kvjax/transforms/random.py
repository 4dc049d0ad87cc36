"""Random draws that depend on seed, layer, KV head and position, and on nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.budgets.budgets import check_count

Seed = int | tuple[int, int]  # of a method, or (seed, layer)


def check_seed(seed: Seed) -> None:
    """Raises unless a seed, and its layer, are integers in [0, 2**32)."""
    for number in _seed_and_layer(seed):
        check_count("seed", number, 0)
        if number >= 2**32:
            raise ValueError(f"seed must be below 2**32, got {number}")


def seed_of_layer(seed: Seed, layer: int) -> Seed:
    """The seed with its layer."""
    return _seed_and_layer(seed)[0], layer


def layer_key(seed: Seed) -> Array:
    """The key of a layer's draws."""
    seed, layer = _seed_and_layer(seed)
    return jax.random.fold_in(jax.random.key(seed), layer)


def uniform(key: Array, position: Int[Array, "B H N"]) -> Float[Array, "B H N"]:
    """A number in [0, 1) per KV head and position, the same in every row."""
    heads = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(position.shape[1]))

    def draw(key: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(key, position))

    return jax.vmap(jax.vmap(jax.vmap(draw, (None, 0))), (None, 0))(heads, position)


def _seed_and_layer(seed: Seed) -> tuple[int, int]:
    return seed if isinstance(seed, tuple) else (seed, 0)
