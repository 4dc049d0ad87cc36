"""`by_head(kvzip)` in the commands: a document read, saved and asked about, and what is refused."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import numpy as np
import pytest

import kvjax
from kvjax.cli.main import main
from kvjax.cli.templates import Dialogue
from kvjax.generation.continuation import TextDecoder, new_text
from kvjax.models import from_pretrained, load_tokenizer
from tests.cli.commands import error, output
from tests.support.marks import some_slow

TEXT = "Once upon a time there was a girl named Lily. She had a red ball and a big dog. " * 16


@pytest.fixture
def read(capsys, tinystories, document, tmp_path):
    """Reads the document, and returns the arguments of a command that would."""

    def arguments(method, budget="0.3"):
        return [
            "read", document, "--out", tmp_path / "out", "--model", tinystories,
            "--method", method, "--budget", budget, "--max-questions", "32", "--max-new", "8",
        ]  # fmt: skip

    return arguments


@pytest.mark.parametrize(
    "method",
    some_slow(
        ("by_head(kvzip(room=64), profile={!r})", "by_head(chain(kvzip, quantize), profile={!r})"),
        exhaustive={"by_head(kvzip(room=64), profile={!r})"},
    ),
)
def test_it_is_read_and_asked_as_in_python(
    capsys, read, heads, model, tinystories, method, tmp_path
):
    method = method.format(str(heads))
    record = json.loads(output(capsys, *read(method), "--json"))
    asked = json.loads(output(capsys, "ask", tmp_path / "out", "Lily said", "The dog", "--json"))
    heads.unlink()  # the context has its own
    again = json.loads(output(capsys, "ask", tmp_path / "out", "Lily said", "The dog", "--json"))
    assert again["results"] == asked["results"] and asked["method"] == method

    tokenizer = load_tokenizer(tinystories)
    tokens = tokenizer(TEXT).input_ids
    kept = kvjax.load_context(tmp_path / "out", model).transform
    context = kvjax.read(
        model, [tokens], transform=kept, max_prompt=len(tokens) + 32, max_new=8,
        document=tokenizer, buckets=[len(tokens)],
    )  # fmt: skip
    assert record["cache_bytes"] == context.nbytes < record["full_cache_bytes"]
    questions = [Dialogue(tokenizer).question(text) for text in ("Lily said", "The dog")]
    result = kvjax.generate(model, questions, context=context, max_new_tokens=8)
    for answer, ids, new in zip(asked["results"], questions, result.tokens, strict=True):
        assert answer["text"] == new_text(TextDecoder(tokenizer), ids, new)


def test_what_is_refused_before_weights_are_read(capsys, monkeypatch, read, heads, tmp_path):
    monkeypatch.setattr("kvjax.models.from_pretrained", lambda *_, **__: pytest.fail("weights"))
    other = tmp_path / "other.safetensors"
    refused = {
        "by_head(kvzip, profile='nowhere')": "no HeadProfile at nowhere: kvjax profile",
        f"by_head(snapkv, profile={str(heads)!r})":
            "is of by_head(kvzip), and by_head(snapkv) needs one of its own",
        f"by_head(kvzip(values=False), profile={str(heads)!r})": "(values=False)) needs",
        "by_head(kvzip, profile=3)": "the path of one, got 3",
        "by_head(quest)": "takes one method whose budget is a share",
        "by_head(h2o)": "compresses prompts and takes a budget for each head",
    }  # fmt: skip
    for method, said in refused.items():
        assert said in error(capsys, *read(method))
    assert "a share of the tokens, such as 0.05, got KVzip(budget=64" in error(
        capsys, *read("by_head(kvzip)", "64")
    )
    table = np.ones((3, 1, 4))
    even = kvjax.ByHead(kvjax.KVzip(0.5), kvjax.kit.HeadProfile(table))
    kvjax.save_calibration(other, even, tiny_model())
    said = error(capsys, *read(f"by_head(kvzip, profile={str(other)!r})"))
    assert "of another model: it has 3 layers of 1 KV heads, expected " in said


def tiny_model():
    def call(*args, **options):
        raise NotImplementedError

    return kvjax.models.FunctionalModel(call, (), 3, 1, 1, 8, 64)


def test_other_weights_are_refused(capsys, read, heads, model):
    profile = kvjax.load_calibration(heads, model)
    model.norm.scale.set_value(2 * model.norm.scale.get_value())
    kvjax.save_calibration(heads, kvjax.ByHead(kvjax.KVzip(0.5), profile), model)
    said = error(capsys, *read(f"by_head(kvzip, profile={str(heads)!r})"))
    assert "heads.safetensors is of another model: its weights" in said


@pytest.mark.slow
def test_a_chat_has_a_document_in_its_first_turn(capsys, monkeypatch, heads, tinystories):
    """The share is one of the first turn, which is repeated; further turns stay beside it."""
    lines = f"{TEXT.strip()}\n/bytes\nWhat did she say?\n/quit\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    method = f"by_head(kvzip, profile={str(heads)!r})"
    args = "chat", "--model", tinystories, "--method", method, "--budget", "0.3", "--max-new", "4"
    assert main([str(x) for x in args]) == 0
    out, err = capsys.readouterr()
    assert " for what was said (" in out and len(out.strip().split("\n")) >= 2
    whole, *cuts = err.strip().split("\n")
    assert whole.startswith(f"{method} and its room take no fewer bytes than quantize, which ")
    assert all("cut by --max-new" in line for line in cuts)


@pytest.mark.slow
def test_a_hint_where_the_end_of_a_document_decides(capsys, read):
    assert main([str(x) for x in read("chain(snapkv, quantize)")]) == 0
    _, err = capsys.readouterr()
    assert "knows no question: --method quantize keeps every token" in err
    for method in ("h2o", "chain(quantize, quest)"):
        output(capsys, *read(method))


@pytest.mark.slow
def test_short_and_empty_documents(capsys, read, document, heads, tmp_path):
    method = f"by_head(kvzip, profile={str(heads)!r})"
    document.write_text("Hi.")
    record = json.loads(output(capsys, *read(method, "0.05"), "--json"))
    assert record["prompt_tokens"] < 5
    assert json.loads(output(capsys, "ask", tmp_path / "out", "Who?", "--json"))["results"]
    document.write_text(" \n")
    assert "the document is empty" in error(capsys, *read(method))


ASK = """
import json, sys
import kvjax
from kvjax.models import from_pretrained
questions = json.loads(sys.stdin.read())
model = from_pretrained(sys.argv[1])
context = kvjax.load_context(sys.argv[2], model)
result = kvjax.generate(model, questions, context=context, max_new_tokens=8)
print(json.dumps([context.nbytes, [list(map(int, row)) for row in result.tokens]]))
"""


@pytest.mark.slow
def test_smollm2_answers_the_same_from_a_file_of_a_few_per_cent(smollm2, data_dir, tmp_path):
    """A twentieth of 2,048 tokens in 8 bits; eight questions in another process."""
    model, tokenizer = from_pretrained(smollm2), load_tokenizer(smollm2)
    text = (data_dir / "text" / "wikitext2.test.txt").read_text()[:16_000]
    tokens = tokenizer(text).input_ids
    document = tokens[-2048:]
    # Uneven shares, alike in all layers: the model's own would be eight layouts to compile.
    size = np.exp(3 * np.random.default_rng(0).normal(size=(model.kv_heads, 1)))
    size = np.broadcast_to(size, (model.num_layers, *size.shape))
    profile = kvjax.kit.HeadProfile(1 - np.exp(-size * np.geomspace(1e-3, 1e8, 64)))
    base = kvjax.chain(kvjax.KVzip(0.05, room=64), kvjax.Quantize())
    context = kvjax.read(
        model, [document], transform=kvjax.ByHead(base, profile), max_prompt=2048 + 64, max_new=8,
        document=tokenizer,
    )  # fmt: skip
    words = "who what when where why which whose how".split()
    questions = [tokenizer(f" {word} it?", add_special_tokens=False).input_ids for word in words]
    result = kvjax.generate(model, questions, context=context, max_new_tokens=8)
    before = [list(map(int, row)) for row in result.tokens]
    kvjax.save_context(tmp_path / "context", context, model=model)
    size = sum(path.stat().st_size for path in (tmp_path / "context").rglob("*") if path.is_file())
    assert len(document) == 2048 and size < 0.03 * context.full_nbytes
    line = [sys.executable, "-c", ASK, str(smollm2), str(tmp_path / "context")]
    done = subprocess.run(
        line, input=json.dumps(questions), capture_output=True, text=True, check=True
    )
    nbytes, after = json.loads(done.stdout)
    assert nbytes == context.nbytes and after == before
    assert len({tuple(row) for row in before}) > 1
