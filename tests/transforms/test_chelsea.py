"""Chelsea against its reference: merged keys, values and masses at every call."""

from __future__ import annotations

import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.references.chelsea import Chelsea
from tests.support.attending import attend, slots_of
from tests.support.marks import some_slow
from tests.support.method_pair import LENGTHS, Pair
from tests.support.tolerances import close

slow = pytest.mark.slow
SMALL = {"chunk": 8, "sinks": 2, "recent": 6, "interval": 10}
CASES = {
    "even": {"budget": 20},
    "one pass is not enough": {"budget": 12},
    "odd chunks, multi-head": {"budget": 16, "heads": (4, 1), "chunk": 5},
    "whole": {"budget": 24, "chunk": "whole"},
    "pairs": {"budget": 20, "heads": (2, 4), "chunk": 2, "interval": 7},
    "smallest": {"budget": 9, "interval": 1},
    "no sinks": {"budget": 12, "heads": (3, 2), "sinks": 0, "recent": 1},
    "share": {"budget": 0.2},
    "schedule": {"budget": 14, "ratio_0": 0.9, "decay": 0.2, "steps": 3, "floor": 0.5},
    "rotated": {"budget": 16, "rope": kvjax.Rope(np.float32([1.0, 0.3, 0.02, 0.001]))},
}
FIELDS = {"chunk", "sinks", "recent", "interval", "ratio_0", "decay", "steps", "floor"}


class ChelseaPair(Pair):
    """Compares the passes too, and what every slot holds at every call."""

    def _check_slots(self, row, where):
        super()._check_slots(row, where)
        state = getattr(self.cache, "cache", self.cache).state  # or that of a prompt being read
        for head in range(self.kv_heads):
            reference, length = self.references[row, head], self.host.length[row]
            assert reference.margin > 1e-6, f"near tie ({reference.margin}): change the seed"
            masses = np.exp(self.host.log_mass[row, head]).sum()
            close(masses, np.float32(length), "reference", where)
            assert int(state.passes[row, head]) == reference.passes, where
        if row == self.rows - 1:
            self.check_contents()

    @property
    def compressions(self) -> list[int]:
        """How often the first head of each row was compressed."""
        return [self.references[row, 0].compressions for row in range(self.rows)]


def pair(budget=16, *, max_new=64, **options) -> ChelseaPair:
    chosen = {name: options.pop(name) for name in FIELDS & set(options)}
    fields = {**SMALL, **chosen}
    in_reference = {**fields, "max_new": max_new}
    if fields["chunk"] == "whole":
        in_reference["chunk"] = 10_000
    return ChelseaPair(
        kvjax.Chelsea(budget, **fields),
        lambda **attention: Chelsea(budget, **in_reference, **attention),
        max_new=max_new,
        **options,
    )


@pytest.mark.parametrize("name", some_slow(CASES, "whole"))
def test_prompt_and_64_decode_steps(name):
    both = pair(**CASES[name]).prompt(LENGTHS)
    before = both.compressions
    both.decode(64)
    assert min(np.subtract(both.compressions, before)) >= 3


@pytest.mark.parametrize("side", ["left", pytest.param("scattered", marks=slow)])
def test_ties_go_to_the_lower_position(side):
    """Identical keys: every A goes to the first B of its chunk, the first A first."""
    both = pair(32, seed=6, sinks=0, recent=8)
    both.k[:], both.q[:] = np.eye(8)[0], 0.0
    both.prompt(LENGTHS, side)
    # Of 29 others, 5 have to go: offsets 0, 2, 4 and 6 of the first chunk, 0 of the second.
    assert both.kept(0, 0) == [p for p in range(37) if p not in (0, 2, 4, 6, 8)]
    mass = np.exp(slots_of(both.cache, 0, 0)["log_mass"])
    np.testing.assert_allclose(mass[:4], [5, 1, 1, 1], rtol=1e-6)


@pytest.mark.parametrize("share", [0.21, 0.07, 0.29, 0.57, 1.0])
def test_the_most_merges_of_a_pass_are_exact(share):
    """In float32, 0.21 of 300 edges are 62, and in float64 0.29 of 100 are 28."""
    [most] = kvjax.Chelsea(128, ratio_0=share).most_merges(2000)
    expected = [math.floor(Fraction(str(share)) * edges) for edges in range(len(most))]
    assert most.tolist() == expected and len(most) > 1000


def test_the_schedule_of_merges_is_exact():
    """0.9 - 3 · 0.2 is 0.3, and 0.29999999999999993 in float64."""
    most = kvjax.Chelsea(128, ratio_0=0.9, decay=0.2, steps=4, floor=0.2).most_merges(20)
    assert most[:, 10].tolist() == [9, 7, 5, 3, 2]


@pytest.mark.parametrize("chunk", [2, "whole"])
def test_a_cache_of_one_slot(chunk):
    transform = kvjax.Chelsea(9, **{**SMALL, "chunk": chunk})
    size = {"batch": 1, "kv_heads": 1, "head_dim": 8, "max_prompt": 1, "max_new": 0}
    row = jnp.ones((1, 1, 1, 8))
    cache = kvjax.init_cache(transform, **size, dtype=jnp.float32)
    _, cache = attend(cache, row, row, row, jnp.array([[0]]), phase="prompt")
    assert slots_of(cache, 0, 0)["position"].tolist() == [0]


# --- what is refused ------------------------------------------------------------------------------

BAD = {
    "budget": (lambda: kvjax.Chelsea(80), ValueError, "80", "at least 81", "sinks + recent + 1"),
    "ratio": (lambda: kvjax.Chelsea(128, ratio_0=1.1), ValueError, "1.1", "ratio_0"),
    "halt": (lambda: kvjax.Chelsea(128, decay=0.5, steps=2), ValueError, "above 0", "2 steps"),
    "outliers": (lambda: kvjax.Chelsea(128, outlier_heads=((0, 1),)), TypeError, "(0, 1)"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    build, error, *words = BAD[name]
    with pytest.raises(error) as caught:
        build()
    assert all(word in str(caught.value) for word in words), str(caught.value)
