"""Gemma 3 of other packages: their loops in kvjax's caches, and kvjax's calls on their models."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
from kvjax.models import from_pretrained
from tests.foreign.port import (
    REAL,
    by_hand,
    prompts,
    read_and_asked,
    texts_beyond_the_window,
    tiny_port,
)

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples" / "adapters"))
PACKAGES = {"gemma": "gemma 4.0.1", "tunix": "google-tunix 0.1.7", "keras_hub": "keras-hub 0.32.0"}
INTERVALS = (
    "every(snapkv(budget=12,window=4),steps=4)", "every(kvmerger(budget=12),steps=4)",
    "every(kvcrush(snapkv(budget=12,window=4)),steps=4)",
    "when_full(snapkv(budget=12,window=4),room=3)",
    "chelsea(budget=14,chunk=8,sinks=2,recent=4,interval=3)",
    "clusterkv(budget=16,sinks=2,interval=4,tokens_per_cluster=4)",
    "chain(quest(budget=16,page=4),offload(interval=4))",
)  # fmt: skip
# Keras and gemma promote ranks and dtypes, and warn under newer versions of NumPy.
pytestmark = [pytest.mark.slow, pytest.mark.lenient, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module", params=PACKAGES)
def package(request):
    """A package's own model and loop."""
    pytest.importorskip(request.param, reason=f"{PACKAGES[request.param]} is not installed")
    return importlib.import_module(f"tests.foreign.with_{request.param}")


@functools.cache
def tiny():
    return tiny_port()


@pytest.fixture(scope="module")
def theirs(package):
    return package.converted(tiny())


def test_their_model_with_their_own_cache_writes_what_the_port_writes(package):
    ours = kvjax.generate(tiny(), prompts(), max_new_tokens=16, end_tokens=())
    assert package.their_loop(package.converted(tiny()), None, prompts(), 16) == ours.tokens
    assert len(set(ours.tokens[0])) > 3


@pytest.mark.parametrize("method", ["full", "h2o(budget=12)", *INTERVALS])
def test_their_loop_and_kvjax_generate(package, theirs, method):
    """Their loop has no place for `kvjax.flush`, and two of three feed tokens once more."""
    compare(package, theirs, tiny(), method, prompts())


# Two models round differently, so that 8 bits of an entry may differ by one. Of two tokens whose
# logits are closer than this either may come.
CLOSEST = {"quantize": 0.05}


def compare(package, theirs, port, method: str, texts: list[list[int]]) -> None:
    """Their loop goes as the port does by hand, and kvjax's calls on both models are equal."""
    text = package.their_loop(theirs, method, texts, 16)
    by_port, margins = by_hand(port, method, texts, 16, package.FED_AGAIN)
    firm = [np.argmax(np.append(row, -1.0) < CLOSEST.get(method, 0.0)) for row in margins]
    assert_equal_for(firm, text, by_port)
    sides = (
        kvjax.generate(model, texts, transform=method, max_new_tokens=16, end_tokens=())
        for model in (package.functional(theirs), port)
    )
    ours, expected = (side.tokens for side in sides)
    assert_equal_for(firm, ours, expected)
    if method == "full" or package.FED_AGAIN is None:
        assert_equal_for(firm, text, ours)


def assert_equal_for(counts, texts: list[list[int]], others: list[list[int]]) -> None:
    """The first tokens of each row are equal, as many as `counts` says."""
    cut = [
        [row[:count] for row, count in zip(rows, counts, strict=True)] for rows in (texts, others)
    ]
    assert cut[0] == cut[1]


def test_a_document_is_read_and_asked_about(package, theirs):
    model = package.functional(theirs)
    expected = read_and_asked(tiny(), prompts(), 0.4, 6)
    assert read_and_asked(model, prompts(), 0.4, 6) == expected
    package.their_loop(theirs, "full", prompts(), 4)  # changes nothing that a context knows it by
    assert read_and_asked(model, prompts(), 0.4, 6) == expected


@functools.cache
def real(path: Path):
    return from_pretrained(path), texts_beyond_the_window(path)


@pytest.fixture(scope="module")
def real_theirs(package, gemma):
    return package.converted(real(gemma)[0])


@pytest.mark.parametrize("method", REAL)
def test_gemma_3_270m_beyond_its_window(package, real_theirs, gemma, method):
    port, texts = real(gemma)
    compare(package, real_theirs, port, method, texts)


def test_gemma_3_270m_reads_and_is_asked(package, real_theirs, gemma):
    port, texts = real(gemma)
    expected = read_and_asked(port, texts, 0.25, 18)
    assert read_and_asked(package.functional(real_theirs), texts, 0.25, 18) == expected
    jax.clear_caches()


def test_the_chat_of_gemma_goes_on_beyond_its_memory():
    """Each answer is that of a whole text; with a method a chat of any length takes as much.

    With their own cache the second answer is another one: tokens of a further turn stand there one
    slot before the one that their mask means.
    """
    pytest.importorskip("gemma", reason=f"{PACKAGES['gemma']} is not installed")
    package = importlib.import_module("tests.foreign.with_gemma")
    theirs = package.converted(tiny())
    turns = [np.random.default_rng(n).integers(3, 64, 20).tolist() for n in range(12)]
    answers, _ = package.chat(theirs, "full", turns, count=8, most=400)
    their_own, _ = package.chat(theirs, None, turns[:2], count=8, most=600)
    assert their_own[0] == answers[0] and their_own[1] != answers[1]
    text: list[int] = []
    for number, (turn, answer) in enumerate(zip(turns, answers, strict=True)):
        text += package.as_turn(turn, first=number == 0)
        whole = kvjax.generate(tiny(), [text], max_new_tokens=8, end_tokens=())
        assert answer == whole.tokens[0]
        text += answer[:-1]  # their loop does not read its last token
    for method in ("streaming_llm(budget=24)", "h2o(budget=24)"):
        answers, caches = package.chat(theirs, method, turns, count=8, most=4000)
        assert [len(answer) for answer in answers] == [8] * 12 and len(text) > 300
        kvjax.check_dropped(caches)
        *windows, whole = (guest.cache.kv.slots for guest in caches)
        assert windows == [17] * 5 and whole <= 25


def test_keras_hub_says_how_many_tokens_are_new():
    pytest.importorskip("keras_hub", reason=f"{PACKAGES['keras_hub']} is not installed")
    package = importlib.import_module("tests.foreign.with_keras_hub")
    lm = package.converted(tiny())
    package.adapter.kvjax_inside(lm, "full", max_new=7)
    with pytest.raises(ValueError, match="max_new=7"):
        package.their_loop(lm, None, prompts()[:1], 8)
