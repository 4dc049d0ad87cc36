"""Chelsea against its reference: merged keys, values and masses at every call."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.references.chelsea import Chelsea
from tests.support.attending import flush, init_cache, slots_of
from tests.support.method_pair import LENGTHS, SIDES, Pair, attend
from tests.support.tolerances import close

SMALL = {"chunk": 8, "sinks": 2, "recent": 6, "interval": 10}
CASES = {
    # budget, heads (KV heads, query heads per KV head), changes of SMALL
    "even": (20, (2, 2), {}),
    "one pass is not enough": (12, (2, 2), {}),
    "odd chunks, multi-head": (16, (4, 1), {"chunk": 5}),
    "one chunk": (24, (2, 2), {"chunk": 256}),
    "whole": (24, (2, 2), {"chunk": "whole"}),
    "pairs": (20, (2, 4), {"chunk": 2, "interval": 7}),
    "smallest": (9, (2, 2), {"interval": 1}),
    "no sinks": (12, (3, 2), {"sinks": 0, "recent": 1}),
    "share": (0.2, (2, 2), {}),
    "schedule": (14, (2, 2), {"ratio_0": 0.9, "decay": 0.2, "steps": 3, "floor": 0.5}),
    "slow": (20, (2, 2), {"ratio_0": 0.3}),
}
MAX_NEW = 64


class ChelseaPair(Pair):
    """Compares what every slot holds, too."""

    def _check(self, row, head, out, expected):
        super()._check(row, head, out, expected)
        where = f"row {row}, head {head}, {self.next[row]} tokens so far"
        reference, mine = self.references[row, head], slots_of(self.cache, row, head)
        assert reference.margin > 1e-6, f"near tie ({reference.margin}): change the seed"
        tokens = reference.slots
        if len(tokens):
            self.close(mine["k"], tokens.keys, where)
            self.close(mine["v"], tokens.values, where)
            close(np.exp(mine["log_mass"]), np.exp(tokens.log_mass), "reference", where)
        close(np.exp(mine["log_mass"]).sum(), np.float32(self.host.length[row]), "reference", where)
        assert int(self.cache.state.passes[row, head]) == reference.passes, where

    @property
    def compressions(self) -> list[int]:
        """How often the first head of each row was compressed."""
        return [self.references[row, 0].compressions for row in range(self.rows)]


def pair(budget, heads=(2, 2), changes=None, *, max_new=MAX_NEW, **kwargs) -> ChelseaPair:
    fields = {**SMALL, **(changes or {})}
    in_reference = {**fields, "max_new": max_new}
    if fields["chunk"] == "whole":
        in_reference["chunk"] = 10_000
    return ChelseaPair(
        kvjax.Chelsea(budget, **fields),
        lambda **o: Chelsea(budget, **in_reference, **o),
        heads=heads,
        max_new=max_new,
        **kwargs,
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.fast_cases("whole")
def test_prompt_and_64_decode_steps(case):
    both = pair(*case).prompt(LENGTHS)
    before = both.compressions
    both.decode(64)
    assert min(np.subtract(both.compressions, before)) >= 3


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.fast_cases("scattered")
def test_padding(side):
    pair(16, seed=1).prompt(LENGTHS, side).decode(12)


def test_prompt_in_chunks():
    pair(16, seed=2).prompt(LENGTHS, chunks=2).decode(12)


@pytest.mark.parametrize("budget", [16, 0.2])
@pytest.mark.fast_cases("16")
def test_second_turn(budget):
    """Merged tokens are merged again with their masses; a share is taken anew."""
    both = pair(budget, seed=3).prompt(LENGTHS)
    both.decode(20).prompt((9, 30, 0), "left").decode(30)


def test_row_that_has_stopped_keeps_its_tokens():
    both = pair(16, seed=5).prompt(LENGTHS).decode(10)
    before = both.kept(0, 1)
    both.decode(20, stopped=(0, 1))
    assert both.kept(0, 1) == before


@pytest.mark.slow
def test_prompts_shorter_than_the_budget_and_none():
    both = pair(0.01, seed=4).prompt((1, 0, 2)).decode(20)
    assert both.kept(1, 0)[:2] == [0, 1]


@pytest.mark.parametrize("side", SIDES)
def test_ties_go_to_the_lower_position(side):
    """Identical keys: every A goes to the first B of its chunk, the first A first."""
    both = pair(32, seed=6, changes={"sinks": 0, "recent": 8})
    both.k[:], both.q[:] = np.eye(8)[0], 0.0
    both.prompt(LENGTHS, side)
    # Of 29 others, 5 have to go: offsets 0, 2, 4 and 6 of the first chunk, 0 of the second.
    assert both.kept(0, 0) == [p for p in range(37) if p not in (0, 2, 4, 6, 8)]
    mass = np.exp(slots_of(both.cache, 0, 0)["log_mass"])
    np.testing.assert_allclose(mass[:4], [5, 1, 1, 1], rtol=1e-6)


def test_rope_is_in_the_keys_that_are_compared():
    rope = kvjax.Rope(np.float32([1.0, 0.3, 0.02, 0.001]))
    pair(16, rope=rope, seed=7).prompt(LENGTHS).decode(12)


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


# --- what merging must not change -----------------------------------------------------------------


@pytest.fixture(scope="module")
def identical():
    """A prompt of 64 tokens whose keys are all alike, read by both caches."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, 4, 80, 8)).astype(np.float32)
    k = np.broadcast_to(rng.normal(size=(1, 2, 1, 8)), (1, 2, 80, 8)).astype(np.float32)
    v = rng.normal(size=(1, 2, 80, 8)).astype(np.float32)
    return q, k, v


def read(transform, qkv, tokens=64):
    cache = init_cache(
        transform, batch=1, kv_heads=2, query_heads=4, head_dim=8, max_prompt=64, max_new=16
    )
    part = [x[:, :, :tokens] for x in qkv]
    return attend(transform, cache, *part, jnp.arange(tokens)[None], phase="prompt")[1]


@pytest.mark.slow
def test_merging_identical_keys_leaves_attention_unchanged(identical):
    outs = []
    for transform in (kvjax.Full(), kvjax.Chelsea(9, **SMALL)):
        cache = read(transform, identical)
        steps = []
        for now in range(64, 80):
            new = [x[:, :, now : now + 1] for x in identical]
            out, cache = attend(transform, cache, *new, jnp.array([[now]]), phase="decode")
            steps.append(np.asarray(out))
            if (now - 63) % SMALL["interval"] == 0:
                cache = flush(cache, SMALL["interval"])
        outs.append(np.stack(steps))
    close(outs[1], outs[0], "rounding")


def test_a_budget_that_covers_everything_changes_no_bit(identical):
    full, mine = read(kvjax.Full(), identical), read(kvjax.Chelsea(80, **SMALL), identical)
    for name, expected in slots_of(full, 0, 0).items():
        np.testing.assert_array_equal(slots_of(mine, 0, 0)[name], expected)


def test_a_step_copies_no_keys_or_values():
    transform = kvjax.Chelsea(256, chunk=64)
    size = {"batch": 1, "kv_heads": 2, "query_heads": 4, "head_dim": 16}
    cache = jax.eval_shape(
        lambda: kvjax.init_cache(transform, **size, max_prompt=1000, max_new=500, dtype="float32")
    )

    def step(cache, q, kv):
        return kvjax.attend(transform, cache, q, kv, kv, jnp.array([[700]]), phase="decode")

    q, kv = (jax.ShapeDtypeStruct((1, heads, 1, 16), jnp.float32) for heads in (4, 2))
    compiled = jax.jit(step, donate_argnums=0).lower(cache, q, kv).compile()
    entry = compiled.as_text().split("\nENTRY")[1].split("\n}")[0]
    store = ",".join(map(str, cache.kv.k.shape))
    assert f"f32[{store}]" in entry
    assert not re.search(rf"f32\[{store}\]\S* copy\(", entry)
    stored = 2 * cache.kv.k.data.size * 4
    assert compiled.memory_analysis().alias_size_in_bytes >= stored


@pytest.mark.parametrize("chunk", [2, "whole"])
def test_a_cache_of_one_slot(chunk):
    transform = kvjax.Chelsea(9, **{**SMALL, "chunk": chunk})
    size = {"batch": 1, "kv_heads": 1, "head_dim": 8, "max_prompt": 1, "max_new": 0}
    row = jnp.ones((1, 1, 1, 8))
    cache = kvjax.init_cache(transform, **size, dtype=jnp.float32)
    _, cache = attend(transform, cache, row, row, row, jnp.array([[0]]), phase="prompt")
    assert slots_of(cache, 0, 0)["position"].tolist() == [0]


# --- what is refused ------------------------------------------------------------------------------

BAD = {
    "budget": (lambda: kvjax.Chelsea(80), ValueError, "80", "at least 81", "sinks + recent + 1"),
    "share": (lambda: kvjax.Chelsea(1.5), ValueError, "1.5", "(0, 1]"),
    "text": (lambda: kvjax.Chelsea("many"), TypeError, "many", "int"),
    "chunk": (lambda: kvjax.Chelsea(128, chunk=1), ValueError, "1", "at least 2"),
    "chunk as text": (lambda: kvjax.Chelsea(128, chunk="all"), TypeError, "all", "chunk"),
    "sinks": (lambda: kvjax.Chelsea(128, sinks=-1), ValueError, "-1", "sinks"),
    "recent": (lambda: kvjax.Chelsea(128, recent=0), ValueError, "0", "recent"),
    "interval": (lambda: kvjax.Chelsea(128, interval=0), ValueError, "0", "interval"),
    "ratio": (lambda: kvjax.Chelsea(128, ratio_0=1.1), ValueError, "1.1", "ratio_0"),
    "decay": (lambda: kvjax.Chelsea(128, decay="fast"), TypeError, "fast", "decay"),
    "floor": (lambda: kvjax.Chelsea(128, floor=-0.1), ValueError, "-0.1", "floor"),
    "halt": (lambda: kvjax.Chelsea(128, decay=0.5, steps=2), ValueError, "above 0", "2 steps"),
    "outliers": (lambda: kvjax.Chelsea(128, outlier_heads=((0, 1),)), TypeError, "(0, 1)"),
    "layers": (lambda: kvjax.Chelsea(128, keep_layers=[0]), TypeError, "[0]", "tuple"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    build, error, *words = BAD[name]
    with pytest.raises(error) as caught:
        build()
    assert all(word in str(caught.value) for word in words), str(caught.value)
