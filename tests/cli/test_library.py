"""Several documents are read into a library, and asked all at once or by name."""

from __future__ import annotations

import contextlib
import json

import pytest

import kvjax
from kvjax.attention.layer import layer_caches
from kvjax.cli.library import TOGETHER, batches
from kvjax.cli.main import main
from kvjax.cli.opened import OpenedModel
from kvjax.cli.saved import Saved
from kvjax.models import from_pretrained
from tests.cli.commands import error, output
from tests.support.attending import same_arrays
from tests.support.marks import some_slow

SENTENCE = "Once upon a time there was a girl named {}. She had a red ball and a big dog. "
TEXTS = {name: SENTENCE.format(name) * times for name, times in dict(Lily=6, Mia=7, Sue=15).items()}
SIZES = "--max-questions", "32", "--max-new", "8"


@pytest.fixture
def files(tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / f"{name}.txt").write_text(text)
    return [tmp_path / f"{name}.txt" for name in TEXTS]


@pytest.fixture
def read(capsys, tinystories, files, tmp_path):
    """Reads documents, all of them by default, and returns what is printed."""

    def run(*options, documents=files, out="library") -> dict:
        args = ["read", *documents, "--out", tmp_path / out, "--model", tinystories, *SIZES]
        return json.loads(output(capsys, *args, "--method", "snapkv", *options, "--json"))

    return run


@pytest.fixture
def calls(monkeypatch):
    """The lengths of the documents of each call of `kvjax.read`."""
    read, lengths = kvjax.read, []

    def note(model, prompts, **options):
        lengths.append(list(map(len, prompts)))
        return read(model, prompts, **options)

    monkeypatch.setattr(kvjax, "read", note)
    return lengths


def positions(context: kvjax.Context) -> list[list[int]]:
    """What each layer and head of a context of one row keeps."""
    kvs = [cache.kv for cache in layer_caches(context.caches)]
    return [
        sorted(kv.position[0, head][kv.live[0, head]].tolist())
        for kv in kvs
        for head in range(kv.shape[1])
    ]


def test_documents_are_read_together_and_asked_apart(
    capsys, read, calls, files, tmp_path, monkeypatch
):
    """Those of similar length are rows of one call; the model is loaded and looked at once."""
    once = []
    for name in ("load", "calibrated"):
        method = getattr(OpenedModel, name)

        def note(*args, name=name, method=method):
            once.append(name)
            return method(*args)

        monkeypatch.setattr(OpenedModel, name, note)
    record = read("--budget", "0.3")
    assert once == ["load", "calibrated"]
    lengths = [document["prompt_tokens"] for document in record["documents"]]
    assert calls == [lengths[:2], lengths[2:]] and lengths[0] < lengths[1] < lengths[2]
    assert [document["read"] for document in record["documents"]] == [True] * 3
    assert record["method"] == "snapkv" and "document" not in record

    asked = json.loads(output(capsys, "ask", tmp_path / "library", "One day", "--json"))
    for file, document, answers in zip(files, record["documents"], asked["documents"], strict=True):
        assert document["out"] == answers["folder"] == str(tmp_path / "library" / file.stem)
        assert document["document"] == answers["document"] == str(file)
    assert main(["ask", str(tmp_path / "library"), "One day"]) == 0
    assert capsys.readouterr().out == "".join(
        f"=== {name}\n{document['results'][0]['text']}\n"
        for name, document in zip(TEXTS, asked["documents"], strict=True)
    )


@pytest.mark.parametrize(
    "method",
    some_slow(("snapkv", "by_head(chain(kvzip, quantize), profile={!r})"), exhaustive={"snapkv"}),
)
def test_a_document_is_kept_and_answers_as_alone(
    capsys, read, files, heads, model, tmp_path, method
):
    options = "--method", method.format(str(heads)), "--budget", "0.3"
    library = read(*options)
    questions = "One day", "The dog"
    asked = json.loads(output(capsys, "ask", tmp_path / "library", *questions, "--json"))
    # The first one is read with the second, and the last one by itself.
    for file, document, answers in list(
        zip(files, library["documents"], asked["documents"], strict=True)
    )[::2]:
        alone = read(*options, documents=[file], out=f"alone {file.stem}")
        assert document["cache_bytes"] == alone["cache_bytes"]
        folders = alone["out"], document["out"]
        apart, together = (positions(kvjax.load_context(folder, model)) for folder in folders)
        assert apart == together
        by_itself = json.loads(output(capsys, "ask", folders[0], *questions, "--json"))
        assert by_itself["results"] == answers["results"]


@pytest.mark.slow
def test_programs_are_shared(capsys, read, compiled, tmp_path, files):
    """Documents that were padded to one length need no other program to answer."""
    read("--budget", "24", documents=files[:2])
    args = "ask", tmp_path / "library" / "Lily", "One day", "--json"
    output(capsys, *args)
    compiled.clear()
    output(capsys, "ask", tmp_path / "library", "One day", "--json")
    assert not compiled


@pytest.mark.slow
def test_what_is_there_stays(capsys, read, calls, files, tmp_path, tinystories):
    """By the same command and of the same tokens; what is new, or was changed, is read."""
    kinds = []

    def again(*options, **named) -> list[bool]:
        calls.clear()
        kinds.append(read("--budget", "24", *options, **named))
        return [document["read"] for document in kinds[-1]["documents"]]

    assert again(documents=files[:2]) == [True, True]
    folder = tmp_path / "library"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert again() == [False, False, True] and len(calls) == 1
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert again() == [False] * 3 and not calls
    assert "cache_bytes" not in kinds[-1]["documents"][0]
    files[1].write_text(TEXTS["Mia"] + "The end.")
    assert again() == [False, True, False]
    assert again("--max-new", "9") == [True] * 3
    assert Saved.of(folder / "Mia").reading.max_new == 9

    args = ["read", *files, "--out", folder, "--model", tinystories, *SIZES, "--max-new", "9"]
    args = [*map(str, args), "--method", "snapkv", "--budget", "24"]
    assert output(capsys, *args).startswith("3 of 3 documents were there already, and stay as ")
    files[1].write_text(TEXTS["Mia"])
    assert main(args) == 0
    out, err = capsys.readouterr()
    (tokens,) = [x["prompt_tokens"] for x in kinds[0]["documents"] if x["out"].endswith("Mia")]
    assert out.startswith(f"{folder / 'Mia'}: {tokens} tokens with snapkv in ")
    assert "\n2 of 3 documents were there already, and stay as they are\n" in out
    assert err == (
        "snapkv keeps what the document's end looks at, and knows no question: --method quantize "
        "keeps every token\n"
    )


@pytest.mark.parametrize("piece", [(), ("--piece", "64")], ids=["whole", "pieces"])
def test_a_library_goes_on_where_it_was_stopped(
    capsys, read, tinystories, tmp_path, monkeypatch, piece
):
    """Behind any save; with pieces, within a document."""
    options = ("--budget", "24", *piece)
    whole = read(*options, out="whole")
    save, saved = kvjax.save_context, []

    def then_stop(folder, context, **named):
        save(folder, context, **named)
        saved.append((folder.name, int(context.length[0])))
        raise KeyboardInterrupt

    monkeypatch.setattr(kvjax, "save_context", then_stop)
    lengths = [document["prompt_tokens"] for document in whole["documents"]]
    step = 64 if piece else max(lengths)
    expected = [
        (name, min(end, length))
        for name, length in zip(TEXTS, lengths, strict=True)
        for end in range(step, length + step, step)
    ]
    for _ in expected:
        with contextlib.suppress(AssertionError):  # nothing is printed
            read(*options)
    assert saved == expected
    monkeypatch.setattr(kvjax, "save_context", save)
    capsys.readouterr()
    assert not any(document["read"] for document in read(*options)["documents"])
    model = from_pretrained(tinystories)
    for name in TEXTS:
        folders = [tmp_path / library / name for library in ("whole", "library")]
        about = [Saved.of(folder) for folder in folders]
        assert about[0] == about[1] and about[0].unfinished is None
        contexts = [kvjax.load_context(folder, model) for folder in folders]
        if piece:
            same_arrays(*contexts)
        else:  # it was read beside other documents before
            assert positions(contexts[0]) == positions(contexts[1])


def test_what_is_refused_is_refused_at_once(capsys, no_weights, files, tinystories, tmp_path):
    """And nothing is written."""
    (tmp_path / "more").mkdir()
    twin, out = tmp_path / "more" / "Lily.md", tmp_path / "library"
    twin.write_text("Another one.")
    args = "--out", out, "--model", tinystories, *SIZES

    def refused(*documents, options=args) -> str:
        return error(capsys, "read", *documents, *options)

    said = refused(*files, twin)
    assert f"{files[0]} and {twin} would both be {out / 'Lily'}: give them different names" in said
    assert "- has no name for a folder of the library" in refused(files[0], "-")
    (tmp_path / "empty.txt").write_text(" ")
    assert f"{tmp_path / 'empty.txt'} is empty" in refused(files[0], tmp_path / "empty.txt")
    (tmp_path / "long.txt").write_text(TEXTS["Lily"] * 9)
    said = refused(files[0], tmp_path / "long.txt")
    assert f"{tmp_path / 'long.txt'}: the model has 512 positions" in said
    assert "it is not a folder" in refused(*files, options=("--out", twin, *args[2:]))
    assert not out.exists()
    (out / "Mia").mkdir(parents=True)
    (out / "Mia" / "letter.txt").write_text("a letter")
    assert f"{out / 'Mia'} is in the way, and stays as it is" in refused(*files)
    assert [path.name for path in out.iterdir()] == ["Mia"]


def test_one_document_and_several(capsys, read, files, tinystories, tmp_path):
    """A library is not taken for a document, nor the other way round."""
    out = tmp_path / "library"
    read("--budget", "24", documents=files[:2])
    args = "--out", out, "--model", tinystories
    said = error(capsys, "read", files[2], *args)
    assert f"{out} is a library of 2 documents (Lily, Mia): --out {out / 'NAME'} adds one" in said
    said = error(capsys, "read", *files, "--out", out / "Lily", "--model", tinystories)
    assert f"{out / 'Lily'} is in the way, and stays as it is: it is the folder of one doc" in said
    said = error(capsys, "chat", out)
    assert f"kvjax chat {out / 'NAME'} is about one, kvjax ask {out} asks all" in said
    read("--budget", "24", documents=files[2:], out="library/Sue")
    asked = json.loads(output(capsys, "ask", out, "One day", "--json"))
    assert len(asked["documents"]) == 3


def test_all_documents_are_looked_at_before_one_answers(capsys, read, files, tmp_path, monkeypatch):
    read("--budget", "24", documents=files[:2])
    read("--budget", "24", "--max-questions", "4", documents=files[2:], out="library/Sue")
    monkeypatch.setattr(kvjax, "load_context", lambda *_, **__: pytest.fail("one was loaded"))
    said = error(capsys, "ask", tmp_path / "library", "word " * 6)
    assert f"{tmp_path / 'library' / 'Sue'}: question 1 has " in said
    of = Saved.of

    def elsewhere(folder):
        saved = of(folder)
        return saved if folder.name != "Mia" else Saved(**{**vars(saved), "model": "another"})

    monkeypatch.setattr(Saved, "of", elsewhere)
    said = error(capsys, "ask", tmp_path / "library", "word")
    assert "Mia are of different models: ask one document by its name" in said


def test_documents_that_are_read_together():
    """Each is in one batch, which is no larger than asked for and pads by less than a quarter."""
    lengths = [int(40 * 1.13**n) for n in range(60)] * 2
    found = list(batches(lengths, None))
    assert sorted(number for _, numbers in found for number in numbers) == [*range(len(lengths))]
    assert len({width for width, _ in found}) < len(lengths) / 3
    for width, numbers in found:
        assert len(numbers) == 1 or width * len(numbers) <= TOGETHER
        assert all(lengths[n] <= width < max(1.25 * lengths[n], lengths[n] + 64) for n in numbers)
    assert all(len(numbers) == 1 for _, numbers in batches(lengths, None, together=0))
