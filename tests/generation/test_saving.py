"""Contexts in folders: the same after loading, whole after an interrupt, refused when damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.models import random_decoder
from tests.generation.test_context import QUESTIONS, TRANSFORMS, generate, read, same
from tests.generation.test_generate import CONFIG, RAGGED, model

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.fast_cases("full", "infinigen", "offload")
def test_loading_is_never_having_saved(name, tmp_path):
    """Token for token and array for array, in the middle of a conversation."""
    context = generate(QUESTIONS, read(name), max_new_tokens=3).context
    kvjax.save_context(tmp_path / "own", context, model=model(), about={"text": "ä", "n": [1, 2]})
    loaded = kvjax.load_context(tmp_path / "own", model())
    same(loaded, context)
    assert kvjax.context_about(tmp_path / "own") == {"text": "ä", "n": [1, 2]}
    expected, found = (generate(QUESTIONS[::-1], each) for each in (context, loaded))
    assert found.tokens == expected.tokens
    same(found.context, expected.context)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a small context, and the context."""
    folder = tmp_path_factory.mktemp("contexts") / "h2o"
    context = read("h2o")
    kvjax.save_context(folder, context, model=model())
    return folder, context


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


def test_a_new_one_takes_the_place_of_the_old(saved, tmp_path):
    folder, context = saved
    own = shutil.copytree(folder, tmp_path / "own")
    later = generate(QUESTIONS, context).context
    kvjax.save_context(own, later, model=model())
    same(kvjax.load_context(own, model()), later)
    assert len(list(own.iterdir())) == 2, "one step and its list"


INTERRUPTED = """
import os, signal, sys
import orbax.checkpoint as ocp
import kvjax
from tests.generation.test_generate import model

context = kvjax.load_context(sys.argv[1], model())
count = 0


def stop(frame, event, arg):
    global count
    file = frame.f_code.co_filename
    if event == "call" and ("orbax" in file or "saving" in file):
        count += 1
        if count > int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)


sys.setprofile(stop)
kvjax.save_context(sys.argv[1], context, model=model(), about={"new": True})
sys.setprofile(None)
print(count)
"""


@pytest.mark.slow
def test_an_interrupted_save_leaves_the_old_one(saved, tmp_path):
    """Killed at points all over the time that a save takes."""
    folder, context = saved
    own = shutil.copytree(folder, tmp_path / "own")

    def save(calls: int):
        line = [sys.executable, "-c", INTERRUPTED, str(own), str(calls)]
        return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)

    whole = save(10**9)
    assert whole.returncode == 0, whole.stderr
    most, kept = int(whole.stdout), []
    for calls in np.linspace(0, most - 1, 8).astype(int):
        shutil.rmtree(own)
        shutil.copytree(folder, own)
        assert save(calls).returncode == -9
        kept.append(kvjax.context_about(own) == {})
        same(kvjax.load_context(own, model()), context)
    assert kept[0], "the first kill comes before anything is written"
    kvjax.save_context(own, context, model=model(), about={"last": 1})
    assert kvjax.context_about(own) == {"last": 1}


def damage(folder: Path, rng: np.random.Generator) -> str:
    """Changes one file of a folder in some way; says which and how."""
    files = sorted(place for place in folder.rglob("*") if place.is_file())
    place = files[rng.integers(len(files))]
    data = bytearray(place.read_bytes())
    kind = ("cut", "flip", "remove", "garbage", "more")[rng.integers(5)]
    if kind == "remove":
        place.unlink()
    elif kind == "flip" and data:
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        place.write_bytes(data)
    elif kind == "garbage":
        place.write_bytes(rng.bytes(len(data) + 7))
    else:
        place.write_bytes(
            data[: rng.integers(len(data))] if kind == "cut" and data else data + b" 1"
        )
    return f"{kind} {place.relative_to(folder)}"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.fast_cases("0")
def test_damaged_folders_are_refused(seed, saved, tmp_path):
    """200 of them, whatever was damaged."""
    folder, _ = saved
    rng = np.random.default_rng(seed)
    for number in range(25):
        own = shutil.copytree(folder, tmp_path / str(number))
        how = damage(own, rng)
        with pytest.raises(ValueError, match="context") as error:
            kvjax.load_context(own, model())
            pytest.fail(how)
        assert str(own) in str(error.value) and "\n" not in str(error.value), how


def test_folders_that_are_none(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    context = read("full")
    for name in ("other", "missing"):
        with pytest.raises(ValueError, match="no folder of a context"):
            kvjax.load_context(tmp_path / name, model())
    with pytest.raises(ValueError, match="holds notes"):
        kvjax.save_context(tmp_path / "other", context, model=model())
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"
    (tmp_path / "photos" / "2024").mkdir(parents=True)
    (tmp_path / "photos" / "2024" / "sea.jpg").write_bytes(b"sea")
    with pytest.raises(ValueError, match="holds 2024"):
        kvjax.save_context(tmp_path / "photos", context, model=model())
    assert (tmp_path / "photos" / "2024" / "sea.jpg").exists()
    with pytest.raises(ValueError, match="what JSON can hold"):
        kvjax.save_context(tmp_path / "own", context, model=model(), about={"x": {1, 2}})


def test_a_pipe_in_the_folder(saved, tmp_path):
    own = shutil.copytree(saved[0], tmp_path / "own")
    file = next(place for place in own.rglob("*") if place.is_file())
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ValueError, match="damaged"):
        kvjax.load_context(own, model())


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


def test_a_changed_number_is_another_model(saved):
    """One number of one parameter, where the fingerprint looks."""
    graph, state = nnx.split(model())
    leaves, treedef = jax.tree.flatten(state)
    leaves[0] = leaves[0].at[(0,) * leaves[0].ndim].add(1.0)
    other = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
    with pytest.raises(ValueError, match="weights"):
        kvjax.load_context(saved[0], other)


def test_methods_without_a_name_are_refused(tmp_path):
    half = kvjax.PerLayer(lambda layer, num_layers: kvjax.Full())
    context = kvjax.read(model(), RAGGED, transform=half)
    with pytest.raises(ValueError, match=r"needs a name \(kvjax.register\)"):
        kvjax.save_context(tmp_path / "own", context, model=model())
    assert not (tmp_path / "own").exists()
