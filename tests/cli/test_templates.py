"""Prompts, documents with questions and turns are exactly what the chat template makes of them."""

from __future__ import annotations

import json

import pytest

from kvjax.cli.templates import INSTRUCTION, Dialogue
from kvjax.models import demo, load_tokenizer
from tests.cli.commands import error, output

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:\n{{ message['content'] }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
)
DOCUMENT, QUESTION = "A long text.\n\nIt ends here.", "How does it end?"


@pytest.fixture(scope="module")
def own():
    tokenizer = load_tokenizer(demo.directory())
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def whole(tokenizer, *texts: str, system: str | None = None) -> list[int]:
    """Tokens of a conversation in which user and assistant take turns."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for number, text in enumerate(texts):
        messages.append({"role": "assistant" if number % 2 else "user", "content": text})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


def check(tokenizer):
    for system in (None, "Be brief."):
        dialogue = Dialogue(tokenizer, system=system)
        assert dialogue.templated
        assert dialogue.prompt(QUESTION) == whole(tokenizer, QUESTION, system=system)
        joined = dialogue.document(DOCUMENT) + dialogue.question(f" {QUESTION}\n")
        assert joined == whole(tokenizer, DOCUMENT + INSTRUCTION + QUESTION, system=system)
        assert dialogue.question(QUESTION) == Dialogue(tokenizer).question(QUESTION)

        before, answer = (
            tokenizer(text, add_special_tokens=False).input_ids for text in ("a\n", "a\nWell.")
        )
        answer = answer[len(before) :]
        ends = (tokenizer.eos_token_id,)
        expected = whole(tokenizer, DOCUMENT, "Well.", QUESTION, system=system)
        for ended_by, said in ((ends, [*answer, *ends]), ((), answer)):
            turn = dialogue.turn(QUESTION, ended_by)
            assert dialogue.prompt(DOCUMENT) + said + turn == expected


def test_parts_join_to_whole_conversations(own):
    check(own)


@pytest.mark.slow
def test_parts_of_a_chat_model_join(smollm2):
    check(load_tokenizer(smollm2))


def test_special_tokens_in_a_text_are_mere_text(own):
    dialogue, end = Dialogue(own), own.eos_token_id
    name = own.eos_token
    for tokens, ends, texts in (
        (dialogue.prompt(f"a {name} b"), 1, 1),
        (dialogue.document(f"a {name} b") + dialogue.question(f"c {name} d"), 1, 2),
        (dialogue.turn(f"a {name} b", (end,)), 1, 1),
    ):
        assert tokens.count(end) == ends
        assert own.decode([one for one in tokens if one != end]).count(name) == texts


def test_without_a_template_texts_are_fed_as_they_are(own):
    dialogue = Dialogue(own, raw=True)
    assert not dialogue.templated
    assert dialogue.prompt("Once. And") == own("Once. And").input_ids
    joined = dialogue.document("Once.\n") + dialogue.question("And then")
    assert own.decode(joined, skip_special_tokens=True).endswith("Once.\nAnd then")
    assert joined.count(own.bos_token_id) == own("a").input_ids.count(own.bos_token_id)
    assert dialogue.turn("And then", ()) == dialogue.question("And then")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no system role') }}", "chat template fails: no system role"),
        ("{{ messages[0]['content'] | upper }}", "must show each message once and as it is"),
        ("{{ messages[0]['content'] * 2 }}", "must show each message once and as it is"),
        ("{% for", "chat template fails"),
    ],
)
def test_templates_that_do_not_work(tinystories, template, said):
    tokenizer = load_tokenizer(tinystories)
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=said):
        Dialogue(tokenizer)


def test_a_prompt_becomes_a_message(capsys, broken_copy, tinystories):
    own = load_tokenizer(tinystories)
    own.chat_template = TEMPLATE
    (broken_copy / "chat_template.jinja").write_text(TEMPLATE)
    args = ["generate", "--model", broken_copy, "--prompt", "Hello", "--max-new", "2", "--json"]
    args += ["--method", "full"]
    for options, expected in (
        ([], whole(own, "Hello")),
        (["--chat"], whole(own, "Hello")),
        (["--system", "Be brief."], whole(own, "Hello", system="Be brief.")),
        (["--raw"], own("Hello").input_ids),
    ):
        record = json.loads(output(capsys, *args, *options))
        assert record["prompt_tokens"] == len(expected)
    (broken_copy / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    assert "chat template fails: no" in error(capsys, *args)
    assert json.loads(output(capsys, *args, "--raw"))["new_tokens"] <= 2
