"""Scores of an answer against a reference, 0 to 1, as the benchmarks' own scorers compute them.

Every metric is called `metric(text, reference, **details)` and ignores details that it does not
need.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvjax.messages import extra_module

Metric = Callable[..., float]

EXTRA = "eval", "scores"
"""Name of the extra that installs the packages of metrics, and their purpose, for messages."""

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1(text: str, reference: str, **details: Any) -> float:
    """Returns the F1 of the words, in lower case, without punctuation and articles, as in SQuAD.

    Example:
      >>> from kvjax.evaluation.tasks.metrics import f1
      >>> f1("The black cat.", "a black dog")
      0.5
    """
    return overlap(_words(text), _words(reference))


def _words(text: str) -> list[str]:
    plain = text.lower().translate(_NO_PUNCTUATION)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def overlap(words: Sequence[str], reference: Sequence[str]) -> float:
    """Returns the F1 of two lists of words; a word counts as often as it occurs in both."""
    shared = (Counter(words) & Counter(reference)).total()
    if shared == 0:
        return 0.0
    precision, recall = shared / len(words), shared / len(reference)
    return 2 * precision * recall / (precision + recall)


def _rouge(name: str, text: str, reference: str, **details: Any) -> float:
    if not text.strip(".") or not reference.strip("."):  # the package refuses texts of no sentence
        return 0.0
    rouge = extra_module("rouge", *EXTRA).Rouge(metrics=[name], stats=["f"])
    with _recursion(len(text.split()) + len(reference.split())):
        return rouge.get_scores(text, reference)[0][name]["f"]


rouge_1, rouge_2, rouge_l = (functools.partial(_rouge, f"rouge-{part}") for part in "12l")
"""F-scores of the package `rouge`: of single words, of pairs of neighbouring words, and of ROUGE-L
over sentences."""


@contextlib.contextmanager
def _recursion(depth: int) -> Iterator[None]:
    """Raises the recursion limit by `depth`: the package finds longest subsequences recursively."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + depth)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def rouge_geometric_mean(text: str, reference: str, **details: Any) -> float:
    """Returns the geometric mean of ROUGE-1, ROUGE-2 and ROUGE-L F-scores, by `rouge-score`.

    Example:
      >>> from kvjax.evaluation.tasks.metrics import rouge_geometric_mean
      >>> rouge_geometric_mean("The cat sat.", "the cat sat")
      1.0
    """
    names = ["rouge1", "rouge2", "rougeL"]
    scorer = extra_module("rouge_score.rouge_scorer", *EXTRA).RougeScorer(names)
    scores = scorer.score(reference, text)
    return math.cbrt(math.prod(scores[name].fmeasure for name in names))


def classification(
    text: str, reference: str, *, all_classes: Sequence[str], **details: Any
) -> float:
    """Returns 1 / n if the text names n classes and the right one is among them, else 0.

    A name that is part of the right one does not count. LongBench's scorer removes such a name from
    the list while it iterates over it, and so never checks the name after it, which then counts in
    any case. This function does the same.

    Example:
      >>> from kvjax.evaluation.tasks.metrics import classification
      >>> classification("Date or City", "City", all_classes=["Date", "City", "State"])
      0.5
    """
    named = [name for name in all_classes if name in text]
    index = 0
    while index < len(named):
        if named[index] in reference and named[index] != reference:
            named.remove(named[index])
        index += 1
    return 1 / len(named) if reference in named else 0.0


def count(text: str, reference: str, **details: Any) -> float:
    """Returns the share of the numbers in the text that equal the right one.

    Example:
      >>> from kvjax.evaluation.tasks.metrics import count
      >>> count("17, or 7", "7")
      0.5
    """
    numbers = re.findall(r"\d+", text)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(text: str, reference: str, **details: Any) -> float:
    """Returns `count` for the number in the reference, such as `"Paragraph 7"` or `"段落7"`.

    Example:
      >>> from kvjax.evaluation.tasks.metrics import retrieval
      >>> retrieval("It is paragraph 7.", "Paragraph 7")
      1.0
    """
    return count(text, re.findall(r"\d+", reference)[0])


def code_similarity(text: str, reference: str, **details: Any) -> float:
    """Returns the similarity of the text's first line of code, rounded to hundredths.

    The similarity is `2 · M / T`: M characters are in matching blocks, and both texts together have
    T. `difflib` computes it, as `fuzzywuzzy` does if `python-Levenshtein` is not installed. A line
    with ```` ` ````, `#` or `//` does not count as code.

    Example:
      >>> from kvjax.evaluation.tasks.metrics import code_similarity
      >>> code_similarity("# sum\\nreturn a + b\\nmore", "return a - b")
      0.92
    """
    lines = text.lstrip("\n").split("\n")
    line = next((x for x in lines if "`" not in x and "#" not in x and "//" not in x), "")
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


def choice(text: str, reference: str, **details: Any) -> float:
    """Returns 1 if the first of the letters A to D that stands alone is the right one, else 0.

    Example:
      >>> from kvjax.evaluation.tasks.metrics import choice
      >>> choice("Answer: (B) Because of C", "B")
      1.0
    """
    first, second = (re.search(r"\b[A-D]\b", part) for part in (text, reference))
    return float(first is not None and second is not None and first[0] == second[0])


def exponential_similarity(text: str, reference: str, **details: Any) -> float:
    """Returns `2 ^ (-10 · |p - q|)` for the first percentages in both texts; 0 if one has none.

    Example:
      >>> from kvjax.evaluation.tasks.metrics import exponential_similarity
      >>> exponential_similarity("about 70% of 50 reviews", "60%")
      0.5
    """
    first, second = (re.search(r"(\d+\.?\d*)%", part) for part in (text, reference))
    if first is None or second is None:
        return 0.0
    return 2.0 ** (-abs(float(first[1]) - float(second[1])) / 10)


def concordance(text: str, reference: str, **details: Any) -> float:
    """Returns the share of the pairs whose order is right; 0 if the text orders other items.

    Items are numbers separated by commas and white space; all other characters are ignored.

    Example:
      >>> from kvjax.evaluation.tasks.metrics import concordance
      >>> round(concordance("1, 3, 2", "1, 2, 3"), 4)
      0.6667
    """
    order, expected = _items(text), _items(reference)
    if sorted(order) != sorted(expected) or len(expected) < 2:
        return 0.0
    # Place in the answer of each item, in the right order: a right pair has rising places.
    places = [order.index(item) for item in expected]
    pairs = [(a, b) for i, a in enumerate(places) for b in places[i + 1 :]]
    return sum(a < b for a, b in pairs) / len(pairs)


def _items(text: str) -> list[str]:
    numbers = re.sub(r"[^0-9\s,]", "", text).replace(",", " ").split()
    return [number.lstrip("0") for number in numbers]
