"""Retrieval cases: lengths, places, keys, and that training has seen none of them."""

from __future__ import annotations

import functools
import itertools
import re

import numpy as np
import pytest

from kvjax.evaluation import OWN_TASKS, Case, Haystack, is_right
from kvjax.evaluation.tasks import retrieval
from kvjax.evaluation.tasks.wording import (
    HELD_OUT_ADJECTIVES,
    HELD_OUT_NOUNS,
    HELD_OUT_WORDING,
    TRAINING_ADJECTIVES,
    TRAINING_NOUNS,
    WORDINGS,
)
from kvjax.models import demo, load_tokenizer
from kvjax.models.demo.training.tasks import Mix, Tasks
from kvjax.models.demo.training.words import FreeWords

NEEDLE = re.compile(r" The code of the (\w+ \w+) is (\d+)\.")
LINK = re.compile(r" The code of the (\w+ \w+) is the code of the (\w+ \w+)\.")
QUESTION = re.compile(r"\n\nQuestion: What is the code of the (\w+ \w+)\?\nAnswer: .* is\Z")
ADJECTIVES, NOUNS = set(HELD_OUT_ADJECTIVES), set(HELD_OUT_NOUNS)


def start_of(case: Case) -> int:
    """Where in the prompt what is asked for begins."""
    return case.details["position"]


def answer_of(case: Case) -> str:
    (answer,) = case.answers
    return answer


@functools.cache
def tokenizer():
    return load_tokenizer(demo.directory())


def encode(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False).input_ids


def decode(tokens: list[int]) -> str:
    return tokenizer().decode(tokens)


@functools.cache
def filler() -> str:
    """Short sentences without digits, no two windows of them equal."""
    words = "boats go out again at noon when rain has gone from our old town".split()
    rng = np.random.default_rng(0)
    return "".join(f" When {' '.join(rng.choice(words, 5))}." for _ in range(1500))


@functools.cache
def haystack() -> Haystack:
    return Haystack(tokenizer(), filler())


def make(task: str = "needle", **options) -> Case:
    return haystack().case(task, **{"length": 512, "depth": 0.5, "seed": 0} | options)


def asked_key(case: Case, pattern: re.Pattern = QUESTION) -> str:
    return pattern.search(decode(case.prompt)).group(1)


def question_of(task: str, case: Case) -> list[int]:
    """The tokens of the question, from the key that the prompt asks for."""
    if task != "key_value":
        return encode(WORDINGS[0].ask(asked_key(case)))
    key = asked_key(case, re.compile(r"Which value has the (\w+ \w+)\?"))
    return encode(f"\n\nQuestion: Which value has the {key}?\nAnswer: {key}:")


@pytest.mark.parametrize("task", OWN_TASKS)
@pytest.mark.parametrize("length", [400, 4096])
def test_prompts_have_exactly_the_length(task, length):
    for seed, depth in enumerate((0, 0.25, 0.5, 0.9, 1)):
        case = make(task, length=length, depth=depth, seed=seed)
        assert len(case.prompt) == length
        assert case.prompt[0] == tokenizer().bos_token_id == 0
        assert 0 not in case.prompt[1:], "one start token"
        question = question_of(task, case)
        assert case.prompt[-len(question) :] == question
        assert re.fullmatch(r"[1-9]\d{5}", answer_of(case))
        assert 1 <= start_of(case) < length - len(question)
        assert {type(token) for token in case.prompt} == {int}


@pytest.mark.parametrize("depth", [0, 0.1, 0.5, 0.77, 1])
def test_needle_stands_at_its_depth(depth):
    length = 300
    for seed in range(3):
        case = make(length=length, depth=depth, seed=seed)
        key = asked_key(case)
        needle = encode(WORDINGS[0].needle(key, answer_of(case)))
        question = question_of("needle", case)
        end = start_of(case) + len(needle)
        assert case.prompt[start_of(case) : end] == needle
        before, after = case.prompt[1 : start_of(case)], case.prompt[end : length - len(question)]
        whole = encode(filler())
        window = before + after
        starts = [i for i in range(len(whole)) if whole[i : i + len(window)] == window]
        assert len(starts) == 1, "the rest is one window of the text"
        ends = [i + 1 for i, token in enumerate(window) if decode([token]) == "."]
        allowed = [0, *ends, len(window)]
        assert len(before) in allowed, "behind the end of a sentence"
        off = [abs(place - depth * len(window)) for place in allowed]
        assert abs(len(before) - depth * len(window)) == min(off) < 12
        if depth in (0, 1):
            assert (len(before), len(after))[depth] == 0


@pytest.mark.parametrize("needles", [1, 20])
def test_several_needles(needles):
    for seed in range(3):
        case = make("multi_needle", length=1024, seed=seed, needles=needles)
        found = NEEDLE.findall(decode(case.prompt))
        keys, values = {key for key, _ in found}, {value for _, value in found}
        assert len(found) == len(keys) == len(values) == needles
        assert dict(found)[asked_key(case)] == answer_of(case)
        ids = encode(WORDINGS[0].needle(asked_key(case), answer_of(case)))
        assert case.prompt[start_of(case) : start_of(case) + len(ids)] == ids


def test_needles_in_text_without_sentences_stand_at_their_depth():
    made = Haystack(tokenizer(), "word " * 3000)
    for depth in (0, 0.25, 0.5, 1):
        case = made.case("needle", length=1500, depth=depth, seed=0)
        room = 1500 - 1 - len(question_of("needle", case))
        room -= len(encode(WORDINGS[0].needle(asked_key(case), answer_of(case))))
        assert start_of(case) == 1 + round(depth * room)


def test_special_tokens_around_and_within_texts():
    """One before the text is kept, one behind it is not; one that the text spells is text."""
    from tokenizers.processors import TemplateProcessing

    other = load_tokenizer(demo.directory())
    other.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    assert other("a").input_ids[-1] == 1
    case = Haystack(other, "About <s> and </s>. " * 200).case(
        "needle", length=400, depth=0.5, seed=0
    )
    assert case.prompt[0] == 0 and not {0, 1} & {*case.prompt[1:]}
    assert "<s>" in decode(case.prompt[1:])


@pytest.mark.parametrize("needles", [1, 8])
def test_key_value_is_one_list(needles):
    asked_lines = set()
    for seed in range(4):
        case = make("key_value", length=700, seed=seed, needles=needles)
        block = re.search(r"\n\n((?:\w+ \w+: \d{6}\n)+)\n", decode(case.prompt)).group(1)
        lines = [line.split(": ") for line in block.splitlines()]
        assert len(dict(lines)) == len({value for _, value in lines}) == 4 * needles
        key = asked_key(case, re.compile(r"Which value has the (\w+ \w+)\?"))
        assert dict(lines)[key] == answer_of(case)
        assert decode(case.prompt[start_of(case) :]).startswith(f"{key}: {answer_of(case)}\n")
        asked_lines.add([name for name, _ in lines].index(key))
    assert len(asked_lines) > 1, "any line may be asked for"


def test_chain_goes_over_another_key():
    source_first = set()
    for seed in range(8):
        case = make("chain", seed=seed)
        text = decode(case.prompt)
        (link,) = LINK.finditer(text)
        (source,) = NEEDLE.finditer(text)
        assert link.group(1) == asked_key(case) != link.group(2)
        assert source.groups() == (link.group(2), answer_of(case))
        ids = encode(link.group())
        assert case.prompt[start_of(case) : start_of(case) + len(ids)] == ids
        source_first.add(source.start() < link.start())
    assert source_first == {True, False}


@pytest.mark.parametrize("task", OWN_TASKS)
def test_reply_tokens_are_those_of_the_exact_answer(task):
    case = make(task)
    reply = f" {answer_of(case)}."
    if task == "chain":
        other = LINK.search(decode(case.prompt)).group(2)
        reply = f" the code of the {other} is {answer_of(case)}."
    assert case.max_new == len(encode(reply)) + 1
    assert is_right(decode(encode(reply)), answer_of(case))


def test_a_case_depends_on_its_arguments_alone():
    base, answers = {"length": 512, "depth": 0.5, "seed": 3}, set()
    again = Haystack(load_tokenizer(demo.directory()), filler())
    for task in OWN_TASKS:
        case = make(task, **base)
        assert again.case(task, length=np.int64(512), depth=0.5, seed=np.int32(3)) == case
        for change in ({}, {"seed": 4}, {"length": 513}, {"depth": 0.25}, {"depth": 1}):
            answers.add(answer_of(make(task, **base | change)))
    assert len(answers) == 5 * len(OWN_TASKS)
    cases = [make(seed=seed) for seed in range(20)]
    assert len({asked_key(case) for case in cases}) >= 18
    assert len({tuple(case.prompt[1:30]) for case in cases}) == 20, "other windows"


def test_the_held_out_wording_and_words():
    usual, other = make(), make(wording=HELD_OUT_WORDING)
    key = asked_key(usual)
    question = f"\n\nQuestion: At which page is the {key}?\nAnswer: You will find the {key} at page"
    assert decode(other.prompt).endswith(question) and len(other.prompt) == len(usual.prompt)
    needle = f" You will find the {key} at page {answer_of(usual)}."
    assert decode(other.prompt[start_of(other) :]).startswith(needle)
    for words in (HELD_OUT_ADJECTIVES, HELD_OUT_NOUNS, TRAINING_ADJECTIVES, TRAINING_NOUNS):
        assert len(set(words)) == len(words)
    for task in OWN_TASKS:
        text = decode(make(task, length=1024).prompt)
        keys = re.findall(r"(?:the |\n)(\w+ \w+)(?: is|:)", text)
        assert keys and {*" ".join(keys).split()} <= ADJECTIVES | NOUNS


def test_training_never_asks_for_what_is_held_out():
    heard = []

    def listen(text: str) -> list[int]:
        heard.append(text)
        return encode(text)

    whole = ("path", "name", "value", "object", "when", "file", "returns", "class", "other")
    free = FreeWords(whole, ("az", "vi"), ("ure", "vid"), frozenset(ADJECTIVES | NOUNS))
    tasks = Tasks(listen, np.arange(2, 2000), free, vocab=2000, special=2, bos=0, eos=1)
    rng = np.random.default_rng(0)
    for share_of_free in (0.0, 1.0):
        for _ in range(100):
            tasks.sequence(rng, 512, Mix(0.1, 0.3, 0.3, 4, 0, free=share_of_free))
    text = "\n".join(heard)
    words = set(re.findall(r"\w+", text.lower()))
    assert not words & (ADJECTIVES | NOUNS)
    for wording in (HELD_OUT_WORDING.statement, HELD_OUT_WORDING.question):
        for part in wording.split("{key}"):
            assert not part.strip(" ?") or part not in text
    for used in ({*TRAINING_ADJECTIVES, *TRAINING_NOUNS}, {*whole}):
        assert len(words & used) > 4, "something was heard at all"


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        (" 482130.", "482130", True),
        (" the code of the vivid daisy is 482130. And 17.", "482130", True),
        (" 48213", "482130", False),
        (" 4821301", "482130", False),
        (" 17. 482130", "482130", False),
        ("", "482130", False),
        ("", "", False),
    ],
)
def test_is_right(text, answer, right):
    assert is_right(text, answer) is right


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"task": "nedle"}, ValueError, "task must be one of .*'chain'.*, got 'nedle'"),
        ({"depth": float("nan")}, ValueError, "depth must lie between 0 and 1, got nan"),
        ({"length": 512.0}, TypeError, "length must be an int, got 512.0"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"task": "key_value", "needles": 400}, ValueError, "different keys, .* needs 1600"),
    ],
)
def test_bad_input_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        make(**changes)


def test_room_for_filler_is_from_nothing_to_the_whole_text():
    """Keys differ in their tokens, so the limits are looked for among many cases."""
    text, rooms = "One. Two. Three.", set()
    small, refusals = Haystack(tokenizer(), text), r"too short: what .* have \d+$|the text has \d+$"
    for length, seed in itertools.product(range(40, 90), range(8)):
        try:
            case = small.case("needle", length=length, depth=0.5, seed=seed)
        except ValueError as error:
            assert re.search(refusals, str(error))
            continue
        needle = encode(WORDINGS[0].needle(asked_key(case), answer_of(case)))
        rooms.add(length - 1 - len(needle) - len(question_of("needle", case)))
    assert rooms == set(range(len(encode(text)) + 1))


def test_another_tokenizer(data_dir):
    other = load_tokenizer(data_dir / "tinystories-656k")
    text = (data_dir / "text" / "tinyshakespeare.txt").read_text(encoding="utf-8")[:40_000]
    haystack = Haystack(other, text)
    start = other("").input_ids
    assert start, "this tokenizer puts a token before a text"
    for depth in (0, 0.5, 1):
        case = haystack.case("needle", length=1500, depth=depth, seed=2)
        assert len(case.prompt) == 1500 and case.prompt[: len(start)] == start
        words = " ".join(other.decode(case.prompt[len(start) :]).split())
        key = re.search(r"What is the code of the (\w+ \w+)\?", words).group(1)
        assert words.endswith(f"Answer: The code of the {key} is")
        found = " ".join(other.decode(case.prompt[start_of(case) :]).split())
        assert found.startswith(f"The code of the {key} is {answer_of(case)}.")


def test_a_statement_of_words_stands_at_its_depth_and_is_asked_for():
    statement = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park"
    task = retrieval(
        "statement", haystack(), length=400, depths=(0.0, 0.5, 1.0), cases=6, seed=0
    )  # fmt: skip
    assert len({tuple(case.context) for case in task.cases}) == 6, "other windows"
    for number, case in enumerate(task.cases):
        assert len(case.prompt) == 400 and case.depth == (0.0, 0.5, 1.0)[number % 3]
        assert decode(case.prompt[case.details["position"] :]).startswith(f" {statement}")
        asked = "\nAnswer: The best thing to do in San Francisco is"
        assert decode(case.question).endswith(asked)
        assert decode(case.context).count("Dolores Park") == 1


@pytest.mark.parametrize(
    ("said", "score"),
    [
        (" eat a sandwich and sit in Dolores Park on a sunny day.", 1.0),
        (" to sit in DOLORES park.", 0.5),
        (" parking sandwiches", 0.0),
        ("", 0.0),
    ],
)
def test_a_statement_is_scored_by_the_words_that_an_answer_has(said, score):
    task = retrieval("statement", haystack(), length=400, depths=(0.5,), cases=1, seed=0)
    assert task.score(said, task.cases[0]) == score and task.floor == 0
