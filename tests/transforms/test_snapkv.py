"""SnapKV against its reference: kept positions and outputs at every call."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.references.snapkv import SnapKV
from tests.support.method_pair import LENGTHS, SIDES, Pair

DEFAULT = (20, 8, 7, "max", "mean", (2, 2))
CASES = {
    # budget, window, kernel, pooling, group_reduce, heads (KV heads, query heads per KV head)
    "default": DEFAULT,
    "authors' code": (20, 8, 5, "avg", "mean", (2, 2)),
    "no pooling, max": (16, 4, 1, "max", "max", (2, 4)),
    "wide average, sum": (24, 6, 13, "avg", "sum", (3, 2)),
    "smallest": (2, 1, 3, "avg", "mean", (4, 1)),
    "long window": (40, 32, 7, "max", "mean", (2, 1)),
    "share": (0.5, 8, 7, "max", "max", (2, 2)),
    "tiny share": (0.01, 8, 3, "max", "mean", (2, 2)),  # window + 1 everywhere
}


def pair(
    budget,
    window=8,
    kernel=7,
    pooling="max",
    reduce="mean",
    heads=(2, 2),
    *,
    options=None,
    **kwargs,
) -> Pair:
    """`options` are those of attention: its sliding window is not SnapKV's."""
    return Pair(
        kvjax.SnapKV(budget, window, kernel, pooling, reduce),
        lambda **o: SnapKV(budget, window, kernel, pooling, reduce, **o),
        heads=heads,
        **(options or {}),
        **kwargs,
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.fast_cases("authors' code")
def test_prompt_and_decode(case):
    """Rows of 37, 5 and 52 tokens; nothing is evicted while decoding."""
    both = pair(*case).prompt(LENGTHS)
    kept = both.kept(2, 1)
    both.decode(20)
    assert both.kept(2, 1) == [*kept, *range(52, 72)]


@pytest.mark.parametrize("side", SIDES)
def test_padding(side):
    pair(*DEFAULT, seed=1).prompt(LENGTHS, side).decode(2)


@pytest.mark.parametrize("case", ["default", "long window"])
@pytest.mark.fast_cases("long window")
def test_prompt_in_chunks(case):
    """The observation window reaches back over the boundary, or lies in the first chunk."""
    both = pair(*CASES[case], seed=2).prompt((37, 24, 52), chunks=2)
    assert len(both.kept(1, 0)) == min(24, CASES[case][0])
    both.decode(2)


@pytest.mark.parametrize("case", ["default", "share"])
@pytest.mark.parametrize("side", ["right", "scattered"])
def test_second_turn(case, side):
    """Everything live, 20 generated tokens too, is compressed as one prompt.

    The last row gets no token of the second prompt: its queries are still those of the first.
    """
    both = pair(*CASES[case], seed=3).prompt(LENGTHS).decode(20)
    both.prompt((9, 30, 0), side).decode(5).prompt((1, 2, 3), side)


def test_prompts_shorter_than_the_window():
    """Fewer queries than the window are averaged once a second turn has something to evict; a row
    that has no second turn is left alone."""
    both = pair(*DEFAULT, seed=4).prompt((3, 7, 1), "left").decode(20)
    assert both.kept(0, 0) == list(range(23))
    both.prompt((1, 2, 0))
    assert [len(both.kept(row, 1)) for row in range(3)] == [20, 20, 21]


SINKS = np.array([0.5, 6.0, -2.0, 3.0])


@pytest.mark.parametrize(
    "options",
    [{"window": 17}, {"scale": 0.9, "window": 30, "soft_cap": 2.5}, {"sinks": SINKS}],
)
@pytest.mark.fast_cases("options0", "options2")
def test_attention_options(options):
    """Scores follow the sliding window, the soft cap and the sinks of attention. (Most tokens that
    a sliding window hides score 0, and tie.)"""
    both = pair(*DEFAULT, options=options, seed=5).prompt(LENGTHS).decode(20)
    both.prompt((9, 30, 0))


def test_rope():
    rope = kvjax.Rope(np.float32([1.0, 0.3, 0.02, 0.001]))
    pair(*DEFAULT, rope=rope, seed=6).prompt(LENGTHS).decode(20).prompt((9, 30, 0))


@pytest.mark.parametrize("side", SIDES)
def test_ties_go_to_the_lower_position(side):
    """Identical keys: every prefix token is seen alike."""
    both = pair(*DEFAULT, seed=7)
    both.k[:] = 1.0
    both.prompt(LENGTHS, side)
    for head in range(2):
        assert both.kept(0, head) == [*range(12), *range(29, 37)]
        assert both.kept(2, head) == [*range(12), *range(44, 52)]


def test_ties_at_the_edge_of_the_average():
    """The average counts the zeros beyond both ends: identical keys score lower there.

    Of 29 prefix tokens, the 25 that have two neighbours on both sides tie.
    """
    both = pair(*CASES["authors' code"], seed=8)
    both.q[:], both.k[:] = 0.0, 1.0
    both.prompt(LENGTHS)
    assert both.kept(0, 0) == [*range(2, 14), *range(29, 37)]


@pytest.mark.slow
def test_a_longer_window_in_a_chain_is_not_looked_at():
    """A neighbour that keeps everything changes nothing, whatever it asks of `attend`."""
    alone, neighbour = kvjax.SnapKV(16, window=4), kvjax.SnapKV(64, window=32)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, n, 64, 8)), jnp.float32) for n in (4, 2, 2))
    kept = []
    for transform in (alone, kvjax.chain(neighbour, alone)):
        cache = kvjax.init_cache(
            transform, batch=1, kv_heads=2, query_heads=4, head_dim=8, max_prompt=64, max_new=4
        )
        _, cache = kvjax.attend(transform, cache, q, k, v, jnp.arange(64)[None], phase="prompt")
        kept.append(np.asarray(cache.kv.position[:, :, :16]))
    np.testing.assert_array_equal(*kept)
