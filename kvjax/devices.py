"""Divides rows and heads among the devices of a mesh.

A mesh has an axis "data", which divides the rows of a batch, and an axis "tensor", which divides
the heads. `kvjax.attend` runs on each device's part (`jax.shard_map`), where a method sees only the
heads of that device. Decisions about all heads of a layer go through `all_heads`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, overload

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from kvjax.serialization import static_value

DATA, TENSOR = "data", "tensor"  # the axes of a mesh


def all_heads(x: Array, heads: int | None, axis: int = 1) -> Array:
    """Gathers the arrays of all devices' heads into one of the whole layer, in the heads' order.

    If all heads are on this device, it returns `x` itself, and nothing is sent. Methods call it for
    a few numbers per slot and head, never for keys and values.

    Args:
      x: `[B, H, ...]`, or another array with an axis of heads.
      heads: number of heads on all devices, as `cache.heads`; None: those of `x`.
      axis: the axis of heads.

    Example:
      >>> import jax.numpy as jnp
      >>> from kvjax.devices import all_heads
      >>> all_heads(jnp.array([[3, 5]]), heads=2).max(1).tolist()
      [5]
    """
    if heads is None or x.shape[axis] == heads:
        return x
    return jax.lax.all_gather(x, TENSOR, axis=axis, tiled=True)


def own_heads(x: Array, own: int) -> Array:
    """Returns the `own` heads of this device in an array of all heads: the reverse of `all_heads`.

    Example:
      >>> import jax.numpy as jnp
      >>> from kvjax.devices import own_heads
      >>> own_heads(jnp.array([[3, 5]]), own=2).tolist()
      [[3, 5]]
    """
    if x.shape[1] == own:
        return x
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(TENSOR) * own, own, axis=1)


def head_numbers(own: int, heads: int | None) -> Int[Array, " H"]:
    """Returns the numbers of this device's heads among all heads.

    Args:
      own: number of heads on this device.
      heads: number of heads on all devices; None: these are all heads.

    Example:
      >>> from kvjax.devices import head_numbers
      >>> head_numbers(3, heads=3).tolist()
      [0, 1, 2]
    """
    numbers = jnp.arange(own)
    return numbers if heads in (None, own) else numbers + jax.lax.axis_index(TENSOR) * own


@static_value
class Placement(NamedTuple):
    """The placement of a layer's cache on the devices of a mesh.

    Args:
      mesh: the devices.
      heads: whether the axis "tensor" divides the heads; else each device of that axis has all of
        them and computes their attention.
    """

    mesh: Mesh | AbstractMesh
    heads: bool

    @classmethod
    def of(
        cls, mesh: Mesh | AbstractMesh | None, kv_heads: int, divisible: bool
    ) -> Placement | None:
        """Returns the placement of a layer's cache; None without a mesh.

        Args:
          kv_heads: KV heads of the layer.
          divisible: whether the heads may be on different devices.
        """
        if mesh is None:
            return None
        tensor = mesh.shape.get(TENSOR, 1)
        return cls(mesh, divisible and tensor > 1 and kv_heads % tensor == 0)

    @property
    def heads_axis(self) -> str | None:
        """The axis of the mesh that divides the heads; None if no axis does."""
        return TENSOR if self.heads else None

    def rows_axis(self, rows: int) -> str | None:
        """Returns the axis that divides `rows` rows; None if they cannot be divided evenly."""
        return rows_axis(self.mesh, rows)


def rows_axis(mesh: Mesh | AbstractMesh, rows: int) -> str | None:
    """Returns the axis of a mesh that divides `rows` rows; None if it cannot do so evenly."""
    data = mesh.shape.get(DATA, 1)
    return DATA if data > 1 and rows % data == 0 else None


@overload
def check_mesh(mesh: AbstractMesh) -> AbstractMesh: ...
@overload
def check_mesh(mesh: object) -> Mesh | AbstractMesh: ...
def check_mesh(mesh: object) -> Mesh | AbstractMesh:
    """Checks a mesh and returns it with automatic axes (`AxisType.Auto`).

    Raises:
      TypeError: `mesh` is not a mesh.
      ValueError: it has axes other than "data" and "tensor", or none.

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
    axis_types = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=axis_types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=axis_types)


@contextlib.contextmanager
def automatic() -> Iterator[None]:
    """Unsets a mesh with explicit axes, so that XLA divides a model's products by itself.

    This is a context manager, and a decorator as well. `jax.make_mesh` makes axes that are part of
    an array's type (`AxisType.Explicit`); programs must name these in products and gathers. Models
    do not: their parameters tell on which mesh they are, and this may be another mesh than that of
    `jax.set_mesh`. Inside of `jit`, JAX does not allow setting a mesh: no mesh with explicit axes
    may be set there.
    """
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        yield
        return
    with jax.set_mesh(None):
        yield


def explicit_mesh(*arrays: Any) -> AbstractMesh | None:
    """Returns the mesh of `jax.set_mesh`, else that of the arrays; None without explicit axes."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays))
        mesh = next((array_mesh for array_mesh in meshes if not array_mesh.empty), mesh)
    return mesh if AxisType.Explicit in mesh.axis_types else None


def in_automatic_mode(
    function: Callable, mesh: AbstractMesh, args: tuple, out: Callable[[Any], Any]
) -> Any:
    """Computes `function(*args)` as if the explicit axes of a mesh were automatic.

    Args:
      function: a function of arrays.
      mesh: from `explicit_mesh`.
      args: pytrees of arrays.
      out: takes the shapes of the result, and returns the `PartitionSpec` of each of its arrays.
    """
    axis_types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, axis_type in axis_types if axis_type == AxisType.Explicit)

    def with_outputs(shardings: Any) -> Callable:
        return jax.sharding.auto_axes(function, axes=axes, out_sharding=shardings)

    def sharding(spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, spec)

    # Any sharding of the outputs gives their shapes.
    shapes = jax.eval_shape(with_outputs(sharding(PartitionSpec())), *args)
    return jax.jit(with_outputs(jax.tree.map(sharding, out(shapes))))(*args)


def mesh_of(params: Any) -> Mesh | None:
    """Returns the mesh of a model's parameters; None unless it has several devices and our axes.

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
            automatic_axes = set(mesh.axis_types) <= {AxisType.Auto}
            ours = automatic_axes and not set(mesh.axis_names) - {DATA, TENSOR}
            return mesh if ours and mesh.size > 1 else None
    return None


def put(
    x: np.ndarray | np.number | Array,
    mesh: Mesh | AbstractMesh | None,
    *axes: str | None,
    memory: str | None = None,
) -> Array:
    """Puts an array of the host, or of this process, on a mesh or else on the default device.

    Processes that share a mesh must all give the same array.

    Args:
      axes: the axes of the mesh that divide the first axes of the array.
      memory: kind of the devices' memory; None: the default one.
    """
    if mesh is None:
        return jnp.asarray(x)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        numbers = put(jax.random.key_data(x), mesh, *axes)
        return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))
    x, sharding = np.asarray(x), NamedSharding(mesh, PartitionSpec(*axes), memory_kind=memory)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: np.asarray(x[index]))


def on_one_device(x: Array) -> Array:
    """Puts an array of a mesh on a device of this process, into the kind of memory that it is in.

    Processes that share the mesh must all call it, and each gets the whole array.
    """
    memory = x.sharding.memory_kind
    if isinstance(x.sharding, NamedSharding) and not x.is_fully_addressable:
        on_every_device = NamedSharding(x.sharding.mesh, PartitionSpec(), memory_kind=memory)
        # Waiting keeps the order: processes that send two arrays in two orders wait for ever.
        x = jax.block_until_ready(jax.device_put(x, on_every_device)).addressable_data(0)
    where = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind=memory)
    return jax.device_put(x, where)


@contextlib.contextmanager
def by_first_process(mesh: Mesh | None) -> Iterator[bool]:
    """Tells whether this process is to do what one of those that share a mesh does for all.

    When the block ends, every process waits until all of them are there.

    Args:
      mesh: the mesh; None: this process does everything for itself.

    Raises:
      OSError: the block has failed in another process.
    """
    processes = (
        {jax.process_index()} if mesh is None else {x.process_index for x in mesh.devices.flat}
    )
    failed = True
    try:
        yield jax.process_index() == min(processes)
        failed = False
    finally:
        failed_anywhere = len(processes) > 1 and _any_process(failed, mesh)  # pyright: ignore[reportArgumentType]  # several processes share one
    if failed_anywhere:
        raise OSError("another process of the mesh has failed: its own error says how")


def _any_process(flag: bool, mesh: Mesh) -> bool:
    """Returns whether the flag of any process that shares a mesh is set."""
    by_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    flags = jax.make_array_from_callback((mesh.size,), by_device, lambda _: np.array([flag]))
    on_every_device = NamedSharding(mesh, PartitionSpec())
    return bool(jax.jit(jnp.any, out_shardings=on_every_device)(flags).addressable_data(0))


def put_by_rows(x: np.ndarray | Array, mesh: Mesh | None) -> Array:
    """Puts an array `[B, ...]` of the host on a mesh, its rows divided if that is even."""
    return put(x, mesh, None if mesh is None else rows_axis(mesh, len(x)))


def divided(x: Array, mesh: Mesh | AbstractMesh | None, *axes: str | None) -> Array:
    """Divides the first axes of `x` by axes of the mesh, inside `jit`; nothing without a mesh."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))


def by_rows(x: Array, mesh: Mesh | AbstractMesh | None) -> Array:
    """Divides the rows of `x [B, ...]` among the mesh if that is even, inside `jit`."""
    return x if mesh is None else divided(x, mesh, rows_axis(mesh, x.shape[0]))
