"""LongBench, ZeroSCROLLS, XSum and GSM8K from files: prompts, what is cut, scores, refusals."""

from __future__ import annotations

import copy
import functools
import json
import sys
import types
import zipfile

import pytest

from kvjax.evaluation.tasks import DATASETS, Frame, dataset
from kvjax.evaluation.tasks.datasets import split_tokens
from kvjax.evaluation.tasks.longbench import chinese
from kvjax.evaluation.tasks.longbench.tables import MAX_NEW, PROMPTS
from kvjax.models import demo, load_tokenizer

PLAIN = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
REAL = ("multi_news", "multifieldqa_zh", "passage_retrieval_zh")
SCROLLS = tuple(name for name in DATASETS if name.startswith("zeroscrolls_"))

LONGBENCH = {
    "context": "Old boats {lie} in the harbour.\n\nNo one asks </s> why. 船很旧。",
    "input": "Question: Who asks {why}?\nAnswer:",
    "answers": ["Nobody 1", "No one 1"],
    "all_classes": ["No one 1", "Many"],
}
ARTICLE = {"document": "Old boats lie in the harbour. " * 20, "summary": "Boats lie in harbours."}


@functools.cache
def tokenizer():
    return load_tokenizer(demo.directory())


@functools.cache
def chatty():
    """The tokenizer with a chat template."""
    found = copy.deepcopy(tokenizer())
    found.chat_template = "{% for m in messages %}USER {{ m.content }} END{% endfor %} BOT:"
    return found


def write(path, *records) -> None:
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_text("".join(lines), encoding="utf-8")


def decode(tokens: list[int]) -> str:
    return tokenizer().decode(tokens, skip_special_tokens=True)


# LongBench


def test_the_tables_are_the_published_ones(data_dir):
    for name, table in (("prompt", PROMPTS), ("maxlen", MAX_NEW)):
        path = data_dir / "longbench" / f"dataset2{name}.json"
        assert table == json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PROMPTS)
def test_context_and_question_are_the_official_prompt(name, tmp_path):
    write(tmp_path / f"{name}.jsonl", LONGBENCH)
    task = dataset(name, tokenizer(), data=tmp_path)
    (case,) = task.cases
    start = tokenizer().bos_token_id
    assert case.prompt[0] == start and start not in case.prompt[1:]
    official = PROMPTS[name].format(context=LONGBENCH["context"], input=LONGBENCH["input"])
    assert tokenizer().decode(case.prompt[1:]) == official
    assert tokenizer().decode(case.context[1:]).endswith(LONGBENCH["context"])
    assert case.max_new == MAX_NEW[name] and case.answers == ("Nobody 1", "No one 1")
    assert task.name == name and task.floor == 0
    assert task.score("No one 1", case) == pytest.approx(float(name != "passage_count"))
    for chat, expected in ((None, name not in PLAIN), (True, True), (False, False)):
        (case,) = dataset(name, chatty(), data=tmp_path, chat=chat).cases
        assert tokenizer().decode(case.question).endswith(" END BOT:") == expected


@pytest.mark.parametrize("name", REAL)
def test_real_tasks(name, data_dir):
    folder = data_dir / "longbench" / "tasks"
    whole = dataset(name, tokenizer(), data=folder, cases=12)
    cut = dataset(name, tokenizer(), data=folder, cases=12, length=1500)
    lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
    records = [json.loads(line) for line in lines[:12]]
    for record, case, short in zip(records, whole.cases, cut.cases, strict=True):
        assert case.answers == tuple(record["answers"])
        official = PROMPTS[name].format(context=record["context"], input=record["input"])
        assert tokenizer().decode(case.prompt[1:]) == official
        assert record["input"] in tokenizer().decode(case.question)
        assert short.question == case.question
        assert len(short.prompt) == min(1500, len(case.prompt))
        assert whole.score(case.answers[0], case) == pytest.approx(1)
    others = [record["answers"][0] for record in [*records[1:], records[0]]]
    pairs = zip(others, whole.cases, strict=True)
    assert whole.floor == pytest.approx(sum(whole.score(*pair) for pair in pairs) / 12)
    assert 0 <= whole.floor < 0.3


@pytest.mark.parametrize(("with_template", "more"), [(False, 1), (True, 2), (True, 40)])
def test_the_middle_is_left_out(with_template, more, tmp_path):
    """The prompt's first and last tokens stay, half and half, and the question stays whole."""
    write(tmp_path / "qasper.jsonl", {**LONGBENCH, "context": LONGBENCH["context"] * 20})
    options = {"data": tmp_path, "chat": with_template}
    make = functools.partial(dataset, "qasper", chatty(), **options)
    (whole,), frame = make().cases, Frame.of(chatty(), with_template)
    around = len(frame.before) + len(frame.after)
    for length in (len(whole.question) + len(frame.before) + more, len(whole.prompt) - more):
        (case,) = make(length=length).cases
        assert len(case.prompt) == length and case.question == whole.question
        room = length - around
        front = min(room // 2, room - (len(whole.question) - len(frame.after)))
        inside = slice(len(frame.before), len(whole.prompt) - len(frame.after))
        body = whole.prompt[inside]
        expected = body[:front] + body[len(body) - (room - front) :]
        assert case.prompt == [*frame.before, *expected, *frame.after]
    assert make(length=len(whole.prompt)).cases == (whole,)
    least = len(whole.question) + len(frame.before)
    with pytest.raises(ValueError, match=f"{least} tokens is too short: {least + 1} are needed"):
        make(length=least)


def test_a_token_across_the_border_belongs_to_the_question():
    whole = tokenizer()("harbour", add_special_tokens=False).input_ids
    start, end = split_tokens(tokenizer(), "harb", "our")
    assert start + end == whole
    assert "harb".startswith(tokenizer().decode(start))
    assert split_tokens(tokenizer(), "", "our")[0] == []
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        split_tokens(types.SimpleNamespace(is_fast=False), "a", "b")


def test_places_of_the_data_and_how_many_cases(tmp_path):
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "qasper.jsonl"
    write(path, LONGBENCH, {**LONGBENCH, "answers": ["Many 2"]}, LONGBENCH)
    for place in (tmp_path, path.parent, path):
        task = dataset("qasper", tokenizer(), data=place, cases=2)
        assert [case.answers for case in task.cases] == [("Nobody 1", "No one 1"), ("Many 2",)]
    with pytest.raises(ValueError, match="cases must be at most the 3 of the data, got 4"):
        dataset("qasper", tokenizer(), data=tmp_path, cases=4)


@pytest.fixture
def hub(monkeypatch):
    """Stands in for the client: `hub.answer` is the file to return or the error to raise."""
    client = types.SimpleNamespace(answer=None)

    def hf_hub_download(*names, repo_type):
        assert (names, repo_type) == (("THUDM/LongBench", "data.zip"), "dataset")
        if isinstance(client.answer, Exception):
            raise client.answer
        return str(client.answer)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    return client


def test_the_hubs_archive(hub, tmp_path):
    hub.answer = tmp_path / "data.zip"
    with zipfile.ZipFile(hub.answer, "w") as files:
        files.writestr("data/qasper.jsonl", json.dumps(LONGBENCH))
    write(tmp_path / "qasper.jsonl", LONGBENCH)
    local = dataset("qasper", tokenizer(), data=tmp_path)
    assert dataset("qasper", tokenizer()).cases == local.cases
    with pytest.raises(ValueError, match=r"cannot read data/trec.jsonl of .*data\.zip"):
        dataset("trec", tokenizer())
    hub.answer = OSError("offline\n\nno network")
    with pytest.raises(ValueError, match=r"cannot be downloaded .*: offline no network$"):
        dataset("qasper", tokenizer())


# GSM8K


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_strict"])
def test_problems(name, data_dir):
    """Eight worked examples are the context; each solution is right, another one is not."""
    lines = (data_dir / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    task = dataset(name, tokenizer(), data=data_dir / "gsm8k", cases=50)
    shown = [f"Question: {x['question']}\nAnswer: {x['answer']}\n\n" for x in records[:8]]
    answers = [record["answer"] for record in records[8:59]]
    for number, case in enumerate(task.cases):
        assert case.context == task.cases[0].context and case.max_new == 256
        assert decode(case.question) == f"Question: {records[8 + number]['question']}\nAnswer:"
        right, other = answers[number], answers[number + 1]
        ends = [float(text.split("#### ")[1].replace(",", "")) for text in (right, other)]
        assert task.score(right, case) == 1 and task.score(other, case) == (ends[0] == ends[1])
    assert decode(task.cases[0].context) == "".join(shown)
    least = max(len(case.prompt) for case in task.cases[:1])
    options = {"data": data_dir / "gsm8k", "cases": 1}
    assert dataset(name, tokenizer(), length=least, **options).cases == task.cases[:1]
    with pytest.raises(ValueError, match=f"too short: {least} are needed"):
        dataset(name, tokenizer(), length=least - 1, **options)


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
def test_which_number_counts(text, strict, flexible, tmp_path):
    record = {"question": "How many?", "answer": "So.\n#### 1450"}
    write(tmp_path / "test.jsonl", *[record] * 9)
    for name, score in (("gsm8k_strict", strict), ("gsm8k", flexible)):
        task = dataset(name, tokenizer(), data=tmp_path)
        assert task.score(text, task.cases[0]) == score


# XSum and ZeroSCROLLS


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
    start = f"Read this.\n\nStory:\n{'Old boats lie in the harbour. ' * 20}\n\n"
    return {
        "id": f"case {number}", "input": f"{start}Question:\nWho?\n\nAnswer:\n",
        "output": output, "query_start_index": len(start),
        "truncation_seperator": "... [The rest of the story is omitted]\n\n",
    }  # fmt: skip


@pytest.mark.parametrize("name", SCROLLS)
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


# Refusals


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("squad", "squad", "", "task must be one of"),
        ("qasper", "trec", "", r"has no qasper\.jsonl or data/qasper\.jsonl"),
        ("qasper", "qasper", "\n\n", r"qasper\.jsonl is empty"),
        ("qasper", "qasper", "x", r"line 1 of .*qasper\.jsonl: Expecting value"),
        ("qasper", "qasper", "7", "line 1 .*: it must be a JSON object, got 7"),
        ("qasper", "qasper", "{}", "line 1 .*: context must be str, got None"),
        (
            "trec", "trec", json.dumps({**LONGBENCH, "all_classes": []}),
            r"line 1 .*: all_classes must be list, got \[\]",
        ),
        ("gsm8k", "test", '{"question": "", "answer": ""}', "first 8 .*, and the data has 1"),
    ],
)  # fmt: skip
def test_what_is_refused(name, file, content, message, tmp_path):
    (tmp_path / f"{file}.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        dataset(name, tokenizer(), data=tmp_path)
    assert "\n" not in str(error.value)


def test_what_is_refused_before_data_is_read(monkeypatch):
    with pytest.raises(TypeError, match="length must be an int"):
        dataset("qasper", tokenizer(), data="nowhere", length=60.0)
    with pytest.raises(ValueError, match="the model's tokenizer has none"):
        dataset("qasper", tokenizer(), data="nowhere", chat=True)
    broken = copy.deepcopy(tokenizer())
    broken.chat_template = "{{ raise_exception('no\nsystem') }}"
    with pytest.raises(ValueError, match=r"chat template fails: no system$"):
        dataset("qasper", broken, data="nowhere")
    monkeypatch.setitem(sys.modules, "jieba", None)
    chinese._jieba.cache_clear()
    with pytest.raises(ValueError, match=r"jieba, .* pip install 'kvjax\[eval\]'"):
        dataset("vcsum", tokenizer(), data="nowhere")
