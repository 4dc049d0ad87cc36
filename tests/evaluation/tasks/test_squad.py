"""Questions about passages of SQuAD: passages, answers, and files that are refused."""

from __future__ import annotations

import functools
import json

import pytest

from kvjax.evaluation.tasks import Frame, squad
from kvjax.models import demo, load_tokenizer
from tests.support.squad_files import IMPOSSIBLE, article, paragraph, question, write

LENGTH = 150  # tokens: three paragraphs and a question


@functools.cache
def tokenizer():
    return load_tokenizer(demo.directory())


def cases_of(path, cases: int, frame: Frame | None = None, **options):
    frame = Frame.of(tokenizer(), chat=False) if frame is None else frame
    options = {"length": LENGTH, **options}
    return squad(tokenizer(), data=path, cases=cases, frame=frame, **options).cases


def text(tokens) -> str:
    return tokenizer().decode(list(tokens), skip_special_tokens=True)


def test_passages_are_made_of_paragraphs_in_order(tmp_path):
    """By turns of the articles, whose last passages are left out if they have others."""
    path = write(tmp_path / "a.json", article("Ham", 7), article("Kew", 1), article("Ash", 6))
    cases = cases_of(path, cases=10)
    passages = {case.details["passage"]: text(case.context) for case in cases}
    names = [
        [f"{name} {n}" for name in ("Ham", "Kew", "Ash") for n in range(7) if f"{name} {n}" in x]
        for x in passages.values()
    ]
    expected = [["Ham 0", "Ham 1", "Ham 2"], ["Kew 0"], ["Ash 0", "Ash 1", "Ash 2"]]
    assert names == [*expected, ["Ham 3", "Ham 4", "Ham 5"]]
    assert all(len(case.prompt) <= LENGTH for case in cases)
    assert cases == cases_of(path, cases=10), "the same again"
    assert cases[:4] == cases_of(path, cases=4), "fewer cases are the first ones"
    with pytest.raises(ValueError, match="cases must be at most the 10 of the data, got 11"):
        cases_of(path, cases=11)


def test_questions_and_their_shortest_answers(tmp_path):
    path = write(tmp_path / "a.json", article("Ham", 3))
    cases = cases_of(path, cases=3)
    for number, case in enumerate(cases):
        assert text(case.question) == f"\n\nQuestion: What stands in Ham {number}?\n\nAnswer:"
        assert case.answers == ("a heron",) and text(case.details["answer_tokens"]) == " a heron"
        assert case.max_new == len(case.details["answer_tokens"])
        assert IMPOSSIBLE not in text(case.prompt)
    spread = cases_of(path, cases=2, questions=2)
    assert [case.question for case in spread] == [cases[0].question, cases[2].question]


def test_of_equally_short_answers_the_first_is_asked_for(tmp_path):
    asked = {"context": "It is a boat.", "qas": [question("What?", "a boat", "boat", "port")]}
    assert len(tokenizer()(" boat").input_ids) == len(tokenizer()(" port").input_ids)
    path = write(tmp_path / "a.json", {"paragraphs": [asked]})
    assert cases_of(path, cases=1)[0].answers == ("boat",)


def test_a_template_ends_before_the_answer_begins(tmp_path):
    path = write(tmp_path / "a.json", article("Ham", 1))
    (case,) = cases_of(path, cases=1, frame=Frame((7, 8), (9,)))
    assert case.context[:2] == [7, 8]
    asked = case.question
    after = asked.index(9)
    assert text(asked[:after]).endswith("in Ham 0?") and text(asked[after + 1 :]) == "Answer:"


def test_real_passages(data_dir):
    """Every answer stands in its passage, and a passage ends where a paragraph has no room."""
    path = data_dir / "squad" / "dev-v2.0-part.json"
    cases = cases_of(path, cases=60, length=1400)
    assert all(case.answers[0] in text(case.context) for case in cases)
    sizes = {case.details["passage"]: len(case.prompt) for case in cases}
    assert len(sizes) == 12 and max(sizes.values()) <= 1400
    assert sum(sizes.values()) / len(sizes) > 1100


def test_a_folder_holds_the_development_set(tmp_path):
    with pytest.raises(ValueError, match=r"has no dev-v2\.0\.json or dev-v1\.1\.json"):
        cases_of(tmp_path, cases=1)
    path = write(tmp_path / "dev-v2.0.json", article("Ham", 1))
    assert cases_of(tmp_path, cases=1) == cases_of(path, cases=1)


WITHOUT_ANSWERS = {"context": "Old boats.", "qas": [{"question": "Who?", "answers": []}]}
EMPTY_ANSWER = {"context": "Old boats.", "qas": [question("Who?", " ")]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "it is not JSON"),
        ("[1]", r"the file must be an object, got \[1\]"),
        ("{}", "data of the file must be list, got None"),
        ('{"data": [{"paragraphs": 3}]}', r"paragraphs of data\[0\] must be list, got 3"),
        (
            '{"data": [{"paragraphs": [{"qas": []}]}]}',
            r"context of data\[0\]\.paragraphs\[0\] must be str, got None",
        ),
        (
            json.dumps({"data": [{"paragraphs": [WITHOUT_ANSWERS]}]}),
            r"answers of data\[0\]\.paragraphs\[0\]\.qas\[0\] must not be empty",
        ),
        (
            json.dumps({"data": [{"paragraphs": [EMPTY_ANSWER]}]}),
            r"text of data\[0\]\.paragraphs\[0\]\.qas\[0\]\.answers\[0\] must not be empty",
        ),
    ],
)
def test_what_is_no_file_of_squad(content, message, tmp_path):
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(
        ValueError, match=rf"broken\.json must be in the format of SQuAD: {message}"
    ):
        cases_of(path, cases=1)


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="questions of SQuAD need data: a file in its format"):
        cases_of(None, cases=1)
    path = write(tmp_path / "a.json", {"paragraphs": [paragraph("Ham")]})
    with pytest.raises(ValueError, match=r"a prompt of 40 tokens is too short for every paragraph"):
        cases_of(path, cases=1, length=40)
    with pytest.raises(ValueError, match="questions must be at least 1, got 0"):
        cases_of(path, cases=1, questions=0)
