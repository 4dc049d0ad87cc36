"""Rows do not depend on each other: a row without tokens in a turn or in steps stays as it is."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import kvjax
from kvjax import (
    H2O,
    CaM,
    Chelsea,
    Every,
    KVCrush,
    KVMerger,
    LayerBudgetEviction,
    PyramidInfer,
    SnapKV,
    StreamingLLM,
    WhenFull,
)
from tests.support.attending import Tokens, decode, new_cache, one_layer, prompt, right, slots_of

METHODS = {
    "streaming_llm": StreamingLLM(0.5),
    "h2o": H2O(0.5),
    "kvmerger": KVMerger(budget=0.5),
    "chelsea": Chelsea(0.3, sinks=1, recent=2, interval=4),
    "pyramidinfer": PyramidInfer(0.5, interval=4),
    "cam": CaM(StreamingLLM(0.5)),
    "kvcrush": KVCrush(H2O(0.5), representatives=3),
    "every snapkv": Every(SnapKV(0.5, window=4), steps=4),
    "when_full snapkv": WhenFull(SnapKV(0.5, window=4), room=4),
    "every layer_budget": Every(LayerBudgetEviction(0.5, window=4), steps=4),
    "when_full layer_budget": WhenFull(LayerBudgetEviction(0.5, window=4), room=4),
    "every kvmerger": Every(KVMerger(budget=10), steps=4),
    "when_full kvmerger": WhenFull(KVMerger(budget=10), room=4),
    "every kvcrush": Every(KVCrush(SnapKV(16, window=4)), steps=4),
}
LENGTHS = (21, 24)
INTERVAL = 4


class Layer:
    """One layer that is flushed as a loop does it."""

    def __init__(self, transform):
        self.transform, self.tokens = one_layer(transform), Tokens.random(rows=2, seed=3)
        self.cache, self.next, self.steps = new_cache(self.transform, batch=2), np.zeros(2, int), 0

    def prompt(self, counts):
        positions = right(self.next, counts, 24)
        self.next, self.steps = self.next + counts, 0
        _, self.cache = prompt(self.transform, self.cache, self.tokens, positions)

    def decode(self, rows, steps: int):
        interval = kvjax.flush_interval(self.cache)
        for _ in range(steps):
            here = np.isin([0, 1], rows)
            _, self.cache = decode(
                self.transform, self.cache, self.tokens, np.where(here, self.next, -1)
            )
            self.next, self.steps = self.next + here, self.steps + 1
            if interval and self.steps % interval == 0:
                self.cache = kvjax.flush(self.cache)

    def row(self, row: int) -> list[np.ndarray]:
        """All that a row holds: slots, columns, and the transform's own numbers."""
        held = [slots_of(self.cache, row, head) for head in range(self.cache.kv.shape[1])]
        state = [x for x in jax.tree.leaves(self.cache.state) if x.ndim and x.shape[0] == 2]
        pinned = self.cache.kv.pinned
        return [*(x for own in held for x in own.values()), *(x[row] for x in (*state, pinned))]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.slow
def test_a_row_without_tokens_stays_as_it_is(name):
    """Row 0 alone decodes, has a further turn, and decodes; row 1 has generated tokens."""
    layer = Layer(METHODS[name])
    layer.prompt(LENGTHS)
    layer.decode((0, 1), INTERVAL)  # row 1 is flushed, with tokens beyond its prompt
    before = layer.row(1)
    layer.decode((0,), INTERVAL)
    layer.prompt((8, 0))
    layer.decode((0,), 2)
    assert layer.next.tolist() == [39, 28]
    for old, new in zip(before, layer.row(1), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.fast_cases("h2o", "streaming_llm")
def test_a_row_gets_the_same_beside_another(name):
    """What a row holds after turns and steps is what it holds where the other one has none."""
    held = []
    for others in (0, 1):
        layer = Layer(METHODS[name])
        layer.prompt((21, 24 * others))
        layer.decode((0, 1) if others else (0,), INTERVAL)
        layer.prompt((6, 3 * others))
        layer.decode((0,), INTERVAL)
        held.append(layer.row(0))
    for alone, beside in zip(*held, strict=True):
        np.testing.assert_allclose(alone, beside, rtol=1e-5, atol=1e-5)
