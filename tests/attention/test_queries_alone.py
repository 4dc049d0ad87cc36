"""Queries without keys and values attend to what a cache holds, and leave it as it is."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax.attention.layer import layer_caches
from tests.compose.test_conformance import CASES, LENGTHS, WIDTH, standard, tokens
from tests.support.attending import (
    attend,
    attended,
    has_probe,
    new_cache,
    prompt,
    right,
    same_arrays,
    the_rope,
)
from tests.support.cases import COVERING, kinds, names, selects
from tests.support.tolerances import close

# Rings of that test hold what the next token sees: see test_ring.py for those that hold more.
CASES = {name: tx for name, tx in CASES.items() if not name.startswith("ring")}
FAST = ("full", "h2o", "every", "chelsea", "clusterkv", "quantize", "head_groups", "reposition")


def alone(tx, cache, positions, phase="decode", **options):
    q, _, _, positions = tokens().at(positions)
    return attend(cache, q, None, None, positions, phase=phase, rope=the_rope(), **options)


again = jax.jit(functools.partial(kvjax.attend, repeats=True), static_argnames=("phase",))


def last_tokens() -> np.ndarray:
    return np.array(LENGTHS)[:, None] - 1


@pytest.mark.parametrize("name", names([n for n in CASES if not selects(n)], *FAST))
def test_a_token_that_is_there_is_not_added_again(name):
    """It attends to what is live by float64, after a prompt and after a step."""
    tx, run = CASES[name], standard(name)
    for cache, where in ((run.prompt_cache, last_tokens()), (run.caches[0], last_tokens() + 1)):
        out, after = alone(tx, cache, where)
        same_arrays(after, cache)
        close(out, attended(tx, cache, tokens(), where, queries_alone=True))


@pytest.mark.parametrize("name", names(filter(selects, COVERING), "clusterkv"))
def test_methods_that_select_choose_among_what_is_there(name):
    """They select everything where they may."""
    tx = COVERING[name]
    _, cache = prompt(tx, new_cache(tx), tokens(), right([0, 0, 0], LENGTHS, WIDTH))
    out, after = alone(tx, cache, last_tokens())
    same_arrays(after, cache)
    close(out, attended(tx, cache, tokens(), last_tokens(), queries_alone=True))


@pytest.mark.parametrize("name", kinds(CASES, "full", "h2o", "clusterkv", "head_groups"))
def test_a_layer_that_shares_keys_attends_to_the_whole_prompt(name):
    """The method decides at the prompt's end as if there were no such queries."""
    tx, where = CASES[name], right([0, 0, 0], LENGTHS, WIDTH)
    expected_out, reading = prompt(tx, new_cache(tx), tokens(), where, last=False)
    out, same = alone(tx, reading, where, phase="prompt", last=False)
    same_arrays(same, reading)
    close(out, expected_out)
    if not has_probe(tx):
        new = prompt(tx, new_cache(tx), tokens(), where)[1]
        out, cache = alone(tx, reading, where, phase="prompt")
        close(out, expected_out)
        for part, twin in zip(layer_caches(cache), layer_caches(new), strict=True):
            np.testing.assert_array_equal(part.kv.live.sum(-1), twin.kv.live.sum(-1))


def test_several_queries_a_step_and_padding():
    tx, cache = CASES["snapkv"], standard("snapkv").prompt_cache
    where = np.array([[20, 23, -1], [-1, -1, -1], [4, -1, 0]])
    out, after = alone(tx, cache, where)
    same_arrays(after, cache)
    close(out, attended(tx, cache, tokens(), where, queries_alone=True))
    assert not np.asarray(out)[where[:, None] * np.ones((3, 4, 3)) < 0].any()


def test_errors():
    cache = standard("full").prompt_cache
    q, k, _, positions = tokens().at(last_tokens())
    for new, phase, error, message in (
        ((k, None), "decode", TypeError, "give both k and v"),
        ((None, None), "probe", ValueError, "need k and v, got None for phase='probe'"),
        ((None, None), "prompt", ValueError, "has been read with last=False"),
    ):
        with pytest.raises(error, match=message):
            kvjax.attend(cache, q, *new, positions, phase=phase)
    with pytest.raises(ValueError, match="one token a step, got 2"):
        alone(CASES["clusterkv"], standard("clusterkv").prompt_cache, np.zeros((3, 2), int))
    with pytest.raises(ValueError, match="4 query heads"):
        kvjax.attend(cache, q[:, :3], None, None, positions, phase="decode")


@pytest.mark.parametrize("name", names(CASES, *FAST))
def test_a_row_may_repeat_its_last_token_while_others_go_on(name):
    """The first row's token is there already, the second one's is new, the third row has none."""
    cache, lengths = standard(name).prompt_cache, np.array(LENGTHS)
    where = np.array([[lengths[0] - 1], [lengths[1]], [-1]])
    *qkv, positions = tokens().at(where)
    q, k, v = qkv
    options = {"phase": "decode", "rope": the_rope()}
    out, after = again(cache, q, k, v, positions, **options)
    only_second = np.where(np.arange(3)[:, None] == 1, where, -1)
    expected, twin = attend(cache, q, k, v, only_second, **options)
    first, _ = attend(
        cache, q, None, None, np.where(np.arange(3)[:, None] == 0, where, -1), **options
    )
    close(out, np.concatenate([first[:1], expected[1:]]))
    for part, other in zip(layer_caches(after), layer_caches(twin), strict=True):
        same_arrays((part.kv, part.window), (other.kv, other.window))
