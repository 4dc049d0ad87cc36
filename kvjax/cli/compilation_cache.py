"""Compiled code of one process, kept in the user's cache folder for the next one."""

from __future__ import annotations

import contextlib
import hashlib
import platform
from pathlib import Path

import jax
import jaxlib

from kvjax.files import keep_recently_used, user_cache

_MOST_BYTES = 2**30


def enable() -> None:
    """Lets JAX keep compiled code in a folder, unless another one is set or `KVJAX_CACHE` is off.

    The folder never causes an error: code that cannot be read or written is compiled.
    """
    root = user_cache()
    already_set = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if root is None or already_set is not None:
        return
    folder = root / _folder_name()
    with contextlib.suppress(OSError):
        # Whoever can write here can make this process run code: the folder is the user's alone.
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        keep_recently_used(root.glob("jaxlib-*/*-cache"), _MOST_BYTES)  # of any jaxlib
    # JAX can bound the size itself, but then reads and locks the folder for everything it compiles.
    for name, value in (
        ("jax_compilation_cache_dir", str(folder)),
        ("jax_persistent_cache_min_compile_time_secs", 0.0),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
        ("jax_raise_persistent_cache_errors", False),
    ):
        jax.config.update(name, value)


def _folder_name() -> str:
    """Returns the name of the folder for code of this jaxlib, backend and CPU type."""
    features = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    digest = hashlib.sha256(features.encode()).hexdigest()[:12]
    return f"jaxlib-{jaxlib.__version__}-{jax.default_backend()}-{digest}"
