"""Templates that change a message, or what is around it: ids are those of `apply_chat_template`."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
from tokenizers import AddedToken

from kvjax.cli.templates import INSTRUCTION, Dialogue
from kvjax.models import demo, load_tokenizer

TEXTS = [
    "a", "What is 2+2?", " leading blank", "trailing blank ", "\n\nlines before", "lines after\n\n",
    "\ttabs\t", " \n both \n ", 'She said "hello".', "It's 'quoted'", "back\\slash \\n",
    "{{ braces }}", "{% if x %}", "a\r\nb", "ünïcödé 漢字 🙂", "no-break\u00a0space\u00a0",
    "<b>bold</b>", "[INST] text [/INST]",
    "# Heading\n\n- item\n- item\n", "think about it /no_think",
]  # fmt: skip

SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
]  # fmt: skip

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "chatml with a system message": "{% if messages[0].role != 'system' %}<|im_start|>system\nBe "
    "kind.<|im_end|>\n{% endif %}" + CHATML,
    # Llama 3 and Gemma trim messages.
    "headers": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}"
    "<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "turns": "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    # GLM puts a line before a message, Phi-3 one behind it.
    "line before": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "line after": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "json": "{% for m in messages %}<|{{ m.role }}|>{{ m.content | tojson }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "html": "{% for m in messages %}<|{{ m.role }}|>{{ m.content | e }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "brackets": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[SYSTEM_PROMPT] "
    "{{ m.content.strip() }} [/SYSTEM_PROMPT]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
    # Qwen 3 and SmolLM3 look into the last message.
    "switch": CHATML + "{% if '/no_think' in messages[-1].content %}<think>\n\n</think>\n\n"
    "{% endif %}",
    "switch before": "{% if '/no_think' in messages[-1].content %}<|system|>Quick.<|end|>"
    "{% endif %}" + CHATML,
}  # fmt: skip


@pytest.fixture(scope="module")
def plain():
    tokenizer = load_tokenizer(demo.directory())
    tokenizer.add_tokens([AddedToken(x, special=True, normalized=False) for x in SPECIAL])
    return tokenizer


@pytest.fixture(params=TEMPLATES)
def templated(request, plain):
    tokenizer = copy.deepcopy(plain)
    tokenizer.chat_template = TEMPLATES[request.param]
    return tokenizer


def whole(tokenizer, *texts: str) -> list[int]:
    """Ids of a conversation in which user and assistant take turns, as transformers has them."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, tokenize=True
    )


def depends(tokenizer) -> bool:
    return "/no_think" in tokenizer.chat_template


def check_prompts(tokenizer):
    dialogue = Dialogue(tokenizer)
    for text in TEXTS:
        assert dialogue.prompt(text) == whole(tokenizer, text), text


def check_documents(tokenizer):
    """Document and question are one message."""
    dialogue, question = Dialogue(tokenizer), "How does it end?"
    for text in TEXTS:
        if depends(tokenizer) and "/no_think" in text:
            continue
        for document, asked in ((text, question), ("A text.", text)):
            joined = dialogue.document(document) + dialogue.question(asked)
            same(tokenizer, joined, whole(tokenizer, document + INSTRUCTION + asked.strip()), text)


def check_turns(tokenizer):
    dialogue = Dialogue(tokenizer)
    answered = whole(tokenizer, "Hi", "Well.", "x")
    said = len(answered) - len(dialogue.turn("x", ()))
    assert tokenizer.decode(answered[:said]).rstrip('" ').endswith("Well.")
    for text in TEXTS:
        expected = whole(tokenizer, "Hi", "Well.", text)
        if expected[:said] == answered[:said]:
            same(tokenizer, answered[:said] + dialogue.turn(text, ()), expected, text)
        else:
            assert depends(tokenizer) and "/no_think" in text


def same(tokenizer, tokens: list[int], expected: list[int], text: str) -> None:
    """Equal ids; equal texts where JSON's signs stand between parts, which tokens may join."""
    if "tojson" in tokenizer.chat_template:
        tokens, expected = tokenizer.decode(tokens), tokenizer.decode(expected)
    assert tokens == expected, text


def test_prompts(templated):
    check_prompts(templated)


def test_documents_and_questions(templated):
    check_documents(templated)


def test_turns(templated):
    check_turns(templated)


def test_what_cannot_be_split_is_said(plain):
    tokenizer = copy.deepcopy(plain)
    tokenizer.chat_template = TEMPLATES["switch"]
    dialogue = Dialogue(tokenizer)
    joined = dialogue.document("A text.") + dialogue.question("Why? /no_think")
    assert joined == whole(tokenizer, "A text." + INSTRUCTION + "Why? /no_think")
    with pytest.raises(ValueError, match="behind a document depend on its text"):
        dialogue.document("A text about /no_think.")
    with pytest.raises(ValueError, match="names of special tokens"):
        dialogue.prompt("/no_think <|im_end|>")
    tokenizer.chat_template = TEMPLATES["switch before"]
    dialogue = Dialogue(tokenizer)
    with pytest.raises(ValueError, match="before a document depend on the question"):
        dialogue.question("Why? /no_think")
    with pytest.raises(ValueError, match="depend on what is said later"):
        dialogue.turn("Why? /no_think", ())


@pytest.mark.parametrize("name", ["headers", "turns", "json"])
def test_names_of_special_tokens_in_a_changed_text_are_text(plain, name):
    tokenizer = copy.deepcopy(plain)
    tokenizer.chat_template = TEMPLATES[name]
    dialogue, end = Dialogue(tokenizer), tokenizer.convert_tokens_to_ids("<|im_end|>")
    text = " a <|im_end|> b\n"
    asked = [*dialogue.document(text), *dialogue.question(text)]
    for tokens in (dialogue.prompt(text), asked, dialogue.turn(text, ())):
        assert end not in tokens and "<|im_end|>" in tokenizer.decode(tokens)
    shown = tokenizer.decode(dialogue.prompt(text))
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    assert shown == rendered


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["KVJAX_SMOLLM2", "KVJAX_QWEN"])
def test_real_models(variable):
    given = os.environ.get(variable)
    if not given or not Path(given).exists():
        pytest.skip(f"no model: set {variable}")
    tokenizer = load_tokenizer(given)
    check_prompts(tokenizer)
    check_documents(tokenizer)
    check_turns(tokenizer)
