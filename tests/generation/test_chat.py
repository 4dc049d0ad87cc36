"""What tokenizers put around texts, and which token ends an answer in a chat."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, processors

import kvjax
from kvjax.generation.chat import begins_twice, raw_tokens, with_start
from kvjax.models import demo, load_tokenizer


@pytest.fixture
def tokenizer():
    """Begins texts with `<s>`, token 0; `</s>` is 1."""
    return load_tokenizer(demo.directory())


def ending(tokenizer, single: str, pair: str = "$A $B"):
    """The tokenizer with another template for single texts."""
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


def test_a_text_that_brings_its_own_start(tokenizer):
    for single, twice in (("<s> $A </s>", True), ("$A", False)):
        tokenizer = ending(tokenizer, single)
        for text, expected in (("<s>hi", twice), ("hi", False), ("hi<s>", False)):
            tokens = raw_tokens(tokenizer, text)
            assert tokens == tokenizer(text).input_ids[: len(tokens)], "as in transformers"
            assert begins_twice(tokenizer, tokens) == expected


def test_only_tokenizers_that_say_so_begin_a_template(tokenizer):
    assert with_start(tokenizer, [5, 6]) == [5, 6]
    tokenizer.init_kwargs["chat_starts_with_bos"] = True
    assert with_start(tokenizer, [5, 6]) == with_start(tokenizer, [0, 5, 6]) == [0, 5, 6]
    assert with_start(tokenizer, []) == [0]


TURN = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}"
    "{% else %}<|bot|>{{ m['content'] }}END{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("</s>", "</s>"),
        ("</s>\n", "</s>"),
        (" </s>", "</s>"),
        ("\n\n <|end|>", "<|end|>"),
        ("", "<|user|>"),  # no terminator: what begins the next message
        ("<|end|></s>", "<|end|>"),
        (" bye</s>", None),
        ("\n### End ###", None),
    ],
)
def test_what_follows_an_answer_ends_it(tokenizer, end, expected):
    added = ["<|user|>", "<|bot|>", "<|end|>"]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in added])
    tokenizer.chat_template = TURN.replace("END", end)
    ends = kvjax.models.chat_end_tokens(tokenizer)
    assert tokenizer.convert_ids_to_tokens(list(ends)) == ([expected] if expected else [])


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ messages[-1]['content'] }}</s>",
        "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}",
    ],
)
def test_templates_that_show_no_conversation(tokenizer, template):
    tokenizer.chat_template = template
    assert kvjax.models.chat_end_tokens(tokenizer) == ()
