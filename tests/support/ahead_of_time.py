"""Compiling for devices that are not there, as `make aot` and `make aot-tpu` do."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SHOWN = 200  # signs of a line of HLO, or of an error


def installed(module: str) -> bool:
    """Whether a module could be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def compile_for(
    mesh: Mesh,
    platform: str,
    function: Callable,
    args: tuple,
    *,
    donated: bool,
    cores: int | None = None,
) -> Any:
    """The compiled function.

    Args:
      mesh: of one described device.
      platform: of the device: what is traced, and Pallas, ask the mesh for it.
      args: shapes, whose memory space counts.
      donated: whether the first argument is.
      cores: of the device, where Pallas asks for them.
    """
    from jax.sharding import AbstractDevice, use_abstract_mesh

    def place(x) -> NamedSharding:
        memory = "pinned_host" if on_host(x) else "device"
        return NamedSharding(mesh, PartitionSpec(), memory_kind=memory)

    kind = mesh.devices.flat[0].device_kind
    abstract = AbstractDevice(device_kind=kind, num_cores=cores, platform=platform)
    with use_abstract_mesh(mesh.abstract_mesh.update(abstract_device=abstract)):
        out = jax.eval_shape(function, *args)
        jitted = jax.jit(
            function, donate_argnums=(0,) if donated else (), keep_unused=True,
            in_shardings=jax.tree.map(place, args),
            out_shardings=jax.tree.map(lambda x: place(jax.typeof(x)), out),
        )  # fmt: skip
        lowered = jitted.lower(*args)
    results = [jax.typeof(x) for x in jax.tree.leaves(out)]
    set_memory_kinds(lowered, jax.tree.leaves(args), results)
    return lowered.compile()


def set_memory_kinds(lowered, args: Sequence, results: Sequence) -> None:
    """Writes into a module where its arguments and results are.

    JAX leaves that out for a device that is described only: it does not know its memories. (For the
    same reason it leaves out copies to the device in a program that has none to the host.)
    """
    if not any(on_host(x) for x in args):
        return
    module = lowered.compiler_ir()
    from jax._src.lib.mlir import ir

    def placed(arrays: Sequence, given: Sequence) -> ir.ArrayAttr:
        attributes = []
        for x, own in zip(arrays, given, strict=True):
            kinds = {name.name: name.attr for name in own}
            kind = "pinned_host" if on_host(x) else "device"
            kinds["mhlo.memory_kind"] = ir.StringAttr.get(kind)
            attributes.append(ir.DictAttr.get(kinds))
        return ir.ArrayAttr.get(attributes)

    with module.context:
        main = next(x for x in module.body.operations if "main" in str(x.attributes["sym_name"]))
        main.arg_attrs = placed(args, main.arg_attrs)
        main.result_attrs = placed(results, main.result_attrs)


def on_host(x: Any) -> bool:
    """Whether an aval is of an array in host memory."""
    return x.memory_space == jax.memory.Space.Host


def why_not(error: Exception) -> str:
    """Why something does not compile, in a line."""
    reason = next((x for x in str(error).splitlines() if x.strip()), type(error).__name__)
    return f"does not compile: {reason[:SHOWN]}"


def write_text(folder: Path | None, name: str, text: str) -> None:
    """Writes what was compiled into a folder, if there is one."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{re.sub(r'[^A-Za-z0-9_]+', '_', name)}.hlo").write_text(text)


def megabytes(count: float) -> str:
    """A number of bytes, to be read."""
    return f"{count / 1e6:.1f} MB"
