"""What random draws depend on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.transforms.random import check_seed, layer_key, seed_of_layer, uniform


def test_draws_depend_on_seed_layer_head_and_position():
    position = jnp.array([[[3, 7, 8], [7, 3, 8]]] * 2)
    seeds = (0, 1, (0, 1), (1, 0), (1, 1))
    draw = jax.jit(uniform)
    draws = [np.asarray(draw(layer_key(seed), position)) for seed in seeds]
    np.testing.assert_array_equal(draws[1], draws[3])  # layer 0, given or not
    np.testing.assert_array_equal(draws[0][0], draws[0][1])  # rows
    assert len({float(x) for draw in draws for x in draw[0].ravel()}) == 4 * 6
    assert all(((draw >= 0) & (draw < 1)).all() for draw in draws)
    assert seed_of_layer(5, 2) == seed_of_layer((5, 9), 2) == (5, 2)


@pytest.mark.parametrize("seed", [-1, 2**32, (0, 2**32)])
def test_a_seed_that_is_none(seed):
    with pytest.raises(ValueError, match="seed"):
        check_seed(seed)
