"""Tokenizers from the metadata of GGUF files, against those that they were written from."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvjax.models import demo, load_tokenizer
from kvjax.models.gguf_tokenizer import gguf_tokenizer
from tests.support.gguf_models import add_tokenizer, replace, write
from tests.support.hf_models import pytorch

TEXTS = (
    "Once upon a time there was a harbour master's ledger.",
    "In 1998 he'd paid 1,234.50 for 3 boats;\n\n\tWE'RE sure   it is 12345 now...\r\n",
    "Größe, naïve, 中文 混ぜる, 🙂🙃 ½ and ٣ of HTMLParser2Go / x==y\n  }\n",
    "  leading and trailing  ",
    "",
)


@pytest.fixture(scope="module")
def described():
    return json.loads((demo.directory() / "tokenizer.json").read_text())


@pytest.fixture
def made(tmp_path):
    """`made(add)`: the GGUF file with this metadata and no tensors."""

    def make(add):
        return write(tmp_path / "vocabulary.gguf", "llama", {}, add)

    return make


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def vocabulary(described, pre, *more, model="gpt2"):
    def add(writer):
        add_tokenizer(writer, model, described, pre)
        for method, *values in more:
            getattr(writer, method)(*values)

    return add


@pytest.mark.parametrize(
    "pre", ["gpt-2", "olmo", "llama-bpe", "smaug-bpe", "dbrx", "qwen2", "tekken", "gpt-4o"]
)
def test_texts_are_taken_apart_as_transformers_does(made, described, pre):
    pytorch()  # which the next module imports
    known = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    if pre not in known.GGUF_PRE_TOKENIZER_SPLITS and pre not in ("gpt-2", "olmo"):
        pytest.skip(f"this version of transformers does not know {pre}")
    sizes = ("add_block_count", 2), ("add_embedding_length", 32), ("add_head_count", 4)
    path = made(vocabulary(described, pre, *sizes))  # which transformers wants to know, too
    reference, _ = known.convert_gguf_tokenizer(*known.get_gguf_tokenizer(str(path))[:2])
    ours = gguf_tokenizer(path)
    for text in TEXTS:
        assert ids(ours, text) == reference.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids(ours, text)) == text


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", " x", "(", "y", ")", "\n  ", "5"]),
        ("glm4", ["It", "'s", " ", "123", "4", " x", "(y", ")\n", " ", " ", "5"]),
    ],
)
def test_pieces_that_transformers_does_not_know(made, described, pre, expected):
    text, tokenizer = "It's 1234 x(y)\n  5", gguf_tokenizer(made(vocabulary(described, pre)))
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == expected


def test_the_same_tokens_as_the_folder_it_came_from(made, described):
    """The bundled tokenizer splits otherwise; with its own splits both are the same."""
    ours = gguf_tokenizer(made(vocabulary(described, "smollm")))
    theirs = load_tokenizer(demo.directory())
    ours.backend_tokenizer.pre_tokenizer = theirs.backend_tokenizer.pre_tokenizer
    text = demo.document().text[:20_000]
    assert ids(ours, text) == ids(theirs, text)
    assert ours.get_vocab() == theirs.get_vocab()


def test_characters_are_composed_for_qwen2(made, described):
    composed = gguf_tokenizer(made(vocabulary(described, "qwen2")))
    assert ids(composed, "u\u0308ber") == ids(composed, "\u00fcber")


def test_special_tokens(made, described):
    path = made(
        vocabulary(
            described, "llama-bpe",
            ("add_bos_token_id", 0), ("add_eos_token_id", 1), ("add_pad_token_id", 1),
            ("add_unk_token_id", 0), ("add_chat_template", "{{ messages[0]['content'] }}!"),
        )
    )  # fmt: skip
    tokenizer = load_tokenizer(path)
    special = ("bos_token", "eos_token", "pad_token", "unk_token")
    assert [getattr(tokenizer, name) for name in special] == ["<s>", "</s>", "</s>", "<s>"]
    assert tokenizer("a</s>b").input_ids[0] == 0, "Llama 3 begins with it by default"
    assert ids(tokenizer, "a</s>b").count(1) == 1
    message = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "hello!"


@pytest.mark.parametrize(("begins", "ends"), [(True, True), (False, True), (None, None)])
def test_what_stands_before_and_behind_a_text(made, described, begins, ends):
    more = [("add_bos_token_id", 0), ("add_eos_token_id", 1)]
    more += [("add_add_bos_token", begins), ("add_add_eos_token", ends)] if ends is not None else []
    tokenizer = gguf_tokenizer(made(vocabulary(described, "gpt-2", *more)))
    text = [*[0] * bool(begins), *ids(tokenizer, "hello there"), *[1] * bool(ends)]
    assert tokenizer("hello there").input_ids == text
    assert tokenizer("hello there", "hello there").input_ids == text * 2


def test_tokens_that_stand_as_they_are(made):
    """Control tokens and those of users are never merged, and may hold spaces."""
    tokens = ["a", "b", "ab", "<|end|>", "a b", "\u0120", "\u0120a"]

    def add(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([1, 1, 1, 3, 4, 1, 1])
        writer.add_token_merges(["a b", "\u0120 a"])

    tokenizer = gguf_tokenizer(made(add))
    assert tokenizer("a bab").input_ids == [4, 2]
    assert tokenizer("ab<|end|>ab").input_ids == [2, 3, 2]
    assert tokenizer.decode([4, 2, 3, 6]) == "a bab<|end|> a"
    assert tokenizer.decode([4, 2, 3, 6], skip_special_tokens=True) == "a bab a"


# Special tokens

MARKERS = (
    "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<\uff5cUser\uff5c>",
    "[|bot|]", "</s>", "<fim_prefix>", "<fim_pad>", "[PAD]",
)  # fmt: skip


@pytest.fixture
def with_markers(made, described):
    """`with_markers(markers, kind)`: the tokenizer of a file that has these tokens too."""

    def make(markers, kind, template=None, name=None):
        def add(writer):
            add_tokenizer(writer, "gpt2", described, "llama-bpe")
            tokens, types = (
                next(data.pop(f"tokenizer.ggml.{key}") for data in writer.kv_data).value
                for key in ("tokens", "token_type")
            )
            new = [marker for marker in markers if marker not in tokens]
            writer.add_token_list([*tokens, *new])
            old = [
                kind if token in markers else own for token, own in zip(tokens, types, strict=True)
            ]
            writer.add_token_types([*old, *[kind] * len(new)])
            if template is not None:
                writer.add_chat_template(template)
            if name is not None:
                writer.add_name(name)

        return gguf_tokenizer(made(add))

    return make


def check_marker(tokenizer, marker, shown=""):
    """The marker is one token wherever a text has it, and decoders leave it out."""
    (token,) = ids(tokenizer, marker)
    assert tokenizer.convert_ids_to_tokens(token) == marker
    around = ids(tokenizer, f"Once{marker}upon a time")
    assert around == [*ids(tokenizer, "Once"), token, *ids(tokenizer, "upon a time")]
    assert tokenizer.decode(around) == f"Once{marker}upon a time"
    assert tokenizer.decode(around, skip_special_tokens=True) == f"Once{shown}upon a time"


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_markers_are_known_by_their_texts(with_markers, kind):
    tokenizer = with_markers(MARKERS, kind)
    for marker in MARKERS:
        check_marker(tokenizer, marker)


@pytest.mark.parametrize("kind", [1, 4])
def test_markers_are_found_in_the_chat_template(with_markers, kind):
    markers = ["<bot>", "[INST]", "[/INST]", "<<SYS>>", "]~b]", "@@user@@"]
    template = "{% for m in messages %}{{ '" + "".join(markers) + "' + m['content'] }}{% endfor %}"
    tokenizer, plain = with_markers(markers, kind, template), with_markers(markers, 1, "{{ m }}")
    for marker in markers:
        check_marker(tokenizer, marker)
        assert len(ids(plain, marker)) > 1


def test_words_of_a_chat_template_are_no_markers(with_markers, described):
    """Neither are tokens that texts are encoded to, whatever they look like."""
    words = ["user", "\n", "role", "[0]", "The", "user\n"]
    plain = with_markers([], 1)
    words += [plain.convert_ids_to_tokens(ids(plain, text)[0]) for text in ("<", "[", "'")]
    tokenizer = with_markers(words, 1, f"{{{{ messages[0]['role'] }}}} {' '.join(words)}")
    text = "The user's messages[0], a[i] < b\n role"
    assert ids(tokenizer, text) == ids(plain, text)
    assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=True) == text


@pytest.mark.parametrize("prefix", [True, False])
def test_what_texts_are_encoded_to_is_no_marker(made, prefix):
    """`<T>` of a program, in a template that shows one."""

    def add(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<", "T", ">", "<T", "<T>", "\u2581", "<R>", "R", "a"])
        writer.add_token_types([2, *[1] * 9])
        writer.add_token_scores([0.0, -9.0, -9.0, -9.0, -2.0, -1.0, -9.0, -1.0, -9.0, -9.0])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(0)
        writer.add_add_space_prefix(prefix)
        writer.add_chat_template("a list<T> of <R> {{ messages[0]['content'] }}")

    tokenizer = gguf_tokenizer(made(add))
    assert ids(tokenizer, "a<T>")[-1] == 5 and ids(tokenizer, "a<R>")[-1] == 7
    assert tokenizer.decode([9, 5, 7], skip_special_tokens=True).endswith("a<T>")


def test_tags_of_answers_and_user_defined_texts_show(with_markers):
    """`<think>` and `<tool_call>` are user-defined in files of Qwen3 and Qwen2.5."""
    tags = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    texts = ["\n\n", "   ", "<table>", "[multimodal]", "a b"]
    template = f"{{{{ messages[0]['content'] }}}}{''.join(tags)}"
    tokenizer = with_markers([*tags, *texts], 4, template)
    for text in (*tags, *texts):
        check_marker(tokenizer, text, text)


def test_markers_of_phi_3_take_spaces_away(with_markers):
    markers = ["<|user|>", "<|end|>", "<|endoftext|>"]
    tokenizer = with_markers(markers, 3, name="Phi-3 mini")
    (user, end, text), word = (
        (ids(tokenizer, marker)[0] for marker in markers),
        ids(tokenizer, "Once"),
    )
    assert ids(tokenizer, "<|user|>\n Once<|end|>\nOnce") == [user, *word, end, *word]
    assert ids(tokenizer, "<|endoftext|>\nOnce")[:1] == [text]
    assert len(ids(tokenizer, "<|endoftext|>\nOnce")) > len([text, *word])
    other = with_markers(markers, 3, name="Llama")
    assert ids(other, "<|user|>\n Once") != [user, *word]


# SentencePiece


@pytest.fixture(scope="module")
def stories(data_dir):
    """The tokenizer of a real model, and its GGUF form, which has scores in place of merges."""
    folder = data_dir / "tinystories-656k"
    return folder, json.loads((folder / "tokenizer.json").read_text())


def sentencepiece(described, *more):
    special = ("add_bos_token_id", 1), ("add_eos_token_id", 2), ("add_unk_token_id", 0)
    return vocabulary(described, "default", *special, *more, model="llama")


def test_scores_are_merges(made, stories, data_dir):
    folder, described = stories
    ours, theirs = gguf_tokenizer(made(sentencepiece(described))), load_tokenizer(folder)
    sample = (data_dir / "text" / "tinystories_sample.txt").read_text()
    for text in (sample, "a", "  two  spaces "):
        assert ours(text).input_ids == theirs(text).input_ids
    known = sample.replace("<|endoftext|>", "").encode("ascii", "ignore").decode()
    assert ours.decode(ids(ours, known)) == known
    # A token of the file stands as it is, and what comes after it begins like a text.
    assert ids(ours, "One<|end_story|>two") == [*ids(ours, "One"), 2, *ids(ours, "two")]


def test_merges_are_taken_before_scores(made, stories):
    folder, described = stories
    merges = [merge if isinstance(merge, str) else " ".join(merge)
              for merge in described["model"]["merges"]]  # fmt: skip

    def add(writer):
        sentencepiece(described, ("add_token_merges", merges))(writer)
        count = len(described["model"]["vocab"])
        replace(writer, "tokenizer.ggml.scores", "add_array", [0.0] * count)

    ours, theirs = gguf_tokenizer(made(add)), load_tokenizer(folder)
    for text in ("Once upon a time, there was a girl named Lily.", "a", "  two  spaces "):
        assert ours(text).input_ids == theirs(text).input_ids


def test_markers_among_scored_tokens(made, stories):
    folder, described = stories
    markers = ["<start_of_turn>", "<end_of_turn>", "<bot>"]

    def add(writer):
        sentencepiece(described, ("add_chat_template", "<bot>"))(writer)
        for data in writer.kv_data:
            for key, more in (
                ("tokens", markers),
                ("token_type", [1, 4, 4]),
                ("scores", [0.0] * 3),
            ):
                value = data.get(f"tokenizer.ggml.{key}")
                if value is not None:
                    value.value = [*value.value, *more]

    tokenizer, plain = gguf_tokenizer(made(add)), load_tokenizer(folder)
    for marker in markers:
        (token,) = ids(tokenizer, marker)
        assert ids(tokenizer, f"{marker}user") == [token, *ids(plain, "user")]
        assert tokenizer.decode([token], skip_special_tokens=True) == ""


def test_no_space_before_a_text(made, stories):
    described = stories[1]
    without = gguf_tokenizer(made(sentencepiece(described, ("add_add_space_prefix", False))))
    assert without.convert_ids_to_tokens(ids(without, "the"))[0] == "the"
    assert without.decode(ids(without, " the")) == " the"


def test_bytes_of_unknown_characters(made):
    def add(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", "a"])
        writer.add_token_types([2, *[6] * 256, 1, 1])
        writer.add_token_scores([0.0] * 259)
        writer.add_unk_token_id(0)

    tokenizer = gguf_tokenizer(made(add))
    assert tokenizer("a\u00e9").input_ids == [257, 258, 1 + 0xC3, 1 + 0xA9]
    assert tokenizer.decode([257, 258, 1 + 0xC3, 1 + 0xA9]) == "a\u00e9"


# What is refused


@pytest.mark.parametrize(
    ("key", "method", "value", "message"),
    [
        ("model", None, None, "ggml.model must be of type str, it is missing"),
        ("model", "add_string", "t5", "ggml.model 't5' is not supported; supported: gpt2, llama"),
        ("pre", "add_string", "viking", "pre 'viking' is not supported; supported: gpt-2, olm"),
        ("tokens", "add_array", [1, 2], r"ggml.tokens must be a list of texts, got \[1, 2\]"),
        ("token_type", "add_array", [1, 2], "one entry for each of 2048 tokens, got 2"),
        ("merges", "add_array", ["a"], "two tokens with a space between, got 'a'"),
        ("merges", "add_array", ["zzzz qqqq"], "its tokenizer cannot be made: .*zzzz"),
        ("bos_token_id", "add_uint32", 2048, "bos_token_id must be below the 2048 tokens, got 20"),
        ("add_bos_token", "add_uint32", 1, "add_bos_token must be of type bool, got 1"),
    ],
)
def test_wrong_metadata(made, described, key, method, value, message):
    def add(writer):
        vocabulary(described, "gpt-2")(writer)
        replace(writer, f"tokenizer.ggml.{key}", method, *([] if method is None else [value]))

    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(made(add))
    assert "vocabulary.gguf: " in str(caught.value)


def test_neither_merges_nor_scores(made, stories):
    def add(writer):
        sentencepiece(stories[1])(writer)
        replace(writer, "tokenizer.ggml.scores")

    with pytest.raises(ValueError, match=r"scores is missing, and so is tokenizer\.ggml\.merges"):
        load_tokenizer(made(add))


def test_a_template_that_is_no_text(made, described):
    path = made(vocabulary(described, "gpt-2", ("add_uint32", "tokenizer.chat_template", 3)))
    with pytest.raises(ValueError, match=r"gguf: tokenizer.chat_template must be text, got 3"):
        load_tokenizer(path)


# What is kept


def test_a_tokenizer_is_kept_for_files_with_the_same_header(made, tmp_path, monkeypatch):
    def file(template):
        def add(writer):
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("gpt-2")
            writer.add_token_list(["a", "b", "ab", "<|end|>", "\u0120", "\u0120a"])
            writer.add_token_types([1, 1, 1, 3, 1, 1])
            writer.add_token_merges(["a b", "\u0120 a"])
            writer.add_bos_token_id(3)
            writer.add_add_bos_token(True)
            writer.add_chat_template(template)

        return made(add)

    def check(path):
        tokenizer = gguf_tokenizer(path)
        assert tokenizer("ab<|end|> ab").input_ids == [3, 2, 3, 4, 2]
        assert tokenizer.decode([3, 2, 5], skip_special_tokens=True) == "ab a"
        assert tokenizer.bos_token == "<|end|>"
        return tokenizer.chat_template

    cache = tmp_path / "cache"
    monkeypatch.setenv("KVJAX_CACHE", str(cache))
    path = file("{{ one }}")
    assert check(path) == "{{ one }}"
    (kept,) = (cache / "tokenizers").iterdir()
    content, written = kept.read_bytes(), kept.stat()
    assert check(path) == "{{ one }}"
    assert kept.stat().st_ino == written.st_ino, "it was loaded, and not made again"
    kept.write_bytes(content[:-9])
    assert check(path) == "{{ one }}"
    assert kept.read_bytes() == content, "a damaged file is made again"
    kept.write_bytes(content.replace(b'"<|end|>"', b'"<|END|>"'))
    assert gguf_tokenizer(path).convert_ids_to_tokens(3) == "<|END|>", "the file is what is read"
    assert check(file("{{ two }}")) == "{{ two }}"
    assert len(list((cache / "tokenizers").iterdir())) == 2
    monkeypatch.setenv("KVJAX_CACHE", str(kept))  # a file, in which nothing can be kept
    assert check(path) == "{{ two }}"


@pytest.mark.slow
def test_no_pytorch_and_no_word(made, described):
    path = made(vocabulary(described, "smollm"))
    code = (
        "import sys; sys.modules['torch'] = None; from kvjax.models import load_tokenizer; "
        f"[load_tokenizer(x).batch_decode([[5, 6]]) for x in {[str(path), str(demo.directory())]}]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
