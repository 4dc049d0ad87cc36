"""CaM over every evicting method against its reference: outputs, kept positions and values."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import H2O, CaM, Every, PyramidKV, SnapKV, StreamingLLM
from kvjax.compose.foreseen import frees_while_decoding
from kvjax.decisions import Retain
from kvjax.transforms.cam import _sum_of_next
from tests.references import cam, h2o, pyramidkv, streaming_llm
from tests.support.method_pair import LENGTHS, Pair
from tests.transforms import test_repeated_snapkv as repeated

SEED, LAYER, LAYERS = 5, 1, 3


# The base, its reference, and its window of newest tokens.
BASES = {
    "streaming_llm": (
        StreamingLLM(12, sinks=3),
        functools.partial(streaming_llm.StreamingLLM, 12, sinks=3),
        lambda base: base.limit - 3,
    ),
    "h2o": (
        H2O(0.3), functools.partial(h2o.H2O, 0.3), lambda base: base.limit - base.limit // 2,
    ),
    "pyramidkv": (
        PyramidKV(20, 8),
        functools.partial(pyramidkv.PyramidKV, 20, LAYER, LAYERS, observation=8),
        8,
    ),
    "every": (
        Every(SnapKV(20, 8), steps=6),
        functools.partial(repeated.EverySnapKV, 20, 8, steps=6),
        8,
    ),
}  # fmt: skip
slow = pytest.mark.slow


def the_draw(head: int, position: int) -> float:
    """The rule of the docstring: a number per seed, layer, KV head and position."""
    key = jax.random.key(SEED)
    for part in (LAYER, head, position):
        key = jax.random.fold_in(key, part)
    return float(jax.random.uniform(key))


def pair(name="h2o", *, merge_tokens=None, expected=False, prompt=False, **options) -> Pair:
    base, base_reference, recent = BASES[name]
    transform = CaM(base, merge_tokens, expected=expected, prompt=prompt, seed=SEED)
    heads = itertools.cycle(range(2))  # a reference is made per row and head, heads fastest

    def reference(**attention):
        draw = None if expected else functools.partial(the_draw, next(heads))
        return cam.CaM(base_reference(**attention), merge_tokens or recent, draw, prompt)

    return Pair(
        kvjax.bind(transform, LAYERS)[LAYER], reference, layer=LAYER, contents=True,
        max_prompt=repeated.MAX_PROMPT, max_new=repeated.MAX_NEW, **options,
    )  # fmt: skip


def merges(both: Pair) -> list[tuple[int, float]]:
    return [merge for reference in both.references.values() for merge in reference.merged]


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        pytest.param(name, prompt, marks=[slow] * ((name, prompt) != ("pyramidkv", True)))
        for name in BASES
        for prompt in (True, False)
    ],
)
def test_prompt_and_decode_steps(name, prompt):
    """With draws in the prompt too, and with the expected merges while decoding alone."""
    both = pair(name, expected=not prompt, prompt=prompt).prompt(LENGTHS, "scattered")
    assert bool(merges(both)) == prompt
    before = len(merges(both))
    both.decode(16)
    assert (len(merges(both)) > before) == frees_while_decoding(both.transform)


@pytest.mark.parametrize(
    ("name", "merge_tokens"),
    [("streaming_llm", 1), *(pytest.param(x, 200, marks=slow) for x in ("h2o", "every"))],
)
def test_merge_tokens(name, merge_tokens):
    """Fewer targets than m where m is larger than what is left; still divided by m."""
    both = pair(name, merge_tokens=merge_tokens, prompt=True, expected=True, seed=1)
    both.prompt(LENGTHS).decode(12)


@pytest.mark.parametrize("count", [1, 2, 5, 7, 8, 100])
def test_sums_of_the_next_entries(count):
    """Exact whatever stood before: a difference of prefix sums would lose the small numbers."""
    x = np.array([1e8, 1e-3, 2e-3, 0.0, 4e-3, 5e-3, 6e-3, 7e-3], np.float32)
    sums = _sum_of_next(jnp.asarray(x)[None, None], jnp.full((1, 1, 1), count))
    expected = [x[n : n + count].astype(float).sum() for n in range(8)]
    np.testing.assert_allclose(np.asarray(sums)[0, 0], expected, rtol=1e-6)


@pytest.mark.slow
def test_attention_of_nothing():
    """0 / 0 is 0: nobody looks at the tokens after the first, except themselves at first."""
    both = pair("streaming_llm", expected=True, prompt=True, seed=4)
    both.q[:], both.k[:] = 0.0, 0.0
    both.q[..., 0], both.k[:, :, 0, 0] = 1000.0, 8**0.5
    both.prompt(LENGTHS).decode(12)
    assert {p for _, p in merges(both)} == {0.0}


@dataclasses.dataclass(frozen=True)
class Newest(kvjax.KVTransform):
    """Evicts, and names no window."""

    def on_step(self, cache, state, step):
        return Retain(cache.position >= 4), state


SIZE = {"batch": 1, "kv_heads": 1, "head_dim": 4, "max_prompt": 8, "max_new": 1}
REFUSED = {
    "full": (lambda: CaM(kvjax.Full()), ValueError, "Full.*"),
    "itself": (lambda: CaM(CaM(H2O(8))), ValueError, "evicts tokens.*CaM"),
    "groups": (lambda: CaM(kvjax.HeadGroups((((0,), H2O(8)),))), ValueError, "HeadGroups"),
    "no tokens": (lambda: CaM(H2O(8), merge_tokens=0), ValueError, "at least 1, got 0"),
    "no window": (
        lambda: kvjax.init_cache(CaM(Newest()), **SIZE), ValueError, "must be given.*Newest"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(case):
    make, error, message = case
    with pytest.raises(error, match=message):
        make()
