"""Tasks from files of published data sets: LongBench, ZeroSCROLLS, XSum and GSM8K."""

from __future__ import annotations

import itertools
import json
import os
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvjax.checks import check_choice, check_count
from kvjax.messages import brief, one_line, printable

from . import metrics
from .encoder import Encoder
from .longbench import chinese
from .longbench.tables import MAX_NEW, PROMPTS
from .metrics import Metric
from .task import Case, Frame, Task

Record = dict[str, Any]

_SHOTS = 8  # worked examples of GSM8K
_CLASSES = "all_classes"  # field of LongBench's records that classifications need
_HUB, _ARCHIVE = "THUDM/LongBench", "data.zip"


class _Example(NamedTuple):
    """A prompt as two texts, and its answers.

    Args:
      context, question: the text that is read first, and the text that follows.
      answers: reference texts for the metric.
      omitted: text put before the question if the context was cut.
      details: further arguments of the metric.
    """

    context: str
    question: str
    answers: tuple[str, ...]
    omitted: str = ""
    details: Mapping[str, Any] = {}


class _DataSet(NamedTuple):
    """A row of the table of tasks.

    Args:
      files: paths of the records in a folder; the first one that exists is read.
      fields: types of the fields that a record must have; further fields are ignored.
      examples: makes examples of the records of a file.
      metric, label: the score against one answer, and the name of its mean.
      max_new: maximum number of new tokens.
      cut: part of the context that is left out of a prompt that is too long.
      plain: whether the benchmark uses no chat template, even if the tokenizer has one.
      answer: picks the part of a continuation that is scored.
    """

    files: tuple[str, ...]
    fields: Mapping[str, type]
    examples: Callable[[list[Record]], Sequence[_Example]]
    metric: Metric
    label: str
    max_new: int
    cut: Literal["middle", "end", "nothing"] = "middle"
    plain: bool = False
    answer: Callable[[str], str] = str


# LongBench

# Prompts of these tasks hold worked examples, and models go on writing further ones: LongBench
# scores the first line alone.
_FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")
# The tasks of each metric, with the name of the metric's mean.
_LONGBENCH: Mapping[Metric, tuple[str, tuple[str, ...]]] = {
    metrics.f1: (
        "F1", ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique",
               "triviaqa"),
    ),
    chinese.f1_zh: ("F1", ("multifieldqa_zh",)),
    metrics.rouge_l: ("ROUGE-L", ("gov_report", "qmsum", "multi_news", "samsum")),
    chinese.rouge_l_zh: ("ROUGE-L", ("dureader", "vcsum")),
    metrics.classification: ("accuracy", ("trec", "lsht")),
    metrics.count: ("accuracy", ("passage_count",)),
    metrics.retrieval: ("accuracy", ("passage_retrieval_en", "passage_retrieval_zh")),
    metrics.code_similarity: ("edit similarity", ("lcc", "repobench-p")),
}  # fmt: skip


def _first_line(text: str) -> str:
    return text.lstrip("\n").split("\n")[0]


def _longbench(name: str) -> _DataSet:
    """Returns a row for a task of LongBench.

    The context is the prompt up to the end of the document, and the question is the rest.
    """
    rows = ((metric, *row) for metric, row in _LONGBENCH.items())
    metric, label, _ = next(row for row in rows if name in row[2])
    # Instructions before the document are read with it, and those after it with the question.
    before, after = PROMPTS[name].split("{context}")
    detail_fields = {_CLASSES: list} if metric is metrics.classification else {}

    def examples(records: list[Record]) -> list[_Example]:
        return [
            _Example(
                before + record["context"], after.replace("{input}", record["input"]),
                tuple(record["answers"]),
                details={field: record[field] for field in detail_fields},
            )
            for record in records
        ]  # fmt: skip

    return _DataSet(
        (f"{name}.jsonl", f"data/{name}.jsonl"),
        {"context": str, "input": str, "answers": list, **detail_fields},
        examples,
        metric,
        label,
        MAX_NEW[name],
        plain=name in (*_FIRST_LINE, "lcc", "repobench-p"),
        answer=_first_line if name in _FIRST_LINE else str,
    )


# GSM8K

_NUMBERS = {  # `gsm8k` scores the last number, `gsm8k_strict` the number after ####
    "gsm8k": re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+"),
    "gsm8k_strict": re.compile(r"#### (-?[0-9.,]+)"),
}


def _is_solved(name: str, text: str, solution: str, **details: Any) -> float:
    """Returns 1 if the number that an answer ends with is the solution's, else 0."""
    numbers = _NUMBERS[name].findall(text)
    if not numbers:
        return 0.0
    number = numbers[-1] if name == "gsm8k" else numbers[0]
    # lm-evaluation-harness removes commas and dollars first, then a point at the end of the rest.
    texts = number, solution.rsplit("#### ", 1)[-1]
    answer, expected = (re.sub(r"[,$]", "", text.strip()).removesuffix(".") for text in texts)
    return float(answer == expected)


def _problems(records: list[Record]) -> list[_Example]:
    if len(records) <= _SHOTS:
        raise ValueError(
            f"the first {_SHOTS} problems are worked examples, and the data has {len(records)}"
        )
    questions = [f"Question: {record['question']}\nAnswer:" for record in records]
    answers = [record["answer"] for record in records]
    # All prompts have the same worked examples as their context: the first records.
    solved = (f"{asking} {answer}\n\n" for asking, answer in zip(questions, answers, strict=True))
    context = "".join(itertools.islice(solved, _SHOTS))
    pairs = zip(questions[_SHOTS:], answers[_SHOTS:], strict=True)
    return [_Example(context, question, (answer,)) for question, answer in pairs]


def _gsm8k(name: str) -> _DataSet:
    return _DataSet(
        ("test.jsonl",), {"question": str, "answer": str}, _problems, partial(_is_solved, name),
        "accuracy", 256, cut="nothing", plain=True, answer=lambda text: text.split("Question:")[0],
    )  # fmt: skip


# XSum

_XSUM: Mapping[str, tuple[Metric, str]] = {
    "xsum": (metrics.rouge_2, "ROUGE-2"),
    "xsum_rouge_1": (metrics.rouge_1, "ROUGE-1"),
    "xsum_rouge_l": (metrics.rouge_l, "ROUGE-L"),
}


def _articles(records: list[Record]) -> list[_Example]:
    request = "\n\nSummarize the above article in 1 sentence.\n"
    return [_Example(f"###\nArticle: {x['document']}", request, (x["summary"],)) for x in records]


def _xsum(name: str) -> _DataSet:
    return _DataSet(
        ("xsum.jsonl",), {"document": str, "summary": str}, _articles, *_XSUM[name], 64,
        answer=lambda text: text.split("###")[0].strip(),
    )  # fmt: skip


# ZeroSCROLLS

_PREFIX = "zeroscrolls_"
_ROUGE = metrics.rouge_geometric_mean, "ROUGE (geometric mean)"
_F1 = metrics.f1, "F1"
# Metric, name of its mean, and maximum new tokens of each task.
_SCROLLS: Mapping[str, tuple[Metric, str, int]] = {
    "gov_report": (*_ROUGE, 1024),
    "summ_screen_fd": (*_ROUGE, 512),
    "qmsum": (*_ROUGE, 512),
    "squality": (*_ROUGE, 512),
    "qasper": (*_F1, 128),
    "narrative_qa": (*_F1, 64),
    "musique": (*_F1, 32),
    "quality": (metrics.choice, "accuracy", 10),
    "space_digest": (metrics.exponential_similarity, "exponential similarity", 36),
    "book_sum_sort": (metrics.concordance, "concordance index", 256),
}


def _scrolls(records: list[Record]) -> list[_Example]:
    """Returns examples whose context ends at the query; records with one `id` are one example."""
    # Records of one `id` have the same input and different reference answers.
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record["id"], []).append(record)
    examples = []
    for group in groups.values():
        text, start = group[0]["input"], group[0]["query_start_index"]
        answers = tuple(record["output"] for record in group)
        omitted = group[0]["truncation_seperator"]
        examples.append(_Example(text[:start], text[start:], answers, omitted))
    return examples


def _zeroscrolls(name: str) -> _DataSet:
    task = name.removeprefix(_PREFIX)
    fields = {
        "id": str, "input": str, "output": str, "query_start_index": int,
        "truncation_seperator": str,
    }  # fmt: skip
    files = f"{task}.jsonl", f"{task}/validation.jsonl"
    return _DataSet(files, fields, _scrolls, *_SCROLLS[task], cut="end")


_TABLE: Mapping[str, _DataSet] = {
    **{name: _longbench(name) for name in PROMPTS},
    **{name: _gsm8k(name) for name in _NUMBERS},
    **{name: _xsum(name) for name in _XSUM},
    **{_PREFIX + name: _zeroscrolls(_PREFIX + name) for name in _SCROLLS},
}

DATASETS: tuple[str, ...] = tuple(_TABLE)
"""Names of all tasks whose cases come from files.

They are the tasks of LongBench; `gsm8k`, which scores the last number of an answer, and
`gsm8k_strict`, which scores the number after `####`; `xsum` (ROUGE-2) and the same task with other
metrics; and the tasks of ZeroSCROLLS, which begin with `zeroscrolls_`.
"""


def dataset(
    name: str,
    tokenizer: Any,
    *,
    data: str | os.PathLike[str] | None = None,
    length: int | None = None,
    cases: int | None = None,
    chat: bool | None = None,
) -> Task:
    """Returns the task of a data set, with the benchmark's prompts and scores.

    Records of the benchmarks are read from these files of the folder `data`:

    - LongBench: `<name>.jsonl`, or `data/<name>.jsonl` as in its archive.
    - GSM8K: `test.jsonl`.
    - XSum: `xsum.jsonl`, with the fields `document` and `summary`.
    - ZeroSCROLLS: `<name>.jsonl` or `<name>/validation.jsonl`, where the name is without
      `zeroscrolls_`.

    A prompt that is too long loses its middle, as in LongBench. A prompt of ZeroSCROLLS loses the
    end of its context instead, and its question then begins with the record's separator, which says
    so. GSM8K's worked examples, the first eight records, are never cut, nor is a question.

    Args:
      name: a name in `DATASETS`.
      tokenizer: tokenizer of the model, from `transformers`.
      data: folder of the benchmark's files, or the task's file. Only LongBench works without: it
        is downloaded from the hub.
      length: maximum tokens of a prompt, chat template included; None to cut nothing.
      cases: number of cases, from the first on; None for all.
      chat: whether prompts are put into the chat template. None follows the benchmark: a template
        if the tokenizer has one, except around examples and code.

    Returns:
      The task. Its floor is the mean score of answers that belong to other cases: they have the
      right form and know nothing of the context.

    Raises:
      ValueError: the name is unknown; the data is absent, damaged or has too few records; the
        length is too small; a package is not installed.
      OSError: the file cannot be read.

    Example:
      >>> from kvjax.evaluation.tasks.datasets import DATASETS, dataset
      >>> len(DATASETS)
      36
      >>> dataset("gsm8k", None)
      Traceback (most recent call last):
      ...
      ValueError: gsm8k needs data: the folder or the file of its records

    Deviations from the benchmarks:
      - LongBench cuts a prompt to a number of tokens, decodes it, puts it into the chat template
        and encodes it again. Here tokens are cut and never decoded, and the template's tokens
        count. Prompts differ at the cut, which may split a character or a word.
      - Special tokens that a text spells out are read as text.
      - Answers of `samsum` end at a line end. LongBench stops there; here the rest is ignored.
      - EleutherAI's harness shows 5 worked examples of GSM8K, drawn from the training set.
      - White space around an answer of XSum is ignored: the package would count it as a word.
      - ZeroSCROLLS takes the geometric mean of the three mean ROUGE scores of a task. Here the
        geometric mean is taken for each case and then averaged. The result is never larger.
      - F1 in ZeroSCROLLS' tasks is LongBench's, for which letters with and without accents differ.
        The benchmark converts all letters to ASCII first.

    References:
      Bai et al., LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding, 2023,
      arXiv:2308.14508; github.com/THUDM/LongBench.
      Cobbe et al., Training Verifiers to Solve Math Word Problems, 2021, arXiv:2110.14168. The form
      of prompts and both scores are those of task `gsm8k` of EleutherAI's lm-evaluation-harness.
      Narayan et al., Don't Give Me the Details, Just the Summary!, 2018, arXiv:1808.08745. Prompt,
      length and package: github.com/FMInference/H2O, `h2o_hf`, which draws answers at temperature
      0.3.
      Shaham et al., ZeroSCROLLS: A Zero-Shot Benchmark for Long Text Understanding, 2023,
      arXiv:2305.14196; lengths of answers: github.com/tau-nlp/zero_scrolls, `experiments/api`.
    """
    check_choice("task", name, DATASETS)
    if data is None and name not in PROMPTS:
        raise ValueError(f"{name} needs data: the folder or the file of its records")
    for count, value in (("length", length), ("cases", cases)):
        if value is not None:
            check_count(count, value, 1)
    row = _TABLE[name]
    # A missing package raises here, before any data is read or downloaded.
    row.metric("1", "1", **{_CLASSES: ["1"]})
    if chat is None:
        chat = not row.plain and getattr(tokenizer, "chat_template", None) is not None
    frame = Frame.of(tokenizer, chat)
    examples = row.examples(_records(row, data))
    if cases is not None and cases > len(examples):
        raise ValueError(f"cases must be at most the {len(examples)} of the data, got {cases}")
    task_cases = tuple(
        _case(row, tokenizer, frame, example, length) for example in examples[:cases]
    )
    score = partial(score_answer, name)
    return Task(name, task_cases, score, row.label, _floor(task_cases, score))


def score_answer(name: str, text: str, case: Case) -> float:
    """Returns the score of a case's continuation, 0 to 1: the best over the case's answers.

    Example:
      >>> from kvjax.evaluation.tasks import Case
      >>> from kvjax.evaluation.tasks.datasets import score_answer
      >>> score_answer("triviaqa", "Paris\\nPassage: more", Case([], [], ("Paris", "Lyon"), 32))
      1.0
    """
    row = _TABLE[name]
    text = row.answer(text)
    return max(row.metric(text, answer, **case.details) for answer in case.answers)


def _floor(cases: Sequence[Case], score: Callable[[str, Case], float]) -> float:
    """Returns the mean score of each case with the answer of the next one; 0 for one case."""
    if len(cases) < 2:
        return 0.0
    pairs = zip(cases, [*cases[1:], cases[0]], strict=True)
    return sum(score(neighbour.answers[0], case) for case, neighbour in pairs) / len(cases)


def _case(
    row: _DataSet, tokenizer: Any, frame: Frame, example: _Example, length: int | None
) -> Case:
    """Returns the case as tokens, with its context cut if the prompt is too long."""
    context, question = split_tokens(tokenizer, example.context, example.question)
    around = len(frame.before) + len(frame.after)
    if length is not None and around + len(context) + len(question) > length:
        if example.omitted:
            marked_question = example.omitted + example.question
            context, question = split_tokens(tokenizer, example.context, marked_question)
        room = length - around - len(question)
        if room <= 0 or row.cut == "nothing":
            # At least one token of a context must remain, or all of it if nothing may be cut.
            least = length - room + (len(context) if row.cut == "nothing" else 1)
            raise ValueError(f"a prompt of {length} tokens is too short: {least} are needed")
        # LongBench halves the prompt as a whole: the second half includes the question.
        front = min((room + len(question)) // 2, room) if row.cut == "middle" else room
        context = context[:front] + context[len(context) - (room - front) :]
    return Case(
        [*frame.before, *context], [*question, *frame.after], example.answers, row.max_new,
        details=dict(example.details),
    )  # fmt: skip


def split_tokens(tokenizer: Any, context: str, question: str) -> tuple[list[int], list[int]]:
    """Returns the tokens of `context + question`, split at the beginning of the question.

    The text is tokenized as a whole, and a token across the border belongs to the question. Special
    tokens that are spelled out are read as text.

    Raises:
      ValueError: the tokenizer cannot say which characters a token stands for.

    Example:
      >>> from kvjax.evaluation.tasks.datasets import split_tokens
      >>> from kvjax.models import demo, load_tokenizer
      >>> tokenizer = load_tokenizer(demo.directory())
      >>> [tokenizer.decode(part) for part in split_tokens(tokenizer, "Old boats.", "Who?")]
      ['Old boats.', 'Who?']
    """
    encoded = Encoder(tokenizer).encode_first(context + question)
    # Tokens that end at the border belong to the context, tokens across it to the question.
    border, tokens = encoded.count_before(len(context)), encoded.tokens.tolist()
    return tokens[:border], tokens[border:]


# Records


def _records(row: _DataSet, data: str | os.PathLike[str] | None) -> list[Record]:
    """Reads the records of the file: a JSON object per line, with the fields of the task."""
    if data is None:
        path, content = _downloaded(row.files[1])
    else:
        path = Path(data)
        if path.is_dir():
            files = [path / name for name in row.files if (path / name).exists()]
            if not files:
                raise ValueError(f"{printable(path)} has no {' or '.join(row.files)}")
            path = files[0]
        content = path.read_bytes()
    records = []
    # Bytes are split: `str.splitlines` would also split at separators within a JSON string.
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            try:
                records.append(_checked(json.loads(line.decode()), row.fields))
            except ValueError as error:
                raise ValueError(f"line {number} of {printable(path)}: {error}") from error
    if not records:
        raise ValueError(f"{printable(path)} is empty")
    return records


def _checked(record: Any, fields: Mapping[str, type]) -> Record:
    """Returns the record if it is an object with these fields; else raises ValueError."""
    if not isinstance(record, dict):
        raise ValueError(f"it must be a JSON object, got {brief(record)}")
    for field, field_type in fields.items():
        value = record.get(field)
        # An empty list of answers or classes has nothing to score against.
        if not isinstance(value, field_type) or value == []:
            raise ValueError(f"{field} must be {field_type.__name__}, got {brief(value)}")
    return record


def _downloaded(member: str) -> tuple[Path, bytes]:
    """Downloads LongBench's archive; returns the path and the content of one file in it."""
    # Imported here: most callers have a folder, and the client takes a while to import.
    from huggingface_hub import hf_hub_download

    try:
        archive = Path(hf_hub_download(_HUB, _ARCHIVE, repo_type="dataset"))
    except Exception as error:  # the client's failures have no common base
        raise ValueError(
            "LongBench cannot be downloaded from Hugging Face, give the folder of its data: "
            f"{one_line(error)}"
        ) from error
    try:
        with zipfile.ZipFile(archive) as files:
            return archive / member, files.read(member)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"cannot read {member} of {printable(archive)}: {one_line(error)}"
        ) from error
