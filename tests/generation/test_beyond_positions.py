"""Texts of more tokens than the model has positions: read with positions in the cache, or refused.

The model has 64 positions, and the reference rotates keys at their ranks in float64.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.compose.wrappers import by_head_groups
from kvjax.generation.prompt_checks import check_positions
from kvjax.models import RopeConfig, random_decoder
from tests.evaluation.fidelity.test_fidelity import INV_FREQ, VOCAB, tiny_model, tiny_reference
from tests.generation.test_context import LAYERED
from tests.generation.test_generate import CONFIG
from tests.references.streaming_llm import StreamingLLM
from tests.support.tolerances import close

LIMIT, BUDGET, PIECE, NEW = 64, 16, 24, 40
RNG = np.random.default_rng(4)
DOCUMENT, QUESTION = (RNG.integers(VOCAB, size=size).tolist() for size in (5 * LIMIT, 9))
BY_RANK = kvjax.StreamingLLM(BUDGET, reposition=True)


def read(transform=BY_RANK, document=DOCUMENT, piece=PIECE, **options) -> kvjax.Context:
    options = {"max_prompt": 400, "max_new": NEW, **options}
    return kvjax.read(tiny_model(), [document], transform=transform, piece=piece, **options)


def test_five_times_the_positions_equal_the_reference():
    """Behind every piece, a question and an answer."""
    pieces = [DOCUMENT[start : start + PIECE] for start in range(0, len(DOCUMENT), PIECE)]
    assert len(pieces[-1]) < PIECE, "the last piece is padded"
    after, new = tiny_reference().compressed(
        [*pieces, QUESTION], NEW,
        lambda layer, head: StreamingLLM(BUDGET, reposition=True, inv_freq=INV_FREQ),
    )  # fmt: skip
    logits = []
    context = read(on_piece=lambda context: logits.append(np.array(context.logits)))
    answer = kvjax.generate(tiny_model(), [QUESTION], context=context, max_new_tokens=NEW)
    found = [row[0] for row in (*logits, context.logits, answer.context.logits)]
    for number, (mine, expected) in enumerate(zip(found, [*after[:-2], after[-1]], strict=True)):
        close(mine, expected, "accumulated", f"after turn {number}")
    assert answer.tokens == [new] and int(answer.context.length[0]) > 5 * LIMIT


def test_a_reading_beyond_the_positions_goes_on():
    saved = []
    whole = read(on_piece=lambda context: saved.append(context.at_rest()))
    again = kvjax.read(tiny_model(), [DOCUMENT], piece=PIECE, context=saved[6])
    assert int(saved[6].length[0]) > LIMIT
    np.testing.assert_array_equal(again.logits, whole.logits)


def test_pieces_fill_the_positions():
    """The first one has them all, and each further one has them beside the budget."""
    read(document=DOCUMENT[:LIMIT], piece=LIMIT)
    most, saved = LIMIT - BUDGET, []
    context = read(piece=most, on_piece=lambda context: saved.append(context.at_rest()))
    kvjax.read(tiny_model(), [DOCUMENT], piece=most, context=saved[0])
    for piece in (most + 1, LIMIT, None):
        with pytest.raises(ValueError, match="must fit into them, so take smaller pieces"):
            read(piece=piece)
    with pytest.raises(ValueError, match="row 0 would need 65"):
        kvjax.read(tiny_model(), [DOCUMENT], piece=most + 1, context=saved[0])
    answer = kvjax.generate(tiny_model(), [[1] * most], context=context, max_new_tokens=NEW)
    assert len(answer.tokens[0]) == NEW
    said = "64 positions, and row 0 would need 65: 320 tokens so far and 89 more: what the cache"
    with pytest.raises(ValueError, match=said):
        kvjax.generate(tiny_model(), [[1] * (most + 1)], context=context, max_new_tokens=NEW)
    with pytest.raises(ValueError, match="or a smaller budget"):
        read(kvjax.StreamingLLM(LIMIT, reposition=True))


@pytest.mark.parametrize("name", LAYERED)
def test_every_method_has_positions_in_the_cache_or_is_refused(name):
    """By its name, before anything is read, with what to do."""
    transform = LAYERED[name]
    layers = kvjax.bind(transform, 3)
    methods = [part for layer in layers for part in by_head_groups(layer)]
    own = [method for method in methods if not method.needs.reposition]
    if not own:
        check_positions(tiny_model(), layers, 5 * LIMIT, NEW, piece=PIECE)
        assert name == "reposition"
        return
    said = rf"64 positions, got a prompt of 320 .*: {type(own[0]).__name__}\(.*take a model with "
    with pytest.raises(ValueError, match=said):
        check_positions(tiny_model(), layers, 5 * LIMIT, NEW, piece=PIECE)


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        ("h2o(budget=16)", r": H2O\(budget=16, .*\) keeps tokens at these: .* streaming_llm\(re"),
        (
            kvjax.HeadGroups((((1,), BY_RANK), ((0,), kvjax.H2O(BUDGET)))),
            r": H2O\(budget=16, .*\) keeps tokens at these",
        ),
    ],
)
def test_refused(transform, said):
    pieces = []
    with pytest.raises(ValueError, match=said):
        read(transform, on_piece=pieces.append)
    assert not pieces


def test_stored_in_8_bits():
    """Keys are stored without rotation, so that ranks turn what is stored."""
    stored, plain = read(kvjax.chain(BY_RANK, kvjax.Quantize())), read()
    logits = stored.logits[0], plain.logits[0]
    error = np.linalg.norm(logits[0] - logits[1]) / np.linalg.norm(logits[1])
    assert 0 < error < 0.05


def test_layers_with_windows_are_refused():
    layers = kvjax.bind(BY_RANK, 2, (8, None), 400)
    with pytest.raises(ValueError, match=r"Ring\(window=8\) keeps tokens at these: take a model w"):
        check_positions(CONFIG, layers, 2 * CONFIG.max_positions, 0, piece=PIECE)


def test_models_are_told_a_length_within_their_positions():
    """No position that a text of any length takes is beyond them."""
    rope = RopeConfig(rotary_dim=8, type="dynamic", factor=4.0, original_max_positions=64)
    told = dataclasses.replace(CONFIG, rope=rope, max_positions=256)
    sizes = [
        kvjax.read(
            random_decoder(told), [[5, 3] * (tokens // 2)], transform=BY_RANK, piece=64, max_new=8
        ).size
        for tokens in (248, 600)
    ]
    assert [size.max_length for size in sizes] == [256, 256] and sizes[1].max_prompt >= 600
