"""Lowering for CUDA where there is no GPU."""

from __future__ import annotations

import contextlib

import jax

KERNEL = "__gpu$xla.gpu.triton"


def lower_for_cuda(function, *args) -> str:
    """The StableHLO of a jitted function for a CUDA device, which need not be there."""
    return _lowered(function, *args).as_text()


def triton_of_kernel(function, *args) -> str:
    """What Triton is given of the first kernel of a function: its own dialect of MLIR, as text."""
    from jax._src.lib.mlir import ir
    from jaxlib.triton import dialect

    def calls(operation):
        if operation.operation.name == "stablehlo.custom_call":
            yield operation
        for region in operation.operation.regions:
            for block in region:
                for inner in block:
                    yield from calls(inner)

    module = _lowered(function, *args).compiler_ir()
    config = next(calls(module.operation)).attributes["mhlo.backend_config"]
    with module.context:
        dialect.register_dialect(module.context)
        return str(ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes))


def _lowered(function, *args):
    with _gpu():
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))


def _gpu():
    """Since 0.11, Pallas wants to know for which device; 0.10 takes one without asking."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    # Automatic, since nothing here is about how arrays are divided.
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    return use_abstract_mesh(mesh)
