"""The benchmark of rotations: its rounding to few levels, its forms, and a run on a tiny model."""

from __future__ import annotations

import importlib
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
from kvjax.models import DecoderConfig, RopeConfig, random_decoder
from pallas_kernels import dequantise_groups, quantise_groups
from tests.support.tolerances import close

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CONFIG = DecoderConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_layers=2, query_heads=4, kv_heads=2,
    head_dim=32, rope=RopeConfig(rotary_dim=32), max_positions=256,
)  # fmt: skip


@pytest.fixture(scope="module")
def rotation():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("rotation")


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("axis", ["token", "channel"])
def test_16_levels_are_the_librarys_4_bits(rotation, axis):
    x = normal(1, 2, 16, 8)
    found = rotation.rounded(x, 4, axis, levels=16)
    for own, expected in zip(found, quantise_groups(x, 4, axis), strict=True):
        close(own, expected, "rounding")


@pytest.mark.parametrize("axis", ["token", "channel"])
def test_8_levels_are_off_by_half_a_step_at_most(rotation, axis):
    x = normal(1, 2, 16, 8)
    values, scale, low = rotation.rounded(x, 4, axis, levels=8)
    spread = np.repeat(scale, 4, axis=-1 if axis == "token" else -2)
    off = np.abs(np.asarray(dequantise_groups(values, scale, low, axis)) - x)
    assert (off <= 0.5001 * spread).all() and off.max() > 0.49 * spread.min()
    assert np.asarray(values).max() <= 0x77, "numbers of 0 to 7"


def test_equal_values_are_kept(rotation):
    x = np.full((1, 1, 4, 4), 3.0, np.float32)
    np.testing.assert_array_equal(dequantise_groups(*rotation.rounded(x, 4, "token", 8)), x)


def test_every_form_is_measured_in_its_ways(rotation):
    ways: dict[str, set] = {}
    bytes_of = {}
    for said, _ in rotation.variants(64):
        ways.setdefault(said["form"], set()).add(said["way"])
        bytes_of[said["form"]] = said["bytes"]
    by_slot = {rotation.AS_THEY_ARE, rotation.ROTATED, rotation.RELATIVE, rotation.DEFAULT}
    assert ways["8 bits"] == ways["4 bits, token"] == by_slot
    assert {rotation.AS_THEY_ARE, rotation.ROTATED} <= ways["4 bits, channel"]
    assert bytes_of["8 bits"] == 68 and bytes_of["4 bits, channel"] == 40


def test_rows_of_a_model(rotation, monkeypatch):
    for name, size in {"TEXTS": 2, "PROMPT": 64, "CONTINUATION": 4, "NEXT": 2}.items():
        monkeypatch.setattr(rotation, name, size)
    forms = {
        said["form"]: tx for said, tx in rotation.variants(32) if said["way"] == rotation.DEFAULT
    }
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 400).tolist()
    chosen = [forms[name] for name in ("8 bits", "4 bits, token", "3 bits, token")]
    rows = list(rotation.measure(random_decoder(CONFIG), ids, chosen))
    eight, four, three = (row["error"] for row in rows)
    assert 0 < eight < four < three
    assert all(row["worst_layer"] >= row["error"] > 0 for row in rows)


def test_three_bits_are_stored_as_their_levels(rotation):
    transform = rotation.Stored(4, key_axis="token", levels=8)
    cache = kvjax.init_cache(
        transform, batch=1, kv_heads=1, head_dim=32, max_prompt=32, max_new=1, dtype="float32"
    )
    rows = normal(1, 1, 32, 32)
    attend = jax.jit(kvjax.attend, static_argnums=0, static_argnames="phase")
    _, cache = attend(transform, cache, rows, rows, rows, np.arange(32)[None], phase="prompt")
    assert 0 < np.asarray(cache.kv.k.encoded.values).max() <= 0x77
