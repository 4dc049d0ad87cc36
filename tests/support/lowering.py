"""Lowering for CUDA where there is no GPU."""

from __future__ import annotations

import contextlib

import jax

KERNEL = "__gpu$xla.gpu.triton"


def lower_for_cuda(function, *args) -> str:
    """The StableHLO of a jitted function for a CUDA device, which need not be there."""
    with _gpu():
        lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


def _gpu():
    """Since 0.11, Pallas wants to know for which device; 0.10 takes one without asking."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    # Automatic, since nothing here is about how arrays are divided.
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    return use_abstract_mesh(mesh)
