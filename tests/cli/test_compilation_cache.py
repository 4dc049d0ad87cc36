"""Compiled code that is kept for the next process: where, how much, and never an error."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import jaxlib
import pytest

from kvjax.cli import compilation_cache
from kvjax.files import user_cache

PROGRAM = """if True:
    import jax, jax.numpy as jnp
    from kvjax.cli import compilation_cache
    from kvjax.messages import quiet

    hits = []
    seen = lambda name, **_: hits.append(name.endswith("/cache_hits"))
    jax.monitoring.register_event_listener(seen)
    with quiet():
        compilation_cache.enable()
        print(float(jax.jit(lambda x: (x * 2).sum())(jnp.arange(4.0))), sum(hits) > 0)
"""


def run(root: Path) -> str:
    """What a process that keeps its code in `root` prints: a number, and whether code was there."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    env["KVJAX_CACHE"] = str(root)
    line = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@pytest.fixture
def settings():
    """JAX as it is without a folder; what is set is put back."""
    names = (
        "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes", "jax_raise_persistent_cache_errors",
    )  # fmt: skip
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield jax.config
    for name, value in before.items():
        jax.config.update(name, value)


def test_where_it_is(settings, monkeypatch, tmp_path):
    monkeypatch.setenv("KVJAX_CACHE", "OFF")
    assert user_cache() is None
    compilation_cache.enable()
    assert settings.jax_compilation_cache_dir is None
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "own"))
    assert user_cache() == tmp_path / "own"
    monkeypatch.delenv("KVJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "kvjax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / ".cache" / "kvjax"


def test_a_folder_of_this_jaxlib_and_cpu(settings, monkeypatch, tmp_path):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "code"))
    compilation_cache.enable()
    (folder,) = (tmp_path / "code").iterdir()
    assert settings.jax_compilation_cache_dir == str(folder)
    assert folder.name.startswith(f"jaxlib-{jaxlib.__version__}-{jax.default_backend()}-")
    assert folder.stat().st_mode & 0o077 == 0, "others could write code into it"
    # A folder that has been set stays.
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "other"))
    compilation_cache.enable()
    assert settings.jax_compilation_cache_dir == str(folder)
    assert not (tmp_path / "other").exists()


def test_what_is_used_least_goes(settings, monkeypatch, tmp_path):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(compilation_cache, "_MOST_BYTES", 100)
    for name in ("mine", "jaxlib-0.0.1-cpu-0123456789ab"):
        (tmp_path / name).mkdir()
    strange = tmp_path / "mine" / "a-cache"
    strange.write_bytes(b"not ours" * 99)
    new, older, oldest = (
        tmp_path / "jaxlib-0.0.1-cpu-0123456789ab" / f"{name}-cache" for name in "abc"
    )
    for age, path in enumerate((new, older, oldest)):
        path.write_bytes(bytes(60))
        os.utime(path, (10**9 - age, 10**9 - age))
    compilation_cache.enable()
    assert [path.exists() for path in (new, older, oldest)] == [True, False, False]
    assert strange.exists()


@pytest.mark.slow
def test_code_is_there_in_the_next_process(tmp_path):
    """Garbage, such as a killed process has written, is not an error."""
    assert run(tmp_path) == "12.0 False"
    assert run(tmp_path) == "12.0 True"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for garbage in (b"", b"garbage", zlib.compress(b"garbage" * 9)):
        for path in files:
            path.write_bytes(garbage)
        assert run(tmp_path).startswith("12.0")
