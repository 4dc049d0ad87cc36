"""Saves and loads contexts in one of two processes, or alone, and prints JSON.

`python -m tests.devices.saved_contexts PART PORT FOLDER METHOD ...`: "0" and "1" are two processes
that share a mesh of eight virtual devices; "before" and "after" are one process that has all of
them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from tests.devices.contexts import QUESTIONS, answer
from tests.devices.many_devices import model, prompts, transform
from tests.support.attending import numbers
from tests.support.tolerances import TOLERANCES

# How the mesh's devices follow each other: rows are divided between two processes, or heads.
ACROSS = {"rows": (2, 4, False), "heads": (2, 4, True)}


def read(own, method: str) -> kvjax.Context:
    return kvjax.read(
        own, prompts(), transform=transform(method), max_prompt=320, max_new=16, dtype="float32"
    )


def same(context: kvjax.Context, other: kvjax.Context) -> bool:
    """Whether this process has the same parts of all arrays, bit for bit, in the same memories."""
    if jax.tree.structure(context) != jax.tree.structure(other):
        return False
    return all(
        x.sharding == y.sharding
        and all(
            numbers(a.data).tobytes() == numbers(b.data).tobytes()
            for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True)
        )
        for x, y in zip(jax.tree.leaves(context), jax.tree.leaves(other), strict=True)
    )


def as_near_as_sums(context: kvjax.Context, other: kvjax.Context) -> bool:
    """Whether arrays are the same up to the order in which devices add."""
    return all(
        np.allclose(numbers(x), numbers(y), **TOLERANCES["float32"])
        if jnp.issubdtype(x.dtype, jnp.floating)
        else np.array_equal(numbers(x), numbers(y))
        for x, y in zip(jax.tree.leaves(context), jax.tree.leaves(other), strict=True)
    )


def before(folder: Path, method: str) -> dict:
    """One device and a mesh of one process save what they have read."""
    for name, sizes in {"one device": (), **ACROSS}.items():
        own = model(*sizes)
        kvjax.save_context(folder / f"{name} in one", read(own, method), model=own)
    return {}


def both(folder: Path, method: str) -> dict:
    """Two processes save what they have read, and what they have loaded."""
    result = {}
    for name, sizes in ACROSS.items():
        own = model(*sizes)
        context = read(own, method)
        kvjax.save_context(folder / f"{name} in two", context, model=own)
        again = kvjax.load_context(folder / f"{name} in two", own)
        result[f"{name}: the same parts"] = same(context, again)
        loaded = kvjax.load_context(folder / "one device in one", own)
        kvjax.save_context(folder / f"{name} back", loaded, model=own)
        divided = [not x.is_fully_addressable for x in jax.tree.leaves(loaded)]
        result[f"{name}: on both"] = all(divided)
        for of, each in {"read": context, "loaded": again, "of one device": loaded}.items():
            result[f"{name}: {of}"] = answer(own, each, QUESTIONS).tokens
    return result


def after(folder: Path, method: str) -> dict:
    """One device loads all of them."""
    one, result = model(), {}
    first = kvjax.load_context(folder / "one device in one", one)
    for name in ACROSS:
        alone, two, back = (
            kvjax.load_context(folder / f"{name} {where}", one)
            for where in ("in one", "in two", "back")
        )
        result[f"{name}: as one process"] = as_near_as_sums(alone, two)
        result[f"{name}: there and back"] = same(first, back)
        result[f"{name}: tokens"] = answer(one, two, QUESTIONS).tokens
    return result


def main(part: str, port: str, folder: str, *methods: str) -> None:
    if part in ("0", "1"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(part))
    work = {"before": before, "after": after}.get(part, both)
    for number, method in enumerate(methods):
        print(json.dumps({method: work(Path(folder) / str(number), method)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
