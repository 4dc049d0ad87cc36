"""RULER's needles against their definition and its own examples, read from decoded prompts."""

from __future__ import annotations

import json
import re
from collections import Counter
from types import MappingProxyType

import numpy as np
import pytest

from kvjax.evaluation.tasks import Frame, ruler
from kvjax.models import demo, load_tokenizer
from tests.support.ruler_cases import NOISE, count, decode, essays, make

WORD, NUMBER = r"[A-Za-z' -]+", r"[1-9]\d{6}"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
# haystack, keys, kind of values, values, keys hidden, values of each, keys asked for
NEEDLES = MappingProxyType({
    "niah_single_1": ("noise", WORD, "number", NUMBER, 1, 1, 1),
    "niah_single_2": ("essay", WORD, "number", NUMBER, 1, 1, 1),
    "niah_single_3": ("essay", WORD, "uuid", UUID, 1, 1, 1),
    "niah_multikey_1": ("essay", WORD, "number", NUMBER, 4, 1, 1),
    "niah_multikey_2": ("needle", WORD, "number", NUMBER, 1, 1, 1),
    "niah_multikey_3": ("needle", UUID, "uuid", UUID, 1, 1, 1),
    "niah_multivalue": ("essay", WORD, "number", NUMBER, 1, 4, 1),
    "niah_multiquery": ("essay", WORD, "number", NUMBER, 4, 1, 4),
})  # fmt: skip
DEPTHS = {round(share) / 100 for share in np.linspace(0, 100, 40)}
SEVERAL_ASKED = ("niah_multivalue", "niah_multiquery")


def needle_pattern(name: str) -> re.Pattern:
    _, key, kind, value, *_ = NEEDLES[name]
    return re.compile(rf"One of the special magic {kind}s for ({key}) is: ({value})\.")


@pytest.mark.parametrize("name", NEEDLES)
@pytest.mark.parametrize("length", [1024, 4096])
def test_needles_are_those_of_the_definition(name, length):
    haystack, key, kind, _, hidden, each, asked = NEEDLES[name]
    for case in make(name, length=length).cases:
        context, question = decode(case.context), decode(case.question)
        found = needle_pattern(name).findall(context)
        values = [value for _, value in found]
        assert len(set(values)) == len(values), "values are distinct"
        keys = list(dict.fromkeys(key for key, _ in found))
        if haystack == "needle":
            assert len(found) == len(keys) > 10
        else:
            assert len(found) == hidden * each and len(keys) == hidden
        one = asked * each == 1
        some, are, all_, s = ("A", "is", "is", "") if one else ("Some", "are", "are all", "s")
        assert context.startswith(
            f"{some} special magic {kind}{s} {are} hidden within the following text. Make sure to "
            f"memorize it. I will quiz you about the {kind}{s} afterwards.\n"
        )
        asks = re.fullmatch(
            rf"\nWhat {all_} the special magic {kind}{s} for (.*) mentioned in the provided "
            rf"text\? The special magic {kind}{s} for (.*) mentioned in the provided text {are}",
            question,
        )
        assert asks[1] == asks[2]
        names = re.split(", and |, ", asks[1])
        assert len(names) == asked and all(re.fullmatch(key, name) for name in names)
        assert (asks[1].count(", and ") == 1) == (asked > 1)
        assert sorted(case.answers) == sorted(value for key, value in found if key in names)
        assert len(case.answers) == asked * each


@pytest.mark.parametrize("name", [name for name in NEEDLES if NEEDLES[name][0] != "essay"])
def test_lines_of_the_haystack(name):
    haystack, key, kind, value, *_ = NEEDLES[name]
    needle = rf"One of the special magic {kind}s for {key} is: {value}\."
    line = re.escape(NOISE) if haystack == "noise" else needle
    for case in make(name, cases=10).cases:
        _, *lines = decode(case.context).split("\n")
        whole = [bool(re.fullmatch(f"{line}|{needle}", text)) for text in lines]
        assert whole.count(False) <= 1, "one line is cut"
        if False in whole:
            cut = whole.index(False)
            assert cut == len(lines) - 1 or (cut == len(lines) - 2 and case.depth == 1)
            assert (NOISE if haystack == "noise" else "One of the special").startswith(
                lines[cut][:18]
            )


def test_the_haystack_is_a_run_of_the_text():
    text = " ".join(essays().split())
    starts = set()
    for name in NEEDLES:
        if NEEDLES[name][0] != "essay":
            continue
        for case in make(name, cases=6).cases:
            _, context = decode(case.context).split("\n")
            run = " ".join(needle_pattern(name).sub("", context).split())
            assert run in f"{text} {text}"
            assert run.startswith("When "), "it begins with a sentence"
            starts.add(run[:60])
    assert len(starts) > 20, "each case has its own"


@pytest.mark.parametrize("name", [name for name in NEEDLES if name not in SEVERAL_ASKED])
@pytest.mark.parametrize("length", [700, 2048])
def test_the_needle_that_is_asked_for_stands_at_its_depth(name, length):
    haystack = NEEDLES[name][0]
    longest = {"noise": 38, "essay": 40, "needle": 90}[haystack]

    def filler(text: str) -> int:
        return count(text if haystack == "needle" else needle_pattern(name).sub("", text))

    for case in make(name, length=length, cases=10).cases:
        _, body = decode(case.context).split("\n", 1)
        before, after = re.split(rf"One of [^:]*: {case.answers[0]}\.", body)
        place, whole = filler(before), filler(before) + filler(after)
        assert -2 <= place - case.depth * whole <= longest, "behind the next end of a sentence"
        if case.depth in (0, 1):
            assert (before, after)[int(case.depth)] == ""


def test_forty_cases_have_forty_depths_and_few_are_spread():
    depths = [case.depth for case in make("niah_single_1", length=256, cases=80).cases]
    assert set(depths[:40]) == set(depths[40:]) == DEPTHS and len(DEPTHS) == 40
    for start in range(30):
        few = sorted(depths[start : start + 10])
        assert max(np.diff([0, *few, 1])) < 0.2
    assert {case.depth for case in make("niah_multivalue").cases} == {None}


@pytest.mark.parametrize("name", [*SEVERAL_ASKED, "niah_multikey_1"])
def test_text_stands_between_several_needles(name):
    for case in make(name, cases=5).cases:
        needles = needle_pattern(name).finditer(decode(case.context))
        assert min(np.diff([needle.start() for needle in needles])) > 60


def test_a_text_without_ends_of_sentences_is_cut_at_the_depth():
    text = "boats go out again " * 3000
    for case in make("niah_single_2", text=text, length=4000, cases=8).cases:
        _, body = decode(case.context).split("\n", 1)
        before, after = map(count, re.split(r" ?One of [^:]*: \d+\.", body))
        off = before - case.depth * (before + after)
        assert abs(off) < 5 or after == 0 < off <= 100, "the end of the text is an end"


@pytest.mark.parametrize(
    "model", ["demo", "tinystories", pytest.param("smollm2", marks=pytest.mark.slow)]
)
def test_lists_of_uuids_have_the_form_of_rulers_own(model, data_dir, request):
    folders = {"demo": demo.directory(), "tinystories": data_dir / "tinystories-656k"}
    tokenizer = load_tokenizer(folders.get(model) or request.getfixturevalue(model))
    published = data_dir / "needle" / "niah_multikey_3_4096.jsonl"
    examples = [json.loads(line) for line in published.read_text().splitlines()[:20]]
    for number, example in enumerate(examples):
        length = len(tokenizer(example["input"]).input_ids)
        frame = Frame.of(tokenizer, chat=False)
        task = ruler(
            "niah_multikey_3", tokenizer, "", length=length, cases=1, seed=number, frame=frame
        )
        (case,) = task.cases
        ours = tokenizer.decode(case.prompt[len(frame.before) :])
        theirs, answer = example["input"], example["outputs"]
        found, expected = form(ours), form(theirs)
        assert found.keys() - expected.keys() <= {cut_line(ours)}
        assert expected.keys() <= found.keys(), "instruction, lines, question and answer"
        line = "One of the special magic uuids for U is: U."
        assert abs(found[line] - expected[line]) <= 2
        assert len(answer) == len(case.answers) == 1


def form(prompt: str) -> Counter:
    """How often each line of a prompt appears, with U for every UUID."""
    lines = (" ".join(line.split()) for line in prompt.split("\n"))
    return Counter(re.sub(UUID, "U", line) for line in lines)


def cut_line(prompt: str) -> str:
    """The one line that is cut, as `form` has it."""
    lines = [" ".join(line.split()) for line in prompt.split("\n")]
    cut = [line for line in lines if line[:6] == "One of"[: len(line)] and line[-1:] != "."]
    assert len(cut) <= 1
    return re.sub(UUID, "U", cut[0]) if cut else ""
