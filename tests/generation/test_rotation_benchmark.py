"""The benchmark of rotations: its rounding to few levels, its forms, and a run on a tiny model."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

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
    ways: dict[str, dict] = {}
    for way in rotation.all_ways():
        ways.setdefault(way.form, {})[way.way] = way
    by_slot = {rotation.AS_THEY_ARE, rotation.ROTATED, rotation.RELATIVE, rotation.BOTH}
    assert set(ways["8 bits"]) == set(ways["float8"]) == set(ways["4 bits, token"]) == by_slot
    assert set(ways["3 bits, token"]) == {rotation.BOTH}
    size = {"batch": 1, "kv_heads": 1, "head_dim": 32, "max_prompt": 32, "max_new": 1}
    for form, own, transform in (
        ("8 bits", rotation.BOTH, kvjax.Quantize(8)),
        ("float8", rotation.RELATIVE, kvjax.Quantize("float8", rotate=False)),
        ("4 bits, token", rotation.BOTH, kvjax.Quantize(4, key_axis="token")),
    ):
        kv = kvjax.init_cache(transform, **size).kv
        assert (ways[form][own].keys, ways[form][own].values) == (kv.k.form, kv.v.form)
    channel, kv = ways["4 bits, channel"], kvjax.init_cache(kvjax.Quantize(4), **size).kv
    assert channel[rotation.ROTATED].keys == dataclasses.replace(kv.k.form, recent=0)
    assert channel[rotation.KEYS_ROTATED].keys.hadamard


def test_rows_of_a_model(rotation, monkeypatch):
    for name, size in {"TEXTS": 2, "PROMPT": 64, "QUERIES": 8}.items():
        monkeypatch.setattr(rotation, name, size)
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 400).tolist()
    rows = list(rotation.measure(random_decoder(CONFIG), CONFIG.head_dim, ids))
    error = {(row["form"], row["way"]): row["error"] for row in rows}
    eight, four, three = (
        error[form, rotation.BOTH] for form in ("8 bits", "4 bits, token", "3 bits, token")
    )
    assert 0 < eight < four < three
    assert all(row["worst_layer"] >= row["first_layer"] > 0 for row in rows)
    bytes_of = {row["form"]: row["bytes"] for row in rows}
    assert bytes_of["8 bits"] == 36 and bytes_of["4 bits, channel"] == 20


def test_three_bits_are_stored_as_their_levels(rotation):
    encoded = rotation.CoarseForm(4, 32).encode(normal(1, 1, 32, 32))
    assert 0 < np.asarray(encoded.values).max() <= 0x77
