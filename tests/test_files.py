"""Files that are read and written: by several threads at once, by killed processes, in vain."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax.files import (
    check_folder,
    check_regular,
    keep_recently_used,
    read_regular,
    user_cache,
    write_whole,
    writing,
)
from tests.generation.test_generate import model

TEXTS = [letter * 200_000 for letter in "abc"]
PROFILES = [kvjax.kit.HeadProfile(np.full((2, 2, steps), 1.0)) for steps in (3000, 4000)]
posix = pytest.mark.skipif(os.name != "posix", reason="files have no such permissions here")


def write_text(path: Path, number: int) -> None:
    write_whole(path, TEXTS[number % 3])


def read_text(path: Path) -> None:
    assert path.read_text() in TEXTS


def save_calibration(path: Path, number: int) -> None:
    by_head = kvjax.ByHead(kvjax.KVzip(0.5), PROFILES[number % 2])
    kvjax.save_calibration(path, by_head, model())


def load_calibration(path: Path) -> None:
    assert kvjax.load_calibration(path, model()) in PROFILES


@pytest.mark.parametrize(
    ("write", "read"),
    [(write_text, read_text), (save_calibration, load_calibration)],
    ids=["write_whole", "save_calibration"],
)
def test_three_threads_write_one_file_and_a_reader_sees_whole_ones(
    tmp_path, write: Callable[[Path, int], None], read: Callable[[Path], None]
):
    path = tmp_path / "file"
    write(path, 0)
    with ThreadPoolExecutor(3) as threads:
        writes = [threads.submit(write, path, number) for number in range(60)]
        while not all(each.done() for each in writes):
            read(path)
        for each in writes:
            each.result()
    read(path)
    assert [x.name for x in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@posix
@pytest.mark.usefixtures("umask")
def test_permissions_are_those_of_any_file(tmp_path):
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    path, other = tmp_path / "file", tmp_path / "other"
    other.write_text("written as any file is")
    write_whole(path, "new")
    assert mode(path) == mode(other) == 0o640
    path.chmod(0o600)
    write_whole(path, b"in its place")
    assert mode(path) == 0o600 and path.read_bytes() == b"in its place"


def test_what_a_killed_process_left_is_removed_after_a_while(tmp_path, monkeypatch):
    def killed(*_):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr("tempfile.TemporaryDirectory.__exit__", lambda *_: None)
        patch.setattr("tempfile.TemporaryDirectory._cleanup", lambda *_, **__: None)
        patch.setattr(os, "replace", killed)
        for _ in range(3):
            with pytest.raises(SystemExit):
                write_whole(tmp_path / "file", "never there")
    left = sorted(tmp_path.iterdir())
    assert len(left) == 3 and not (tmp_path / "file").exists()
    assert all(place.name.startswith(".") for place in left)
    for place in left[:2]:
        os.utime(place, (0, time.time() - 4000))
    (tmp_path / ".of-another-program").mkdir()
    os.utime(tmp_path / ".of-another-program", (0, 0))
    write_whole(tmp_path / "another file", "there")
    names = {".of-another-program", "another file", left[2].name}
    assert {x.name for x in tmp_path.iterdir()} == names


def test_a_write_that_fails_leaves_the_file_and_nothing_else(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    write_whole(path, "earlier")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*file'"):
        write_whole(path, "later")
    assert [(x.name, x.read_text()) for x in tmp_path.iterdir()] == [("file", "earlier")]


def test_what_is_no_file_to_read(tmp_path):
    path = tmp_path / "file"
    for read in (check_regular, lambda path: read_regular(path, 4)):
        with pytest.raises(ValueError, match=r"cannot read .*file: No such file or directory$"):
            read(path)
        with pytest.raises(ValueError, match="must be a regular file"):
            read(tmp_path)
    path.write_bytes(b"12345")
    check_regular(path)
    assert read_regular(path, 5) == b"12345"
    for read in (check_regular, read_regular):
        with pytest.raises(ValueError, match=r"cannot read .*file: it has more than 4 bytes"):
            read(path, 4)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no such file here")
def test_a_file_whose_reading_fails():
    """Nothing lies at the beginning of a process's memory."""
    with pytest.raises(ValueError, match="cannot read /proc/self/mem: Input/output error"):
        read_regular(Path("/proc/self/mem"), 4)


def test_errors_of_the_system_name_what_is_written(tmp_path):
    path = tmp_path / "wanted"
    with pytest.raises(FileNotFoundError, match=r"No such file .*wanted'$"), writing(path):
        (tmp_path / "nowhere" / "part").touch()
    with pytest.raises(OSError, match=r"^of another library$"), writing(path):
        raise OSError("of another library")
    path.touch()
    with pytest.raises(ValueError, match=r"cannot write to .*wanted: it is not a directory"):
        check_folder(path)


def test_where_things_are_kept_between_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", "Off")
    assert user_cache() is None
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    assert user_cache() == tmp_path
    monkeypatch.delenv("KVJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert user_cache() == tmp_path / "xdg" / "kvjax"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert user_cache() == tmp_path / "home" / ".cache" / "kvjax"

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert user_cache() is None


def test_the_least_recently_used_make_room(tmp_path):
    """A folder was last used when any file in it was; empty folders stay."""
    hours = {"new": 0, "used/old": 5, "used/new": 1, "older": 2, "folder/a": 3, "folder/b": 4}
    for name, hour in {**hours, "oldest": 6}.items():
        place = tmp_path / name
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(bytes(100))
        os.utime(place, (0, 10**9 - 3600 * hour))
    (tmp_path / "empty").mkdir()
    for most, left in (
        (600, ["empty", "folder", "new", "older", "used"]),
        (599, ["empty", "new", "older", "used"]),
        (300, ["empty", "new", "used"]),
    ):
        keep_recently_used(list(tmp_path.iterdir()), most)
        assert sorted(place.name for place in tmp_path.iterdir()) == left
