"""Folders of contexts: interrupted saves, several saves at once, hidden files."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvjax
from kvjax.files import is_hidden
from kvjax.generation import saving
from tests.generation.test_context import QUESTIONS, generate, read, same
from tests.generation.test_generate import model

ROOT = Path(__file__).parents[2]


def save(folder: Path, context: kvjax.Context, about: object = None) -> None:
    kvjax.save_context(folder, context, model=model(), about={"n": about})


def about(folder: Path) -> object:
    return kvjax.context_about(folder)["n"]


def names(folder: Path) -> list[str]:
    return sorted(place.name for place in folder.iterdir() if not is_hidden(place))


@pytest.fixture(scope="module")
def contexts():
    """Two contexts whose arrays have the same shapes."""
    first = read("h2o")
    return first, generate(QUESTIONS, first).context


@pytest.fixture(scope="module")
def saved(tmp_path_factory, contexts):
    folder = tmp_path_factory.mktemp("contexts") / "first"
    save(folder, contexts[0], 1)
    return folder


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory, contexts, saved):
    """Copies of a folder at all moments of a save, the first one and one that replaces another."""
    place = tmp_path_factory.mktemp("interrupted")
    copies: dict[tuple, Path] = {}
    folder = place / "own"

    def copy(frame, event, arg) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not any(name in file for name in ("orbax", "saving", "shutil")):
            return
        with contextlib.suppress(OSError):  # the folder may change meanwhile
            state = tuple(sorted(path.relative_to(folder) for path in folder.rglob("*")))
            if state not in copies:
                whole = shutil.copytree(folder, place / f"copy {len(copies)}")
                copies[state] = whole

    for _ in range(2):
        sys.setprofile(copy)
        try:
            save(folder, contexts[0], 1)
        finally:
            sys.setprofile(None)
    return list(copies.values())


def test_what_an_interrupted_save_leaves_is_no_one_elses(interrupted):
    """It is never in the way, and where a context was complete it can be read."""
    assert len(interrupted) > 20
    states = set()
    for folder in interrupted:
        saving.check_free(folder)
        step = saving._complete_step(folder)
        states.add(step)
        if step is not None:
            assert about(folder) == 1
        else:
            with pytest.raises(ValueError, match=r"it holds nothing|is not complete"):
                about(folder)
    assert states == {None, 1, 2}


@pytest.mark.slow
def test_a_save_goes_on_from_what_an_interrupted_one_left(interrupted, contexts):
    for folder in interrupted:
        save(folder, contexts[1], 2)
        assert about(folder) == 2 and len(names(folder)) == 2, "one step and its list"
        same(kvjax.load_context(folder, model()), contexts[1])


@pytest.mark.parametrize(
    "left",
    [
        [],
        [".lock"],
        ["1.orbax-checkpoint-tmp/"],
        ["1.orbax-checkpoint-tmp/arrays.orbax-checkpoint-tmp/d/0", "1.orbax-checkpoint-tmp/about/"],
        ["1/arrays/d/0", "1/about/metadata"],
        ["1/arrays/d/0", "1/about/metadata", "1.json.part"],
        ["4.orbax-checkpoint-tmp/arrays/d/0", "3/arrays/d/0", "3/about/metadata"],
    ],
)
def test_what_is_left_is_replaced(tmp_path, contexts, left):
    folder = tmp_path / "own"
    folder.mkdir()
    for name in left:
        place = folder / name
        (place if name.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            place.write_text("{}")
    save(folder, contexts[0], 1)
    assert about(folder) == 1 and len(names(folder)) == 2


@pytest.mark.parametrize(
    "name",
    [
        "2024.json", "2024/sea.jpg", "1.orbax-checkpoint-tmp/default/d", "1/default/d", "7",
        "1.orbax-checkpoint-tmp", "1.json.part", "1.partial/arrays", "notes.txt",
    ],
)  # fmt: skip
def test_what_others_wrote_stays(tmp_path, contexts, name):
    place = tmp_path / "own" / name
    place.parent.mkdir(parents=True)
    place.write_text('{"mine": 1}')
    with pytest.raises(ValueError, match=f"it holds {Path(name).parts[0]}$"):
        save(tmp_path / "own", contexts[0])
    assert place.read_text() == '{"mine": 1}' and len(list(place.parent.iterdir())) == 1
    with pytest.raises(ValueError, match="no folder of a context"):
        kvjax.load_context(tmp_path / "own", model())


HIDDEN = ".DS_Store", "._1", ".nfs0000001", "Thumbs.db", "desktop.ini"


def test_hidden_files_do_not_matter(tmp_path, contexts, saved):
    own = shutil.copytree(saved, tmp_path / "own")
    folders = [own, *(place for place in own.rglob("*") if place.is_dir())]
    for folder in folders:
        for name in HIDDEN:
            (folder / name).write_bytes(b"\0")
        (folder / "@eaDir").mkdir()
        (folder / "@eaDir" / "1").write_bytes(b"\0")
    same(kvjax.load_context(own, model()), contexts[0])
    save(own, contexts[1], 2)
    same(kvjax.load_context(own, model()), contexts[1])
    assert len(names(own)) == 2 and set(HIDDEN) <= {place.name for place in own.iterdir()}

    new = tmp_path / "new"
    new.mkdir()
    (new / ".DS_Store").write_bytes(b"\0")
    with pytest.raises(ValueError, match="it holds nothing"):
        kvjax.context_about(new)
    save(new, contexts[0], 3)
    assert about(new) == 3 and (new / ".DS_Store").exists()


def test_files_beside_a_context_do_not_hinder_its_reader(tmp_path, contexts, saved):
    own = shutil.copytree(saved, tmp_path / "own")
    (own / "README.txt").write_text("what this is")
    same(kvjax.load_context(own, model()), contexts[0])
    with pytest.raises(ValueError, match=r"it holds README.txt"):
        save(own, contexts[1])


@pytest.mark.parametrize("when", ["_content", "_read_arrays"])
def test_who_reads_gets_the_old_one_or_the_new_one(monkeypatch, tmp_path, contexts, saved, when):
    """A save that begins and ends while another process is reading."""
    own = shutil.copytree(saved, tmp_path / "own")
    plain = getattr(saving, when)

    def replaced_before(*args):
        monkeypatch.setattr(saving, when, plain)
        save(own, contexts[1], 2)
        return plain(*args)

    monkeypatch.setattr(saving, when, replaced_before)
    context, read_about = saving.load_with_about(own, model())
    assert read_about == {"n": 2}
    same(context, contexts[1])


SAVES = """
import sys
import kvjax
from tests.generation.test_generate import model

context = kvjax.load_context(sys.argv[1], model())
print("ready", flush=True)
sys.stdin.readline()
for n in range(int(sys.argv[4])):
    kvjax.save_context(sys.argv[2], context, model=model(), about={"n": [int(sys.argv[3]), n]})
"""


@pytest.mark.slow
# Where a file is gone, Orbax fails with reads under way, which find their event loop closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_saves_into_one_folder_at_once(tmp_path, contexts, saved):
    """The last one stays, whole, and readers never see anything else than one that is whole."""
    own, processes, rounds = tmp_path / "own", 4, 25
    save(own, contexts[0], [0, 0])
    line = [sys.executable, "-c", SAVES, str(saved), str(own)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    running = [
        subprocess.Popen([*line, str(number), str(rounds)], **pipes) for number in range(processes)
    ]
    for process in running:
        assert process.stdout.readline() == "ready\n"
    for process in running:
        process.stdin.write("\n")
        process.stdin.flush()
    seen = set()
    while any(process.poll() is None for process in running):
        context, found = saving.load_with_about(own, model())
        same(context, contexts[0])
        seen.add(tuple(found["n"]))
    for process in running:
        assert process.wait() == 0
        process.stdin.close()
        process.stdout.close()
    assert len(seen) > 3
    assert about(own)[1] == rounds - 1 and len(names(own)) == 2
    same(kvjax.load_context(own, model()), contexts[0])


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path, contexts):
    (tmp_path / "own").mkdir(mode=0o500)
    with pytest.raises(OSError, match="Permission denied"):
        save(tmp_path / "own", contexts[0])
