"""Marks arrays as different on each device inside `jax.shard_map`."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

T = TypeVar("T")


def varying(start: T, *arrays: Any) -> T:
    """Marks `start` as varying over the mesh axes that `arrays` vary over.

    Loops begin with such arrays, and branches return them. With its default `check_vma`,
    `jax.shard_map` tells constants from arrays that differ by device, and refuses a loop that
    begins with the former and goes on with the latter. Outside of it, `start` comes back unchanged.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.base.varying import varying
      >>> varying(jnp.zeros(2), jnp.ones(2)).tolist()
      [0.0, 0.0]
    """
    axes = frozenset().union(*map(_axes, jax.tree.leaves(arrays)))
    if not axes:
        return start

    def cast(x: Any) -> jax.Array:
        missing = axes - _axes(x)
        return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(cast, start)


def _axes(x: Any) -> frozenset[str]:
    """Returns the mesh axes over which an array differs; the attribute depends on JAX's version."""
    aval: Any = jax.typeof(x)
    return frozenset(aval.vma if hasattr(aval, "vma") else aval.mat.varying)
