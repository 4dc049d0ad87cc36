"""The table of tile sizes, and the search that fills it."""

from __future__ import annotations

import functools
import json
import re

import jax
import numpy as np
import pytest

from pallas_kernels import tune
from pallas_kernels.attention.prompt_kernel import REDUCTIONS
from pallas_kernels.attention.tuning import Attention
from pallas_kernels.base import dispatch, tiles
from pallas_kernels.base.tiles import Tile
from pallas_kernels.grouping.tuning import Grouping

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
    [(128, 10_000, 32), (100, 10_000, 32), (8192, 10_000, 16), (16, 20, 32), (16, 10_000, 256)],
)
def test_a_block_is_a_power_of_two_that_fits(row_bytes, slots, block):
    assert SIZES.block(row_bytes, slots) == block


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


@pytest.mark.parametrize("heads", [1, 8, 64, 100, 264, 1000])
def test_no_program_waits_for_another(heads):
    """A few programs more than run at a time would take as long as twice as many."""
    tile = Tile(tile_bytes=8192, warps=4, stages=3, programs=2, cores=132)
    splits = tile.splits(heads, 2**20, 64, 16)
    assert splits == 1 if heads > 264 else 264 - heads < splits * heads <= 264


def test_a_part_reads_more_than_it_writes():
    tile = Tile(tile_bytes=8192, warps=4, stages=3, programs=4, cores=132)
    assert [tile.splits(1, 32_768, 16, rows) for rows in (16, 64)] == [256, 64]


def test_narrow_heads_have_no_larger_tiles_of_logits():
    tile = Tile(tile_bytes=16384, warps=8, stages=3, programs=2, cores=132, query_bytes=32768)
    assert tile.rows(64, 4096) == tile.rows(256, 4096) == 128 > tile.rows(512, 4096)


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


ROWS = {"heads": 2, "channels": 32, "dtype": "float32"}
GROUPINGS = {
    "centroids": Grouping(2, 40, 20, clusters=5, **ROWS),
    "pairs": Grouping(1, 60, 30, **ROWS),
    "means": Grouping(1, 40, 40, clusters=7, average=True, **ROWS),
}
ATTENTIONS = [
    Attention(1, 40, **ROWS), Attention(2, 40, listed=24, **ROWS), Attention(1, 40, "int8", **ROWS),
    Attention(1, 40, "4 bits", **ROWS), Attention(1, 40, "codebook", **ROWS),
    Attention(1, 40, queries=24, **ROWS),
    *(Attention(1, 40, queries=24, columns=operation, **ROWS) for operation in REDUCTIONS),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("work", [*ATTENTIONS, *GROUPINGS.values()], ids=str)
def test_what_is_measured_can_be_run(work):
    """What comes out can be added to the first argument, which is how calls wait for each other."""
    operands = work.operands()
    call = functools.partial(work.call, tile=SIZES, interpret=True)
    out = np.asarray(jax.jit(call)(*operands))
    assert np.isfinite(out).all() and out.any() and work.bytes > 0
    if isinstance(work, Grouping):
        assert np.broadcast_shapes(out.shape, operands[0].shape) == operands[0].shape


SMALL = {
    "decode_attention": Attention(1, 4096),
    "prompt_attention": Attention(1, 4096, queries=512),
    **{name: Attention(1, 4096, queries=512, columns=name) for name in REDUCTIONS},
    "best_match": GROUPINGS["pairs"],
    "kmeans": GROUPINGS["means"],
}


@pytest.mark.gpu
@pytest.mark.parametrize("operation", SMALL)
def test_tuning_measures(operation, monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "WORKS", {operation: (SMALL[operation],)})
    monkeypatch.setattr(tune, "candidates", lambda _, cores: [Tile(8192, 4, 2, 1, cores)])
    path = tmp_path / "tiles.json"
    assert tune.main(["--out", str(path), "--rounds", "2", "--operations", operation]) == 0
    row = json.loads(path.read_text())[tiles.generation(dispatch.gpu_capability())]
    assert row[operation]["tile_bytes"] == 8192
