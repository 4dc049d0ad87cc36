"""A prompt read with its repetition equals whole passes that are cut afterwards."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.compose.foreseen import foreseen
from kvjax.generation.compiler import Compiler
from kvjax.generation.model import as_functional
from kvjax.generation.prompt_pass import CacheSize
from kvjax.generation.read_once import Observe
from kvjax.generation.turns import Start, first_turn
from kvjax.models import DecoderConfig, LayerConfig, RopeConfig, random_decoder
from kvjax.protocol import Asking, Needs
from kvjax.transforms.kvzip.repetition import Repetition
from tests.references.attention import softmax_attention
from tests.references.slots import best
from tests.references.snapkv import pool
from tests.support.attending import slots_of
from tests.support.marks import some_slow
from tests.support.tolerances import close
from tests.support.words import Words

# No token twice, so that no two scores are equal.
PROMPTS = [np.random.default_rng(n).permutation(250)[:n].tolist() for n in (150, 70, 33)]
FIRST, FURTHER, PIECE = (251, 252), (253,), 64
WORDS = Words(FIRST, FURTHER)
BUDGET, SINKS, NEWEST, WINDOW = 0.2, 3, 2, 40
SIZES = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2,
    "query_heads": 4, "kv_heads": 2, "head_dim": 8, "rope": RopeConfig(rotary_dim=8),
    "max_positions": 512,
}  # fmt: skip
LOCAL = (LayerConfig(RopeConfig(rotary_dim=8, theta=100.0), WINDOW), LayerConfig(SIZES["rope"]))
CASES = {
    "plain": {}, "soft cap": {"attention_soft_cap": 1.5, "attention_scale": 4.0},
    "windows": {"layers": LOCAL, "attention_scale": 3.0, "norms": "both"},
}  # fmt: skip


@functools.cache
def model(name: str):
    return random_decoder(DecoderConfig(**SIZES | CASES[name]), seed=3)


def whole_pass(name: str, ids: list[int]):
    """Of each layer: queries, keys and values of all tokens, every one of them kept."""
    functional, width = as_functional(model(name)), len(ids)
    observe = Observe(Needs(query_window=width))
    size = CacheSize.of(functional, 1, width, 0, np.float32, width)
    layers = (observe,) * functional.num_layers
    start = Start(observe, layers, size, [width])
    context = first_turn(functional, [ids], start, Compiler(), last=False)
    for reading in context.caches:
        assert reading.kv.position[0, 0, :width].tolist() == list(range(width))
        stored = reading.kv.k, reading.kv.v
        k, v = (np.asarray(x.read(), np.float64)[0, :, :width] for x in stored)
        yield np.asarray(reading.queries.query, np.float64)[0], k, v


def pieces(prompt: list[int]) -> list[list[int]]:
    """Tokens that follow the prompt, once for each of its pieces."""
    made = [[*FIRST, *prompt[:PIECE]]]
    for start in range(PIECE, len(prompt), PIECE):
        asked = *FURTHER, *prompt[start - 8 : start]
        made.append([*asked, *prompt[start : start + PIECE]])
    return made


def expected(name: str, prompt: list[int], windows: bool):
    """Of each layer and KV head: kept positions, their keys and their values."""
    length, config = len(prompt), model(name).config
    passes = [list(whole_pass(name, prompt + piece)) for piece in pieces(prompt)]
    for number in range(config.num_layers):
        window = config.layers[number].window if config.layers else None
        for head in range(2):
            group, score = slice(head * 2, head * 2 + 2), np.zeros(length)
            for layers in passes:
                q, k, v = layers[number]
                at = np.arange(k.shape[1])
                _, p = softmax_attention(
                    q[group, length:], k[head], v[head], at[length:], at, window=window,
                    scale=config.attention_scale or 8**-0.5, soft_cap=config.attention_soft_cap,
                )  # fmt: skip
                score = np.maximum(score, p[..., :length].max((0, 1)))
            _, k, v = passes[0][number]
            k, v = k[head, :length], v[head, :length]
            if window is None or windows:
                size = np.linalg.norm(v, axis=1)
                score = pool(score * size / np.median(size), 3, "avg")
                score[:SINKS], score[length - NEWEST :] = np.inf, np.inf
                kept = best(score, max(int(BUDGET * length), SINKS + NEWEST + 1))
            else:
                kept = [*range(length)][-WINDOW + 1 :]  # and the next token
            yield number, head, kept, k[kept], v[kept]


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("name", some_slow(CASES, "windows"))
@pytest.mark.parametrize("everywhere", [False, True])
def test_it_equals_whole_passes_that_are_cut_afterwards(name, everywhere, parts):
    if everywhere and name != "windows":
        pytest.skip("no layer has a window")
    tx = kvjax.KVzip(BUDGET, sinks=SINKS, window=NEWEST, piece=PIECE)
    tx = kvjax.Everywhere(tx) if everywhere else tx
    functional = as_functional(model(name))
    if not parts:
        functional = dataclasses.replace(functional, parts=None)
    context = kvjax.read(
        functional, PROMPTS, transform=tx, max_new=4, dtype=np.float32, document=WORDS
    )
    assert context.length.tolist() == [150, 70, 33]
    for row, prompt in enumerate(PROMPTS):
        for number, head, kept, k, v in expected(name, prompt, everywhere):
            slots = slots_of(context.caches[number], row, head)
            where = f"row {row}, layer {number}, head {head}"
            np.testing.assert_array_equal(slots["position"][-len(kept) :], kept, where)
            close(slots["k"][-len(kept) :], k, what=where)
            close(slots["v"][-len(kept) :], v, what=where)
            assert len(slots["position"]) <= len(kept) + (len(kept) == WINDOW - 1)


def test_the_logits_are_those_of_the_prompt():
    """A repetition changes what is kept, and nothing of the pass itself."""
    read = functools.partial(kvjax.read, model("plain"), PROMPTS, max_new=4, dtype=np.float32)
    full = read(transform=kvjax.Full())
    looked = read(transform=kvjax.KVzip(BUDGET, piece=PIECE), document=WORDS)
    close(looked.logits, full.logits)


@pytest.mark.parametrize("parts", [True, False])
def test_pieces_are_as_long_as_positions_allow(parts):
    """A prompt of 150 tokens of 200: pieces of 200 - 150 - 9 tokens."""
    few = random_decoder(DecoderConfig(**SIZES | {"max_positions": 200}), seed=3)
    functional = as_functional(few)
    if not parts:
        functional = dataclasses.replace(functional, parts=None)
    read = functools.partial(
        kvjax.read, functional, PROMPTS[:1], max_new=4, dtype=np.float32, document=WORDS
    )
    of_64, of_41 = (read(transform=kvjax.KVzip(BUDGET, piece=piece)) for piece in (PIECE, 41))
    for x, y in zip(jax.tree.leaves(of_64.caches), jax.tree.leaves(of_41.caches), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_prompt_without_room_for_its_repetition_is_refused():
    few = random_decoder(DecoderConfig(**SIZES | {"max_positions": 190}), seed=3)
    message = "149 tokens at most, .* the model's 190 positions .* got 150"
    with pytest.raises(ValueError, match=message):
        kvjax.read(
            few, PROMPTS, transform=kvjax.KVzip(BUDGET, piece=PIECE), document=WORDS, max_new=4
        )


def test_the_instruction_is_in_the_tokens_of_the_model():
    def letters(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    document = list(range(300, 400))
    asking = Asking(SimpleNamespace(max_positions=None), letters, len(document))
    ((first, further),) = Repetition(piece=64).pieces([document], 128, asking)
    begins, ends = "\n\nRepeat the previous context exactly.\n\n", "exactly, starting with"
    assert first[first >= 0].tolist() == [*letters(begins), *document[:64]]
    asked = further[further >= 0].tolist()
    assert asked[-44:] == [*document[56:64], *document[64:]]
    assert asked[:-44][-len(ends) :] == letters(ends)
    assert first.shape == (136,)  # 64 tokens, 63 letters and 8 of the piece before, in eights


def test_one_reading_has_one_probe():
    needs = Needs(probe=Repetition(piece=64))
    assert needs.union(Needs(decode_mass=True)).union(needs).probe == needs.probe
    with pytest.raises(ValueError, match="one reading of a document has one probe"):
        needs.union(Needs(probe=Repetition(piece=32)))


@pytest.mark.parametrize(
    ("made", "error", "got"),
    [
        ([[[1, 2, 3]]], TypeError, "got list"),
        (np.ones((1, 3), np.int32), ValueError, r"got int32 of shape \(1, 3\)"),
        (np.ones((2, 1, 3), np.int32), ValueError, r"got int32 of shape \(2, 1, 3\)"),
        (np.ones((1, 1, 3)), ValueError, r"got float64 of shape"),
        (np.full((1, 1, 3), 256), ValueError, "below 256, the size of the vocabulary, got 256"),
    ],
    ids=["list", "no pieces", "too many rows", "floats", "unknown token"],
)
def test_what_are_no_pieces(made, error, got):
    class Looks(kvjax.kit.Received):
        def pieces(self, documents, width, asking):
            return made

    class Method(kvjax.kit.DocumentBudget):
        needs = property(lambda self: Needs(probe=Looks()))

    with pytest.raises(error, match=rf"Looks.pieces must return integers \[1 documents.*{got}"):
        kvjax.read(model("plain"), [PROMPTS[2]], transform=Method(0.5))


def test_scores_of_another_shape():
    class ByToken(kvjax.kit.DocumentBudget):
        def scores(self, cache, state, step, document):
            return document.any(1).astype(jnp.float32)

    with pytest.raises(ValueError, match=r"ByToken.scores must return a score for each slot"):
        foreseen(ByToken(0.5), "prompt")


def test_scores_of_what_no_probe_notes():
    """A method whose `needs` were forgotten is refused before anything is read."""

    class Forgets(kvjax.kit.DocumentBudget):
        def scores(self, cache, state, step, document):
            return step.record.slots["received"]

    layers = []
    message = r"Forgets.on_prompt: the slots of .* have nothing, and not 'received': name a probe"
    with pytest.raises(TypeError, match=message):
        kvjax.read(
            model("plain"), [PROMPTS[2]], transform=Forgets(0.5), on_layer=layers.append
        )  # fmt: skip
    assert not layers


@pytest.mark.parametrize(
    ("where", "name", "has"), [("slots", "query", "received"), ("rows", "received", "nothing")]
)
def test_a_record_of_which_a_decision_reads_what_is_not_noted(where, name, has):
    class Decides(kvjax.KVTransform):
        needs = property(lambda self: Needs(probe=kvjax.kit.Received()))

        def on_prompt(self, cache, state, step):
            return kvjax.kit.Keep(cache.length, getattr(step.record, where)[name]), state

    message = rf"Decides.on_prompt: the {where} of .* have {has}, and not '{name}'"
    with pytest.raises(TypeError, match=message):
        foreseen(Decides(), "prompt")


def test_a_key_that_scores_miss_elsewhere():
    """The author's own error comes out as it is, and is not blamed on the probe."""

    class Weighs(kvjax.kit.DocumentBudget):
        def scores(self, cache, state, step, document):
            return {"recent": 1.0}["received"] * document

    with pytest.raises(KeyError) as raised:
        foreseen(Weighs(0.5), "prompt")
    assert raised.value.args == ("received",)


def test_scores_of_a_record_that_was_mapped():
    """`scores` gets a pytree, as every record is."""

    class Halves(kvjax.kit.DocumentBudget):
        needs = property(lambda self: Needs(probe=kvjax.kit.Received()))

        def scores(self, cache, state, step, document):
            return jax.tree.map(lambda x: x / 2, step.record).slots["received"]

    decision = foreseen(Halves(0.5), "prompt")
    assert decision.score.shape == decision.always.shape
