"""Metrics of answers: the 21 published figures, and references written from the definitions."""

from __future__ import annotations

import itertools
import json
import sys

import numpy as np
import pytest

from kvjax.evaluation.tasks import Case, metrics
from kvjax.evaluation.tasks.datasets import score_answer
from kvjax.evaluation.tasks.longbench import chinese
from kvjax.evaluation.tasks.longbench.tables import PROMPTS
from tests.support.marks import some_slow

SLOW = {"gov_report", "multi_news", "vcsum"}  # long answers: 3 to 8 s each


@pytest.mark.parametrize(
    "name", some_slow(PROMPTS, *(set(PROMPTS) - SLOW), exhaustive={"gov_report"})
)
def test_the_published_figure(name, data_dir):
    folder = data_dir / "longbench" / "scored" / "llama2-7b-chat-4k"
    lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    scores = []
    for record in map(json.loads, lines):
        details = {"all_classes": record["all_classes"]}
        case = Case([], [], tuple(record["answers"]), 1, details=details)
        scores.append(score_answer(name, record["pred"], case))
    figure = json.loads((folder / "result.json").read_text())[name]
    assert round(100 * sum(scores) / len(scores), 2) == figure
    assert min(scores) >= 0 and max(scores) <= 1


def sentences(seed: int, words: str = "red blue old new cat dog sat ran far home".split()):
    """Pairs of sentences of different words, so that words and their places are one-to-one."""
    rng = np.random.default_rng(seed)
    for _ in range(50):
        yield [list(rng.choice(words, rng.integers(1, 9), replace=False)) for _ in range(2)]


def f_score(same: int, mine: int, reference: int) -> float:
    if same == 0:
        return 0.0
    precision, recall = np.float64(same) / mine, np.float64(same) / reference
    return 2 * precision * recall / (precision + recall)


def longest_common(a: list[str], b: list[str]) -> int:
    """By trying all parts of the shorter one."""
    for size in range(len(a), 0, -1):
        for part in itertools.combinations(a, size):
            rest = iter(b)
            if all(word in rest for word in part):
                return size
    return 0


def test_f1_is_that_of_the_definition():
    for a, b in sentences(0):
        a, b = a * 2, b + b[:2]  # words that occur more than once
        same, left = 0, list(b)
        for word in a:
            if word in left:
                left.remove(word)
                same += 1
        text, reference = f"The {' '.join(a).title()}.", " an ".join(b)
        assert metrics.f1(text, reference) == pytest.approx(f_score(same, len(a), len(b)))
    assert metrics.f1("", "cat") == metrics.f1("the", "the") == 0.0


@pytest.mark.parametrize("metric", [metrics.rouge_1, metrics.rouge_2, metrics.rouge_l])
def test_rouge_of_one_sentence_is_that_of_the_definition(metric):
    for a, b in sentences(1):
        grams = [{tuple(x[i : i + 2]) for i in range(len(x) - 1)} for x in (a, b)]
        same, mine, reference = {
            metrics.rouge_1: (len({*a} & {*b}), len(a), len(b)),
            metrics.rouge_2: (len(grams[0] & grams[1]), len(grams[0]), len(grams[1])),
            metrics.rouge_l: (longest_common(a, b), len(a), len(b)),
        }[metric]
        expected = f_score(same, mine, reference)
        assert metric(" ".join(a), " ".join(b)) == pytest.approx(expected, abs=1e-6)


def test_the_geometric_mean_of_rouge():
    texts = "the old cat sat far away", "the old dog sat there"
    scores = [one(*texts) for one in (metrics.rouge_1, metrics.rouge_2, metrics.rouge_l)]
    found = metrics.rouge_geometric_mean(texts[0].upper(), texts[1])
    assert found == pytest.approx(np.prod(scores) ** (1 / 3), abs=1e-6) and found > 0.3


@pytest.mark.parametrize("metric", [metrics.rouge_1, metrics.rouge_l, chinese.rouge_l_zh])
@pytest.mark.parametrize("text", ["", "...", ".", "。" * 3])
def test_rouge_of_no_words(metric, text):
    assert metric(text, "a cat") == 0.0
    assert metric("a cat", text) == 0.0


def test_rouge_of_a_long_sentence():
    words = " ".join(f"w{number % 700}" for number in range(1100))
    limit = sys.getrecursionlimit()
    assert metrics.rouge_l(words, words) == pytest.approx(1)
    assert sys.getrecursionlimit() == limit


def test_chinese_words():
    assert chinese.f1_zh("「厦门大学」。", "厦门大学") == 1
    assert chinese.f1_zh("北京 ABC", "abc") == pytest.approx(2 / 3)
    assert chinese.f1_zh("。」", "厦门") == 0
    assert chinese.rouge_l_zh("会议讨论了问题", "会议讨论了问题") == pytest.approx(1)


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        ("Other location", "Other location", 1.0),  # `location` is a part of it
        ("Date or City", "City", 0.5),
        ("Date", "City", 0.0),
        ("nothing", "City", 0.0),
        ("Letter like a-z", "Letter like a-z", 0.5),  # `Letter` goes, and `like` behind it stays
    ],
)
def test_classification(text, reference, expected):
    classes = "location", "Other location", "Date", "City", "Letter", "like", "Letter like a-z"
    assert metrics.classification(text, reference, all_classes=classes) == expected


@pytest.mark.parametrize(
    ("metric", "text", "reference", "expected"),
    [
        (metrics.count, "7", "7", 1),
        (metrics.count, "7 or 8 or 7", "7", 2 / 3),
        (metrics.count, "none", "7", 0),
        (metrics.count, "07", "7", 0),
        (metrics.retrieval, "段落12", "段落12", 1),
        (metrics.retrieval, "Paragraph 1 of 30", "Paragraph 30", 0.5),
        (metrics.code_similarity, "\n\n```python\n# a\n// b\nx = 1\n", "x = 1", 1),
        (metrics.code_similarity, "abcd", "bcde", 0.75),  # 2 · 3 / 8
        (metrics.code_similarity, "abcdefg", "g", 0.25),  # 2 · 1 / 8
        (metrics.code_similarity, "# only\n", "x", 0),
        (metrics.choice, "The answer is C, not D", "C", 1),
        (metrics.choice, "Alone (b)", "B", 0),
        (metrics.choice, "none", "none", 0),
        (metrics.exponential_similarity, "30%", "50%", 0.25),
        (metrics.exponential_similarity, "Of 70 reviews 62.5% and 10%", "62.5%", 1),
        (metrics.exponential_similarity, "many", "50%", 0),
        (metrics.exponential_similarity, "50 percent", "50%", 0),
        (metrics.exponential_similarity, "150%", "50%", 2**-10),
        (metrics.concordance, "2, 1, 3, 4", "1,2,3,4", 5 / 6),
        (metrics.concordance, "4 3 2 1", "1 2 3 4", 0),
        (metrics.concordance, "Summary 02, then #1.\nAnd (3)", "2, 1, 3", 1),
        (metrics.concordance, "1-2-3", "1, 2, 3", 0),
        (metrics.concordance, "1, 2", "1, 2, 3", 0),
        (metrics.concordance, "1, 2, 2", "1, 2, 3", 0),
    ],
)
def test_other_metrics(metric, text, reference, expected):
    assert metric(text, reference) == pytest.approx(expected)


def test_an_absent_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(ValueError, match=r"package rouge-score, .* pip install 'kvjax\[eval\]'"):
        metrics.rouge_geometric_mean("a", "b")
