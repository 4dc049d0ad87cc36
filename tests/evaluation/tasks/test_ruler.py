"""RULER's tasks: exact lengths, what a case depends on, scores, errors."""

from __future__ import annotations

import re
import sys

import pytest

from kvjax.evaluation.tasks import RULER_TASKS, Case
from kvjax.evaluation.tasks.ruler.draws import word_list
from tests.support.ruler_cases import CHAT, PLAIN, decode, make, tokenizer


@pytest.mark.parametrize("frame", [PLAIN, CHAT], ids=["plain", "chat"])
@pytest.mark.parametrize("name", RULER_TASKS)
def test_prompts_have_exactly_the_length(name, frame):
    for length in (900, 1537):
        task = make(name, length=length, frame=frame)
        assert task.name == name and len(task.cases) == 3 and task.floor == 0
        for case in task.cases:
            assert len(case.prompt) == length
            assert tuple(case.context[: len(frame.before)]) == frame.before
            assert {type(token) for token in case.prompt} == {int}
            if frame.after:
                # The frame's end stands between the question and the beginning of the answer.
                size = len(frame.after)
                windows = [tuple(case.question[i : i + size]) for i in range(len(case.question))]
                assert windows.count(frame.after) == 1
                place = windows.index(frame.after)
                assert decode(case.question[:place]).endswith(("?", "text above."))
                begun = decode(case.question[place + size :])
                assert begun.startswith((" The special magic", " Answer: "))


def test_contexts_of_a_task_differ_in_length_by_their_questions_alone():
    for name in RULER_TASKS:
        cases = make(name, cases=10).cases
        lengths = {len(case.context) for case in cases}
        assert max(lengths) - min(lengths) <= (40 if name == "niah_multiquery" else 12), name


@pytest.mark.parametrize("name", RULER_TASKS)
def test_a_case_depends_on_its_number_and_the_seed_alone(name):
    few, many = make(name, cases=2).cases, make(name, cases=4).cases
    assert few == many[:2]
    most_new = {"vt": 30, "cwe": 120, "fwe": 50}.get(name, 128)
    assert {case.max_new for case in many} == {most_new}
    assert len({tuple(case.answers) for case in many}) == 4
    assert {case.answers for case in many}.isdisjoint(
        case.answers for case in make(name, cases=4, seed=1).cases
    )
    assert make(name, length=1400, cases=2).cases[1].answers == few[1].answers


def test_special_tokens_that_are_spelled_out_are_text():
    text = "Boats have </s> and <s> on them. " * 200
    for case in make("niah_single_2", text=text).cases:
        assert not set(case.prompt[1:]) & set(tokenizer().all_special_ids)


def test_scores_are_shares_of_answers_found():
    task = make("niah_multivalue")
    case = Case([], [], ("Alpha", "beta", "42", "7"), 1)
    assert task.score("It is ALPHA, Beta.", case) == 0.5
    assert task.score("", case) == 0
    assert task.score("7 42 alphabet beta", case) == 1
    assert all(task.score(decode(case.context), case) == 1 for case in task.cases)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"name": "niah_single_4"}, r"the task of RULER must be one of .*, got 'niah_single_4'"),
        ({"text": "Boats go. " * 9}, r"too short: \d+ tokens of it are needed, and it has \d\d$"),
        ({"text": ""}, r"too short: \d+ tokens of it are needed, and it has \d$"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error_of_one_line(changes, error):
    with pytest.raises(ValueError, match=error) as caught:
        make(**{"name": "niah_single_2"} | changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", RULER_TASKS)
def test_the_least_length_that_an_error_names_is_enough(name):
    with pytest.raises(ValueError, match="are needed") as caught:
        make(name, length=40, cases=1)
    least = int(re.search(r"(\d+) are needed", str(caught.value))[1])
    assert len(make(name, length=least, cases=1).cases[0].prompt) == least
    with pytest.raises(ValueError, match="too short"):
        make(name, length=least - 1, cases=1)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    word_list.cache_clear()
    for name in ("niah_single_1", "cwe"):
        with pytest.raises(ValueError, match=r"wonderwords, .* pip install 'kvjax\[eval\]'"):
            make(name)
    for name in ("niah_multikey_3", "vt", "fwe"):
        make(name)
