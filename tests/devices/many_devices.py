"""Text on a mesh of eight virtual devices, beside that on one: a program of its own, prints JSON.

`python -m tests.devices.many_devices METHOD ...`
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import sys
import time

import jax
import numpy as np

import kvjax
from kvjax.attention.layer import layer_caches
from kvjax.generation import compiler
from kvjax.models import demo, from_pretrained, load_tokenizer
from kvjax.storage.offload.payload import Offloaded

LENGTHS, NEW = (200, 190, 164, 240), 40
LAYERS = 2
MOVES = re.compile(r" = (.*) (?:all-gather|all-to-all|collective-permute)(?:-start)?\(")
SHAPE = re.compile(r"\w+\[([\d,]*)\]")


@functools.cache
def prompts() -> list[list[int]]:
    ids = load_tokenizer(demo.directory())(demo.held_out_text()).input_ids
    return [ids[700 * row : 700 * row + length] for row, length in enumerate(LENGTHS)]


@functools.cache
def model(data: int = 1, tensor: int = 1, across: bool = False):
    """The first layers of the bundled model, since all layers of a loop of steps are compiled.

    `across`: devices that follow each other do not share an axis of heads.
    """
    mesh = None
    if data * tensor > 1:
        order = np.array(jax.devices()[: data * tensor])
        devices = order.reshape(tensor, data).T if across else order.reshape(data, tensor)
        mesh = jax.sharding.Mesh(devices, ("data", "tensor"))
    whole = from_pretrained(demo.directory(), dtype="float32", mesh=mesh)
    whole.config = dataclasses.replace(whole.config, num_layers=LAYERS)
    whole.num_layers, whole.layers = LAYERS, whole.layers[:LAYERS]
    return whole


def transform(method: str) -> kvjax.KVTransform:
    budget = 0.3 if "spindlekv" in method or "layer_budget" in method else 96
    return kvjax.calibrated(kvjax.parse(method, budget), model(), prompts())


class Programs:
    """While it is open, the text of every program that is compiled, by what it is for."""

    def __enter__(self):
        self.text: dict[str, str] = {}
        self.before = compiler.Compiler.compile_new

        def compile_new(own, what, function, *args):
            self.text[what] = function.lower(*args).compile().as_text()

        compiler.Compiler.compile_new = compile_new
        return self

    def __exit__(self, *error):
        compiler.Compiler.compile_new = self.before

    def moved(self) -> dict[str, int]:
        """Elements of the largest array that devices gather or exchange, by program."""
        most = {}
        for what, text in self.text.items():
            arrays = [s for found in MOVES.findall(text) for s in SHAPE.findall(found)]
            sizes = [math.prod(map(int, s.split(","))) if s else 1 for s in arrays]
            most[what.partition(" of layer")[0]] = max(
                [*sizes, most.get(what.partition(" of layer")[0], 0)]
            )
        return most


def generate(own, tx, rows=None, **options) -> kvjax.Generation:
    options = {"max_new_tokens": NEW, "dtype": "float32", "end_tokens": ()} | options
    return kvjax.generate(own, prompts()[:rows], transform=tx, **options)


def smallest_store(method: str) -> int:
    """Elements of the smallest array of keys that all devices of one row hold together."""
    context = kvjax.read(
        model(2, 4), prompts(), transform=transform(method), max_new=64, dtype="float32"
    )
    sizes = []
    for cache in layer_caches(context.caches):
        keys = cache.kv.k
        rows, lists, slots, head_dim = keys.shape
        if isinstance(keys, Offloaded):
            slots = keys.store.shape[2]
        sizes.append(rows // 2 * lists * slots * head_dim)
    return min(sizes)


def compare(method: str) -> dict:
    """Whether tokens are the same on one device and on eight, and what moves between these."""
    start, tx = time.perf_counter(), transform(method)
    one = generate(model(), tx)
    with Programs() as programs:
        many = generate(model(2, 4), tx)
    return {
        "same": one.tokens == many.tokens,
        "different": len({tuple(row) for row in one.tokens}) > 1,
        "bytes": [one.cache_bytes, many.cache_bytes],
        "moved": programs.moved(),
        "store": smallest_store(method),
        "seconds": round(time.perf_counter() - start, 1),
    }


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps({name: compare(name)}), flush=True)
