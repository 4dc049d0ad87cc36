"""Several prompts in one batch, files of prompts, standard input, stop strings."""

from __future__ import annotations

import io
import json
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from kvjax.cli import inputs, opened
from kvjax.cli.answers import InOrder, Row
from kvjax.cli.main import main
from kvjax.generation.continuation import TextDecoder
from kvjax.generation.generate import Stream
from kvjax.models import demo, load_tokenizer
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
        (b"\xef\xbb\xbfone\r\ntwo\r\n", ["one", "two"]),
        (b"one\rtwo\r", ["one", "two"]),
        (b'"one"\r\n"two"\r\n', ["one", "two"]),
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


@pytest.mark.parametrize("how", ["--prompt", "--prompt-file", "--prompts"])
def test_line_ends_of_windows_do_not_reach_the_model(monkeypatch, tmp_path, how):
    """Whatever way a text comes."""

    class Dialogue:
        def __init__(self, tokenizer, *, system, raw, chat):
            assert system == "one\ntwo\n"

        def prompt(self, text):
            assert text == "one\ntwo\n"
            raise KeyboardInterrupt

    monkeypatch.setattr(opened, "Dialogue", Dialogue)
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    (tmp_path / "json").write_bytes(b'{"prompt": "one\\r\\ntwo\\r\\n"}\r\n')
    windows = "one\r\ntwo\r\n"
    given = {
        "--prompt": windows,
        "--prompt-file": tmp_path / "text",
        "--prompts": tmp_path / "json",
    }
    assert main(["generate", "--system", windows, how, str(given[how])]) == 130


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\n \n", "is empty"),
        (b'{"text": "a"}', "line 1 of"),
        (b'\n"a"\nb', "line 3 of"),
        (b'"a"\n""', "prompt 2 is empty"),
        (b"\xff", "is not UTF-8 text"),
    ],
)
def test_files_that_are_no_prompts(capsys, tmp_path, no_weights, data, said):
    file = tmp_path / "prompts"
    file.write_bytes(data)
    assert said in error(capsys, "generate", "--prompts", file)


# Batches


def test_several_prompts(capsys, monkeypatch, tinystories, tmp_path):
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

    pieces, plain = [], Stream.__next__

    def next_and_look(self):
        pieces.append(capsys.readouterr().out)
        return plain(self)

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "__next__", next_and_look)
        assert main(args) == 0
    out, err = capsys.readouterr()
    pieces.append(out)
    first, second = (f"--- {n}/2: {texts[n - 1]}\n{alone[n - 1]}\n" for n in (1, 2))
    assert "".join(pieces) == first + second
    early = "".join(pieces[: len(pieces) // 2])
    assert len(early) > len(f"--- 1/2: {texts[0]}\n") and first.startswith(early)
    tokens = [sum(one[k] for one in record["results"]) for k in ("prompt_tokens", "new_tokens")]
    assert err.startswith(f"{tokens[0]} + {tokens[1]} tokens")

    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"prompt": texts[0]}))
    record = json.loads(output(capsys, *story(tinystories, "--prompts", file, "--json")))
    assert [one["text"] for one in record["results"]] == alone[:1]


# Stop strings


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
    pieces: list[str] = []
    row = Row(lambda ids: bytes(ids).decode(errors="replace"), [], stops, pieces.append)
    for start in range(0, len(text), size):
        row.add(text[start : start + size].encode())
    row.finish()
    assert row.over and row.text == "".join(pieces) == expected


@pytest.fixture(scope="module")
def chat_tokenizer():
    """The bundled model's tokenizer with markers of a chat."""
    tokenizer = load_tokenizer(demo.directory())
    markers = ["<|im_start|>", "<|im_end|>", "<|im_end|>2"]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in markers])
    return tokenizer


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["<|im_start|>"], "Paris. Rome."),
        (["</s>", "<|im_end|>"], "Paris."),
        (["<|im_end|> Rome"], "Paris."),
        (["Paris.<|im_end|>"], ""),
        (["is.<|im_end|> R"], "Par"),
        (["<|im_end|><|im_start|>"], "Paris. Rome. Oslo."),
        (["<|im_start|></s>"], "Paris. Rome."),
        ([" Rome.<|im_start|></s> Os"], "Paris."),
        (["<|im_end|>2"], "Paris. Rome. Oslo."),
        (["Paris. Rome"], ""),  # special tokens between do not count, unless a stop has them
        (["Paris. Rome", "Oslo<|im_end|>"], "Paris. Rome. Oslo."),
        (["never"], "Paris. Rome. Oslo."),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_special_tokens_in_stop_strings(chat_tokenizer, stops, text, at_once):
    whole = "Paris.<|im_end|> Rome.<|im_start|></s> Oslo."
    tokens = chat_tokenizer(whole, add_special_tokens=False).input_ids
    pieces: list[str] = []
    row = Row(TextDecoder(chat_tokenizer), [1], stops, pieces.append)
    for piece in [tokens] if at_once else [[token] for token in tokens]:
        row.add(piece)
    assert row.over == row.stopped == (text != "Paris. Rome. Oslo.")
    row.finish()
    assert row.text == "".join(pieces) == text


def test_an_end_token_completes_a_stop_string(chat_tokenizer):
    """And so does its name in letters."""
    letters = chat_tokenizer(
        "Paris.<|im_end|> Rome", add_special_tokens=False, split_special_tokens=True
    ).input_ids
    row = Row(TextDecoder(chat_tokenizer), [1], stops=["<|im_end|>"])
    row.add(letters)
    assert (row.text, row.over) == ("Paris.", True)
    end = chat_tokenizer.convert_tokens_to_ids("<|im_end|>")
    paris = chat_tokenizer("It is Paris.", add_special_tokens=False).input_ids
    for came, text in ((end, "It is"), (1, "It is Paris."), (None, "It is Paris.")):
        row = Row(TextDecoder(chat_tokenizer), [1], stops=[" Paris.<|im_end|>"])
        row.add(paris)
        assert row.text == "It is", "it may be the beginning of a stop string"
        row.finish(came)
        assert (row.text, row.stopped) == (text, came == end)


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


def test_what_follows_an_answer_in_the_template_ends_it(capsys, broken_copy, tinystories):
    """Also where the configuration names another end token than the model was trained with."""
    args = ("--prompt", "Once upon a time", "--max-new", "150", "--json")
    whole = json.loads(output(capsys, *story(tinystories, *args)))
    for name in ("config.json", "generation_config.json"):
        raw = json.loads((broken_copy / name).read_text())
        (broken_copy / name).write_text(json.dumps({**raw, "eos_token_id": 0}))
    (broken_copy / "chat_template.jinja").write_text(
        "{{ bos_token }} {% for m in messages %}{{ m['content'] }}"
        "{{ '' if loop.last else '<|end_story|>' }}{% endfor %}"
    )
    answer = json.loads(output(capsys, *story(broken_copy, *args)))
    assert (answer["text"], answer["finish_reason"]) == (whole["text"], "stop")
    assert json.loads(output(capsys, *story(broken_copy, *args, "--raw")))["new_tokens"] == 150


def test_what_is_cut_says_so(capsys, tinystories):
    one = story(tinystories, "--prompt", "Once upon a time", "--max-new", "4")
    assert json.loads(output(capsys, *one, "--json"))["finish_reason"] == "length"
    assert main(one) == 0
    assert capsys.readouterr().err.rstrip().endswith("cut by --max-new")
    assert main([*one, "--stop", " little"]) == 0
    assert "cut" not in capsys.readouterr().err
    two = [*one, "--prompt", "Lily and Ben", "--stop", " little"]
    found = json.loads(output(capsys, *two, "--json"))["results"]
    assert [row["finish_reason"] for row in found] == ["stop", "length"]
    assert main(two) == 0
    assert capsys.readouterr().err.rstrip().endswith("1 of 2 cut by --max-new")


def test_a_raw_text_that_brings_its_own_start(capsys, tinystories, tmp_path):
    args = story(tinystories, "--max-new", "2", "--prompt")
    note = "the text begins with <|start_story|>, and the tokenizer puts another one before it\n"
    assert main([*args, "<|start_story|>Once"]) == 0
    assert note in capsys.readouterr().err
    assert main([*args, "<|start_story|>Once", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == note and json.loads(out)["prompt_tokens"] == 4
    assert main([*args, "Once <|start_story|>"]) == 0
    assert note not in capsys.readouterr().err

    file = tmp_path / "document.txt"
    file.write_text("<|start_story|>Once upon a time")
    read = ["read", str(file), "--out", str(tmp_path / "out"), "--model", str(tinystories)]
    assert main([*read, "--method", "full"]) == 0
    assert capsys.readouterr().err == note


# Several texts on one stream


@given(st.lists(st.text("ab\n", max_size=12), min_size=1, max_size=4), st.integers(1, 5))
def test_texts_come_in_their_order(texts, size):
    """At any time the first text that is not over has been shown as far as it has come."""
    rows = [Row(lambda ids: bytes(ids).decode(), []) for _ in texts]
    headers, shown = [f"{n}:" for n in range(len(texts))], []
    order = InOrder(rows, headers, shown.append)
    for step in range(0, max(map(len, texts)) + 1, size):
        for row, text in zip(rows, texts, strict=True):
            row.add(text[step : step + size].encode())
            if step + size >= len(text):
                row.finish()
        order.update()
        over = [row.over for row in rows]
        first = over.index(False) if False in over else len(rows) - 1
        expected = "".join(f"{headers[n]}{texts[n]}\n" for n in range(first))
        expected += headers[first] + rows[first].text + "\n" * over[first]
        assert "".join(shown) == expected
    assert all(shown)
