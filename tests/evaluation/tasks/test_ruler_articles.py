"""RULER's questions about articles: where the right paragraph stands, lengths, scores, errors."""

from __future__ import annotations

import re

import pytest

from kvjax.evaluation.tasks import RULER_QA, Case, Task, ruler
from tests.support.ruler_cases import PLAIN, decode, tokenizer
from tests.support.squad_files import ANSWERS, IMPOSSIBLE, article, paragraph, question, write

ORDER = "Answer the question based on the given documents."


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    articles = [article(name, 12) for name in ("Ham", "Kew", "Ash")]
    return write(tmp_path_factory.mktemp("squad") / "a.json", *articles)


def make(data, *, length: int = 800, cases: int = 8, seed: int = 0) -> Task:
    return ruler(
        RULER_QA, tokenizer(), "", length=length, cases=cases, seed=seed, frame=PLAIN, data=data
    )


def test_the_paragraph_is_whole_and_others_are_around_it(data):
    task, before = make(data), set()
    for case in task.cases:
        assert len(case.prompt) == 800 and case.max_new == 32 and case.answers == ANSWERS
        text, asked = decode(case.context), decode(case.question)
        assert text.startswith(ORDER) and asked.startswith(f"\n\n{ORDER}")
        name = re.search(r"\n\nQuestion: What stands in (\w+ \d+)\? Answer:$", asked)[1]
        documents = re.split(r"\n\nDocument (\d+):\n", text)
        numbers, texts = documents[1::2], documents[2::2]
        assert [int(number) for number in numbers] == list(range(1, len(texts) + 1))
        right = paragraph(name)["context"]
        before.add(texts.index(right) / len(texts))
        assert texts.count(right) == 1 and len(set(texts)) == len(texts), "no paragraph comes twice"
        ours = sum(f"In {name.split()[0]} " in each for each in texts)
        assert ours == min(12, len(texts)), "those of the same article come first"
    assert min(before) < 0.3 and max(before) > 0.6, "at random places"


def test_a_case_depends_on_its_number_and_the_seed_alone(data):
    few, many = make(data, cases=2).cases, make(data, cases=4).cases
    assert few == many[:2] and many != make(data, cases=4, seed=1).cases


def test_any_answer_counts(data):
    case = Case([], [], ("a heron", "the bird"), 1)
    score = make(data, cases=1).score
    assert (score("It is A Heron.", case), score("the birds", case), score("", case)) == (1, 1, 0)


def test_what_does_not_fit_is_an_error(data, tmp_path):
    with pytest.raises(ValueError, match=r"too short for qa_1: (\d+) are needed") as caught:
        make(data, length=40, cases=1)
    least = int(re.search(r"(\d+) are needed", str(caught.value))[1])
    assert len(make(data, length=least, cases=1).cases[0].prompt) == least
    with pytest.raises(ValueError, match=r"not enough paragraphs: \d+ tokens of them are needed"):
        make(data, length=4000, cases=1)
    with pytest.raises(ValueError, match="questions of SQuAD need data"):
        make(None)
    asked = {"context": "Boats.", "qas": [question(IMPOSSIBLE)]}
    path = write(tmp_path / "none.json", {"paragraphs": [asked]})
    with pytest.raises(ValueError, match="no question of the data has an answer"):
        make(path)
