"""Chooses the implementation of an operation: a kernel of the device, or XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.export
from jax.sharding import AxisType
from jaxtyping import Array

from pallas_kernels.base import route

# XLA; a kernel that is compiled for the device; the kernel for GPUs, interpreted on any device.
IMPLEMENTATIONS = ("xla", "pallas", "interpret")
GPU_KERNELS = ("pallas", "interpret")  # kernels for GPUs, where XLA runs loops from the host
OLDEST_GPU = (8, 0)  # the compute capability that kernels need


def choose_implementation(
    implementation: str | None, *stores: Array | None, for_tpu: bool = False
) -> str:
    """Returns the implementation that runs: the named one, or else the best that can run here.

    Naming `"pallas"` on a machine without a GPU is not an error by itself, since code can be
    lowered for another machine. Pallas refuses it when it compiles for a CPU. On a TPU, `"pallas"`
    means the kernel for TPUs.

    A kernel sees the arrays of one device. Where arrays are divided among devices automatically,
    XLA is the best choice, since it divides its own operations. Inside `shard_map`, the kernel is.

    Args:
      implementation: the caller's choice.
      stores: arrays that the kernel reads in place.
      for_tpu: whether the operation has a kernel for TPUs that reads them.

    Returns:
      `"xla"`; `"pallas"` or `"interpret"`, the kernel for GPUs; `"tpu"`, the one for TPUs.

    Raises:
      ValueError: an unknown name; `"pallas"` on a GPU that is too old for it, for a store that it
        cannot address, or on a TPU where there is no kernel.
      RuntimeError: a kernel for GPUs is named, and this JAX cannot lower kernels.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}"
        )
    if on_tpu() and implementation in (None, "pallas"):
        if implementation == "pallas" and not for_tpu:
            raise ValueError(
                "implementation='pallas' on a TPU needs a kernel for TPUs, and this operation has "
                "none that reads these arrays; None takes XLA"
            )
        able = for_tpu and not any(_is_divided(x) for x in stores if x is not None)
        return "tpu" if implementation or able else "xla"
    if implementation in GPU_KERNELS:
        route.check_route()
    capability = gpu_capability()
    able = route.has_route() and capability is not None and capability >= OLDEST_GPU
    if implementation == "pallas" and capability is not None and not able:
        raise ValueError(
            f"implementation='pallas' needs a CUDA GPU of compute capability "
            f"{OLDEST_GPU[0]}.{OLDEST_GPU[1]} or newer, got {capability[0]}.{capability[1]}"
        )
    arrays = [x for x in stores if x is not None]
    too_large = [x.shape for x in arrays if _is_unaddressable(x)]
    if implementation == "pallas" and too_large:
        raise ValueError(
            "implementation='pallas' takes no arrays of 2 to 4 GiB whose elements are bytes, got "
            f"shape {too_large[0]}"
        )
    able &= not too_large and not any(map(_is_divided, arrays))
    return implementation or ("pallas" if able else "xla")


def _is_unaddressable(x: Array) -> bool:
    """Returns whether Pallas may fail to address all elements of `x`.

    Pallas counts elements in signed 32 bits wherever 32 bits can count the bytes. Arrays of any
    number of rows (`jax.export.symbolic_shape`) may have too many elements.
    """
    symbolic = jax.export.is_symbolic_dim(x.size)
    return x.dtype.itemsize == 1 and (symbolic or 2**31 <= x.size <= 2**32)


def _is_divided(x: Array) -> bool:
    """Returns whether a mesh axis that is not manual may divide `x` among several devices."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and axis_type != AxisType.Manual for size, axis_type in axes)


def on_one_cpu(implementation: str | None, *stores: Array) -> bool:
    """Returns whether XLA runs the operation on a CPU, on arrays that no devices divide.

    A condition is cheap there, so a program can choose the shorter of two ways at run time. On a
    GPU it would wait for the host, and several devices would wait for each other.
    """
    by_xla = choose_implementation(implementation, *stores) == "xla"
    on_cpu = _computing_device().platform == "cpu"
    return by_xla and on_cpu and not any(map(_is_divided, stores))


def on_tpu() -> bool:
    """Returns whether the mesh that is set, or else the default device, is a TPU."""
    return _computing_device().platform == "tpu"


def tpu_cores() -> int:
    """Returns how many cores of the TPU share a kernel's grid: two in v4 and v5p, one in others."""
    return getattr(_computing_device(), "num_cores", None) or 1


def _computing_device() -> Any:
    return jax.sharding.get_abstract_mesh().abstract_device or _default_device()


def gpu_capability() -> tuple[int, int] | None:
    """Returns the compute capability of the default device; None unless it is a CUDA GPU."""
    device = default_device()
    # A plugin's version begins with "PJRT C API", the built-in client's with "cuda".
    if device is None or "cuda" not in device.client.platform_version:
        return None
    major, _, minor = str(device.compute_capability).partition(".")
    return int(major), int(minor or 0)


def default_device() -> Any:
    """Returns the default device if it is a GPU, else None."""
    device = _default_device()
    return device if device.platform == "gpu" else None


def _default_device() -> Any:
    # The option holds None, a device, or the name of a platform.
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    return jax.devices()[0] if device is None else device
