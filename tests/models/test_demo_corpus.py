"""The text that the bundled model is trained with, and its tokenizer."""

import itertools
import sys
import zlib
from pydoc_data.topics import topics

import numpy as np
import pytest

from kvjax.models import demo
from kvjax.models.demo.training import corpus, held_out, recipe, tasks, train
from tests.support.demo_texts import TINY, bundled_tokenizer, texts, tiny_tokenizer


def test_split_is_by_name_alone():
    documents = [(f"topic {i}", f" text {i} ") for i in range(500)]
    training_, kept_back = corpus.split_documents(documents)
    assert set(training_) | set(kept_back) == {f"text {i}\n\n" for i in range(500)}
    assert not set(training_) & set(kept_back)
    assert 30 <= len(kept_back) <= 70
    for i in range(500):
        held = zlib.crc32(f"topic {i}".encode()) % 10 == 0
        assert (f"text {i}\n\n" in kept_back) is held
    changed = [(name, text.upper()) for name, text in reversed(documents)]
    _, again = corpus.split_documents(changed)
    assert [text.upper().strip() for text in kept_back] == [text.strip() for text in again][::-1]


def test_documents_of_this_python(tmp_path, monkeypatch):
    library = {
        "a.py": '"""Of a."""\ndef f():\n    """Of f.\n\n    More."""\nclass C:\n    """Of C."""',
        "package/b.py": '"""Of b."""',
        "package/plain.py": "x = 1",
        "broken.py": "def (",
        "test/c.py": '"""Of a test."""',
        "package/tests/d.py": '"""Of a test."""',
        "site-packages/e.py": '"""Of another."""',
    }
    for name, source in library.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    monkeypatch.setattr(corpus.sysconfig, "get_path", {"stdlib": str(tmp_path)}.get)
    documents = dict(corpus.python_documents())
    modules = {name: text for name, text in documents.items() if name.startswith("module ")}
    assert list(modules) == ["module a", "module package.b"]
    assert sorted(modules["module a"].split("\n\n")) == ["More.", "Of C.", "Of a.", "Of f."]
    assert modules["module package.b"] == "Of b."
    assert len(documents) - 2 == len(topics)
    assert documents["topic lambda"] == topics["lambda"]


@pytest.mark.skipif(sys.version_info[:3] != (3, 11, 7), reason="the bundled text is of 3.11.7")
@pytest.mark.slow
def test_the_bundled_held_out_text_was_held_out(monkeypatch):
    text = demo.held_out_text()
    documents = list(corpus.python_documents())
    monkeypatch.setattr(held_out, "python_documents", lambda: documents)
    assert held_out.held_out_text() == text
    training_, kept_back = corpus.split_documents(documents)
    paragraphs = {paragraph.strip() for paragraph in text.split("\n\n")} - {""}
    assert len(paragraphs) > 1000
    assert not paragraphs & {part.strip() for given in training_ for part in given.split("\n\n")}
    assert paragraphs <= {part.strip() for given in kept_back for part in given.split("\n\n")}


def test_documents_of_a_file(tmp_path):
    text = "\n\n".join(f"Paragraph {i} of this Ünïcode text. " * (i % 7) for i in range(300))
    path = tmp_path / "some.txt"
    path.write_text(text, encoding="utf-8")
    names, pieces = zip(*corpus.file_documents(path), strict=True)
    assert "".join(pieces) == text + "\n\n"
    assert len(set(names)) == len(names) > 5 and names[0] == "part 0"
    assert all(4000 < len(piece) < 4500 for piece in pieces[:-1])
    held = corpus.split_documents(corpus.file_documents(path))[1]
    assert pieces[0].strip() not in {piece.strip() for piece in held}, "a short file is trained on"


@pytest.mark.parametrize("make", [tiny_tokenizer, bundled_tokenizer], ids=["tiny", "bundled"])
def test_digits_are_read_in_pairs(make):
    tokenizer = make()
    rng = np.random.default_rng(0)
    for value in rng.integers(10**5, 10**6, 200):
        ids = tokenizer.encode(f" {value}.", add_special_tokens=False).ids
        pieces = [tokenizer.decode([i]) for i in ids]
        assert "".join(pieces) == f" {value}."
        assert all(len(piece.strip()) <= 2 for piece in pieces)
        edges = set(itertools.accumulate(len(piece) for piece in pieces))
        assert {3, 5, 7} <= edges, "pairs from the left"
        if make is bundled_tokenizer:
            assert len(ids) == 4, "three pairs and a full stop"
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("a12345").ids]
    assert "23" not in pieces and pieces[-1] == "5"


@pytest.mark.parametrize("make", [tiny_tokenizer, bundled_tokenizer], ids=["tiny", "bundled"])
@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n\nQuestion: What is the code of the amber falcon?\nAnswer: The code is 482130.",
        "  two  spaces\tand\ttabs \n \n\n end ",
        "naïve Ünïcode, 漢字 and 😀 e\u0301",
        "x=[1,22,333]; def f(a_b): return '--->'",
        "\x00\x7f\r\n",
    ],
)
def test_text_survives_the_tokenizer(make, text):
    tokenizer = make()
    ids = tokenizer.encode(text).ids
    assert ids[0] == 0 and ids.count(0) == 1
    assert tokenizer.decode(ids) == text
    plain = tokenizer.encode(text, add_special_tokens=False).ids
    assert plain == ids[1:]


def test_sizes_of_the_vocabularies():
    assert tiny_tokenizer().get_vocab_size() == TINY.vocab_size
    assert bundled_tokenizer().get_vocab_size() == recipe.CONFIG.vocab_size
    for tokenizer in (tiny_tokenizer(), bundled_tokenizer()):
        assert [tokenizer.token_to_id(name) for name in (corpus.BOS, corpus.EOS)] == [0, 1]
    assert (recipe.CONFIG.bos_token_id, recipe.CONFIG.eos_token_ids) == (0, (1,))


def test_the_tokenizer_is_the_same_every_time():
    again = train.make_tokenizer(texts(), TINY.vocab_size)
    assert again.to_str() == tiny_tokenizer().to_str()
    assert tasks.TEXT != tasks.ANSWER
