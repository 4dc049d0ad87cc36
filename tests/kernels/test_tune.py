"""The table of tile sizes, and the search that fills it."""

from __future__ import annotations

import functools
import json
import re

import jax
import numpy as np
import pytest

from pallas_kernels import dequantise_slots, tune
from pallas_kernels.attention.tuning import Attention
from pallas_kernels.base import dispatch, tiles
from pallas_kernels.base.tiles import Tile
from pallas_kernels.grouping.tuning import Grouping
from tests.references.attention import softmax_attention
from tests.references.chelsea import cosine
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
    "work", [Attention(1, 40), Attention(2, 40, listed=24), Attention(1, 40, "int8")], ids=str
)
@pytest.mark.fast_cases(
    "Attention(rows=1, slots=40, form='int8', listed=None, queries=1, sums=False, heads=8, group=4, channels=128, dtype='bfloat16')"  # noqa: E501
)
def test_what_is_measured_is_attention(work):
    work = work._replace(heads=2, channels=16, dtype="float32")
    q, k, v, slots, query, _ = operands = jax.jit(work.operands)()
    call = functools.partial(work.call, tile=SIZES, interpret=True)
    out = jax.jit(call)(*operands)
    k, v = (dequantise_slots(*x[:2]) if work.form == "int8" else x for x in (k, v))
    for b, h in np.ndindex(out.shape[:2]):
        at = slice(None) if slots.index is None else np.asarray(slots.index)[b, h]
        one = (q[b, h], k[b, h][at], v[b, h][at], query[b], slots.position[b, h][at])
        close(out[b, h], softmax_attention(*one)[0])


def test_what_is_measured_of_prompts_is_their_attention_and_column_sums():
    work = Attention(1, 40, heads=2, channels=16, dtype="float32", queries=24)
    operands = work.operands()
    q, k, v, slots, query, _ = jax.tree.map(np.asarray, operands)
    assert query.tolist() == [list(range(16, 40))]
    out = work.call(*operands, tile=SIZES, interpret=True)
    found = work._replace(sums=True).call(*operands, tile=SIZES, interpret=True)
    for h in range(2):
        one, position = (q[0, h], k[0, h]), (query[0], slots.position[0, h])
        close(out[0, h], softmax_attention(*one, v[0, h], *position)[0])
        logits = np.einsum("gtd,sd->gts", *one) / 4
        seen = np.where(position[1] <= position[0][:, None], np.exp(logits), 0)
        close(found[0, h], seen.sum(1), what="of log-sum-exps that are 0")


def test_candidates_differ_in_what_their_kernels_look_at():
    few, prompt, grouping = (
        {(tile.programs, tile.query_bytes) for tile in tune.candidates(work, cores=3)}
        for work in (Attention(1, 40), Attention(1, 40, queries=24), GROUPINGS["pairs"])
    )
    default = Tile(1, 4, 2, 1, 1).query_bytes
    assert few == {(1, default), (2, default), (4, default)}
    assert prompt == {(2, 16_384), (2, 32_768)} and grouping == {(1, default)}


@pytest.mark.parametrize(
    ("row_bytes", "rows", "tile"), [(256, 1000, 64), (256, 20, 32), (256, 3, 16), (2048, 99, 16)]
)
def test_a_tile_of_queries_is_a_power_of_two_that_fits(row_bytes, rows, tile):
    assert SIZES.rows(row_bytes, rows) == tile


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (Attention(2, 100), 2 * 8 * 100 * (4 * 128 + 8)),
        (Attention(2, 100, listed=10), 2 * 8 * 10 * (4 * 128 + 12)),
        (Attention(1, 100, "int8"), 8 * 100 * (2 * (128 + 4) + 8)),
        (Attention(1, 100, "4 bits"), 8 * 100 * (2 * (64 + 2 * 4 * 2) + 8)),
        (Attention(1, 100, "codebook"), 2 * 200 * 128 * 2 + 8 * 100 * (2 * (2 + 2) + 8)),
    ],
    ids=str,
)
def test_bytes_are_those_that_must_be_read(work, expected):
    assert work.bytes == expected


@pytest.mark.parametrize("form", ["4 bits", "codebook"])
@pytest.mark.fast_cases("codebook")
def test_other_forms_can_be_measured(form):
    work = Attention(1, 40, form, heads=2, channels=32, dtype="float32")
    out = work.call(*work.operands(), tile=SIZES, interpret=True)
    assert out.shape == (1, 2, 4, 1, 32) and np.isfinite(out).all() and float(out.std()) > 0


GROUPINGS = {
    "centroids": Grouping(2, 40, 20, clusters=5, heads=2, channels=24),
    "pairs": Grouping(1, 60, 30, heads=2, channels=24, dtype="float32"),
    "means": Grouping(1, 40, 40, clusters=7, average=True, heads=2, channels=24),
}


@pytest.mark.parametrize("name", GROUPINGS)
def test_what_is_measured_is_grouping(name):
    work = GROUPINGS[name]
    x, keys, *label = work.operands()
    call = functools.partial(work.call, tile=SIZES, interpret=True)
    out = np.asarray(jax.jit(call)(x, keys, *label))
    assert np.broadcast_shapes(out.shape, x.shape) == x.shape, "it can be added"
    own, centroids = (np.float64(a) for a in (keys[0, 0], x))
    if name == "pairs":
        close(out, max(cosine(own[0], b) for b in own[1::2]), "accumulated")
    elif name == "centroids":
        close(out, max(own[0] @ c / np.linalg.norm(c) for c in centroids[0, 0]))
    else:
        members = np.asarray(label[0][0, 0])
        for cluster in set(members):
            close(out[0, 0, cluster], own[members == cluster].mean(0))


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (Grouping(2, 64, 16, clusters=3), 2 * 8 * 64 * (256 + 8) + 2 * 8 * 4 * 3 * 512),
        (Grouping(1, 64, 16), 8 * 64 * (256 + 8)),
        (Grouping(1, 64, 16, 3, average=True), 8 * 64 * (256 + 4) + 8 * 4 * 3 * 512 * 2),
    ],
    ids=["centroids", "pairs", "means"],
)
def test_bytes_of_a_grouping_are_those_that_must_move(work, expected):
    assert work.bytes == expected


SMALL = {
    "decode_attention": Attention(1, 4096),
    "prompt_attention": Attention(1, 4096, queries=512),
    "column_sums": Attention(1, 4096, queries=512, sums=True),
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
