"""A decode step of every method and composition holds no loop and no condition of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.testing import control_flow
from tests.compose.test_conformance import CASES, snapkv
from tests.support.attending import Tokens, new_cache, right, the_rope

ATTENTION = ("_fetch",)  # rows of a store in host memory come run by run
CHAINS = {
    "chain of three": kvjax.chain(
        snapkv(14), kvjax.H2O(budget=12), kvjax.Quantize(4, group=4, key_axis="token")
    ),
}


def jaxpr_of_a_step(transform):
    tokens = Tokens.random()

    def step(cache, q, k, v, at):
        return kvjax.attend(transform, cache, q, k, v, at, phase="decode", rope=the_rope())

    def after_prompt():
        arrays = tokens.at(right([0, 0, 0], (24, 17, 5), 24))
        return kvjax.attend(
            transform, new_cache(transform), *arrays, phase="prompt", rope=the_rope()
        )[1]

    cache = jax.eval_shape(after_prompt)
    return jax.make_jaxpr(step)(cache, *tokens.at(np.full((3, 1), 24)))


@pytest.mark.parametrize("name", [*CASES, *CHAINS])
def test_a_step_holds_no_loop_and_no_condition(name):
    transform = {**CASES, **CHAINS}[name]
    found = control_flow(jaxpr_of_a_step(transform).jaxpr, lambda inner: inner in ATTENTION)
    assert found == [], name


def test_a_loop_would_be_found():
    def loops(x):
        x = jax.lax.while_loop(lambda x: x < 3, lambda x: x + 1, x)
        x = jax.jit(lambda x: jax.lax.cond(x > 2, jnp.sin, jnp.cos, x * 1.0))(x)
        return jax.lax.fori_loop(0, 3, lambda i, x: x + i, x)

    assert control_flow(jax.make_jaxpr(loops)(0).jaxpr) == ["while", "cond", "scan"]
