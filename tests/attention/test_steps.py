"""A decode step of every method holds no loop, no condition and no copy of keys or values."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.testing import OWN_CONDITIONS, control_flow
from tests.compose.test_conformance import CASES, names
from tests.conftest import AS_USERS
from tests.support.attending import KV_HEADS, Tokens, new_cache, parts, the_rope
from tests.support.hlo_text import Program

# Rows of a store in host memory come run by run; sums in which a free slot's NaN is are made again,
# and so is a ranking of clusters whose first ones do not fill a list.
OWN = ("_fetch", *OWN_CONDITIONS)
FAST = ("chain", "full", "kvcrush", "kvmerger", "when_full")


@pytest.mark.parametrize("name", names(CASES, *FAST))
def test_a_step_holds_no_loop_and_no_condition(name):
    """By XLA, whose loops of known length are none; `kvjax.testing.check` looks at kernels."""
    tokens = Tokens.random().at(np.full((3, 1), 24))
    cache = jax.eval_shape(lambda: new_cache(CASES[name]))  # a prompt changes no shape of it
    step = functools.partial(kvjax.attend, phase="decode", rope=the_rope(), implementation="xla")
    found = control_flow(jax.make_jaxpr(step)(cache, *tokens).jaxpr, lambda inner: inner in OWN)
    assert set(found) <= {"scan"}


# CaM adds to the values of many tokens, and keys that are stored unrotated are rotated at the ranks
# that they have by now: one pass each. A codebook's store is a code of 16 bits for each slot, which
# `write_slots` writes by a pass: one over the keys' codes, one over the values'.
PASSES = {"cam": 1, "reposition": 1, "spindlekv": 2, "spindlekv_unfold": 2, "h2o_codebook": 2}
# Fusions as users get them; how LLVM compiles each of them makes no difference here.
FUSED_AS_USERS = {**AS_USERS, "xla_backend_optimization_level": 0}
MADE = re.compile(r" = (\w+)\[([\d,]+)\]")
TYPES = {"float32": "f32", "int8": "s8", "uint8": "u8", "uint16": "u16"}


def store_of(payload):
    """The largest array of a payload: of one that is encoded, blocks of which are decoded, that of
    its codes."""
    leaves = jax.tree.leaves(payload)
    codes = [x for x in leaves if x.dtype.itemsize < 4]
    return max(codes or leaves, key=lambda x: math.prod(x.shape))


def compiled_steps(transform, cache, tokens, count=16):
    """Steps with a donated cache, as XLA compiles them for CPU."""

    def loop(cache, q, k, v, at):
        def step(number, carry):
            cache, out = carry
            out, cache = kvjax.attend(
                cache, q + out, k, v, at + number, phase="decode", rope=the_rope()
            )
            return cache, out

        return jax.lax.fori_loop(0, count, step, (cache, jnp.zeros_like(q)))

    lowered = jax.jit(loop, donate_argnums=0).lower(cache, *tokens)
    return Program(lowered.compile(FUSED_AS_USERS).as_text())


def copies_of_stores(transform, rows, kv_heads):
    """Lines of compiled steps that make an array of the type and size of a store, other than by
    changing rows in place."""
    cache = jax.eval_shape(lambda: new_cache(transform, batch=rows, kv_heads=kv_heads))
    payloads = [x for part in parts(transform, cache) for x in (part.cache.kv.k, part.cache.kv.v)]
    stored = {(TYPES[str(x.dtype)], math.prod(x.shape)) for x in map(store_of, payloads)}
    tokens = Tokens.random(rows, kv_heads=kv_heads).at(np.full((rows, 1), 24))
    program = compiled_steps(transform, cache, tokens)
    copies = []
    for line in program.copies(min(elements for _, elements in stored), kernel="none"):
        made = {(kind, math.prod(map(int, shape.split(",")))) for kind, shape in MADE.findall(line)}
        copies += [line] * bool(made & stored)
    return copies


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA makes of it on CPU")
@pytest.mark.parametrize("name", names(CASES, "chelsea"))
def test_no_step_copies_keys_or_values(name):
    copies = copies_of_stores(CASES[name], 3, KV_HEADS)
    assert len(copies) == PASSES.get(name, 0), copies


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA makes of it on CPU")
def test_no_step_copies_what_one_head_of_one_row_holds():
    """A token's row is the only one that is written, as in a group of one head (`ByHead`)."""
    assert copies_of_stores(kvjax.Full(), 1, 1) == []
