"""What is the same on all devices inside `jax.shard_map`, and what is not."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

T = TypeVar("T")


def varying(start: T, *arrays: Any) -> T:
    """Arrays that loops begin with, or that branches give, as different on devices as `arrays`.

    With its default `check_vma`, `jax.shard_map` knows constants from what differs by device, and
    refuses a loop that begins with the one and goes on with the other. Elsewhere it is `start`.

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
    """The axes of a mesh over which an array differs; JAX has renamed where it says so."""
    aval: Any = jax.typeof(x)
    return frozenset(aval.vma if hasattr(aval, "vma") else aval.mat.varying)
