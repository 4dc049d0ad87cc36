"""Compiling for devices that are not there, as `make aot` and `make aot-tpu` do."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

SHOWN = 200  # signs of a line of HLO, or of an error
OLDEST_JAX = (0, 11)


@dataclass(frozen=True)
class Program:
    """A function and the shapes that it is compiled for.

    Args:
      name: in the report.
      function, args: what is compiled; args are avals, whose memory space counts.
      stores: the arrays whose bytes are what compression saves: none may be copied or decoded.
      decoded_bytes: of keys and values, if the stores were decoded.
      kernel: the name of the kernel that must be in it; None: XLA's own, of which is told what it
        takes.
      donated: whether the first argument is, and all stores are in it.
      rewrites: whether keys and values become others, so that it makes arrays as large as a store.
      to_host: whether rows may go to host memory, as an offloaded cache's do now and then.
      waits: whether loops and branches may depend on what the device alone knows.
      copied: how many stores are copied once. Where a store comes out smaller than it came in, it
        cannot be donated, and new tokens are put into a copy.
      known: what is known to be wrong with it: a part of the fault's text.
    """

    name: str
    function: Callable
    args: tuple
    stores: tuple
    decoded_bytes: int = 0
    kernel: str | None = None
    donated: bool = False
    rewrites: bool = False
    to_host: bool = False
    waits: bool = True
    copied: int = 0
    known: str | None = None

    @property
    def store_bytes(self) -> int:
        """Of all stores."""
        return sum(x.size * x.dtype.itemsize for x in self.stores)

    @property
    def store_elements(self) -> int:
        """Of the smallest store: as large an array is a copy, or what one decodes to."""
        return min(x.size for x in self.stores)


def parser_of(name: str, doc: str, devices: Sequence[str]) -> argparse.ArgumentParser:
    """The options of a command that compiles programs for devices."""
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.{name}", description=doc.splitlines()[0]
    )
    parser.add_argument("--devices", nargs="+", choices=devices, default=devices)
    parser.add_argument("--only", default="", help="programs with this text in their names")
    parser.add_argument("--hlo", type=Path, help="a folder for what was compiled, as text")
    return parser


def cannot(extra: str, device: str, modules: Iterable[str]) -> str | None:
    """Why nothing can be compiled here, where one of the modules has to be there."""
    there = f"jax {jax.__version__} on Python {sys.version.split()[0]}"
    if jax.__version_info__ < OLDEST_JAX:
        there += ", which is too old"
    elif not any(map(installed, modules)):
        there += f" without the compiler for a {device}"
    else:
        return None
    return (
        f"needs jax[{extra}] 0.11 or newer, on Python 3.12 or newer, and no {device}; got {there}"
    )


def installed(module: str) -> bool:
    """Whether a module could be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def mesh_of(topology: Any) -> Mesh:
    """A mesh of the first device of a described topology."""
    return Mesh(np.array(topology.devices[:1]), ("x",), axis_types=(AxisType.Auto,))


def compiled(program: Program, mesh: Mesh, folder: Path | None, name: str, **kind: Any) -> tuple:
    """The compiled program, its text, seconds, and why there is none.

    `folder` is where its text is written; `kind` has the `platform` and `cores` of `compile_for`.
    """
    begin = time.perf_counter()
    try:
        found = compile_for(mesh, program.function, program.args, donated=program.donated, **kind)
    except Exception as error:
        reason = next((x for x in str(error).splitlines() if x.strip()), type(error).__name__)
        fault = f"does not compile: {reason[:SHOWN]}"
        return None, "", time.perf_counter() - begin, [fault]
    seconds, text = time.perf_counter() - begin, found.as_text()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        file = re.sub(r"[^A-Za-z0-9_]+", "_", f"{name} {program.name}")
        (folder / f"{file}.hlo").write_text(text)
    return found, text, seconds, []


def compile_for(
    mesh: Mesh, function: Callable, args: tuple, *, platform: str, donated: bool,
    cores: int | None = None, options: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """The compiled function, for a mesh of one described device.

    The memory space of args counts. What is traced, and Pallas, ask for the platform and cores.
    `options` are XLA's.
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
    return lowered.compile(options)


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
        for x, attributes_of in zip(arrays, given, strict=True):
            kinds = {name.name: name.attr for name in attributes_of}
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


def megabytes(count: float) -> str:
    """A number of bytes, to be read."""
    return f"{count / 1e6:.1f} MB"
