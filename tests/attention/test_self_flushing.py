"""Caches that flush themselves give what a loop gives that calls `flush`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.attention.layer import layer_caches
from tests.compose.test_conformance import CASES, LENGTHS, STEPS, WIDTH, names, standard, tokens
from tests.support.attending import (
    MAX_NEW,
    decode,
    decoded,
    flushed,
    new_cache,
    prompt,
    right,
    same_arrays,
    the_rope,
)


def interval_of(transform) -> int | None:
    return kvjax.flush_interval(jax.eval_shape(lambda: new_cache(transform)))


FLUSHED = [name for name in CASES if interval_of(CASES[name])]
FAST = ("every", "chelsea", "clusterkv_offload", "h2o_codebook")
GROUPS = kvjax.HeadGroups((((1,), CASES["every"]), ((0,), kvjax.Full())))


def after_prompt(transform, positions):
    cache = kvjax.self_flushing(new_cache(transform, len(positions)))
    return prompt(transform, cache, tokens().rows(range(len(positions))), positions)[1]


def one_position(lengths) -> np.ndarray:
    return np.asarray(lengths)[:, None]


def as_made(caches):
    """The caches without the counts of their steps."""
    return [
        (part.kv, part.state, part.window, part.rope, part.options) for part in layer_caches(caches)
    ]


@pytest.mark.parametrize("name", names(FLUSHED, *FAST))
def test_a_scan_of_steps_gives_what_a_loop_with_flushes_gives(name):
    tx = CASES[name]
    cache = after_prompt(tx, right([0, 0, 0], LENGTHS, WIDTH))
    where = one_position(LENGTHS) + np.arange(STEPS)
    q, k, v, positions = (np.asarray(x) for x in tokens().at(where))

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(cache, q, k, v, positions):
        def step(cache, new):
            out, cache = kvjax.attend(cache, *new, phase="decode", rope=the_rope())
            return cache, out

        return jax.lax.scan(step, cache, (q, k, v, positions))

    steps = [np.moveaxis(x[..., None, :], 2, 0) for x in (q, k, v)]
    cache, outs = loop(cache, *steps, np.moveaxis(positions, 1, 0)[..., None])
    expected = standard(name)
    np.testing.assert_allclose(outs, np.stack(expected.outs), rtol=1e-5, atol=1e-5)
    assert kvjax.flush_interval(cache) is None and kvjax.flush(cache) is cache
    for part, twin in zip(layer_caches(cache), layer_caches(expected.caches[-1]), strict=True):
        np.testing.assert_array_equal(part.kv.dropped, 0)
        # The loop has flushed behind its last step where the number of steps was a multiple of M.
        if STEPS % interval_of(tx):
            np.testing.assert_array_equal(part.kv.live.sum(-1), twin.kv.live.sum(-1))


@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(CASES["every"], id="every"),
        pytest.param(GROUPS, id="head_groups", marks=pytest.mark.slow),
    ],
)
def test_it_is_the_same_bit_for_bit_in_a_while_loop_and_a_further_turn(tx):
    """A prompt of some rows flushes the others, as `generate` does between two turns."""
    interval, lengths = interval_of(tx), np.array(LENGTHS)
    positions = right([0, 0, 0], lengths, WIDTH)
    cache = new_cache(tx)
    _, cache = prompt(tx, cache, tokens(), positions)
    _, caches = decoded(tx, cache, tokens(), lengths, 5)
    turn = right(lengths + 5, [4, 0, 3], 4)
    _, expected = prompt(tx, caches[-1], tokens(), turn)
    expected = kvjax.flush(expected, interval)
    lengths = lengths + np.array([9, 5, 8])
    _, after = decoded(tx, expected, tokens(), lengths, 3)
    expected = after[-1]  # flushed, since M is 3

    own = after_prompt(tx, positions)
    every_token = tokens().at(np.tile(np.arange(tokens().q.shape[2]), (3, 1)))[:3]

    @functools.partial(jax.jit, donate_argnums=0)
    def steps(cache, start, count):
        def step(carry):
            number, cache = carry
            at = (start + number)[:, None]
            picked = (
                jnp.take_along_axis(jnp.asarray(x), at[:, None, :, None], axis=2)
                for x in every_token
            )
            _, cache = kvjax.attend(cache, *picked, at, phase="decode", rope=the_rope())
            return number + 1, cache

        return jax.lax.while_loop(lambda carry: carry[0] < count, step, (0, cache))[1]

    own = steps(own, jnp.array(LENGTHS), 5)
    _, own = prompt(tx, own, tokens(), turn)
    own = steps(own, jnp.asarray(lengths), 3)
    # The loop has flushed behind the third step, and the cache will before a fourth one.
    _, own = decode(tx, own, tokens(), lengths + 3)
    _, expected = decode(tx, expected, tokens(), lengths + 3)
    same_arrays(as_made(own), as_made(expected))


def test_rows_that_come_bring_their_count():
    tx = CASES["every"]
    one = after_prompt(tx, right([0], [24], WIDTH))
    batch = after_prompt(tx, right([0, 0, 0], LENGTHS, WIDTH))
    for step in range(2):
        _, one = decode(tx, one, tokens().rows([0]), [24 + step])
    batch = kvjax.put_rows(batch, [1], one)
    assert batch.clock.waiting.tolist() == [0, 2, 0]
    assert kvjax.take_rows(batch, [1, 1]).clock.waiting.tolist() == [2, 2]
    for step in range(2, MAX_NEW):
        _, batch = decode(tx, batch, tokens(), [24 + step] * 3)
    assert not batch.kv.dropped.any()


def test_all_layers_flush_at_the_least_interval():
    layers = kvjax.Every(kvjax.SnapKV(12, window=4), 6), CASES["every"], kvjax.Full()
    caches = kvjax.self_flushing([new_cache(tx) for tx in layers])
    assert [cache.clock and cache.clock.interval for cache in caches] == [3, 3, None]
    again = kvjax.self_flushing(caches)
    assert [cache.clock and cache.clock.interval for cache in again] == [3, 3, None]


def test_without_it_tokens_are_lost():
    """So that the tests above show something."""
    tx = CASES["every"]
    _, cache = prompt(tx, new_cache(tx), tokens(), right([0, 0, 0], LENGTHS, WIDTH))
    own = after_prompt(tx, right([0, 0, 0], LENGTHS, WIDTH))
    for step in range(STEPS):
        _, cache = decode(tx, cache, tokens(), np.array(LENGTHS) + step)
        _, own = decode(tx, own, tokens(), np.array(LENGTHS) + step)
    assert cache.kv.dropped.any() and not own.kv.dropped.any()


def test_steps_of_several_tokens():
    tx = kvjax.Quantize(4, 4, residual=4)
    where = right([0, 0, 0], LENGTHS, WIDTH)
    own, (_, cache) = after_prompt(tx, where), prompt(tx, new_cache(tx), tokens(), where)
    assert interval_of(tx) == 4
    for step in range(0, 8, 2):
        where = right(np.array(LENGTHS) + step, [2, 2, 2], 2)
        out, own = decode(tx, own, tokens(), where)
        expected, cache = decode(tx, cache, tokens(), where)
        cache = flushed(cache, step + 2)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_errors():
    tx = CASES["every"]
    where = right([0, 0, 0], LENGTHS, WIDTH)
    _, reading = prompt(tx, new_cache(tx), tokens(), where, last=False)
    with pytest.raises(ValueError, match="the prompt is not complete"):
        kvjax.self_flushing(reading)
    with pytest.raises(TypeError, match="caches must be those of init_cache"):
        kvjax.self_flushing([None, 3])
