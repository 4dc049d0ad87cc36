"""The table of tile sizes, and the search that fills it."""

from __future__ import annotations

import functools
import json
import re

import jax
import numpy as np
import pytest

from pallas_kernels import dequantise_slots, tune
from pallas_kernels.base import dispatch, tiles
from pallas_kernels.base.tiles import Tile
from tests.references.attention import softmax_attention
from tests.support.tolerances import close

SIZES = Tile(tile_bytes=4096, warps=4, stages=2, programs=2, cores=3)


def test_every_generation_has_every_operation():
    operations = set(tune.WORKS)
    for name, rows in tiles.table().items():
        assert set(rows) == operations, name
        assert all(Tile(**row).block(256, 10_000) >= 16 for row in rows.values())
    capabilities = [None, (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 1)]
    assert {tiles.generation(c) for c in capabilities} == set(tiles.table())


@pytest.mark.parametrize(
    ("row_bytes", "slots", "block"),
    [
        (256, 10_000, 16),
        (128, 10_000, 32),
        (100, 10_000, 32),
        (8192, 10_000, 16),
        (16, 20, 32),
        (16, 10_000, 256),
    ],
)
def test_a_block_is_a_power_of_two_that_fits(row_bytes, slots, block):
    assert SIZES.block(row_bytes, slots) == block


@pytest.mark.parametrize(
    ("programs", "slots", "splits"), [(1, 10_000, 6), (4, 10_000, 2), (100, 10_000, 1), (1, 130, 3)]
)
def test_splits_fill_the_device_but_leave_each_some_blocks(programs, slots, splits):
    assert SIZES.splits(programs, slots, block=16) == splits


@pytest.mark.parametrize(
    ("capability", "there"), [(None, jax.default_backend()), ((7, 5), r"a GPU of 7\.5")]
)
def test_tuning_needs_a_gpu_that_runs_the_kernels(monkeypatch, capsys, tmp_path, capability, there):
    monkeypatch.setattr(tune, "gpu_capability", lambda: capability)
    with pytest.raises(SystemExit) as raised:
        tune.main(["--out", str(tmp_path / "tiles.json")])
    assert raised.value.code == 2
    message = capsys.readouterr().err
    assert "8.0 or newer" in message and len(message.splitlines()) == 1
    assert re.search(rf"got {there}$", message)
    assert not list(tmp_path.iterdir())


def test_the_best_is_best_over_all_shapes():
    a, b, c = (Tile(1, 4, 2, n, 1) for n in (1, 2, 4))
    assert tune.best({a: (1.0, 8.0), b: (2.0, 3.0), c: (6.0, 2.0)}) == (b, (2.0, 3.0))
    with pytest.raises(RuntimeError, match="none of the candidates"):
        tune.best({})


def test_what_was_found_replaces_its_row_alone(tmp_path):
    path = tmp_path / "tiles.json"
    tune.write(path, "hopper", {"gather_attention": SIZES})
    tune.write(path, "later", {"decode_attention": SIZES})
    assert [x.name for x in tmp_path.iterdir()] == ["tiles.json"]
    new, old = json.loads(path.read_text()), tiles.table()
    assert Tile(**new["hopper"]["gather_attention"]) == SIZES
    assert new.pop("later") == {"decode_attention": new["hopper"]["gather_attention"]}
    new["hopper"]["gather_attention"] = old["hopper"]["gather_attention"]
    assert new == old, "and the table in memory is not touched"


@pytest.mark.parametrize(
    "work", [tune.Work(1, 40), tune.Work(2, 40, listed=24), tune.Work(1, 40, "int8")], ids=str
)
@pytest.mark.fast_cases(
    "Work(rows=1, slots=40, form='int8', listed=None, heads=8, group=4, channels=128, dtype='bfloat16')"  # noqa: E501
)
def test_what_is_measured_is_attention(work):
    work = work._replace(heads=2, channels=16, dtype="float32")
    made = jax.jit(tune.operands, static_argnums=0)
    q, k, v, slots, query, _ = operands = made(work)
    call = functools.partial(tune.attention, tile=SIZES, interpret=True)
    out = jax.jit(call)(*operands)
    k, v = (dequantise_slots(*x[:2]) if work.form == "int8" else x for x in (k, v))
    for b, h in np.ndindex(out.shape[:2]):
        at = slice(None) if slots.index is None else np.asarray(slots.index)[b, h]
        one = (q[b, h], k[b, h][at], v[b, h][at], query[b], slots.position[b, h][at])
        close(out[b, h], softmax_attention(*one)[0])


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (tune.Work(2, 100), 2 * 8 * 100 * (4 * 128 + 8)),
        (tune.Work(2, 100, listed=10), 2 * 8 * 10 * (4 * 128 + 12)),
        (tune.Work(1, 100, "int8"), 8 * 100 * (2 * (128 + 4) + 8)),
        (tune.Work(1, 100, "4 bits"), 8 * 100 * (2 * (64 + 2 * 4 * 2) + 8)),
        (tune.Work(1, 100, "codebook"), 2 * 200 * 128 * 2 + 8 * 100 * (2 * (2 + 2) + 8)),
    ],
    ids=str,
)
def test_bytes_are_those_that_must_be_read(work, expected):
    assert work.bytes == expected


@pytest.mark.parametrize("form", ["4 bits", "codebook"])
@pytest.mark.fast_cases("codebook")
def test_other_forms_can_be_measured(form):
    work = tune.Work(1, 40, form, heads=2, channels=32, dtype="float32")
    out = tune.attention(*tune.operands(work), tile=SIZES, interpret=True)
    assert out.shape == (1, 2, 4, 1, 32) and np.isfinite(out).all() and float(out.std()) > 0


@pytest.mark.gpu
def test_tuning_measures(monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "WORKS", {"decode_attention": (tune.Work(1, 4096),)})
    monkeypatch.setattr(tune, "candidates", lambda cores: [Tile(8192, 4, 2, 2, cores)])
    path = tmp_path / "tiles.json"
    assert tune.main(["--out", str(path), "--rounds", "2", "--operations", "decode_attention"]) == 0
    row = json.loads(path.read_text())[tiles.generation(dispatch.gpu_capability())]
    assert row["decode_attention"]["tile_bytes"] == 8192
