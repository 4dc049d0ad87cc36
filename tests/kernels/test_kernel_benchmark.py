"""The benchmark of the kernels, at a small shape: that it runs, and what it writes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import jax
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
    "prompt_attention", "prompt_attention_and_sums", "prompt_attention_and_maxima", "column_sums",
    "column_maxima", "kmeans", "soft_matching", "segment_merge",
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
