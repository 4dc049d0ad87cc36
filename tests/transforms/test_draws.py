"""What random draws depend on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.transforms.random import layer_key, uniform

DRAWING = [
    kvjax.CaM(kvjax.StreamingLLM(8)),
    kvjax.KVCrush(kvjax.H2O(8), representatives=2),
    kvjax.KVMerger(budget=8, pivot="random"),
    kvjax.Every(kvjax.KVMerger(budget=8, pivot="random"), steps=2),
    kvjax.ClusterKV(24, dense_layers=()),
]


def test_draws_depend_on_seed_layer_head_and_position():
    position = jnp.array([[[3, 7, 8], [7, 3, 8]]] * 2)
    draw = jax.jit(uniform)
    draws = [
        np.asarray(draw(layer_key(seed, layer), position)) for seed in (0, 1) for layer in (0, 1)
    ]
    np.testing.assert_array_equal(draws[0], draw(layer_key(0, 0), position))
    np.testing.assert_array_equal(draws[0][0], draws[0][1])  # rows
    assert len({float(x) for draw in draws for x in draw[0].ravel()}) == 4 * 6
    assert all(((draw >= 0) & (draw < 1)).all() for draw in draws)


@pytest.mark.parametrize("transform", DRAWING, ids=str)
def test_layers_that_differ_by_draws_alone_are_equal(transform):
    """Seed and layer make a key in the state, and equal layers share compiled code."""
    first, second = kvjax.bind(transform, 2)
    assert first == second
    size = {"batch": 1, "kv_heads": 1, "head_dim": 4, "max_prompt": 32, "max_new": 4}
    keys = [
        [leaf for leaf in jax.tree.leaves(kvjax.init_cache(first, **size, layer=layer).state)
         if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
        for layer in (0, 1)
    ]  # fmt: skip
    assert [len(own) for own in keys] == [1, 1]
    assert (jax.random.key_data(keys[0][0]) != jax.random.key_data(keys[1][0])).any()
