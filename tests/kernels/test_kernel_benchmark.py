"""The benchmark of the kernels, at a small shape: that it runs, and what it writes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import jax
import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
KEYS = {
    "model", "tokens", "batch", "group", "operation", "implementation", "microseconds", "bytes",
    "gigabytes_per_second", "share_of_copy", "rounds", "calls", "larger_than_caches",
    "difference_from_xla",
}  # fmt: skip
OPERATIONS = {
    "copy", "decode_attention", "gather_attention", "quantized_attention", "codebook_attention",
    "rank_clusters", "build_indices", "choosing", "page_scores", "host_rows", "link",
    "prompt_attention", "column_sums", "kmeans", "soft_matching", "segment_merge",
    "segment_sum", "pair_cosine", "pair_distance",
    "join_anchors", "greedy_cover", "nearest_entries",
}  # fmt: skip


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("kernels")


def run(kernels, path, *arguments):
    kernels.main(["--small", "--rounds", "2", "--out", str(path), *arguments])
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param("interpret", marks=pytest.mark.slow),
        pytest.param("pallas", marks=pytest.mark.gpu),
    ],
)
def test_it_writes_what_was_measured(kernels, monkeypatch, tmp_path, implementation):
    monkeypatch.setattr(kernels, "implementations", lambda: (implementation, "xla"))
    result = run(kernels, tmp_path / "kernels.json")
    assert result["environment"]["jax"] == jax.__version__
    assert not result["failed"] and not result["left_out"], result
    for row in result["results"]:
        assert set(row) >= KEYS and row["bytes"] > 0 and row["microseconds"] > 0
        assert row["rounds"] == row["calls"] == 2
    by_xla = {row["operation"] for row in result["results"] if row["implementation"] == "xla"}
    assert by_xla == OPERATIONS
    compared = [r for r in result["results"] if r["implementation"] == implementation
                and r["difference_from_xla"] is not None]  # fmt: skip
    assert {row["operation"] for row in compared} == OPERATIONS - {"copy", "link"}
    assert all(row["difference_from_xla"] < 1e-2 for row in compared), compared


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="it would run")
def test_it_needs_a_gpu(kernels, capsys):
    with pytest.raises(SystemExit) as raised:
        kernels.main([])
    assert raised.value.code == 2
    assert "needs a CUDA GPU of compute capability 8.0 or newer, or --small" in (
        capsys.readouterr().err
    )


def test_a_group_that_breaks_does_not_take_the_others_with_it(kernels, monkeypatch, tmp_path):
    def breaks(*_):
        raise RuntimeError("lost")

    def side_breaks(*_):
        side = kernels.copy(8)
        yield side._replace(operation="runs")
        yield side._replace(operation="breaks", make=breaks)

    monkeypatch.setattr(kernels, "GROUPS", {"broken": breaks, "half": side_breaks})
    result = run(kernels, tmp_path / "kernels.json", "--groups", "broken", "half")
    assert {row["operation"] for row in result["results"]} == {"copy", "runs"}
    assert [(x["group"], x["reason"]) for x in result["left_out"]] == [
        ("broken", "RuntimeError: lost")
    ]
    assert [(x["operation"], x["reason"]) for x in result["failed"]] == [
        ("breaks", "RuntimeError: lost")
    ]


@pytest.mark.parametrize(
    ("aim", "beside", "seconds", "size", "met"),
    [
        (0.5, None, 2.1, 1, False),
        (0.5, None, 2.1, 1e-3, None),  # small enough for caches
        (1.5, "other", 3.0, 1e-3, True),
        (1.5, "lost", 1.0, 1, False),
    ],
)
def test_a_kernel_meets_its_target_or_misses_it(kernels, aim, beside, seconds, size, met):
    def ran(operation, seconds, size=1.0, **options):
        side = kernels.Side(operation, "pallas", int(1e9 * size), lambda calls: None, **options)
        return kernels.Ran(side, 10, lambda: None, np.zeros(1), [99.0, 10 * seconds, 0.0])

    own = ran("own", seconds, size, aim=aim, beside=beside)
    row = kernels.row(own, [ran("copy", 1.0), ran("other", 2.0), own])
    assert row.get("met") is met
    assert row["share_of_copy"] == round(size / seconds, 3)
