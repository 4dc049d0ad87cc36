"""Contexts in folders: the same after loading, whole after a kill, refused when damaged."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax.files import is_hidden
from kvjax.generation import context_files
from kvjax.generation.context_files import context_about
from kvjax.models import random_decoder
from tests.generation.test_context import QUESTIONS, TRANSFORMS, generate, read
from tests.generation.test_generate import CONFIG, RAGGED, model
from tests.support.attending import same_arrays
from tests.support.defaults import change_default
from tests.support.marks import some_slow

ROOT = Path(__file__).parents[2]


# Methods that have other arrays to save; all others run before a release.
SAVED = {"kvmerger", "clusterkv", "4 bits", "offload"}


@pytest.mark.parametrize(
    "name", some_slow(TRANSFORMS, "full", "infinigen", exhaustive={*TRANSFORMS} - SAVED)
)
def test_loading_is_never_having_saved(name, tmp_path):
    """Token for token and array for array, in the middle of a conversation."""
    context = generate(QUESTIONS, read(name), max_new_tokens=3).context
    kvjax.save_context(tmp_path / "own", context, model=model(), about={"text": "ä", "n": [1, 2]})
    loaded = kvjax.load_context(tmp_path / "own", model())
    same_arrays(loaded, context.at_rest())
    assert context_about(tmp_path / "own") == {
        "text": "ä",
        "n": [1, 2],
    }
    expected, found = (generate(QUESTIONS[::-1], each) for each in (context, loaded))
    assert found.tokens == expected.tokens
    same_arrays(found.context, expected.context)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a small context, and the context."""
    folder = tmp_path_factory.mktemp("contexts") / "h2o"
    context = read("h2o")
    kvjax.save_context(folder, context, model=model())
    return folder, context


@pytest.mark.slow
def test_another_process_goes_on(saved, tmp_path):
    """What was computed in this process plays no part."""
    folder, context = saved
    script = f"""
        import kvjax
        from tests.generation.test_generate import model
        context = kvjax.load_context({str(folder)!r}, model())
        print(kvjax.generate(model(), {QUESTIONS}, context=context, max_new_tokens=6).tokens)
    """
    line = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == generate(QUESTIONS, context).tokens


def save(folder: Path, context: kvjax.Context, number: int = 0) -> None:
    kvjax.save_context(folder, context, model=model(), about={"number": number})


def names(folder: Path) -> list[str]:
    return sorted(place.name for place in folder.iterdir() if not is_hidden(place))


HIDDEN = ".DS_Store", "._1", ".nfs0000001", "Thumbs.db", "desktop.ini"


def test_a_new_one_takes_the_place_of_the_old(saved, tmp_path):
    """Hidden files, which systems put anywhere, do not matter and stay."""
    folder, context = saved
    own = shutil.copytree(folder, tmp_path / "own")
    for place in (own, *(place for place in own.rglob("*") if place.is_dir())):
        for name in HIDDEN:
            (place / name).write_bytes(b"\0")
    same_arrays(kvjax.load_context(own, model()), context)
    later = generate(QUESTIONS, context).context
    save(own, later, 2)
    same_arrays(kvjax.load_context(own, model()), later.at_rest())
    assert names(own) == ["2"] and set(HIDDEN) <= {place.name for place in own.iterdir()}


@pytest.fixture(scope="module")
def moments(tmp_path_factory, saved):
    """Copies of a folder between any two files of two saves, as a killed process leaves it."""
    place = tmp_path_factory.mktemp("moments")
    copies: dict[tuple, Path] = {}
    folder, number_of_copy = place / "own", itertools.count()

    def copy(frame, event, arg) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not any(name in file for name in ("orbax", "saving", "shutil")):
            return
        with contextlib.suppress(OSError):  # the folder may change meanwhile
            state = tuple(sorted(path.relative_to(folder) for path in folder.rglob("*")))
            if state not in copies:
                copies[state] = shutil.copytree(folder, place / f"copy {next(number_of_copy)}")

    for number in (1, 2):
        sys.setprofile(copy)
        try:
            save(folder, saved[1], number)
        finally:
            sys.setprofile(None)
    return list(copies.values())


def test_a_killed_save_leaves_the_old_one_or_the_new_one(moments):
    assert len(moments) > 20
    seen = []
    for folder in moments:
        context_files.check_free(folder)  # nothing is in the way of the next save
        if context_files._steps(folder):
            seen.append(context_about(folder)["number"])
        else:
            seen.append(0)
            with pytest.raises(ValueError, match="it holds none"):
                context_about(folder)
    assert seen == sorted(seen) and set(seen) == {0, 1, 2}


@pytest.mark.parametrize(
    "part", [slice(None, None, 9), pytest.param(slice(None), marks=pytest.mark.slow)]
)
def test_a_save_goes_on_from_what_a_killed_one_left(moments, saved, tmp_path, part):
    for number, folder in enumerate(moments[part]):
        own = shutil.copytree(folder, tmp_path / str(number))
        save(own, saved[1], 3)
        assert context_about(own) == {"number": 3} and len(names(own)) == 1
        same_arrays(kvjax.load_context(own, model()), saved[1])


# Where a file is gone, Orbax fails with reads under way, which find their event loop closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["cut", "removed", "garbage"])
def test_damaged_folders_are_refused(how, saved, tmp_path):
    """Whatever file it is, except where what is loaded is the same without it."""
    folder, context = saved
    refused = 0
    files = [x.relative_to(folder) for x in sorted(folder.rglob("*")) if x.is_file()]
    for number, file in enumerate(files):
        own = shutil.copytree(folder, tmp_path / str(number))
        place = own / file
        data = place.read_bytes()
        place.unlink()
        if how != "removed":
            place.write_bytes(data[: len(data) // 2] if how == "cut" else b"garbage")
        try:
            loaded = kvjax.load_context(own, model())
        except ValueError as error:
            assert str(own) in str(error) and "\n" not in str(error), file
            refused += 1
        else:
            same_arrays(loaded, context)
    assert refused >= 3, "the JSON, and the arrays with their index"


@pytest.mark.parametrize(
    "name",
    [
        "2024/sea.jpg", "1/default/d", "7", "1.orbax-checkpoint-tmp", "1.partial/arrays",
        "notes.txt", "1000.orbax-checkpoint-tmp/state/weights", "1.orbax-checkpoint-tmp/notes.txt",
        "state.orbax-checkpoint-tmp/about", "1.orbax-checkpoint-tmp.old/arrays/d", "\u0663/about",
        "1.orbax-checkpoint-tmp-mine/arrays.orbax-checkpoint-tmp/d",
    ],
)  # fmt: skip
def test_what_others_wrote_stays(tmp_path, saved, name):
    place = tmp_path / "own" / name
    place.parent.mkdir(parents=True)
    place.write_text("mine")
    with pytest.raises(ValueError, match=f"it holds {Path(name).parts[0]}$"):
        save(tmp_path / "own", saved[1])
    assert place.read_text() == "mine" and len(list(place.parent.iterdir())) == 1
    with pytest.raises(ValueError, match="not the folder of a context"):
        kvjax.load_context(tmp_path / "own", model())


@pytest.mark.parametrize("extra", ["state/weights", "notes.txt"])
def test_a_checkpoint_with_more_in_it_is_of_another_program(tmp_path, saved, extra):
    own = shutil.copytree(saved[0], tmp_path / "own")
    (step,) = (place for place in own.iterdir() if not is_hidden(place))
    (step / extra).parent.mkdir(exist_ok=True)
    (step / extra).write_text("mine")
    with pytest.raises(ValueError, match=f"it holds {step.name}$"):
        save(own, saved[1])
    assert (step / extra).read_text() == "mine"


def test_folders_that_are_none(saved, tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        kvjax.load_context(tmp_path / "missing", model())
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="not the folder of a context"):
        kvjax.load_context(tmp_path / "file", model())
    with pytest.raises(ValueError, match="what JSON can hold"):
        kvjax.save_context(tmp_path / "own", saved[1], model=model(), about={"x": {1, 2}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_files, "FORMAT", 2)
        save(tmp_path / "old", saved[1])
    with pytest.raises(ValueError, match=r"has format 2, written by kvjax .*; kvjax .* reads"):
        kvjax.load_context(tmp_path / "old", model())
    own = shutil.copytree(saved[0], tmp_path / "with notes")
    (own / "README.txt").write_text("what this is")
    same_arrays(kvjax.load_context(own, model()), saved[1])


def about_of(folder: Path) -> tuple[Path, dict]:
    """The file of a context's JSON, and its content."""
    (place,) = folder.glob("*/about/metadata")
    return place, json.loads(place.read_text())


def test_a_context_keeps_its_parameters_when_a_default_changes(tmp_path, monkeypatch):
    transform = kvjax.chain(kvjax.H2O(12), kvjax.Quantize(4, 4, "token"))
    shares = kvjax.kit.HeadProfile(np.array([[[0.8, 1.0], [0.1, 1.0]]] * 2))
    by_head = kvjax.ByHead(kvjax.KVzip(0.5, room=8), shares)
    contexts = {
        name: kvjax.read(model(), RAGGED[:1], transform=tx, max_prompt=256, max_new=64)
        for name, tx in (("stored", transform), ("by head", by_head))
    }
    for name, context in contexts.items():
        save(tmp_path / name, context)
    rotate = kvjax.Quantize().rotate
    change_default(monkeypatch, kvjax.Quantize, rotate=not rotate)
    change_default(monkeypatch, kvjax.KVzip, kernel=1)
    change_default(monkeypatch, kvjax.ByHead, safeguard=0.9)
    for name, context in contexts.items():
        loaded = kvjax.load_context(tmp_path / name, model())
        assert loaded.layers == context.layers
        same_arrays(loaded.caches, context.caches)
    assert kvjax.load_context(tmp_path / "stored", model()).transform == transform
    loaded = kvjax.load_context(tmp_path / "by head", model()).transform
    assert loaded == by_head


@pytest.mark.parametrize("inside", [True, False])
def test_by_head_with_infinigen_is_saved(tmp_path, inside):
    """The calibration is of all heads, and each layer's rectangles have their part of it."""
    shares = kvjax.kit.HeadProfile(np.array([[[0.8, 1.0], [0.1, 1.0]], [[0.2, 1.0], [0.4, 1.0]]]))
    snapkv, infinigen = kvjax.SnapKV(0.5, window=8), kvjax.InfiniGen(8, dense_layers=())
    by_head = kvjax.ByHead(kvjax.chain(snapkv, infinigen) if inside else snapkv, shares)
    transform = kvjax.calibrated(
        by_head if inside else kvjax.chain(by_head, infinigen), model(), RAGGED[:1]
    )
    context = kvjax.read(model(), RAGGED[:1], transform=transform, max_prompt=256, max_new=64)
    assert any(isinstance(layer, kvjax.HeadGroups) for layer in context.layers)
    save(tmp_path, context)
    loaded = kvjax.load_context(tmp_path, model())
    assert loaded.transform == transform
    same_arrays(loaded, context)
    expected, found = (generate(QUESTIONS[:1], each) for each in (context, loaded))
    assert found.tokens == expected.tokens


def test_a_context_whose_file_lacks_parameters_is_refused(saved, tmp_path):
    """As earlier versions wrote them, and later ones see them that have more parameters."""
    for number, (method, said) in enumerate(
        [("h2o(budget=12)", "h2o needs group_reduce="), ("h2o(budget=12, x=1)", "no parameter 'x'")]
    ):
        own = shutil.copytree(saved[0], tmp_path / str(number))
        place, content = about_of(own)
        place.write_text(json.dumps({**content, "method": method}))
        with pytest.raises(ValueError, match=rf"which kvjax 0.* wrote, .*{said}.*Read its text"):
            kvjax.load_context(own, model())
        save(own, saved[1])  # takes its place


def test_another_model_or_tokenizer(saved, tmp_path):
    folder, context = saved
    with pytest.raises(ValueError, match="of another model: its weights"):
        kvjax.load_context(folder, random_decoder(CONFIG, seed=9))

    class Words:
        def __init__(self, *words):
            self.words = {word: n for n, word in enumerate(words)}

        def get_vocab(self):
            return self.words

    kvjax.save_context(tmp_path / "own", context, model=model(), tokenizer=Words("a", "b"))
    kvjax.load_context(tmp_path / "own", model(), tokenizer=Words("a", "b"))
    kvjax.load_context(tmp_path / "own", model())
    with pytest.raises(ValueError, match="its tokenizer"):
        kvjax.load_context(tmp_path / "own", model(), tokenizer=Words("b", "a"))


def test_methods_without_a_name_are_refused(tmp_path):
    half = kvjax.PerLayer(lambda layer, num_layers: kvjax.Full())
    context = kvjax.read(model(), RAGGED, transform=half)
    with pytest.raises(ValueError, match=r"needs a name \(kvjax.register\)"):
        kvjax.save_context(tmp_path / "own", context, model=model())
    assert not (tmp_path / "own").exists()
