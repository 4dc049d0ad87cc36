"""Prompts that are read in pieces: as turns, with memory for one piece, and to be gone on with."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import kvjax
from kvjax.attention.layer import layer_caches
from kvjax.budgets.profile import shares
from kvjax.compose.foreseen import frees_at_prompts_end
from kvjax.compose.walks import walk
from kvjax.models import random_decoder
from kvjax.transforms.document_budget import _part_of
from tests.evaluation.fidelity.test_fidelity import (
    KV_HEADS,
    LAYERS,
    METHODS,
    VOCAB,
    WINDOW,
    snapkv,
    tiny_model,
    tiny_reference,
)
from tests.generation.test_context import QUESTIONS, ROWS, TRANSFORMS, generate, read
from tests.generation.test_generate import CONFIG, RAGGED, compiled, method, model
from tests.support.attending import same_arrays
from tests.support.marks import some_slow
from tests.support.tolerances import close
from tests.transforms import test_scenarios

FAST = "snapkv", "kvzip"
RARE = {*TRANSFORMS} - {*ROWS, *FAST, "offload"}  # before a release
LONG = [list(range(1, 61)), [9, 2, 7], [*range(40, 10, -1), 5]]  # tokens of each row


@pytest.mark.parametrize("name", some_slow(TRANSFORMS, *FAST, exhaustive=RARE))
def test_one_piece_is_the_whole_prompt(name):
    same_arrays(read(name, piece=64), read(name))


@pytest.mark.parametrize("name", some_slow(TRANSFORMS, *FAST, exhaustive=RARE))
def test_reading_goes_on_where_it_stopped(name):
    """Killed behind any piece, and gone on with from what was saved: bit for bit the same."""
    saved = []
    whole = read(name, LONG, piece=16, on_piece=lambda context: saved.append(context.at_rest()))
    assert [context.length.tolist() for context in saved] == [
        [16, 3, 16], [32, 3, 31], [48, 3, 31],
    ]  # fmt: skip
    assert whole.length.tolist() == [60, 3, 31]
    for context in saved:
        before = context.copy()
        again = kvjax.read(model(), LONG, piece=16, context=context)
        if name != "offload":  # whose free slots keep what was in them, in host memory
            same_arrays(again, whole)
        same_arrays(context, before)
        same_arrays(again.logits, whole.logits)
        for part, other in zip(*(layer_caches(x.caches) for x in (again, whole)), strict=True):
            same_arrays(
                (part.kv.position, part.kv.log_mass), (other.kv.position, other.kv.log_mass)
            )
    questions = [generate(QUESTIONS, each) for each in (again, whole)]  # pyright: ignore[reportPossiblyUnboundVariable]  # the loop runs
    assert questions[0].tokens == questions[1].tokens
    same_arrays(questions[0].context.logits, questions[1].context.logits)


# Profiles of three layers of two heads.
SHARES = np.random.default_rng(8).uniform(0.2, 0.8, (LAYERS, KV_HEADS, 1))
PROFILE = kvjax.kit.HeadProfile(np.concatenate((SHARES, np.ones_like(SHARES)), 2))
BY_HEAD = kvjax.ByHead(kvjax.SnapKV(0.4, window=WINDOW, kernel=3), PROFILE)
OF_HEADS = shares(PROFILE.table, 0.4, BY_HEAD.safeguard)
REFERENCES = METHODS | {
    "by_head": (BY_HEAD, lambda layer, head: snapkv(float(OF_HEADS[layer][head])))
}


# References whose parts are in others run before a release.
LIKE_OTHERS = {"full", "h2o, a share", "per_layer", "by rank in one group"}


@pytest.mark.parametrize("name", some_slow(REFERENCES, "pyramidkv", exhaustive=LIKE_OTHERS))
def test_pieces_equal_the_reference(name):
    """In a whole model, behind every piece, and after an answer: each head has a reference."""
    transform, reference = REFERENCES[name]
    prompt, logits = np.random.default_rng(3).integers(VOCAB, size=52).tolist(), []
    pieces = [prompt[start : start + 12] for start in range(0, len(prompt), 12)]
    context = kvjax.read(
        tiny_model(), [prompt], transform=transform, max_prompt=60, max_new=8, piece=12,
        on_piece=lambda context: logits.append(np.array(context.logits)),
    )  # fmt: skip
    after, new = tiny_reference().compressed([*pieces, [5, 9]], 6, reference)
    answer = kvjax.generate(tiny_model(), [[5, 9]], context=context, max_new_tokens=6)
    found = [row[0] for row in (*logits, context.logits, answer.context.logits)]
    for number, (mine, expected) in enumerate(zip(found, [*after[:-2], after[-1]], strict=True)):
        close(mine, expected, "accumulated", f"after turn {number}")
    assert answer.tokens == [new]


def test_every_method_that_frees_slots_has_a_reference_of_pieces():
    """`everywhere` has its base in its place when it is bound."""
    methods = {
        name
        for name, kind in kvjax.registry.METHODS.items()
        if kind.__module__.startswith("kvjax.")  # and is not another test's
        for layer in kvjax.bind(method(name), 2)
        if any(frees_at_prompts_end(part) for part in walk(layer))
    }
    assert {"h2o", "kvmerger", "spindlekv"} <= methods and "quest" not in methods
    compared = {*test_scenarios.PAIRS, *test_scenarios.OTHERS_IN_PIECES, *REFERENCES}
    assert methods | {*kvjax.registry.WRAPPERS} - {"everywhere"} | {"chain", "quantize"} <= compared


def test_the_full_cache_does_not_see_pieces():
    """It keeps all tokens, so that pieces give what the whole prompt gives."""
    whole, pieces = (generate(QUESTIONS, read("full", LONG, **x)) for x in ({}, {"piece": 16}))
    assert whole.tokens == pieces.tokens
    np.testing.assert_allclose(whole.context.logits, pieces.context.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("transform", "slots"), [("h2o(budget=24)", 24 + 1), ("kvzip(budget=24, room=8)", 24 + 8 + 8)]
)
def test_memory_and_programs_are_those_of_one_piece(transform, slots):
    """Whatever the length of the prompt: the caches are as large, and nothing more is compiled."""
    sizes = set()

    def noted(context: kvjax.Context) -> None:
        sizes.update(part.kv.slots for part in layer_caches(context.held))

    def read_all(tokens: int) -> tuple[int, int]:
        prompt = np.arange(tokens)[None] % CONFIG.vocab_size
        options = {"max_prompt": 256, "max_new": 8, "piece": 32}
        kvjax.read(model(), prompt, transform=transform, on_piece=noted, **options)
        return compiled()

    assert read_all(96) == read_all(200)
    assert sizes == {slots}


def test_a_number_of_slots_is_shared_by_all_pieces():
    prompt = [[*np.random.default_rng(0).integers(0, CONFIG.vocab_size, 96)]]
    context = kvjax.read(
        model(), prompt, transform="kvzip(budget=24, sinks=2)", max_new=8, piece=24
    )
    for part in layer_caches(context.caches):
        for position, mass in zip(part.kv.position[0], part.kv.log_mass[0], strict=True):
            kept = np.sort(position[mass > -np.inf])
            counts = np.histogram(kept, [0, 24, 48, 72, 96])[0]
            assert counts.sum() == 24 and counts.min() >= 3 and {0, 1} <= {*kept.tolist()}


@pytest.mark.parametrize("slots", [5, 1_000, 65_521, 2_000_003])
def test_parts_of_a_budget_are_whole_numbers_without_error(slots):
    rng = np.random.default_rng(slots)
    total = rng.integers(1, 2_000_000, 2_000)
    tokens = (rng.random(2_000) * (total + 1)).astype(np.int64)
    tokens[:9], total[:9] = total[:9], np.maximum(tokens[:9], total[:9])
    part = _part_of(slots, *(np.asarray(x, np.int32) for x in (tokens, total)))
    np.testing.assert_array_equal(part, slots * tokens // total)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"piece": 0}, "piece must be at least 1, got 0"),
        ({"on_piece": print}, "on_piece is for prompts that are read in pieces: give piece too"),
        ({"piece": 16, "document": False}, "at most 8 tokens .*KVzip.*, got piece=16"),
    ],
)
def test_refused(options, said):
    with pytest.raises(ValueError, match=said):
        kvjax.read(model(), LONG, transform="kvzip(budget=24, room=8)", max_new=8, **options)


def test_what_the_last_piece_is_refused_for_comes_before_the_first_one():
    prompt, read = [[3] * 230], []
    with pytest.raises(ValueError, match="a prompt that is repeated may have"):
        kvjax.read(
            model(), prompt, transform="kvzip(budget=24)", max_new=8, piece=32,
            on_layer=read.append,
        )  # fmt: skip
    assert not read


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        (LONG, {"transform": "h2o"}, "a context has its own transform, got transform= as well"),
        (LONG, {"piece": None}, "context is for prompts that are read in pieces: give piece too"),
        (LONG[:2], {}, "prompts must be of the context's 3 rows, got 2"),
        ([LONG[0][::-1], *LONG[1:]], {}, "the context has begun another prompt in row 0"),
        ([LONG[0][:8], *LONG[1:]], {}, "it has 16 tokens in row 0, whose prompt has 8"),
    ],
)
def test_contexts_that_have_not_begun_the_prompts_are_refused(prompts, options, said):
    saved = []
    read("h2o", LONG, piece=16, on_piece=lambda context: saved.append(context.at_rest()))
    with pytest.raises(ValueError, match=said):
        kvjax.read(model(), prompts, **{"piece": 16, "context": saved[0]} | options)


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        ([*LONG[:2], None], {}, "each prompt must be a sequence of token ids, got None"),
        ([*LONG[:2], 3], {}, "each prompt must be a sequence of token ids, got 3"),
        (LONG, {"context": "folder"}, "context must be a kvjax.Context.*got 'folder'"),
        (LONG, {"document": 3}, "document must be True, False or a tokenizer, got 3"),
        (LONG, {"on_piece": 3}, "on_piece must be a function or None, got 3"),
    ],
)
def test_what_has_a_wrong_type_is_refused_before_a_piece_is_read(prompts, options, said):
    saved, layers = [], []
    read("kvzip", LONG, piece=16, on_piece=lambda context: saved.append(context.at_rest()))
    options = {"piece": 16, "context": saved[0], "on_layer": layers.append} | options
    with pytest.raises(TypeError, match=said):
        kvjax.read(model(), prompts, **options)
    assert not layers


def test_another_model_is_refused_where_nothing_is_left_to_read():
    with pytest.raises(ValueError, match="the context must be of this model"):
        kvjax.read(
            random_decoder(CONFIG, seed=7), LONG, piece=16, context=read("snapkv", LONG, piece=16)
        )


def test_it_can_be_interrupted():
    """What `on_piece` raises ends the reading; the context that it was given can be kept."""
    saved = []

    def stop(context: kvjax.Context) -> None:
        saved.append(context.at_rest())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read("snapkv", RAGGED, piece=16, on_piece=stop)
    again = kvjax.read(model(), RAGGED, piece=16, context=saved[0])
    same_arrays(again, read("snapkv", RAGGED, piece=16))
    assert all(x.is_deleted() is False for x in jax.tree.leaves(saved[0]))
