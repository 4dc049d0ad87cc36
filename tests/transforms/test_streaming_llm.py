"""StreamingLLM against its reference: kept positions and outputs at every step."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from tests.references.streaming_llm import StreamingLLM
from tests.support.marks import some_slow
from tests.support.method_pair import LENGTHS, Pair

ROPE = kvjax.Rope(np.float32([1.0, 0.25, 0.01]), factor=1.2)  # 6 of 8 channels


def pair(budget=12, sinks=4, reposition=False, **options) -> Pair:
    if reposition:
        options |= {"rope": ROPE, "late": True}

    def reference(**attention):
        turned = {"reposition": True, "inv_freq": np.asarray(ROPE.inv_freq), "factor": ROPE.factor}
        return StreamingLLM(budget, sinks, **(turned if reposition else {}), **attention)

    transform = kvjax.StreamingLLM(budget, sinks=sinks, reposition=reposition)
    return Pair(transform, reference, **options)


CASES = {
    "int": {"rope": ROPE},
    "no sinks": {"budget": 7, "sinks": 0, "heads": (4, 1)},
    "smallest": {"budget": 3, "sinks": 2, "heads": (2, 4)},
    "share": {"budget": 0.25, "heads": (3, 2)},
    "tiny share": {"budget": 0.01, "sinks": 2},  # 3 slots everywhere
    "repositioned": {"reposition": True},
    "repositioned, a share": {"budget": 0.25, "heads": (3, 2), "reposition": True},
    # Rank decides the rotation, the token's own position what a query sees.
    "in a window": {"reposition": True, "window": 10, "soft_cap": 2.0},
}


@pytest.mark.parametrize("name", some_slow(CASES, "no sinks", "in a window"))
def test_prompt_and_64_decode_steps(name):
    pair(**CASES[name]).prompt(LENGTHS).decode(64)
