"""Many devices: the axes of a mesh, and decisions that look across heads which they share out.

A mesh has an axis "data", which divides the rows of a batch, and an axis "tensor", which divides
the heads. `kvjax.attend` runs on each device's part (`jax.shard_map`), where a method sees the
heads of that device alone. What it says of all heads of a layer goes through `all_heads`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

DATA, TENSOR = "data", "tensor"  # the axes of a mesh


def all_heads(x: Array, heads: int | None, axis: int = 1) -> Array:
    """An array of this device's heads as that of all heads of the layer, in their order.

    Where all heads are here it is `x` itself, and nothing is sent. Methods call it for a few
    numbers per slot and head, never for keys and values.

    Args:
      x: `[B, H, ...]`, or another array with an axis of heads.
      heads: how many there are on all devices, as `cache.heads`; None: those of `x`.
      axis: that of the heads.

    Example:
      >>> import jax.numpy as jnp
      >>> from kvjax.devices import all_heads
      >>> all_heads(jnp.array([[3, 5]]), heads=2).max(1).tolist()
      [5]
    """
    if heads is None or x.shape[axis] == heads:
        return x
    return jax.lax.all_gather(x, TENSOR, axis=axis, tiled=True)


def own_heads(x: Array, own: int, axis: int = 1) -> Array:
    """The `own` heads of this device in an array of all heads: the reverse of `all_heads`.

    Example:
      >>> import jax.numpy as jnp
      >>> from kvjax.devices import own_heads
      >>> own_heads(jnp.array([[3, 5]]), own=2).tolist()
      [[3, 5]]
    """
    if x.shape[axis] == own:
        return x
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(TENSOR) * own, own, axis)


def head_numbers(own: int, heads: int | None) -> Int[Array, " H"]:
    """The numbers of this device's heads among all `heads`; None: there are no others.

    Example:
      >>> from kvjax.devices import head_numbers
      >>> head_numbers(3, heads=3).tolist()
      [0, 1, 2]
    """
    numbers = jnp.arange(own)
    return numbers if heads in (None, own) else numbers + jax.lax.axis_index(TENSOR) * own


class Placement(NamedTuple):
    """Where the cache of a layer is.

    Args:
      mesh: the devices.
      heads: whether the axis "tensor" divides its heads; else each device of that axis has all of
        them, and computes their attention.
    """

    mesh: Mesh | AbstractMesh
    heads: bool

    @classmethod
    def of(
        cls, mesh: Mesh | AbstractMesh | None, kv_heads: int, divisible: bool
    ) -> Placement | None:
        """That of a layer with so many KV heads, `divisible` if each may stand alone."""
        if mesh is None:
            return None
        tensor = mesh.shape.get(TENSOR, 1)
        return cls(mesh, divisible and tensor > 1 and kv_heads % tensor == 0)

    @property
    def heads_axis(self) -> str | None:
        """The axis of the mesh that divides heads."""
        return TENSOR if self.heads else None

    def rows_axis(self, rows: int) -> str | None:
        """The axis that divides so many rows; None where they cannot be divided evenly."""
        return rows_axis(self.mesh, rows)


def rows_axis(mesh: Mesh | AbstractMesh, rows: int) -> str | None:
    """The axis of a mesh that divides so many rows; None where they cannot be divided evenly."""
    data = mesh.shape.get(DATA, 1)
    return DATA if data > 1 and rows % data == 0 else None


def check_mesh(mesh: object) -> Mesh | AbstractMesh:
    """The mesh with axes that XLA looks after (`AxisType.Auto`); raises unless it is one of ours.

    Raises:
      TypeError: no mesh.
      ValueError: axes other than "data" and "tensor".

    Example:
      >>> import jax
      >>> from kvjax.devices import check_mesh
      >>> dict(check_mesh(jax.make_mesh((1, 1), ("data", "tensor"))).shape)
      {'data': 1, 'tensor': 1}
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {mesh!r:.80}")
    if not mesh.axis_names or set(mesh.axis_names) - {DATA, TENSOR}:
        raise ValueError(
            f"mesh must have the axes 'data' and 'tensor', or one of them, got {mesh.axis_names}"
        )
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


@contextlib.contextmanager
def automatic() -> Iterator[None]:
    """While it is open, no mesh with explicit axes is set, so that XLA divides a model's products.

    Also a decorator. `jax.make_mesh` makes axes that are part of an array's type
    (`AxisType.Explicit`), which programs must name in products and gathers. Models do not: where
    they are is known from their parameters, and may be another mesh than that of `jax.set_mesh`.
    Inside of `jit`, JAX lets no mesh be set, so that no such mesh may be there.
    """
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        yield
        return
    with jax.set_mesh(None):
        yield


def explicit_mesh(*arrays: Any) -> AbstractMesh | None:
    """The mesh of `jax.set_mesh` or of arrays, if it has axes that are part of an array's type."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays))
        mesh = next((own for own in meshes if not own.empty), mesh)
    return mesh if AxisType.Explicit in mesh.axis_types else None


def in_automatic_mode(
    function: Callable, mesh: AbstractMesh, args: tuple, out: Callable[[Any], Any]
) -> Any:
    """`function(*args)`, computed as if XLA looked after the axes of a mesh that are explicit.

    Args:
      function: of arrays.
      mesh: from `explicit_mesh`.
      args: pytrees of arrays.
      out: the `PartitionSpec` of each array of the result, whose shapes it is given.
    """
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in kinds if kind == AxisType.Explicit)

    def called(shardings: Any) -> Callable:
        return jax.sharding.auto_axes(function, axes=axes, out_sharding=shardings)

    def on(spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, spec)

    shapes = jax.eval_shape(called(on(PartitionSpec())), *args)
    return jax.jit(called(jax.tree.map(on, out(shapes))))(*args)


def mesh_of(params: Any) -> Mesh | None:
    """The mesh that a model's parameters lie on, if it has our axes and several devices.

    Example:
      >>> import jax.numpy as jnp
      >>> from kvjax.devices import mesh_of
      >>> mesh_of({"kernel": jnp.ones(3)}) is None
      True
    """
    for x in jax.tree.leaves(params):
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            return None
        mesh = getattr(x.sharding, "mesh", None)
        if isinstance(mesh, Mesh):
            kinds = set(mesh.axis_types) <= {AxisType.Auto}
            ours = kinds and not set(mesh.axis_names) - {DATA, TENSOR}
            return mesh if ours and mesh.size > 1 else None
    return None


def put(x: np.ndarray | Array, mesh: Mesh | None, *axes: str | None) -> Array:
    """An array of the host on a mesh, its first axes divided by these; None: on one device.

    Processes that share a mesh must all give the same.
    """
    if mesh is None:
        return jnp.asarray(x)
    x, sharding = np.asarray(x), NamedSharding(mesh, PartitionSpec(*axes))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: np.asarray(x[index]))


def put_rows(x: np.ndarray | Array, mesh: Mesh | None) -> Array:
    """An array `[B, ...]` of the host on a mesh, its rows divided where that is even."""
    return put(x, mesh, None if mesh is None else rows_axis(mesh, len(x)))


def divided(x: Array, mesh: Mesh | None, *axes: str | None) -> Array:
    """Inside `jit`: `x`, whose first axes these axes of the mesh divide; as it is without one."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))


def by_rows(x: Array, mesh: Mesh | None) -> Array:
    """Inside `jit`: `x [B, ...]`, its rows divided by the mesh where that is even."""
    return x if mesh is None else divided(x, mesh, rows_axis(mesh, x.shape[0]))
