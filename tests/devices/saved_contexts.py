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

import kvjax
from kvjax.generation import context_files
from tests.devices.contexts import QUESTIONS, answer
from tests.devices.many_devices import model, prompts, transform
from tests.support.attending import numbers

# How the mesh's devices follow each other: rows are divided between two processes, or heads.
ACROSS = {"rows": (2, 4, False), "heads": (2, 4, True)}


def read(own, method: str) -> kvjax.Context:
    return kvjax.read(
        own, prompts(), transform=transform(method), max_prompt=320, max_new=16, dtype="float32"
    )


def same(context: kvjax.Context, other: kvjax.Context) -> bool:
    """Whether two contexts on one device are the same, bit for bit, in the same memories."""
    if jax.tree.structure(context) != jax.tree.structure(other):
        return False
    return all(
        x.sharding == y.sharding and numbers(x).tobytes() == numbers(y).tobytes()
        for x, y in zip(jax.tree.leaves(context), jax.tree.leaves(other), strict=True)
    )


def before(folder: Path, method: str) -> dict:
    """One device, and a mesh of one process, save what they have read."""
    for name, sizes in {"one device": (), "mesh": (2, 4)}.items():
        own = model(*sizes)
        kvjax.save_context(folder / name, read(own, method), model=own)
    return {}


def both(folder: Path, method: str) -> dict:
    """Two processes save what they have read, and what they have loaded."""
    result = {}
    for name, sizes in ACROSS.items():
        own = model(*sizes)
        context = read(own, method)
        kvjax.save_context(folder / name, context, model=own)
        again = kvjax.load_context(folder / name, own)
        result[f"{name}: kept"] = same(context.at_rest_on(None), again.at_rest_on(None))
        pairs = zip(jax.tree.leaves(context), jax.tree.leaves(again), strict=True)
        result[f"{name}: places"] = all(x.sharding == y.sharding for x, y in pairs)
        for where in ("one device", "mesh"):
            loaded = kvjax.load_context(folder / where, own)
            divided = [not x.is_fully_addressable for x in jax.tree.leaves(loaded)]
            result[f"{name}: {where} on both"] = all(divided)
            kvjax.save_context(folder / f"{where} by {name}", loaded, model=own)
            result[f"{name}: tokens of {where}"] = answer(own, loaded, QUESTIONS).tokens
        result[f"{name}: tokens of {name}"] = answer(own, again, QUESTIONS).tokens
    result["a failure"] = failure(folder, own, again)  # pyright: ignore[reportPossiblyUnboundVariable]  # the loop runs
    return result


def failure(folder: Path, own, context: kvjax.Context) -> bool:
    """Whether every process raises if the one that writes fails."""

    def fail(*args):
        raise OSError("the disk is full")

    write, context_files._write = context_files._write, fail
    try:
        kvjax.save_context(folder / "rows", context, model=own)
    except OSError as error:
        said = "the disk is full" if jax.process_index() == 0 else "another process of the mesh"
        return str(error).startswith(said)
    finally:
        context_files._write = write
    return False


def after(folder: Path, method: str) -> dict:
    """One device loads all of them."""
    one, result = model(), {}
    contexts = {place.name: kvjax.load_context(place, one) for place in folder.iterdir()}
    for where in ("one device", "mesh", *ACROSS):
        result[f"tokens of {where}"] = answer(one, contexts[where], QUESTIONS).tokens
    for name in ACROSS:
        for where in ("one device", "mesh"):
            back = contexts[f"{where} by {name}"]
            result[f"{where} and back by {name}"] = same(contexts[where], back)
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
