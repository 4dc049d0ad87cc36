"""Prompts, documents with questions and turns are exactly what the chat template makes of them."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest
from tokenizers import AddedToken, processors

from kvjax.cli.templates import INSTRUCTION, Dialogue
from kvjax.evaluation.tasks import Frame
from kvjax.models import demo, load_tokenizer
from tests.cli.commands import error, output
from tests.support.gguf_models import add_tokenizer, write
from tests.support.marks import slow

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
    """Ids of a conversation in which user and assistant take turns, as transformers has them."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for number, text in enumerate(texts):
        messages.append({"role": "assistant" if number % 2 else "user", "content": text})
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, tokenize=True
    )


MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
SILENT = (
    "{% for message in messages if message['role'] != 'system' %}"
    "[{{ message['role'] }}] {{ message['content'] | trim }}{% endfor %}"
)


CHANGING = r"must show each message once and as it is"


@pytest.mark.parametrize(
    ("template", "system", "said"),
    [
        (MISTRAL, "Be brief.", r"roles must alternate .*; leave out --system$"),
        (SILENT, "Be brief.", CHANGING + ", .*; leave out --system$"),
        ("{{ raise_exception('No.') }}", "Be brief.", r"chat template fails: No\.$"),
        ("{{ raise_exception('No.') }}", None, "chat template fails: No"),
        ("{{ messages[0]['content'] | upper }}", None, CHANGING),
        ("{{ messages[0]['content'] * 2 }}", None, CHANGING),
        ("{% for", None, "chat template fails"),
    ],
)
def test_templates_that_do_not_work(template, system, said):
    tokenizer = load_tokenizer(demo.directory())
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=said):
        Dialogue(tokenizer, system=system)
    if template in (MISTRAL, SILENT):
        assert Dialogue(tokenizer).templated


WITHOUT_ENDS = (
    "{% for m in messages %}{{ '<|user|>' if m['role'] == 'user' else '<|bot|>' }}"
    "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)


def test_a_turn_leaves_out_the_token_that_came_and_no_other(own):
    """A model may end its answers with the user's marker, and with a token of no template."""
    own = copy.deepcopy(own)
    added = ["<|user|>", "<|bot|>", "<|end|>"]
    own.add_tokens([AddedToken(name, special=True, normalized=False) for name in added])
    user, bot, end = own.convert_tokens_to_ids(added)
    other = own.eos_token_id
    own.chat_template = WITHOUT_ENDS
    (text,) = (own("And?", add_special_tokens=False).input_ids,)
    dialogue = Dialogue(own)
    assert dialogue.end_tokens == (user,)
    assert dialogue.turn("And?", (user,)) == [*text, bot]
    for ended_by in ((), (other,), (end,)):
        assert dialogue.turn("And?", ended_by) == [user, *text, bot]

    own.chat_template = WITHOUT_ENDS.replace(
        "{{ m['content'] }}", "{{ m['content'] }}{{ ' <|end|>' if m['role'] != 'user' }}"
    )
    dialogue = Dialogue(own)
    assert dialogue.end_tokens == (end,)
    assert dialogue.turn("And?", (end,)) == [user, *text, bot], "the space before it as well"
    whole = dialogue.turn("And?", ())
    assert own.decode(whole) == " <|end|><|user|>And?<|bot|>"
    assert dialogue.turn("And?", (other,)) == dialogue.turn("And?", (user,)) == whole


def ending_texts(tokenizer):
    """The tokenizer with an end token behind every single text."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="$A $B", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


@pytest.mark.parametrize("raw", [True, False])
def test_nothing_that_is_continued_has_an_end(own, raw):
    tokenizer = ending_texts(own)
    assert tokenizer("a").input_ids[-1] == 1
    dialogue, plain = Dialogue(tokenizer, raw=raw), Dialogue(own, raw=raw)
    for name in ("prompt", "document", "question"):
        tokens = getattr(dialogue, name)(DOCUMENT)
        assert tokens == getattr(plain, name)(DOCUMENT) and tokens[-1] != 1
    assert dialogue.turn(DOCUMENT, ()) == plain.turn(DOCUMENT, ())
    assert Frame.of(tokenizer, chat=not raw) == Frame.of(own, chat=not raw)


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("has_start", [True, False])
def test_chats_of_gguf_files_begin_once(tmp_path, has_start, begins, ends):
    """As llama.cpp has it: one first token where the file wants one or the template has one."""
    described = json.loads((demo.directory() / "tokenizer.json").read_text())

    def add(writer):
        add_tokenizer(writer, "gpt2", described, "gpt-2")
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_add_bos_token(begins)
        writer.add_add_eos_token(ends)
        writer.add_chat_template("{{ bos_token }}" * has_start + TEMPLATE)

    tokenizer = load_tokenizer(write(tmp_path / "chat.gguf", "llama", {}, add))
    dialogue = Dialogue(tokenizer)
    prompt, document = dialogue.prompt(QUESTION), dialogue.document(DOCUMENT)
    for tokens in (prompt, document, Frame.of(tokenizer, chat=True).before):
        assert tokens[:1].count(0) == list(tokens).count(0) == (begins or has_start)
    assert prompt[-1] != 1 and document[-1] != 1
    for tokens in (dialogue.question(QUESTION), dialogue.turn(QUESTION, ())):
        assert 0 not in tokens
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True
    ).input_ids
    assert prompt == [0] * (begins and not has_start) + rendered, "the template stays as it is"
    raw = Dialogue(tokenizer, raw=True).prompt(QUESTION)
    assert raw == [0] * begins + tokenizer(QUESTION, add_special_tokens=False).input_ids

    tokenizer.save_pretrained(tmp_path / "folder")
    assert Dialogue(load_tokenizer(tmp_path / "folder")).prompt(QUESTION) == prompt


def test_without_a_template_texts_are_fed_as_they_are(own):
    dialogue = Dialogue(own, raw=True)
    assert not dialogue.templated
    assert dialogue.prompt("Once. And") == own("Once. And").input_ids
    joined = dialogue.document("Once.\n") + dialogue.question("And then")
    assert own.decode(joined, skip_special_tokens=True).endswith("Once.\nAnd then")
    assert joined.count(own.bos_token_id) == own("a").input_ids.count(own.bos_token_id)
    assert dialogue.turn("And then", ()) == dialogue.question("And then")


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


# Templates that change a message, or what is around it: ids are those of `apply_chat_template`

TEXTS = [
    "a", "What is 2+2?", " leading blank", "trailing blank ", "\n\nlines before", "lines after\n\n",
    "\ttabs\t", " \n both \n ", 'She said "hello".', "It's 'quoted'", "back\\slash \\n",
    "{{ braces }}", "{% if x %}", "a\r\nb", "ünïcödé 漢字 🙂", "no-break\u00a0space\u00a0",
    "<b>bold</b>", "[INST] text [/INST]",
    "# Heading\n\n- item\n- item\n", "think about it /no_think",
]  # fmt: skip

SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|user|>", "<|assistant|>", "<|system|>", "<|end|>",
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
    # Llama 3 trims messages.
    "headers": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}"
    "<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    # GLM puts a line before a message, Phi-3 one behind it.
    "line before": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "line after": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "json": "{% for m in messages %}<|{{ m.role }}|>{{ m.content | tojson }}<|end|>{% endfor %}"
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


@pytest.fixture(params=[*TEMPLATES, *slow("KVJAX_SMOLLM2", "KVJAX_QWEN")])
def templated(request, plain):
    """A tokenizer with each template, and those of real models."""
    if request.param not in TEMPLATES:
        path = os.environ.get(request.param)
        if not path or not Path(path).exists():
            pytest.skip(f"no model: set {request.param}")
        return load_tokenizer(path)
    tokenizer = copy.deepcopy(plain)
    tokenizer.chat_template = TEMPLATES[request.param]
    return tokenizer


def same(tokenizer, tokens: list[int], expected: list[int], text: str) -> None:
    """Equal ids; equal texts where JSON's signs stand between parts, which tokens may join."""
    if "tojson" in tokenizer.chat_template:
        tokens, expected = tokenizer.decode(tokens), tokenizer.decode(expected)
    assert tokens == expected, text


def test_parts_are_those_of_the_whole(templated):
    dialogue, question = Dialogue(templated), "How does it end?"
    switches = "/no_think" in templated.chat_template
    answered = whole(templated, "Hi", "Well.", "x")
    said = len(answered) - len(dialogue.turn("x", ()))
    assert templated.decode(answered[:said]).rstrip('" ').endswith("Well.")
    for text in TEXTS:
        assert dialogue.prompt(text) == whole(templated, text), text
        turns = whole(templated, "Hi", "Well.", text)
        if switches and "/no_think" in text:
            continue
        assert turns[:said] == answered[:said]
        same(templated, answered[:said] + dialogue.turn(text, ()), turns, text)
        for document, asked in ((text, question), ("A text.", text)):
            joined = dialogue.document(document) + dialogue.question(asked)
            same(templated, joined, whole(templated, document + INSTRUCTION + asked.strip()), text)


def test_system_messages(own):
    dialogue = Dialogue(own, system="Be brief.")
    assert dialogue.prompt(QUESTION) == whole(own, QUESTION, system="Be brief.")
    joined = dialogue.document(DOCUMENT) + dialogue.question(f" {QUESTION}\n")
    assert joined == whole(own, DOCUMENT + INSTRUCTION + QUESTION, system="Be brief.")


def test_what_cannot_be_split_is_said(plain):
    tokenizer = copy.deepcopy(plain)
    tokenizer.chat_template = TEMPLATES["switch"]
    dialogue = Dialogue(tokenizer)
    joined = dialogue.document("A text.") + dialogue.question("Why? /no_think")
    assert joined == whole(tokenizer, "A text." + INSTRUCTION + "Why? /no_think")
    with pytest.raises(ValueError, match="after a document depends on the document"):
        dialogue.document("A text about /no_think.")
    with pytest.raises(ValueError, match="names of special tokens"):
        dialogue.prompt("/no_think <|im_end|>")
    tokenizer.chat_template = TEMPLATES["switch before"]
    dialogue = Dialogue(tokenizer)
    with pytest.raises(ValueError, match="before a document depends on the question"):
        dialogue.question("Why? /no_think")
    with pytest.raises(ValueError, match="depends on later messages"):
        dialogue.turn("Why? /no_think", ())


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATES["json"]])
def test_names_of_special_tokens_in_a_text_are_text(plain, template):
    """Those that transformers does not count among a tokenizer's special tokens, too."""
    tokenizer = copy.deepcopy(plain)
    tokenizer.chat_template = template
    dialogue, end = Dialogue(tokenizer), tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert "<|im_end|>" not in tokenizer.all_special_tokens
    text = " a <|im_end|> b\n"
    asked = [*dialogue.document(text), *dialogue.question(text)]
    for tokens in (dialogue.prompt(text), asked, dialogue.turn(text, ())):
        assert end not in tokens and "<|im_end|> b" in tokenizer.decode(tokens)
