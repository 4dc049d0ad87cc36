"""Methods whose budgets fall from layer to layer: few kinds of layer, each layer its own budget."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import (
    Every,
    HeadGroups,
    KVCrush,
    LayerBudgetEviction,
    PyramidInfer,
    PyramidKV,
    Quantize,
    SpindleKV,
    bind,
    chain,
    init_cache,
)
from kvjax.kit import Extent
from tests.references import pyramidinfer
from tests.references.budgets import rows_budget
from tests.references.pyramidkv import layer_budgets
from tests.references.spindlekv import layer_tokens
from tests.support.attending import SIZE, Tokens, right, structure, the_rope
from tests.support.marks import some_slow

LAYERS, KINDS, WINDOW = 30, 4, 4
METHODS = {
    "pyramidkv": PyramidKV(16, window=WINDOW),
    "pyramidkv, share": PyramidKV(0.4, window=WINDOW),
    "pyramidinfer": PyramidInfer(context=6, ratio=0.5, interval=3),
    "pyramidinfer, slots": PyramidInfer(16, interval=3),
    "layer_budget": LayerBudgetEviction(0.5, window=WINDOW),
    "spindlekv": SpindleKV(0.5, window=WINDOW, capacity=60),
    "every": Every(PyramidKV(0.4, window=WINDOW), steps=3),
    "kvcrush": KVCrush(PyramidKV(0.6, window=WINDOW)),
    "chain": chain(PyramidKV(0.4, window=WINDOW), Quantize(8)),
    "groups": HeadGroups((((0,), PyramidKV(0.4, window=WINDOW)), ((1,), kvjax.H2O(8)))),
}
ROWS = (30, 17, 9, 3)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("num_layers", [1, 4, 5, 61])
def test_few_kinds_of_layer(name, num_layers):
    """Neighbours are of one kind; up to four layers have room for their own budget alone."""
    layers = bind(METHODS[name], num_layers)
    kinds = list(dict.fromkeys(layers))
    assert len(kinds) == min(num_layers, KINDS)
    order = [kinds.index(layer) for layer in layers]
    assert order == sorted(order)
    assert np.ptp([order.count(i) for i in range(len(kinds))]) <= 1


empty = functools.partial(init_cache, **{**SIZE, "batch": len(ROWS)})


def ragged(seed: int):
    return Tokens.random(rows=len(ROWS), seed=seed).at(right([0] * len(ROWS), ROWS, 30))


@pytest.mark.parametrize("name", some_slow(METHODS, "layer_budget"))
def test_caches_of_a_kind_are_alike(name):
    """Equal layers with caches of one structure share compiled code."""
    of_kinds = {}
    for number, layer in enumerate(bind(METHODS[name], LAYERS)):
        cache = jax.eval_shape(functools.partial(empty, layer, layer=number))
        assert structure(cache) == of_kinds.setdefault(layer, structure(cache))


def pyramid(budget, layer: int, length: int) -> int:
    mean = rows_budget(budget, length, WINDOW + 1)
    return layer_budgets(mean, WINDOW, 20, length, LAYERS)[layer]


def spindle(layer: int, length: int) -> int:
    return WINDOW + layer_tokens(0.5, length, WINDOW, layer, LAYERS)


SCHEDULES = {
    "pyramidkv, share": functools.partial(pyramid, 0.4),
    "layer_budget": spindle,
    "kvcrush": functools.partial(pyramid, 0.6),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def prompted(transform, numbers: range, *tokens):
    """The caches of the layers of a kind after a prompt, one compiled function for all of them."""
    caches = [empty(transform, layer=number) for number in numbers]
    states = jax.tree.map(lambda *x: jnp.stack(x), *(cache.state for cache in caches))

    def read(state):  # in which alone the caches differ
        cache = dataclasses.replace(caches[0], state=state)
        return kvjax.attend(cache, *tokens, phase="prompt", rope=the_rope())[1]

    return jax.lax.map(read, states)


@pytest.mark.parametrize("name", some_slow(SCHEDULES, "pyramidkv, share"))
def test_every_layer_keeps_its_own_budget(name):
    """Of ragged rows, in all 30 layers, by the references' schedules."""
    tokens, layers = ragged(seed=2), bind(METHODS[name], LAYERS)
    for kind in dict.fromkeys(layers):
        first = layers.index(kind)
        numbers = range(first, first + layers.count(kind))
        kv = prompted(kind, numbers, *tokens).kv
        live = (np.asarray(kv.log_mass) > -np.inf).sum(-1)
        for own, number in zip(live, numbers, strict=True):
            expected = [min(SCHEDULES[name](number, length), length) for length in ROWS]
            np.testing.assert_array_equal(own, np.broadcast_to(np.c_[expected], own.shape))
        assert not np.asarray(kv.dropped).any()


SMOLLM2 = {"kv_heads": 3, "query_heads": 9, "head_dim": 64, "dtype": jnp.bfloat16}
OVERHEADS = {  # budgets at 4,096 tokens, and most slots above those of 30 layers together
    "pyramidkv": (PyramidKV(0.2), layer_budgets(819, 8, 20, 4096, LAYERS), 0.22),
    "pyramidinfer": (PyramidInfer(0.2), pyramidinfer.layer_shares(819, 4096, LAYERS), 0.12),
    "pyramidinfer, paper": (PyramidInfer(), pyramidinfer.entering(4096, LAYERS)[:-1], 0.09),
    "layer_budget": (
        LayerBudgetEviction(0.5),
        [32 + layer_tokens(0.5, 4096, 32, layer, LAYERS) for layer in range(LAYERS)],
        0.21,
    ),
}


@pytest.mark.parametrize("name", OVERHEADS)
def test_capacities_are_little_above_the_budgets(name):
    """At most a quarter; and what layers have in their states is at most 2 % of keys and values."""
    transform, budgets, most = OVERHEADS[name]
    slots = np.array([layer.extent(Extent(4096, 0)).prompt for layer in bind(transform, LAYERS)])
    assert (slots >= budgets).all()
    assert most - 0.015 < slots.sum() / np.sum(budgets) - 1 < most <= 0.25
    make = functools.partial(init_cache, batch=1, max_prompt=4096, max_new=0, **SMOLLM2)
    caches = [
        jax.eval_shape(functools.partial(make, layer, layer=number))
        for number, layer in enumerate(bind(transform, LAYERS))
    ]
    state = kvjax.nbytes([cache.state for cache in caches])
    assert state <= 0.02 * kvjax.nbytes([(cache.kv.k, cache.kv.v) for cache in caches])


def test_the_layers_number_is_needed():
    layers = bind(PyramidKV(16, window=WINDOW), 9)
    size = {"batch": 1, "kv_heads": 1, "head_dim": 8, "max_prompt": 32, "max_new": 0}
    for number in (None, 3, 9):
        with pytest.raises(ValueError, match=rf"layer=, one of \[0, 1, 2\], got {number}"):
            init_cache(layers[0], **size, layer=number)
    with pytest.raises(ValueError, match=r"one of \[3, 4\], got 0"):
        init_cache(KVCrush(Every(layers[3], 4)), **size, layer=0)
