"""Cases of RULER's tasks with the bundled tokenizer, as the tests read them."""

from __future__ import annotations

import functools

import numpy as np

from kvjax.evaluation.tasks import Frame, Task, ruler
from kvjax.models import demo, load_tokenizer

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
PLAIN, CHAT = Frame((0,)), Frame((0, 300, 301), (302, 303, 304, 305))


@functools.cache
def tokenizer():
    return load_tokenizer(demo.directory())


@functools.cache
def essays() -> str:
    """Sentences of one to twelve words, no two windows of them equal."""
    words = "boats go out again at noon when rain has gone from our old town".split()
    rng = np.random.default_rng(0)
    return "\n".join(
        f"When {' '.join(rng.choice(words, rng.integers(1, 12)))}{rng.choice(list('.?!'))}"
        for _ in range(2000)
    )


def make(
    name: str,
    *,
    text: str | None = None,
    length: int = 1024,
    cases: int = 3,
    seed: int = 0,
    frame: Frame = PLAIN,
) -> Task:
    text = essays() if text is None else text
    return ruler(name, tokenizer(), text, length=length, cases=cases, seed=seed, frame=frame)


def decode(tokens: list[int]) -> str:
    return tokenizer().decode(tokens, skip_special_tokens=True)


def count(text: str) -> int:
    """Tokens of a text."""
    return len(tokenizer()(text, add_special_tokens=False).input_ids)
