"""Random draws that depend only on seed, layer, KV head and position."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.checks import check_count
from kvjax.devices import head_numbers
from kvjax.messages import brief

# Set here, not taken from `jax_default_prng_impl`: with "rbg", the draws under `vmap` depend on the
# number of mapped keys, so that a row's draws would depend on the batch.
GENERATOR = "threefry2x32"

NO_MESH = jax.sharding.AbstractMesh((), ())


def check_seed(seed: int) -> None:
    """Raises unless the seed is an integer in [0, 2**32)."""
    check_count("seed", seed, 0, most=math.inf)
    if seed >= 2**32:  # JAX would drop the upper bits
        raise ValueError(f"seed must be below 2**32, got {brief(seed)}")


def layer_key(seed: int, layer: int) -> Array:
    """Returns the random key of a layer's draws."""
    # Computed while tracing: else XLA would compile the generator once for each layer. Its words
    # leave as a NumPy constant, which lies on no mesh, so that `shard_map` takes it.
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(NO_MESH):
        key = jax.random.fold_in(jax.random.key(seed, impl=GENERATOR), layer)
        words = np.asarray(jax.random.key_data(key))
    return jax.random.wrap_key_data(words, impl=GENERATOR)  # pyright: ignore[reportArgumentType]  # JAX takes those of NumPy, too


def uniform(
    key: Array, position: Int[Array, "B H N"], heads: int | None = None
) -> Float[Array, "B H N"]:
    """Draws a number in [0, 1) per KV head and position, the same in every row.

    With `heads` as in `kvjax.devices.all_heads`, a head draws the same numbers on every device.
    """
    numbers = head_numbers(position.shape[1], heads)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers)

    def draw(key: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(key, position), dtype=jnp.float32)

    return jax.vmap(jax.vmap(jax.vmap(draw, (None, 0))), (None, 0))(keys, position)
