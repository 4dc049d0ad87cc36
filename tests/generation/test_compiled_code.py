"""Compiled code is dropped before Linux ends a process that has too much of it."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax import compiled_code
from kvjax.generation import decode_loop, prompt_pass
from tests.generation.test_generate import model

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="memory maps are counted on Linux"
)
PROGRAMS = [prompt_pass._read_layer, decode_loop._decode]


def programs() -> list[int]:
    return [function._cache_size() for function in PROGRAMS]


@pytest.fixture
def limit(tmp_path, monkeypatch):
    """Sets how many maps a process may have."""

    def set_to(most: int) -> None:
        (tmp_path / "limit").write_text(f"{most}\n")
        monkeypatch.setattr(compiled_code, "_MOST_MAPS", tmp_path / "limit")

    return set_to


def generate(length: int) -> list[list[int]]:
    prompts, method = [list(range(1, length))], kvjax.SnapKV(8, 4)
    return kvjax.generate(model(), prompts, transform=method, max_new_tokens=3).tokens


def test_generate_drops_its_own_programs_before_maps_run_out(limit):
    limit(10**9)
    first = generate(10)
    before = programs()
    assert min(before) > 0

    @jax.jit
    def of_a_user(x):
        return x + 1

    of_a_user(jnp.zeros(3))
    limit(2)
    with pytest.warns(RuntimeWarning, match=r"jax\.clear_caches\(\) drops all compiled code"):
        assert generate(10) == first
    assert programs() == [1, 1] and of_a_user._cache_size() == 1
    limit(10**9)
    assert generate(10) == first and programs() == [1, 1]
    assert not compiled_code._compiled_since.is_set()
