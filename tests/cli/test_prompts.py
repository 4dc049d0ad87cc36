"""Several prompts in one batch, files of prompts, standard input, stop strings."""

from __future__ import annotations

import io
import json
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.cli import inputs
from kvjax.cli.main import main
from kvjax.cli.writing import Row
from tests.cli.commands import error, output


def story(tinystories, *args) -> list[str]:
    return ["generate", "--model", str(tinystories), "--method", "full", "--max-new", "40", *args]


@pytest.fixture
def stdin(monkeypatch):
    """Sets what standard input has."""

    def give(data: bytes) -> None:
        monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=io.BytesIO(data)))

    return give


# Files


@pytest.mark.parametrize(
    ("data", "prompts"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\r\n\r\n \n two ", ["one", " two "]),
        (b'"one"\n"t\\u0077o\\n"', ["one", "two\n"]),
        (b'{"prompt": "one", "id": 3}\n\n"two"\n', ["one", "two"]),
        ("ein\u2028zwei\n{".encode(), ["ein\u2028zwei", "{"]),
        (b"[1]\n3\n", ["[1]", "3"]),
    ],
)
def test_files_of_prompts(tmp_path, stdin, data, prompts):
    file = tmp_path / "prompts"
    file.write_bytes(data)
    assert inputs.read_prompts(str(file)) == prompts
    stdin(data)
    assert inputs.read_prompts("-") == prompts


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b'{"text": "a"}', "line 1 of"),
        (b"{", "line 1 of"),
        (b'\n"a"\nb', "line 3 of"),
        (b'"a"\n{"prompt": 3}', "line 2 of"),
        (b'"a"\n""', "prompt 2 is empty"),
        (b"\xff", "is not UTF-8 text"),
    ],
)
def test_files_that_are_no_prompts(capsys, tmp_path, no_weights, data, said):
    file = tmp_path / "prompts"
    file.write_bytes(data)
    assert said in error(capsys, "generate", "--prompts", file)


def test_standard_input_is_a_prompt(capsys, stdin, no_weights):
    stdin(b"")
    assert "the prompt is empty" in error(capsys, "generate", "--prompt-file", "-")
    stdin(b"\xff")
    said = error(capsys, "generate", "--prompt-file", "-")
    assert "standard input is not UTF-8 text" in said


# Batches


def test_several_prompts(capsys, tinystories, tmp_path):
    texts = ["Once upon a time", "Lily and Ben went to the park"]
    alone = [
        json.loads(output(capsys, *story(tinystories, "--prompt", text, "--json")))["text"]
        for text in texts
    ]
    args = story(tinystories, *(part for text in texts for part in ("--prompt", text)))
    record = json.loads(output(capsys, *args, "--json"))
    assert [one["prompt"] for one in record["results"]] == texts
    assert [one["text"] for one in record["results"]] == alone
    assert "text" not in record and record["compile_s"] > 0

    assert main(args) == 0
    out, err = capsys.readouterr()
    first, second = (f"--- {n}/2: {text}\n" for n, text in enumerate(texts, 1))
    assert out == f"{first}{alone[0]}\n{second}{alone[1]}\n"
    tokens = [sum(one[k] for one in record["results"]) for k in ("prompt_tokens", "new_tokens")]
    assert err.startswith(f"{tokens[0]} + {tokens[1]} tokens")

    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"prompt": texts[0]}))
    record = json.loads(output(capsys, *story(tinystories, "--prompts", file, "--json")))
    assert [one["text"] for one in record["results"]] == alone[:1]


# Stop strings


def stopped(text: str, stops: list[str], size: int) -> tuple[str, list[str]]:
    """The text of a row and its pieces, for tokens that are bytes."""
    pieces: list[str] = []
    row = Row(lambda ids: bytes(ids).decode(errors="replace"), [], stops, pieces.append)
    data = list(text.encode())
    for start in range(0, len(data), size):
        row.add(data[start : start + size])
    row.finish()
    assert row.over and row.text == "".join(pieces)
    return row.text, pieces


@given(
    st.text("ab.", max_size=12),
    st.lists(st.text("ab.", min_size=1, max_size=3), max_size=2),
    st.integers(1, 5),
)
def test_a_row_ends_where_a_stop_string_is_complete(text, stops, size):
    ends = (end for end in range(len(text) + 1) if any(stop in text[:end] for stop in stops))
    complete = text[: next(ends, len(text))]
    expected = complete
    for stop in stops:
        if stop in complete:
            expected = min(expected, complete[: complete.find(stop)], key=len)
    assert stopped(text, stops, size)[0] == expected


def test_only_what_may_begin_a_stop_string_waits():
    text, pieces = stopped("one. two.\n three", [".\n", "never"], 1)
    assert text == "one. two"
    assert "." not in pieces and ". " in pieces


def test_stop_strings_are_not_printed(capsys, tinystories):
    args = story(tinystories, "--prompt", "Once upon a time")
    whole = json.loads(output(capsys, *args, "--json"))
    before, _, after = whole["text"].partition(" Lily")
    assert after
    args += ["--stop", "never comes", "--stop", " Lily"]
    record = json.loads(output(capsys, *args, "--json"))
    assert record["text"] == before
    assert 0 < record["new_tokens"] < whole["new_tokens"]
    assert set(record) == set(whole) and record["cache_bytes"] == whole["cache_bytes"]
    assert main(args) == 0
    out, err = capsys.readouterr()
    assert out == before + "\n" and err.startswith(f"6 + {record['new_tokens']} tokens")


@pytest.mark.slow
def test_each_row_has_its_own_end(capsys, tinystories):
    args = story(tinystories, "--prompt", "Once upon a time", "--prompt", "Lily and Ben", "--json")
    whole = [one["text"] for one in json.loads(output(capsys, *args))["results"]]
    found = json.loads(output(capsys, *args, "--stop", " Lily"))["results"]
    assert [one["text"] for one in found] == [text.partition(" Lily")[0] for text in whole]
