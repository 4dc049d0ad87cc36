"""Checks what goes with a mesh beside `generate`, on eight virtual devices, and prints JSON.

`python -m tests.devices.contexts CHECK ...`
"""

from __future__ import annotations

import json
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.attention.layer import layer_caches
from tests.devices.many_devices import generate, model, prompts, transform
from tests.support.conversations import arrays, conversation
from tests.support.tolerances import TOLERANCES

QUESTIONS = [[5, 6, 7], [8, 9], [10] * 12, [11]]


def everywhere(work) -> bool:
    """Whether some work gives the same with the model on one device and on eight."""
    return work(model()) == work(model(2, 4))


def questions(own) -> list:
    """Several questions about one document, then a turn of some rows, then none but the answer."""
    document = kvjax.read(
        own, prompts()[:1], transform=transform("every(snapkv, steps=8)"), max_prompt=320,
        max_new=64, dtype="float32",
    )  # fmt: skip
    first = answer(own, document, QUESTIONS)
    second = answer(own, first.context, [[3, 4], None, None, [7, 7, 7]], donate=True)
    third = answer(own, second.context, None)
    lengths = [result.context.length.tolist() for result in (first, second, third)]
    return [first.tokens, second.tokens, third.tokens, lengths]


def answer(own, context, rows, **options) -> kvjax.Generation:
    how = {"max_new_tokens": 12, "end_tokens": ()} | options
    return kvjax.generate(own, rows, context=context, **how)


def drawn(own) -> list:
    sampling = kvjax.Sampling(temperature=0.8, top_k=40, top_p=0.9)
    return generate(own, kvjax.Full(), sampling=sampling, seed=3).tokens


def streamed(own) -> list:
    steps = kvjax.stream(own, prompts(), transform=transform("h2o"), max_new_tokens=12)
    rows = [[] for _ in prompts()]
    for new in steps:
        for row, tokens in zip(rows, new, strict=True):
            row.extend(tokens)
    return rows


def saved_and_loaded() -> bool:
    """A context saved on one device goes on on the mesh, and the other way round."""
    one, many, method = model(), model(2, 4), transform("kvcrush(snapkv)")
    answers = []
    for there, here in ((one, many), (many, one), (one, one)):
        context = kvjax.read(there, prompts(), transform=method, max_prompt=320, dtype="float32")
        with tempfile.TemporaryDirectory() as folder:
            kvjax.save_context(folder, context, model=there)
            context = kvjax.load_context(folder, here)
        answers.append(answer(here, context, QUESTIONS).tokens)
    return answers[0] == answers[1] == answers[2]


def saved_while_awake() -> bool:
    """Saving an awake context of a mesh leaves it as it is, and keeps the same."""
    many = model(2, 4)
    context = kvjax.read(many, prompts()[:1], transform=by_head(), max_prompt=320, dtype="float32")
    context = answer(many, context, QUESTIONS[:1]).context
    with tempfile.TemporaryDirectory() as folder:
        kvjax.save_context(folder, context, model=many)
        again = kvjax.load_context(folder, many)
    first, second = (answer(many, each, QUESTIONS[1:2]).tokens for each in (context, again))
    return first == second


def groups() -> kvjax.HeadGroups:
    parts = ((0, 3), kvjax.Full()), ((1, 2), transform("kvcrush(snapkv)"))
    return kvjax.HeadGroups(parts)


def by_head() -> kvjax.ByHead:
    """Layers whose groups have other heads in the same rectangles."""
    layers, heads = model().num_layers, np.arange(4)
    shares = np.stack([0.05 + 0.25 * np.roll(heads, layer) for layer in range(layers)])
    table = np.stack((shares, np.ones_like(shares)), axis=2)
    return kvjax.ByHead(kvjax.SnapKV(0.3, window=8), kvjax.kit.HeadProfile(table))


def same_tokens(tx, *sizes: int, rows: int | None = None) -> bool:
    return generate(model(), tx, rows).tokens == generate(model(*sizes), tx, rows).tokens


def placed() -> bool:
    """Keys are divided by rows and heads, weights by heads, width and vocabulary."""
    own = model(2, 4)
    context = kvjax.read(own, prompts(), transform=transform("quantize"), dtype="float32")
    keys = context.caches[0].kv.k.encoded.values
    weights = own.layers[0].mlp.down_proj.kernel.get_value(), own.embed.embedding.get_value()
    parts = [x.addressable_shards[0].data.size for x in (keys, *weights)]
    return parts == [keys.size // 8, *(x.size // 4 for x in weights)]


def rested() -> bool:
    """A context at rest is divided among eight devices as when it is awake."""
    groups_of_slots = transform("quantize(bits=4, key_axis='channel')")
    for method in (by_head(), groups_of_slots):
        one, many = (
            kvjax.read(own, prompts(), transform=method, max_prompt=320, dtype="float32")
            for own in (model(), model(2, 4))
        )
        awake, whole = many.awake(), one.nbytes < many.nbytes < one.awake_nbytes
        same = jax.tree.map(lambda x, y: np.array_equal(x, y), many.held, awake.at_rest().held)
        shardings = (
            [x.sharding for x in jax.tree.leaves([part.kv for part in layer_caches(caches)])]
            for caches in (many.held, awake.held)
        )
        places = all(a.spec == b.spec for a, b in zip(*shardings, strict=True))
        if not (whole and places and all(jax.tree.leaves(same))):
            return False
    return True


def refused() -> bool:
    """A context is not taken to a model that lies elsewhere."""
    context = kvjax.read(model(), prompts(), max_prompt=320, dtype="float32")
    try:
        answer(model(2, 4), context, QUESTIONS)
    except ValueError as error:
        return "the model is on a mesh of {'data': 2, 'tensor': 4}" in str(error)
    return False


def kernels() -> bool:
    """Kernels run on each device's part of a cache."""
    return same_layer(kvjax.chain(kvjax.SnapKV(40), kvjax.Quantize(bits=8)), "interpret")


def sinks() -> bool:
    """Learned sinks go to the devices of their heads, and stay in a cache until a flush."""
    every = kvjax.Every(kvjax.SnapKV(24, window=8), steps=1)
    both = kvjax.HeadGroups((((0, 3), kvjax.H2O(24)), ((1, 2), every)))
    quest = kvjax.Quest(24, page=8, dense_layers=())
    own = jnp.array([0.5, 6.0, -2.0, 3.0, 1.0, -4.0, 2.0, 8.0])
    return all(same_layer(tx, "xla", own) for tx in (every, both, quest))


def flushes_itself() -> bool:
    """Caches that flush themselves do so on each device."""
    every = kvjax.Every(kvjax.SnapKV(24, window=8), steps=1)
    both = kvjax.HeadGroups((((0, 3), kvjax.H2O(24)), ((1, 2), every)))
    return all(same_layer(tx, "xla", flushes_itself=True) for tx in (every, both))


def queries_alone() -> bool:
    """Queries without keys attend to each device's part of a cache."""

    def last_token_again(tx, mesh, q, k, v, position):
        _, caches = conversation(tx, [(64, "prompt", True)], 64, q, k, v, position, mesh=mesh)
        at = position[:, 63:64]
        return kvjax.attend(caches[-1], q[:, :, 63:64], None, None, at, phase="decode")[0]

    run, mesh = (
        jax.jit(last_token_again, static_argnums=(0, 1)),
        jax.make_mesh((2, 4), ("data", "tensor")),
    )
    outs = [
        [run(tx, mesh, *arrays(2, 4, 8, 64, 16)) for mesh in (None, mesh)]
        for tx in (kvjax.SnapKV(24, window=8), groups(), kvjax.Quest(24, page=8, dense_layers=()))
    ]
    return all(np.allclose(one, many, **TOLERANCES["float32"]) for one, many in outs)


def same_layer(
    tx: kvjax.KVTransform, implementation: str, sinks=None, flushes_itself=False
) -> bool:
    """Whether a layer's outputs on eight devices are those on one, without a model.

    One device is given the flushes.
    """
    calls = (64, "prompt", True), (1, "decode", True), (1, "decode", True)
    run = jax.jit(
        conversation,
        static_argnums=(0, 1, 2),
        static_argnames=("mesh", "implementation", "flushes_itself"),
    )
    (one, _), (many, _) = (
        run(tx, calls, 64, *arrays(2, 4, 8, 66, 16), mesh=mesh, implementation=implementation,
            sinks=sinks, flushes_itself=flushes_itself and mesh is not None)
        for mesh in (None, jax.make_mesh((2, 4), ("data", "tensor")))
    )  # fmt: skip
    return all(np.allclose(a, b, **TOLERANCES["float32"]) for a, b in zip(one, many, strict=True))


CHECKS = {
    "questions": lambda: everywhere(questions),
    "drawn": lambda: everywhere(drawn),
    "streamed": lambda: everywhere(streamed),
    "saved and loaded": saved_and_loaded,
    "saved while awake": saved_while_awake,
    "heads in groups": lambda: same_tokens(groups(), 2, 4),
    "a budget by head": lambda: same_tokens(by_head(), 2, 4),
    "more devices than heads": lambda: same_tokens(transform("kvcrush(snapkv)"), 1, 8),
    "rows that cannot be divided": lambda: same_tokens(transform("h2o"), 2, 4, rows=3),
    "rows alone": lambda: same_tokens(transform("snapkv"), 4, 1),
    "placed": placed,
    "rested": rested,
    "refused": refused,
    "kernels": kernels,
    "sinks": sinks,
    "flushes itself": flushes_itself,
    "queries alone": queries_alone,
}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps({name: CHECKS[name]()}), flush=True)
