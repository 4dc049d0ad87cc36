"""Methods that change what is stored, in 16 bits, against their float64 references."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import kvjax
from tests.references import cam, streaming_llm
from tests.references.kvmerger import KVMerger
from tests.support.attending import slots_of
from tests.support.marks import some_slow
from tests.support.method_pair import Pair
from tests.support.tolerances import within_roundings
from tests.transforms import test_chelsea as chelsea

every_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def positive(both: Pair, mean: float) -> Pair:
    """Values around a mean: what is merged into them adds up."""
    both.v = both.held(mean + 0.3 * both.v)
    return both


# A thousand steps in float16 run before a release.
LONG = ("bfloat16", 512, 1000), ("float16", 512, 1000)


@pytest.mark.parametrize(
    ("dtype", "budget", "steps"),
    some_slow(
        [("bfloat16", 24, 60), ("float16", 24, 60), *LONG],
        ("bfloat16", 24, 60), ("float16", 24, 60), exhaustive=LONG[1:],
    ),
)  # fmt: skip
def test_what_cam_adds_is_not_rounded_away(dtype, budget, steps):
    """Each step adds a five-hundredth of a value to five hundred others, many times over."""
    sinks, recent = 4, budget - 4
    both = Pair(
        kvjax.CaM(kvjax.StreamingLLM(budget, sinks), expected=True),
        lambda **o: cam.CaM(streaming_llm.StreamingLLM(budget, sinks, **o), recent, None, False),
        rows=1, heads=(1, 2), max_prompt=56, max_new=steps, dtype=dtype, roundings=1.5,
    )  # fmt: skip
    positive(both, 0.5).prompt((50,)).decode(steps)
    [reference] = both.references.values()
    own = slots_of(both.cache, 0, 0)
    within_roundings(own["v"], reference.slots.values, dtype, 1.0, "values")
    merged = reference.slots.values.mean()
    assert merged > 0.55  # without merging 0.5


@every_dtype
def test_keys_a_little_apart_are_not_equal_to_kvmerger(dtype):
    """Keys of a set are 2 to 3 % apart; rounding to bfloat16 moves them by 0.4 % at most."""
    both = Pair(
        kvjax.KVMerger(None, 0.9, recent=1, heavy=0),
        functools.partial(KVMerger, budget=None, epsilon=0.9, recent=1, heavy=0),
        rows=1, heads=(1, 1), dtype=dtype, roundings=1.5,
    )  # fmt: skip
    token = np.arange(both.k.shape[2])
    apart = np.array([0.0, 0.02, 0.025, 0.03])[token % 4, None]
    directions = np.eye(8)[token // 4 % 4] + apart * np.eye(8)[4 + token // 4 % 4]
    both.k = both.held(directions)[None, None]
    both.prompt((16,))
    [reference] = both.references.values()
    own = slots_of(both.cache, 0, 0)
    within_roundings(own["v"], reference.slots.values, dtype, 1.5, "values")
    within_roundings(own["k"], reference.slots.keys, dtype, 1.5, "keys")


@pytest.mark.parametrize("dtype", some_slow(["bfloat16", "float16"], exhaustive={"float16"}))
def test_chelsea_over_many_flushes(dtype):
    """Keys are equal, so that rounding decides nothing; values are merged again and again."""
    both = chelsea.pair(20, max_new=1000, seed=3, dtype=dtype, roundings=3.0)
    both.k[:] = np.eye(8)[0]
    positive(both, 0.45).prompt(chelsea.LENGTHS).decode(1000)
