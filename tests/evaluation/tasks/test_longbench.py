"""LongBench's cases: prompts, what is left out of long ones, templates, files and the hub."""

from __future__ import annotations

import copy
import functools
import json
import sys
import types
import zipfile

import pytest

from kvjax.evaluation.tasks import Frame
from kvjax.evaluation.tasks.datasets import DATASETS, dataset
from kvjax.evaluation.tasks.longbench.longbench import LONGBENCH, longbench
from kvjax.evaluation.tasks.longbench.tables import MAX_NEW, PROMPTS
from kvjax.evaluation.tasks.prompts import cut_end, cut_middle, split_tokens
from kvjax.models import demo, load_tokenizer

RECORD = {
    "context": "Old boats {lie} in the harbour.\n\nNo one asks </s> why. 船很旧。",
    "input": "Question: Who asks {why}?\nAnswer:",
    "answers": ["Nobody 1", "No one 1"],
    "all_classes": ["No one 1", "Many"],
}
PLAIN = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
REAL = ("multi_news", "multifieldqa_zh", "passage_retrieval_zh")


@functools.cache
def tokenizer():
    return load_tokenizer(demo.directory())


@functools.cache
def chatty():
    """The tokenizer with a chat template."""
    found = copy.deepcopy(tokenizer())
    found.chat_template = "{% for m in messages %}USER {{ m.content }} END{% endfor %} BOT:"
    return found


def write(folder, name: str, *records) -> None:
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def test_the_tables_are_the_published_ones(data_dir):
    for name, table in (("prompt", PROMPTS), ("maxlen", MAX_NEW)):
        path = data_dir / "longbench" / f"dataset2{name}.json"
        assert table == json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", LONGBENCH)
def test_context_and_question_are_the_official_prompt(name, tmp_path):
    write(tmp_path, name, RECORD)
    task = longbench(name, tokenizer(), data=tmp_path)
    (case,) = task.cases
    start = tokenizer().bos_token_id
    assert case.prompt[0] == start and start not in case.prompt[1:]
    official = PROMPTS[name].format(context=RECORD["context"], input=RECORD["input"])
    assert tokenizer().decode(case.prompt[1:]) == official
    assert tokenizer().decode(case.context[1:]).endswith(RECORD["context"])
    assert case.max_new == MAX_NEW[name] and case.answers == ("Nobody 1", "No one 1")
    assert task.name == name and task.floor == 0
    assert task.score("No one 1", case) == pytest.approx(float(name != "passage_count"))


@pytest.mark.parametrize("name", LONGBENCH)
def test_chat_templates(name, tmp_path):
    write(tmp_path, name, RECORD)
    ends = {}
    for chat in (None, True, False):
        (case,) = longbench(name, chatty(), data=tmp_path, chat=chat).cases
        ends[chat] = tokenizer().decode(case.question).endswith(" END BOT:")
    assert ends == {None: name not in PLAIN, True: True, False: False}


def test_a_chat_template_must_be_there(tmp_path):
    write(tmp_path, "qasper", RECORD)
    with pytest.raises(ValueError, match="has none"):
        longbench("qasper", tokenizer(), data=tmp_path, chat=True)


def test_a_chat_template_that_fails_is_one_line():
    broken = copy.deepcopy(tokenizer())
    broken.chat_template = "{{ raise_exception('no\nsystem') }}"
    with pytest.raises(ValueError, match=r"chat template fails: no system$"):
        Frame.of(broken, chat=True)


@pytest.mark.parametrize("frame", [Frame((0,)), Frame((0, 7), (8, 9, 7))])
@pytest.mark.parametrize("length", [60, 61, 99, 199])
def test_the_middle_is_left_out(frame, length):
    context, question = list(range(10, 200)), list(range(200, 240))
    start, end = cut_middle(frame, context, question, length)
    assert len(start) + len(end) == length
    assert end == [*question, *frame.after]
    assert start[: len(frame.before)] == list(frame.before)
    room = length - len(frame.before) - len(frame.after)
    front = min(room // 2, room - len(question))
    body = [*start, *end][len(frame.before) : length - len(frame.after)]
    whole = context + question
    assert body == whole[:front] + whole[len(whole) - (room - front) :]


def test_short_prompts_stay_whole_and_long_questions_are_refused():
    frame, context, question = Frame((0,), (5,)), [1, 2, 3], [4, 4]
    for cut in (cut_middle, cut_end):
        assert cut(frame, context, question, 7) == ([0, 1, 2, 3], [4, 4, 5])
        assert cut(frame, context, question, None) == ([0, 1, 2, 3], [4, 4, 5])
        with pytest.raises(ValueError, match=r"4 tokens is too short: question .* have 4"):
            cut(frame, context, question, 4)
        with pytest.raises(ValueError, match="length must be at least 1"):
            cut(frame, context, question, 0)
    assert cut_middle(frame, context, question, 5) == ([0, 1], [4, 4, 5])
    assert cut_middle(frame, context, [4], 5) == ([0, 1, 3], [4, 5])
    assert cut_end(frame, context, [4], 5) == ([0, 1, 2], [4, 5])
    assert cut_end(frame, context, question, 5) == ([0, 1], [4, 4, 5])


def test_a_token_across_the_border_belongs_to_the_question():
    whole = tokenizer()("harbour", add_special_tokens=False).input_ids
    start, end = split_tokens(tokenizer(), "harb", "our")
    assert start + end == whole
    assert "harb".startswith(tokenizer().decode(start))
    assert split_tokens(tokenizer(), "", "our")[0] == []


def test_a_tokenizer_without_places_is_refused():
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        split_tokens(types.SimpleNamespace(is_fast=False), "a", "b")


@pytest.mark.parametrize("name", REAL)
def test_real_tasks(name, data_dir):
    folder = data_dir / "longbench" / "tasks"
    whole = longbench(name, tokenizer(), data=folder, cases=12)
    cut = longbench(name, tokenizer(), data=folder, cases=12, length=1500)
    lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
    records = [json.loads(line) for line in lines[:12]]
    for record, case, short in zip(records, whole.cases, cut.cases, strict=True):
        assert case.answers == tuple(record["answers"])
        official = PROMPTS[name].format(context=record["context"], input=record["input"])
        assert tokenizer().decode(case.prompt[1:]) == official
        assert record["context"].rstrip() in tokenizer().decode(case.context)
        assert record["input"] in tokenizer().decode(case.question)
        assert short.question == case.question
        assert len(short.prompt) == min(1500, len(case.prompt))
        assert whole.score(case.answers[0], case) == pytest.approx(1)
    others = [record["answers"][0] for record in [*records[1:], records[0]]]
    pairs = zip(others, whole.cases, strict=True)
    assert whole.floor == pytest.approx(sum(whole.score(*pair) for pair in pairs) / 12)
    assert 0 <= whole.floor < 0.3


def test_cases_are_the_first_ones(tmp_path):
    write(tmp_path, "qasper", RECORD, {**RECORD, "answers": ["Many 2"]}, RECORD)
    task = longbench("qasper", tokenizer(), data=tmp_path, cases=2)
    assert [case.answers for case in task.cases] == [("Nobody 1", "No one 1"), ("Many 2",)]
    with pytest.raises(ValueError, match="cases must be at most 3"):
        longbench("qasper", tokenizer(), data=tmp_path, cases=4)


def test_layouts_of_the_data(tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", "qasper", RECORD)
    tasks = [
        longbench("qasper", tokenizer(), data=path)
        for path in (tmp_path, tmp_path / "data", tmp_path / "data" / "qasper.jsonl")
    ]
    assert tasks[0].cases == tasks[1].cases == tasks[2].cases
    with pytest.raises(ValueError, match=r"has no trec\.jsonl or data/trec\.jsonl"):
        longbench("trec", tokenizer(), data=tmp_path)
    with pytest.raises(ValueError, match=r"cannot read .*nowhere"):
        longbench("trec", tokenizer(), data=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("qasper", "{", "line 2 .*qasper.jsonl: it is not JSON"),
        ("qasper", "[" * 100_000, "nested too deeply"),
        ("qasper", "7", "must be a JSON object, got 7"),
        ("qasper", "{}", "it has no context, which must be a text"),
        ("qasper", {**RECORD, "context": None}, "context must be a text, got None"),
        ("qasper", {**RECORD, "answers": []}, "answers must be a list of texts"),
        ("qasper", {**RECORD, "answers": "no"}, "answers must be a list of texts"),
        ("qasper", {**RECORD, "input": "\ud800"}, "input must be a text"),
        ("qasper", {**RECORD, "dataset": "trec"}, "a record of 'trec', expected one of qasper"),
        ("trec", {**RECORD, "all_classes": None}, "all_classes must be a list of texts"),
        ("passage_retrieval_zh", {**RECORD, "answers": ["?"]}, "must name a number"),
    ],
)
def test_damaged_records_are_one_line(name, record, message, tmp_path):
    line = record if isinstance(record, str) else json.dumps(record)
    (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(RECORD)}\n{line}\n")
    with pytest.raises(ValueError, match=message) as error:
        longbench(name, tokenizer(), data=tmp_path)
    assert "line 2" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "is empty"), (b"\n\n", "is empty"), (b"\xff", "not UTF-8")]
)
def test_files_without_records(content, message, tmp_path):
    (tmp_path / "qasper.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        longbench("qasper", tokenizer(), data=tmp_path)


def test_an_absent_package_is_told_before_data_is_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(ValueError, match=r"jieba, .* pip install 'kvjax\[eval\]'"):
        longbench("vcsum", tokenizer(), data="nowhere")


@pytest.fixture
def hub(monkeypatch):
    """Stands in for the client: `hub.answer` is the file to return or the error to raise."""
    client = types.SimpleNamespace(answer=None, asked=None)

    def hf_hub_download(*names, **options):
        client.asked = names, options
        if isinstance(client.answer, Exception):
            raise client.answer
        return str(client.answer)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    return client


def test_the_hubs_archive(hub, tmp_path):
    hub.answer = tmp_path / "data.zip"
    with zipfile.ZipFile(hub.answer, "w") as files:
        files.writestr("data/qasper.jsonl", json.dumps(RECORD))
    write(tmp_path, "qasper", RECORD)
    local = longbench("qasper", tokenizer(), data=tmp_path)
    assert longbench("qasper", tokenizer()).cases == local.cases
    assert hub.asked == (("THUDM/LongBench", "data.zip"), {"repo_type": "dataset"})
    with pytest.raises(ValueError, match=r"cannot read data/trec.jsonl of .*data\.zip"):
        longbench("trec", tokenizer())
    hub.answer.write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"cannot read data/trec.jsonl of .*data\.zip"):
        longbench("trec", tokenizer())


def test_no_network_is_one_line(hub):
    hub.answer = OSError("offline\n\nno network")
    with pytest.raises(ValueError, match=r"cannot be downloaded .*: offline no network") as error:
        longbench("qasper", tokenizer())
    assert "\n" not in str(error.value)


def test_all_data_sets_by_name(tmp_path):
    assert len(set(DATASETS)) == len(DATASETS) == 36
    write(tmp_path, "qasper", RECORD)
    arguments = {"data": tmp_path, "length": 160, "cases": 1, "chat": False}
    found = dataset("qasper", tokenizer(), **arguments)
    assert found.cases == longbench("qasper", tokenizer(), **arguments).cases
    with pytest.raises(ValueError, match="task must be one of"):
        dataset("squad", tokenizer())
