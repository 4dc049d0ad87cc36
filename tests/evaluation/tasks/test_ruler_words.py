"""RULER's chains of variables and counts of words, computed anew from decoded prompts."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from kvjax.evaluation.tasks.ruler.draws import word_list
from tests.support.ruler_cases import NOISE, count, decode, make


def test_the_chain_of_variables():
    for length in (1024, 4096):
        for case in make("vt", length=length, cases=5).cases:
            prompt = decode(case.prompt)
            example, asked = prompt.split("\n\nMemorize and track the chain(s)")
            example += " "
            assert prompt.startswith(
                "Memorize and track the chain(s) of variable assignment hidden"
            )
            names, begun = chain_of(asked)
            assert len(names) == 5 and list(case.answers) == names and begun == ""
            assert all(re.fullmatch("[A-Z]{5}", name) for name in names)
            shown, answer = chain_of(example)
            assert answer.split() == shown and all(re.fullmatch("[A-Z]{3}", name) for name in shown)
            assert example.count(NOISE) == (5 if length < 4096 else 15)


def chain_of(text: str) -> tuple[list[str], str]:
    """The variables that have the value that is asked for, in order, and the answer."""
    body, value, same, answer = re.fullmatch(
        r"(.*)\nQuestion: Find all variables that are assigned the value (\d{5}) in the text "
        r"above\. Answer: According to the chain\(s\) of variable assignment in the text above, 5 "
        r"variables are assgined the value (\d{5}), they are:(.*)",
        text,
        re.DOTALL,
    ).groups()
    assert value == same
    has = {}
    for name, given in re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)", body):
        assert name not in has
        has[name] = has.get(given, given)  # in this order: a variable has its value before
    assert set(has.values()) == {value}
    noise = re.sub(r"VAR [A-Z]+ = (VAR )?\w+ ", "", body)
    line = f"{NOISE}\n"
    assert line in noise and re.sub(re.escape(NOISE), "", noise).count("The grass") <= 1
    return list(has), answer


@pytest.mark.parametrize(
    ("length", "common", "others", "shown"), [(1100, 6, 1, (20, 3, 1)), (4300, 30, 3, (40, 10, 3))]
)
def test_common_words_are_counted(length, common, others, shown):
    for case in make("cwe", length=length).cases:
        example, asked = decode(case.prompt).split("\nBelow is a numbered list of words.")
        counts, answer, left = counted(asked)
        assert answer == []
        assert {word for word, count in counts.items() if count == common} == set(case.answers)
        rest = [count for word, count in counts.items() if word not in case.answers]
        assert len(case.answers) == 10 and set(rest) <= {1, others}
        assert sum(count != others for count in rest) <= (4 if others > 1 else 0)
        known = set(word_list("noun") + word_list("adjective") + word_list("verb"))
        assert set(counts) <= known
        assert not left or any(word.startswith(left) for word in known), "the last one is cut"

        words, common_shown, others_shown = shown
        counts, answer, _ = counted(example + " 0. end")
        assert Counter(counts.values()) == {common_shown: 10, others_shown: words - 10}
        assert {word for word, count in counts.items() if count == common_shown} == set(answer)
        assert not set(counts) & set(case.answers)


def counted(text: str) -> tuple[Counter, list[str], str]:
    """How often each word of a list appears, the words of the answer, and the cut last word."""
    listed, answer = re.fullmatch(
        r".*that appear most often\.\n(1\. .*)\nQuestion: What are the 10 most common words in the "
        r"above list\? Answer: The top 10 words that appear most often in the list are:(.*)",
        text,
        re.DOTALL,
    ).groups()
    words = re.split(r" ?\d+\. ?", listed)[1:]
    numbers = [int(number) for number in re.findall(r"(\d+)\.", listed)]
    assert numbers == list(range(1, len(numbers) + 1))
    *whole, last = words
    if answer:  # the example's list is not cut
        return Counter(words), re.split(r" \d+\. ", answer)[1:-1], ""
    return Counter(whole), [], re.sub(r" \d+$", "", last)  # a number may be cut, too


@pytest.mark.parametrize("length", [400, 1024, 4096])
def test_frequent_words_are_counted(length):
    for case in make("fwe", length=length).cases:
        prompt = decode(case.prompt)
        coded = re.fullmatch(
            r"Read the following coded text and track the frequency of each coded word\. Find the "
            r"three most frequently appeared coded words\. (.*)\nQuestion: Do not provide any "
            r"explanation\. Please ignore the dots '\.\.\.\.'\. What are the three most frequently "
            r"appeared words in the above coded text\? Answer: According to the coded text above, "
            r"the three most frequently appeared words are:",
            prompt,
        )[1]
        counts = Counter(coded.split())
        dots = counts.pop("...")
        assert all(re.fullmatch("[a-z]{6}", word) for word in counts)
        (_, first), (_, second), (_, third), (_, fourth), *_ = counts.most_common()
        assert first > second > third > fourth
        assert tuple(word for word, _ in counts.most_common(3)) == case.answers
        # Of N words, the k-th appears ⌊N / (k² ζ(2))⌋ times. Dots are the first; there are more of
        # them only in place of the tokens that one more of each word would need.
        shares = 6 / np.pi**2 / np.arange(1, length // 50 + 1) ** 2
        appears = [number for _, number in counts.most_common()]
        further = min(
            dots - int(total * shares[0])
            for total in range(length)
            if [n for n in np.floor(total * shares)[1:] if n] == appears
            and total * shares[0] < dots + 1
        )
        assert further < sum(count(f" {word}") for word in counts) + 6
