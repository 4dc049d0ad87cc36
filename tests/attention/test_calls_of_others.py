"""Tests of what others bring along: layouts, masks, phases by length, caches of all layers."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.attention.layer import layer_caches
from tests.compose.test_conformance import CASES, LENGTHS, WIDTH, standard, tokens
from tests.support.attending import SIZE, new_cache, right, same_arrays, the_rope

attend = functools.partial(kvjax.attend, rope=the_rope())


def shapes_before_tokens(*arrays):
    return [x.swapaxes(1, 2) for x in arrays]


@pytest.mark.parametrize("name", ["snapkv", pytest.param("head_groups", marks=pytest.mark.slow)])
def test_tokens_before_heads(name):
    cache, run = new_cache(CASES[name]), standard(name)
    for phase, where in (
        ("prompt", right([0, 0, 0], LENGTHS, WIDTH)),
        ("decode", np.array(LENGTHS)[:, None]),
    ):
        *qkv, positions = tokens().at(where)
        expected, after = attend(cache, *qkv, positions, phase=phase)
        swapped = shapes_before_tokens(*qkv)
        out, twin = attend(cache, *swapped, positions, phase=phase, layout="BTHD")
        np.testing.assert_array_equal(out.swapaxes(1, 2), expected)
        same_arrays(twin, after)
        cache = after
    np.testing.assert_allclose(expected, run.outs[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="layout must be one of"):
        attend(cache, *qkv, positions, phase="decode", layout="BTNH")


def test_the_number_of_tokens_decides_where_it_is_told_to():
    tx = CASES["snapkv"]
    *qkv, positions = tokens().at(right([0, 0, 0], LENGTHS, WIDTH))
    _, cache = attend(new_cache(tx), *qkv, positions, phase="by_length")
    _, expected = attend(new_cache(tx), *qkv, positions, phase="prompt")
    same_arrays(cache, expected)
    *qkv, positions = tokens().at(np.array(LENGTHS)[:, None])
    same_arrays(
        attend(cache, *qkv, positions, phase="by_length"),
        attend(cache, *qkv, positions, phase="decode"),
    )


def test_positions_of_masks():
    mask = np.array([[0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]])
    expected = [[-1, -1, 0, 1], [0, 1, -1, -1], [0, -1, 1, -1], [-1] * 4]
    for kind in (bool, np.int32, np.uint8):
        assert kvjax.positions_of(mask.astype(kind)).tolist() == expected
    assert kvjax.positions_of(mask * 7).tolist() == expected
    later = kvjax.positions_of(mask, start=jnp.array([5, 2, 0, 9]))
    assert later.tolist() == [[-1, -1, 5, 6], [2, 3, -1, -1], [0, -1, 1, -1], [-1] * 4]
    with pytest.raises(TypeError, match="bools or integers"):
        kvjax.positions_of(mask * 1.0)
    with pytest.raises(ValueError, match=r"mask must be \[B, T\]"):
        kvjax.positions_of(mask[:, None])


def test_caches_of_all_layers():
    tx = kvjax.PyramidKV(12, window=4)
    sizes, windows = {**SIZE, "dtype": jnp.float32}, (None, 8, None)
    caches = kvjax.init_caches(
        tx, num_layers=3, windows=windows, soft_cap=(None, 3.0, 4.0), **sizes
    )
    layers = kvjax.bind(tx, 3, windows, sizes["max_prompt"] + sizes["max_new"])
    for layer, (cache, bound, cap) in enumerate(zip(caches, layers, (None, 3.0, 4.0), strict=True)):
        expected = kvjax.init_cache(
            bound, layer=layer, window=windows[layer], soft_cap=cap, **sizes
        )
        same_arrays(cache, expected)
    by_text = kvjax.init_caches("snapkv(budget=12, window=4)", num_layers=2, **sizes)
    assert layer_caches(by_text)[1].transform == kvjax.SnapKV(12, window=4)
    with pytest.raises(ValueError, match="soft_cap must have 3 entries, got 2"):
        kvjax.init_caches(tx, num_layers=3, soft_cap=(1.0, 2.0), **sizes)
    with pytest.raises(ValueError, match="windows must have one entry per layer, 3, got 2"):
        kvjax.init_caches(tx, num_layers=3, windows=(1, 2), **sizes)
    with pytest.raises(TypeError, match="max_new must be an int"):
        kvjax.init_caches(tx, num_layers=3, **{**sizes, "max_new": None})
