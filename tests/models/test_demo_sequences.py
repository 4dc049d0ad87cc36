"""What the bundled model is trained with: text, returning segments, questions; and their words."""

import dataclasses
import functools
import re

import numpy as np
import pytest

from kvjax.evaluation.tasks import wording
from kvjax.models.demo import recipe, train
from kvjax.models.demo.tasks import ANSWER, IGNORED, TEXT, Mix, Tasks
from kvjax.models.demo.words import FreeWords, given_keys
from tests.support.demo_texts import bundled_tokenizer, texts, tiny_tokenizer

MIXES = {
    "segments": Mix(1.0, 0.0, 0.0, 6, 0),
    "lists": Mix(0.0, 1.0, 0.0, 6, 0),
    "chains": Mix(0.0, 0.0, 1.0, 6, 0),
    "needles": Mix(0.0, 0.0, 0.0, 6, 0),
    "free lists": Mix(0.0, 1.0, 0.0, 6, 0, free=1.0),
    "free chains": Mix(0.0, 0.0, 1.0, 6, 0, free=1.0),
    "free needles": Mix(0.0, 0.0, 0.0, 6, 0, free=1.0),
}
WORDS = FreeWords(
    ("kral", "plux", "ston"), ("gru", "bli", "fre"), ("ok", "um", "ax", "ez"), frozenset()
)
LETTERS = 5000  # letters are ids from here on, filler is below


def is_free(word: str) -> bool:
    return re.fullmatch("kral|plux|ston|(gru|bli|fre)(ok|um|ax|ez){1,2}", word) is not None


# Sequences, of a tokenizer that reads letters and a filler that has none.


@functools.cache
def letter_tasks() -> Tasks:
    stream = np.random.default_rng(7).integers(2, 4000, 20_000)
    return Tasks(
        lambda text: [LETTERS + ord(letter) for letter in text], stream, WORDS,
        vocab=4000, special=2, bos=0, eos=1,
    )  # fmt: skip


def letters(tokens: list[int]) -> str:
    """The text of a sequence; filler is a dot in the middle, the end of an answer a bar."""
    return "".join(chr(t - LETTERS) if t >= LETTERS else "|" if t == 1 else "·" for t in tokens)


def sequences(kind: str, count: int = 20, length: int = 4000):
    rng = np.random.default_rng(11)
    for _ in range(count):
        yield letter_tasks().sequence(rng, length, MIXES[kind])


@pytest.mark.parametrize("kind", MIXES)
@pytest.mark.parametrize("length", [1000, 4001])
def test_sequences_have_exactly_the_length(kind, length):
    for tokens, marks in sequences(kind, 10, length):
        assert len(tokens) == len(marks) == length
        assert tokens[0] == 0 and 0 not in tokens[1:]
        assert marks[0] == IGNORED
        assert set(marks) <= {IGNORED, TEXT, ANSWER}


@pytest.mark.parametrize("kind", list(MIXES)[1:])
def test_text_counts_and_what_is_told_does_not(kind):
    for tokens, marks in sequences(kind, 5):
        is_filler = [2 <= token < LETTERS for token in tokens]
        assert [mark == TEXT for mark in marks] == is_filler


def answers(kind: str, pattern: str):
    """Every question of some sequences: the match, the text before it; its marks are checked."""
    asked, at_end, sizes = 0, 0, set()
    for tokens, marks in sequences(kind):
        text, seen = letters(tokens), 0
        for match in re.finditer(pattern, text):
            start, end = match.span("answer")
            assert text[end] == "|", "an end token follows the answer"
            assert marks[start : end + 1] == [ANSWER] * (end + 1 - start)
            assert marks[match.start() : start] == [IGNORED] * (start - match.start())
            seen += end + 1 - start
            at_end += "·" not in text[end:]
            yield match, text[: match.start()]
            asked += 1
        assert seen == marks.count(ANSWER), "nothing else counts as an answer"
        sizes.add(text.count("|"))
    assert asked > 30 and 0.4 < at_end / asked < 0.95, "most at the end, some anywhere"
    assert len(sizes) > 1


@pytest.mark.parametrize("kind", ["needles", "free needles"])
def test_needles_are_told_before_they_are_asked_for(kind):
    pattern = r"\n\nQuestion: (?P<question>[^·|]*?)\nAnswer: (?P<said>[^·|]*?)(?P<answer> \d+\.)\|"
    statements, lengths = set(), set()
    for match, before in answers(kind, pattern):
        said, answer = match["said"], match["answer"]
        told = re.findall(rf" {re.escape(said)}( \d+\.)", before)
        assert answer in told
        # The same words may stand in an earlier question for the same needle, with its answer.
        assert set(told) == {answer}, "one value per key"
        statements.add(re.sub(r"\b(\w+ \w+)(?= is| has|:| they| =)", "KEY", said))
        assert any(map(is_free, re.findall(r"\w+", said))) is (kind == "free needles")
        lengths.add(len(answer) - 2)
    assert len(statements) >= 6, "all wordings"
    usual = [said for said in statements if re.match("The code of the|Remember that", said)]
    assert 0 < len(usual) < len(statements), "of free needles two thirds are worded by chance"
    assert lengths == {4, 6, 8}


@pytest.mark.parametrize("kind", ["lists", "free lists"])
def test_lists_hold_what_is_asked_for(kind):
    pattern = (
        r"\n\nQuestion: Which value has the (?P<key>[^·|?]*)\?\n"
        r"Answer: (?P=key):(?P<answer> \d+\.)\|"
    )
    for match, before in answers(kind, pattern):
        lines = re.findall(r"(?<=\n)(\w+ \w+): (\d+)\n", before)
        assert len({key for key, _ in lines}) == len(lines) >= 2
        assert dict(lines)[match["key"]] == match["answer"][1:-1]
        assert all(map(is_free, match["key"].split())) is (kind == "free lists")


@pytest.mark.parametrize("kind", ["chains", "free chains"])
def test_chains_lead_to_the_answer(kind):
    pattern = (
        r"\n\nQuestion: What is the code of the (?P<key>\w+ \w+)\?\n"
        r"Answer: The code of the (?P=key) is"
        r"(?P<answer>(?: the code of the \w+ \w+ is)* \d+\.)\|"
    )
    depths = set()
    for match, before in answers(kind, pattern):
        key, steps = match["key"], ""
        while True:
            links = re.findall(rf" The code of the {key} is the code of the (\w+ \w+)\.", before)
            if not links:
                break
            key = links[0]
            steps += f" the code of the {key} is"
        value = re.search(rf" The code of the {key} is (\d+)\.", before).group(1)
        assert match["answer"] == f"{steps} {value}."
        assert all(map(is_free, match["key"].split())) is (kind == "free chains")
        depths.add(steps.count("code"))
    assert depths == {1, 2}


def test_segments_return():
    gaps, sizes = set(), set()
    for tokens, marks in sequences("segments", 8, 1500):
        ids, found = np.array(tokens), 0
        marks = np.array(marks)
        assert ids[1:].min() >= 2, "no special tokens"
        edges = np.flatnonzero(np.diff(np.r_[0, marks == ANSWER, 0]))
        for start, end in edges.reshape(-1, 2):
            segment = ids[start - 2 : end]  # two tokens say which segment it is
            assert (marks[start - 2 : start] == IGNORED).all()
            size = len(segment)
            places = [
                i
                for i in range(start - 2 - size + 1)
                if ids[i] == segment[0] and (ids[i : i + size] == segment).all()
            ]
            assert places and any((marks[i : i + size] == IGNORED).all() for i in places)
            gaps.add(start - 2 - places[0])
            sizes.add(size)
            found += 1
        assert found >= 1
    assert len(gaps) > 20 and np.std(list(gaps)) > 200, "a fixed gap would be copied by position"
    assert min(sizes) >= 4 and max(sizes) <= 64 and len(sizes) > 10


def test_half_of_the_segments_are_random_tokens():
    stream = letter_tasks().stream
    known = {tuple(stream[i : i + 4]) for i in range(len(stream) - 3)}
    from_text = []
    for tokens, marks in sequences("segments", 12, 1500):
        starts = np.flatnonzero((np.array(marks) == ANSWER) & (np.roll(marks, 1) != ANSWER)) - 2
        from_text += [tuple(tokens[start : start + 4]) in known for start in starts]
    assert 0.3 < np.mean(from_text) < 0.7


def test_mixes_choose_kinds():
    rng, tasks_ = np.random.default_rng(0), letter_tasks()
    drawn = [letters(tasks_.sequence(rng, 3000, Mix(0.2, 0.3, 0.1, 4, 0))[0]) for _ in range(150)]
    kinds = [
        "lists" if "Which value has" in text
        else "chains" if re.search(r" is the code of the \w+ \w+\.", text)
        else "needles" if "Question" in text or re.search(r"[a-z]", text)
        else "segments"
        for text in drawn
    ]  # fmt: skip
    shares = {kind: kinds.count(kind) / len(kinds) for kind in MIXES}
    expected = {"segments": 0.2, "lists": 0.3, "chains": 0.1, "needles": 0.4}
    assert all(abs(shares[kind] - expected[kind]) < 0.12 for kind in expected), shares


def test_positions_rise_below_their_spread():
    rng = np.random.default_rng(0)
    mix = dataclasses.replace(MIXES["segments"], positions=1000)
    positions = letter_tasks().batch(rng, 200, 100, mix)["positions"]
    assert positions.shape == (200, 100) and positions.dtype == np.int32
    steps = np.diff(positions, axis=1)
    assert (positions[:, 0] == 0).all() and (steps >= 1).all() and positions.max() < 1000
    spread = positions[:, -1] > 99
    assert 0.35 < spread.mean() < 0.6, "half of them"
    assert positions.max() > 800 and (steps > 1).sum(axis=1).max() <= 8
    assert (positions[~spread] == np.arange(100)).all()
    for too_few in (0, 99, 100):
        mix = dataclasses.replace(mix, positions=too_few)
        positions = letter_tasks().batch(rng, 20, 100, mix)["positions"]
        assert (positions == np.arange(100)).all()


@pytest.mark.parametrize("stage", recipe.STAGES, ids=lambda stage: stage.name)
def test_batches_of_the_real_stages(stage):
    made = train.make_tasks(bundled_tokenizer(), texts())
    batch = made.batch(np.random.default_rng((0, 5)), 3, stage.length, stage.mix)
    assert batch["tokens"].shape == batch["marks"].shape == (3, stage.length + 1)
    assert batch["positions"].shape == (3, stage.length)
    assert all(value.dtype == np.int32 for value in batch.values())
    assert batch["tokens"].min() >= 0 and batch["tokens"].max() < recipe.CONFIG.vocab_size
    assert batch["positions"].max() < recipe.CONFIG.max_positions
    assert (batch["marks"] == ANSWER).any(axis=1).all()
    again = made.batch(np.random.default_rng((0, 5)), 3, stage.length, stage.mix)
    other = made.batch(np.random.default_rng((0, 6)), 3, stage.length, stage.mix)
    assert all((batch[name] == again[name]).all() for name in batch)
    assert (batch["tokens"] != other["tokens"]).any()


# Keys.


def keys_of(kind: str, rng: np.random.Generator, count: int) -> list[str]:
    if kind == "free":
        return free_words().keys(rng, count)
    return given_keys(rng, wording.TRAINING_ADJECTIVES, wording.TRAINING_NOUNS, count)


@functools.cache
def free_words() -> FreeWords:
    return train.make_tasks(bundled_tokenizer(), texts()).words


@pytest.mark.parametrize("kind", ["free", "given"])
@pytest.mark.parametrize("count", [1, 2, 9, 30, 144])
def test_keys_differ_and_share_words(kind, count):
    rng, held_out = np.random.default_rng(count), set()
    alike = []
    for _ in range(20):
        pairs = [tuple(key.split(" ")) for key in keys_of(kind, rng, count)]
        assert len(set(pairs)) == len(pairs) == count and {len(pair) for pair in pairs} == {2}
        held_out |= {word for pair in pairs for word in pair}
        alike.append(1 - len({first for first, _ in pairs}) / count)
    assert not held_out & {*wording.HELD_OUT_ADJECTIVES, *wording.HELD_OUT_NOUNS}
    assert count == 1 or max(alike) > 0.3
    assert kind == "free" or held_out <= {*wording.TRAINING_ADJECTIVES, *wording.TRAINING_NOUNS}


@pytest.mark.parametrize("make", [tiny_tokenizer, bundled_tokenizer], ids=["tiny", "bundled"])
def test_free_words_are_of_one_or_more_tokens_and_not_held_out(make):
    held_out = {*wording.HELD_OUT_ADJECTIVES, *wording.HELD_OUT_NOUNS}
    words = FreeWords.of(make().get_vocab(), held_out)
    for word in words.whole:
        assert re.fullmatch("[a-z]{3,}", word) and word not in held_out
        assert len(make().encode(f" {word}", add_special_tokens=False).ids) == 1
    rng = np.random.default_rng(0)
    drawn = [words.word(rng) for _ in range(600)]
    sizes = [len(make().encode(f" {word}", add_special_tokens=False).ids) for word in drawn]
    assert all(re.fullmatch("[a-z]+", word) for word in drawn)
    if make is bundled_tokenizer:
        assert len(words.whole) > 500 and len(set(drawn)) > 400
        shares = np.bincount(sizes, minlength=4) / len(sizes)
        assert shares[1] > 0.25 and shares[2] > 0.15 and shares[3] > 0.1


def test_a_held_out_word_is_never_made_of_pieces():
    words = FreeWords(("kral",), ("gru",), ("ok", "um"), frozenset(["gruok", "gruokok"]))
    rng = np.random.default_rng(0)
    drawn = {words.word(rng) for _ in range(300)}
    assert drawn == {"kral", "gruum", "gruokum", "gruumok", "gruumum"}
