"""Long decodes against the references: caches that are refilled many times over."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from tests.references.h2o import H2O
from tests.references.streaming_llm import StreamingLLM
from tests.support.method_pair import LENGTHS, Pair

STEPS = 1000

pytestmark = pytest.mark.slow


def test_h2o():
    """Every slot is reused dozens of times, and scores have run on over a thousand queries."""
    both = Pair(kvjax.H2O(24), lambda **o: H2O(24, **o), heads=(2, 2), seed=11, max_new=STEPS)
    both.prompt(LENGTHS).decode(STEPS)
    assert [len(both.kept(row, 0)) for row in range(3)] == [24, 24, 24]


def test_streaming_llm_repositioned():
    rope = kvjax.Rope(np.float32([1.0, 0.3, 0.02, 0.001]))
    both = Pair(
        kvjax.StreamingLLM(24, reposition=True),
        lambda **o: StreamingLLM(24, reposition=True, inv_freq=np.asarray(rope.inv_freq), **o),
        seed=12,
        max_new=STEPS,
        rope=rope,
        late=True,
    )
    both.prompt(LENGTHS).decode(STEPS)
    assert both.kept(0, 0)[:4] == [0, 1, 2, 3]
