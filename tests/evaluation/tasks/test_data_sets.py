"""GSM8K, XSum and ZeroSCROLLS from files."""

from __future__ import annotations

import functools
import json
import re

import pytest

from kvjax.evaluation.tasks import Case
from kvjax.evaluation.tasks.datasets import dataset
from kvjax.evaluation.tasks.gsm8k import GSM8K, gsm8k, score_gsm8k
from kvjax.evaluation.tasks.zeroscrolls import ZEROSCROLLS
from kvjax.models import demo, load_tokenizer


@functools.cache
def tokenizer():
    return load_tokenizer(demo.directory())


def write(path, *records) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def decode(tokens: list[int]) -> str:
    return tokenizer().decode(tokens, skip_special_tokens=True)


PROBLEM = {"question": "How many are 2 boats?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}


def solved(number: int) -> dict:
    return {"question": f"How many are {number} boats?", "answer": f"All.\n#### {number:,}"}


@pytest.mark.parametrize("name", GSM8K)
def test_solutions_are_right(name, data_dir):
    lines = (data_dir / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    solutions = [json.loads(line)["answer"] for line in lines]
    assert len(solutions) == 1319
    for solution, other in zip(solutions, [*solutions[1:], solutions[0]], strict=True):
        case = Case([], [], (solution,), 1)
        ends = [float(text.split("#### ")[1].replace(",", "")) for text in (solution, other)]
        assert score_gsm8k(name, solution, case) == 1
        assert score_gsm8k(name, other, case) == (ends[0] == ends[1])


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("#### 1,450", 1, 1),
        ("#### 1450.", 1, 1),
        ("It is $1,450.", 0, 1),
        ("#### 1450.,", 1, 1),
        ("#### 1450 or 7", 1, 0),
        ("#### 7, then #### 1450", 0, 1),
        ("#### 1450\n\nQuestion: And 7?\nAnswer: #### 7", 1, 1),
        ("-1450", 0, 0),
        ("many", 0, 0),
        ("", 0, 0),
    ],
)
def test_which_number_counts(text, strict, flexible):
    case = Case([], [], ("So.\n#### 1450",), 1)
    assert score_gsm8k("gsm8k_strict", text, case) == strict
    assert score_gsm8k("gsm8k", text, case) == flexible


def test_worked_examples_are_the_context(data_dir):
    task = gsm8k("gsm8k", tokenizer(), data=data_dir / "gsm8k", cases=5, shots=2)
    lines = (data_dir / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines[:7]]
    shown = [f"Question: {x['question']}\nAnswer: {x['answer']}\n\n" for x in records]
    for case, record in zip(task.cases, records[2:], strict=True):
        assert case.context == task.cases[0].context
        assert decode(case.context) == shown[0] + shown[1]
        assert decode(case.question) == f"Question: {record['question']}\nAnswer:"
        assert case.max_new == 256 and task.score(record["answer"], case) == 1


def test_worked_examples_of_another_file(tmp_path):
    write(tmp_path / "test.jsonl", PROBLEM, solved(3))
    write(tmp_path / "train.jsonl", solved(4), solved(5))
    options = {"data": tmp_path, "examples": tmp_path / "train.jsonl", "shots": 1}
    task = gsm8k("gsm8k_strict", tokenizer(), **options)
    assert decode(task.cases[0].context) == (
        "Question: How many are 4 boats?\nAnswer: All.\n#### 4\n\n"
    )
    assert [task.score("#### 3", case) for case in task.cases] == [0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shots": 3}, "shots must be at most 2"),
        ({"shots": 2}, "all 2 records are worked examples"),
        ({"shots": 0}, "shots must be at least 1"),
        ({"shots": 1, "cases": 2}, "cases must be at most 1"),
        ({"shots": 1, "length": 10}, r"1 worked examples .* has \d+ tokens, more than 10"),
    ],
)
def test_too_many_examples(options, message, tmp_path):
    write(tmp_path / "test.jsonl", PROBLEM, solved(3))
    with pytest.raises(ValueError, match=message):
        gsm8k("gsm8k", tokenizer(), data=tmp_path, **options)


def test_a_solution_without_a_number(tmp_path):
    write(tmp_path / "test.jsonl", PROBLEM, {**PROBLEM, "answer": "two"})
    with pytest.raises(ValueError, match=r"line 2 of .*test\.jsonl: answer must end with ####"):
        gsm8k("gsm8k", tokenizer(), data=tmp_path, shots=1)


ARTICLE = {"document": "Old boats lie in the harbour. " * 20, "summary": "Boats lie in harbours."}


def test_xsum(tmp_path):
    write(tmp_path / "xsum.jsonl", ARTICLE, {**ARTICLE, "summary": "Boats go out again at noon."})
    task = dataset("xsum", tokenizer(), data=tmp_path)
    (case, _), document = task.cases, ARTICLE["document"]
    assert decode(case.context) == f"###\nArticle: {document}"
    assert decode(case.question) == "\n\nSummarize the above article in 1 sentence.\n"
    assert (task.metric, case.max_new) == ("ROUGE-2", 64)
    assert task.score(f"{case.answers[0]}\n###\nArticle: more", case) == pytest.approx(1)
    assert task.score("Boats lie there", case) == pytest.approx(2 * 1 / (2 + 3), abs=1e-6)
    words = dataset("xsum_rouge_1", tokenizer(), data=tmp_path, cases=1)
    assert words.score("Boats lie there", case) == pytest.approx(2 * 2 / (3 + 4), abs=1e-6)
    assert dataset("xsum_rouge_l", tokenizer(), data=tmp_path, cases=1).metric == "ROUGE-L"
    short = dataset("xsum", tokenizer(), data=tmp_path, length=60).cases[0]
    assert len(short.prompt) == 60 and short.question == case.question


GOOD = {  # the text that is right, one that is not
    "quality": ("(B)", "C"), "space_digest": ("60%", "90%"), "book_sum_sort": ("2, 1, 3", "3, 1, 2")
}  # fmt: skip


def scrolls(number: int, output: str) -> dict:
    start = f"Read this.\n\nStory:\n{'Old boats lie in the harbour. ' * 20}"
    question = "\n\nQuestion:\nWho?\n\nAnswer:\n"
    return {
        "id": f"case {number}", "pid": f"{number}_0", "input": start + question,
        "output": output, "document_start_index": 20, "document_end_index": len(start),
        "query_start_index": len(start) + 2, "query_end_index": len(start) + 17,
        "truncation_seperator": "... [The rest of the story is omitted]\n\n",
    }  # fmt: skip


@pytest.mark.parametrize("name", ZEROSCROLLS)
def test_zeroscrolls(name, tmp_path):
    task = name.removeprefix("zeroscrolls_")
    right, wrong = GOOD.get(task, ("the old boats", "nothing of it"))
    (tmp_path / task).mkdir()
    records = scrolls(0, right), scrolls(1, wrong), scrolls(1, right)
    write(tmp_path / task / "validation.jsonl", *records)
    found = dataset(name, tokenizer(), data=tmp_path)
    assert [case.answers for case in found.cases] == [(right,), (wrong, right)]
    case = found.cases[0]
    assert decode(case.prompt) == records[0]["input"]
    assert decode(case.question) == "Question:\nWho?\n\nAnswer:\n"
    assert found.score(right, case) == 1 and found.score(wrong, case) < 0.5
    assert found.score(right, found.cases[1]) == 1
    whole = len(case.prompt)
    assert dataset(name, tokenizer(), data=tmp_path, length=whole).cases == found.cases
    short = dataset(name, tokenizer(), data=tmp_path, length=whole - 20, cases=1).cases[0]
    assert len(short.prompt) == whole - 20
    assert decode(case.context).startswith(decode(short.context))
    omitted = records[0]["truncation_seperator"]
    assert decode(short.question) == f"{omitted}Question:\nWho?\n\nAnswer:\n"


@pytest.mark.parametrize("start", [0, 10**6])
def test_zeroscrolls_queries_lie_inside(start, tmp_path):
    write(tmp_path / "quality.jsonl", {**scrolls(0, "B"), "query_start_index": start})
    with pytest.raises(ValueError, match=r"line 1 of .*: query_start_index must lie inside"):
        dataset("zeroscrolls_quality", tokenizer(), data=tmp_path)


@pytest.mark.parametrize("name", ["gsm8k", "xsum", "zeroscrolls_qasper"])
def test_lengths_are_whole_numbers(name, tmp_path):
    write(tmp_path / "test.jsonl", *[PROBLEM] * 9)
    write(tmp_path / "xsum.jsonl", ARTICLE)
    write(tmp_path / "qasper.jsonl", scrolls(0, "B"))
    for wrong in ("60", 60.0):
        with pytest.raises(TypeError, match="length must be an int"):
            dataset(name, tokenizer(), data=tmp_path, length=wrong)


@pytest.mark.parametrize("name", ["gsm8k", "xsum", "zeroscrolls_qasper"])
def test_absent_and_damaged_data(name, tmp_path):
    file = {"gsm8k": "test", "xsum": "xsum"}.get(name, "qasper")
    with pytest.raises(ValueError, match=f"{name} needs data"):
        dataset(name, tokenizer())
    with pytest.raises(ValueError, match=rf"has no {file}\.jsonl"):
        dataset(name, tokenizer(), data=tmp_path)
    for content, message in (("", "is empty"), ("{}", "line 1 .* it has no"), ("x", "not JSON")):
        (tmp_path / f"{file}.jsonl").write_text(content)
        with pytest.raises(ValueError, match=message) as error:
            dataset(name, tokenizer(), data=tmp_path)
        assert re.search(rf"{file}\.jsonl", str(error.value)) and "\n" not in str(error.value)
