"""What one process has compiled, kept in a folder of the user's for the next one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import zlib
from pathlib import Path

import jax
import jaxlib

_OFF = ("", "0", "off")  # values of KVJAX_CACHE that switch it off
_MOST_BYTES = 2**30
_VERSIONS = 2  # of jaxlib whose folders are kept
_OWN_FOLDER = re.compile(r"jaxlib-(.+)-[a-z]+-[0-9a-f]{12}")
_ENTRY = "-cache"  # how JAX's files end
_CHECKED = "checked"  # a file as old as the newest entry that is known to be whole


def enable() -> None:
    """Lets JAX keep compiled code in a folder, unless another one is set or `KVJAX_CACHE` is off.

    Nothing about it is ever an error: code that cannot be read or written is compiled.
    """
    root = home()
    given = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if root is None or given is not None:
        return
    folder = root / _folder_name()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # who writes here has code run
        _tidy(root, folder)
    # JAX's own bound of the size reads and locks the folder whenever something is compiled.
    for name, value in (
        ("jax_compilation_cache_dir", str(folder)),
        ("jax_persistent_cache_min_compile_time_secs", 0.0),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
        ("jax_raise_persistent_cache_errors", False),
    ):
        jax.config.update(name, value)


def home() -> Path | None:
    """The folder of all compiled code: `KVJAX_CACHE`, or `kvjax` among the user's caches."""
    given = os.environ.get("KVJAX_CACHE")
    if given is not None:
        return None if given.lower() in _OFF else Path(given).absolute()
    caches = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # a user without a home
        return (Path(caches) if caches else Path.home() / ".cache") / "kvjax"
    return None


def _folder_name() -> str:
    """Of code that runs here: compiled code is that of one jaxlib and one kind of CPU."""
    features = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    digest = hashlib.sha256(features.encode()).hexdigest()[:12]
    return f"jaxlib-{jaxlib.__version__}-{jax.default_backend()}-{digest}"


def _tidy(root: Path, folder: Path) -> None:
    """Removes what is broken in `folder`, then old folders, then the entries used longest ago."""
    _drop_broken(folder)
    os.utime(folder)
    own = [path for path in root.iterdir() if _OWN_FOLDER.fullmatch(path.name)]
    own.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    versions = dict.fromkeys(_OWN_FOLDER.fullmatch(path.name)[1] for path in own)
    for path in own:
        if _OWN_FOLDER.fullmatch(path.name)[1] not in list(versions)[:_VERSIONS]:
            shutil.rmtree(path, ignore_errors=True)
    entries = [(path, path.stat()) for one in own for path in one.glob(f"*{_ENTRY}")]
    total = 0
    for path, stat in sorted(entries, key=lambda x: max(x[1].st_atime, x[1].st_mtime))[::-1]:
        total += stat.st_size
        if total > _MOST_BYTES:
            path.unlink(missing_ok=True)


def _drop_broken(folder: Path) -> None:
    """Removes entries that were cut short, as by Ctrl-C: JAX would never write them again.

    Each is looked at once, when it is newer than those that have been looked at.
    """
    mark = folder / _CHECKED
    before = mark.stat().st_mtime_ns if mark.exists() else 0
    found = [(path, path.stat().st_mtime_ns) for path in folder.glob(f"*{_ENTRY}")]
    new = [(path, time) for path, time in found if time > before]
    for path, _ in new:
        if not _is_whole(path):
            path.unlink(missing_ok=True)
    if new:
        newest = max(time for _, time in new)
        mark.touch()
        os.utime(mark, ns=(newest, newest))


def _is_whole(path: Path) -> bool:
    """Whether a file can be what JAX compressed; with Zstandard, that it begins as such."""
    data = path.read_bytes()
    if data.startswith(b"\x28\xb5\x2f\xfd"):
        return True
    try:
        return len(zlib.decompress(data)) > 0
    except zlib.error:
        return False
