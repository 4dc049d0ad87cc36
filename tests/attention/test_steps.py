"""A decode step of every method holds no loop, no condition and no copy of keys or values."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.testing import control_flow
from tests.compose.test_conformance import CASES, HEAD_DIM, KV_HEADS, QUERY_HEADS, names, snapkv
from tests.support.attending import Tokens, new_cache, right, the_rope
from tests.support.hlo_text import Program

ATTENTION = ("_fetch",)  # rows of a store in host memory come run by run
CHAINS = {
    "chain of three": kvjax.chain(
        snapkv(14), kvjax.H2O(budget=12), kvjax.Quantize(4, group=4, key_axis="token")
    ),
}


def jaxpr_of_a_step(transform, implementation):
    tokens = Tokens.random()

    def step(cache, *tokens):
        return kvjax.attend(
            transform, cache, *tokens, phase="decode", rope=the_rope(),
            implementation=implementation,
        )  # fmt: skip

    def after_prompt():
        arrays = tokens.at(right([0, 0, 0], (24, 17, 5), 24))
        return kvjax.attend(
            transform, new_cache(transform), *arrays, phase="prompt", rope=the_rope()
        )[1]

    cache = jax.eval_shape(after_prompt)
    return jax.make_jaxpr(step)(cache, *tokens.at(np.full((3, 1), 24)))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("name", [*CASES, *CHAINS])
def test_a_step_holds_no_loop_and_no_condition(name, implementation):
    """With kernels, nor a loop of known length, which XLA would run from the host."""
    step = jaxpr_of_a_step({**CASES, **CHAINS}[name], implementation)
    found = control_flow(step.jaxpr, lambda inner: inner in ATTENTION)
    assert set(found) <= ({"scan"} if implementation == "xla" else set()), name


def test_a_loop_would_be_found():
    def loops(x):
        x = jax.lax.while_loop(lambda x: x < 3, lambda x: x + 1, x)
        x = jax.jit(lambda x: jax.lax.cond(x > 2, jnp.sin, jnp.cos, x * 1.0))(x)
        return jax.lax.fori_loop(0, 3, lambda i, x: x + i, x)

    assert control_flow(jax.make_jaxpr(loops)(0).jaxpr) == ["while", "cond", "scan"]


# CaM adds to the values of many tokens: one pass over them, elementwise and so in place.
REWRITES_VALUES = {"cam": 1}
# Fusions as users get them; how LLVM compiles each of them makes no difference here.
FUSED_AS_USERS = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):
    FUSED_AS_USERS["xla_cpu_use_fusion_emitters"] = True


def compiled_loop(transform, rows=2, steps=16, slots=128):
    """Steps with a donated cache, compiled for CPU, and the elements of its smallest store."""

    def loop(cache, q, k, v, at):
        def step(number, carry):
            cache, out = carry
            out, cache = kvjax.attend(
                transform, cache, q + out, k, v, at + number, phase="decode", rope=the_rope()
            )
            return cache, out

        return jax.lax.fori_loop(0, steps, step, (cache, jnp.zeros_like(q)))

    cache = jax.eval_shape(
        lambda: kvjax.init_cache(
            transform, batch=rows, kv_heads=KV_HEADS, query_heads=QUERY_HEADS, head_dim=HEAD_DIM,
            max_prompt=slots, max_new=64,
        )
    )  # fmt: skip
    q, k = (
        jax.ShapeDtypeStruct((rows, heads, 1, HEAD_DIM), jnp.float32)
        for heads in (QUERY_HEADS, KV_HEADS)
    )
    at = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    lowered = jax.jit(loop, donate_argnums=0).lower(cache, q, k, k, at)
    caches = cache if isinstance(cache, tuple) else (cache,)
    stores = [payload for one in caches for payload in (one.kv.k, one.kv.v)]
    sizes = [max(math.prod(x.shape) for x in jax.tree.leaves(store)) for store in stores]
    return Program(lowered.compile(FUSED_AS_USERS).as_text()), min(sizes)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA makes of it on CPU")
@pytest.mark.parametrize("name", names(CASES))
def test_no_step_copies_keys_or_values(name):
    program, elements = compiled_loop(CASES[name])
    copies = program.copies(elements, kernel="none")
    assert len(copies) == REWRITES_VALUES.get(name, 0), copies
