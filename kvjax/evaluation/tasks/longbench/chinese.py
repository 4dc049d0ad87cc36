"""Scores of Chinese answers, which `jieba` splits into words."""

from __future__ import annotations

import functools
import string
from typing import Any

from kvjax.evaluation.tasks.metrics import EXTRA, overlap, rouge_l
from kvjax.messages import extra_module, quiet

from .tables import CHINESE_PUNCTUATION

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation + CHINESE_PUNCTUATION)


def f1_zh(text: str, reference: str, **details: Any) -> float:
    """Returns the F1 of Chinese words, as `jieba` splits them, without punctuation.

    Example:
      >>> from kvjax.evaluation.tasks.longbench.chinese import f1_zh
      >>> f1_zh("厦门大学。", "厦门大学")
      1.0
    """
    return overlap(_words_zh(text), _words_zh(reference))


def rouge_l_zh(text: str, reference: str, **details: Any) -> float:
    """Returns ROUGE-L (`rouge_l`) of Chinese words, as `jieba` splits them."""
    return rouge_l(" ".join(_cut_zh(text)), " ".join(_cut_zh(reference)))


def _words_zh(text: str) -> list[str]:
    plain = (word.lower().translate(_NO_PUNCTUATION) for word in _cut_zh(text))
    return ["".join(word.split()) for word in plain if word.strip()]


@functools.cache
def _jieba() -> Any:
    """Returns the package with its dictionary loaded, without its messages on standard error."""
    jieba = extra_module("jieba", *EXTRA)
    with quiet():
        jieba.initialize()
    return jieba


def _cut_zh(text: str) -> list[str]:
    return _jieba().lcut(text)
