"""Meshes with the axes that JAX makes, on four virtual devices: a program of its own, prints JSON.

`python -m tests.devices.axes traced METHOD ...`, `computed METHOD ...`, or `generated`. Methods are
traced and computed in eight ways, which have every pair of conditions; `whole METHOD ...` traces
them in all.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
from kvjax.models import DecoderConfig, RopeConfig, on_mesh, random_decoder
from tests.docs.test_pages import GUIDES, run
from tests.support import conversations
from tests.support.conversations import conversation
from tests.support.tolerances import TOLERANCES

ROWS, KV_HEADS, QUERY_HEADS, HEAD_DIM, PROMPT = 4, 2, 4, 32, 48
MESHES = {"rows": ((4,), ("data",)), "rows and heads": ((2, 2), ("data", "tensor"))}


CALLS = (PROMPT, "prompt", True), (1, "decode", True), (1, "decode", True)


def outputs(tx, mesh, *new):
    """Runs a prompt and two steps; none changes the types of a cache that flushes itself."""
    outs, caches = conversation(tx, CALLS, PROMPT, *new, mesh=mesh, flushes_itself=True)
    types = [[str(jax.typeof(x)) for x in jax.tree.leaves(cache)] for cache in caches]
    assert types[0] == types[1] == types[2]
    return outs


arrays = functools.partial(conversations.arrays, ROWS, KV_HEADS, QUERY_HEADS, PROMPT + 2, HEAD_DIM)


def each_way(method: str, computed: bool, whole: bool) -> dict[str, bool]:
    """A method on meshes of both kinds, set and not, given to the cache and not, arrays placed.

    `whole` takes all 32 ways. Eight of them, the others left out, have every pair of conditions.
    """
    tx = kvjax.bind(kvjax.parse(method, 24), 2)[1]
    call = jax.jit(outputs, static_argnums=(0, 1)) if computed else traced
    expected, found = call(tx, None, *arrays()), {}

    def compare(name: str, outs: list) -> None:
        found[f"{method}: {name}"] = all(
            np.allclose(a, b, **TOLERANCES["float32"]) if computed else a.shape == b.shape
            for a, b in zip(outs, expected, strict=True)
        )

    kinds = (AxisType.Explicit, AxisType.Auto)
    for (name, (sizes, axes)), kind in itertools.product(MESHES.items(), kinds):
        mesh = jax.make_mesh(sizes, axes, (kind,) * len(axes))
        rows, explicit = len(axes) == 1, kind == AxisType.Explicit
        for is_set, given, placed in itertools.product((True, False), repeat=3):
            if not whole and (given, placed) != (rows != explicit, rows != is_set):
                continue
            with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
                outs = call(
                    tx, mesh if given else None, *arrays(place(mesh) if placed else jnp.asarray)
                )
            compare(f"{name}, {kind}, set {is_set}, given {given}, placed {placed}", outs)
            if placed and kind == AxisType.Explicit:
                assert jax.typeof(outs[-1]).sharding.spec[0] == "data"
    mesh = jax.make_mesh((4,), ("data",))
    for is_set in (True, False):
        with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
            mapped = jax.shard_map(
                lambda *x: outputs(tx, None, *x), mesh=mesh, in_specs=P("data"),
                out_specs=P("data"),
            )  # fmt: skip
            new = arrays(place(mesh))
            outs = jax.jit(mapped)(*new) if computed else jax.eval_shape(mapped, *new)
            compare(f"a shard_map of one's own, set {is_set}", outs)
    return found


def traced(tx, mesh, *new) -> list:
    return jax.eval_shape(lambda *x: outputs(tx, mesh, *x), *new)


def place(mesh):
    """Puts arrays on a mesh: rows, and heads where an axis divides them."""

    def put(x: np.ndarray) -> jax.Array:
        spec = P(*mesh.axis_names) if x.ndim == 4 else P("data")
        return jax.device_put(x, NamedSharding(mesh, spec))

    return put


def generated() -> dict[str, bool]:
    """Text of a model, all at once and as it comes; and the page about devices."""
    rope = RopeConfig(rotary_dim=8)
    config = DecoderConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
        kv_heads=2, head_dim=8, rope=rope, max_positions=128,
    )  # fmt: skip
    model, found = random_decoder(config, seed=0), {}
    prompts = np.random.default_rng(0).integers(0, 64, (2, 40)).tolist()
    how = {"transform": kvjax.SnapKV(24, window=8), "max_new_tokens": 6, "end_tokens": ()}
    expected = kvjax.generate(model, prompts, **how).tokens
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))
    for is_set in (True, False):
        with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
            own = on_mesh(model, mesh)
            found[f"generate, {is_set}"] = kvjax.generate(own, prompts, **how).tokens == expected
            steps = kvjax.stream(own, prompts, **how)
            rows = [[token for new in row for token in new] for row in zip(*steps, strict=True)]
            found[f"stream, {is_set}"] = rows == expected
            if is_set:
                assert jax.sharding.get_mesh() == mesh
                run(next(page for page in GUIDES if page.stem == "devices"))
    return found


def refused() -> bool:
    """A cache of another mesh than the one that is set is an error that names both."""
    tx = kvjax.Full()
    with jax.set_mesh(jax.make_mesh((4,), ("data",))):
        try:
            traced(tx, jax.make_mesh((2, 2), ("data", "tensor")), *arrays())
        except ValueError as error:
            return "{'data': 2, 'tensor': 2}" in str(error) and "{'data': 4}" in str(error)
    return False


if __name__ == "__main__":
    what, *methods = sys.argv[1:]
    if what == "generated":
        print(json.dumps(generated()), flush=True)
    else:
        print(json.dumps({"refused": refused()}), flush=True)
    for name in methods:
        print(json.dumps(each_way(name, what == "computed", what == "whole")), flush=True)
