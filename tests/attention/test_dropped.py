"""`check_dropped` raises where tokens found no free slot, and says what to do."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.support.attending import Tokens, attend, decode, new_cache, prompt, right

EVERY = kvjax.Every(kvjax.SnapKV(12, window=4), steps=3)


@functools.cache
def tokens() -> Tokens:
    return Tokens.random()


def steps(tx, cache, count: int):
    _, cache = prompt(tx, cache, tokens(), right([0, 0, 0], [24, 17, 5], 24))
    for step in range(count):
        _, cache = decode(tx, cache, tokens(), np.array([24, 17, 5]) + step)
    return cache


def test_a_loop_without_flush():
    good, lossy = steps(EVERY, new_cache(EVERY), 3), steps(EVERY, new_cache(EVERY), 5)
    lost = int(lossy.kv.dropped.max())
    assert lost and kvjax.check_dropped([good, good]) is None
    message = (
        rf"^caches\[1\] lost tokens .* up to {lost} of a row: call kvjax.flush\(caches\) after"
    )
    with pytest.raises(RuntimeError, match=f"{message} every 3 decode steps"):
        kvjax.check_dropped([good, lossy])
    groups = kvjax.HeadGroups((((1,), kvjax.Full()), ((0,), EVERY)))
    lossy = steps(groups, new_cache(groups), 5)
    with pytest.raises(RuntimeError, match=r"^caches\['local'\]\[1\] lost tokens .* flush"):
        kvjax.check_dropped({"global": good, "local": lossy})
    stacked = jax.tree.map(lambda *x: jnp.stack(x), good, steps(EVERY, new_cache(EVERY), 5))
    with pytest.raises(RuntimeError, match=r"^caches lost tokens"):
        kvjax.check_dropped(stacked)


def test_too_many_tokens():
    tx = kvjax.Full()
    cache = new_cache(tx, max_prompt=24, max_new=2)
    with pytest.raises(RuntimeError, match=r"the row has more tokens, 27, than the .* = 26 of"):
        kvjax.check_dropped(steps(tx, cache, 3))
    cache = new_cache(tx, max_prompt=20, max_new=0)
    where = right([0, 0, 0], [24, 17, 5], 24)
    _, reading = prompt(tx, cache, tokens(), where, last=False)
    with pytest.raises(RuntimeError, match=r"up to 4 of a row: the row has more tokens, 24"):
        kvjax.check_dropped(reading)


def test_errors():
    tx = kvjax.Full()
    cache = new_cache(tx)

    @jax.jit
    def loop(cache):
        kvjax.check_dropped(cache)
        return cache

    with pytest.raises(ValueError, match="outside of jit"):
        loop(cache)
    with pytest.raises(TypeError, match="check_dropped: caches must be those of init_cache"):
        kvjax.check_dropped([attend])
