"""The benchmark of the kernels, at small shapes: that it runs, and what it writes."""

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
    "decode_attention", "gather_attention", "quantized_attention", "codebook_attention",
    "rank_clusters", "build_indices", "page_scores", "choosing", "clusterkv step",
}  # fmt: skip


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("kernels")


def run(kernels, path):
    kernels.main(["--small", "--rounds", "2", "--out", str(path)])
    return json.loads(path.read_text())


@pytest.mark.slow
def test_it_writes_what_was_measured(kernels, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kernels, "implementations", lambda: ("xla",))
    few = {name: kernels.GROUPS[name] for name in ("dense", "step")}
    monkeypatch.setattr(kernels, "GROUPS", few)
    result = run(kernels, tmp_path / "kernels.json")
    assert result["environment"]["jax"] == jax.__version__
    assert not result["failed"] and not result["left_out"]
    operations = {"copy", "decode_attention", "gather_attention", "choosing", "clusterkv step"}
    assert {row["operation"] for row in result["results"]} == operations
    for row in result["results"]:
        assert (
            set(row) >= KEYS and row["bytes"] > 0 and row["microseconds"] > 0 and row["rounds"] == 2
        )
        assert row["difference_from_xla"] in (0, None)
    assert [target["target"] for target in result["targets"]] == [0.85, 0.75, 0.6, 1.0, 0.1]
    assert all(target["measured"] is target["met"] is None for target in result["targets"])
    assert set(result["bytes"]) >= OPERATIONS - {"quantized_attention"}


@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param("interpret", marks=pytest.mark.slow),
        pytest.param("pallas", marks=pytest.mark.gpu),
    ],
)
def test_kernels_compute_what_xla_does(kernels, monkeypatch, tmp_path, implementation):
    monkeypatch.setattr(kernels, "implementations", lambda: (implementation, "xla"))
    result = run(kernels, tmp_path / "kernels.json")
    assert not result["failed"], result["failed"]
    compared = [r for r in result["results"] if r["implementation"] == implementation
                and (r["group"], r["operation"]) != ("codebook", "decode_attention")]  # fmt: skip
    assert {row["operation"] for row in result["results"]} >= OPERATIONS
    assert {row["operation"] for row in compared} >= {"decode_attention", "clusterkv step"}
    assert all(row["difference_from_xla"] < 1e-2 for row in compared), compared


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="it would run")
def test_it_needs_a_gpu(kernels, capsys):
    with pytest.raises(SystemExit) as raised:
        kernels.main([])
    assert raised.value.code == 2
    assert "needs a CUDA GPU of compute capability 8.0 or newer, or --small" in (
        capsys.readouterr().err
    )


def test_what_finds_no_time_is_said(kernels, monkeypatch, tmp_path):
    monkeypatch.setattr(kernels, "implementations", lambda: ("xla",))
    path = tmp_path / "kernels.json"
    kernels.main(["--small", "--seconds", "1e-9", "--out", str(path)])
    result = json.loads(path.read_text())
    assert not result["results"]
    assert [(x["what"], x["why"]) for x in result["left_out"]] == [("everything", "no time left")]


def row(operation, share, microseconds=1.0, group="dense", large=True, **options):
    return {
        "model": "m", "tokens": 1, "batch": 1, "group": group, "operation": operation,
        "implementation": "pallas", "share_of_copy": share, "microseconds": microseconds,
        "larger_than_caches": large, **options,
    }  # fmt: skip


def test_a_shape_that_breaks_does_not_take_the_others_with_it(kernels, monkeypatch, tmp_path):
    monkeypatch.setattr(kernels, "implementations", lambda: ("xla",))
    monkeypatch.setattr(kernels, "GROUPS", {"dense": kernels.GROUPS["dense"]})
    saved, inputs = tmp_path / "kernels.json", kernels.inputs
    (small,), _ = kernels.table(small=True)
    monkeypatch.setattr(kernels, "table", lambda _: ([small, small._replace(tokens=128)], []))

    def breaks(shape):
        if shape.tokens == 128:
            assert json.loads(saved.read_text())["results"], "saved after the shape before"
            raise RuntimeError("lost")
        return inputs(shape)

    monkeypatch.setattr(kernels, "inputs", breaks)
    result = run(kernels, saved)
    assert {row["tokens"] for row in result["results"]} == {256}
    assert [(x["shape"], x["why"]) for x in result["left_out"]] == [
        ("small, 128 tokens x 2", "RuntimeError: lost")
    ]


def test_targets_are_those_of_the_worst_shape(kernels):
    lost = kernels.Failure("a shape", "gather_attention", "pallas", {"rows": 1024}, "why")
    other = kernels.Failure("a shape", "quantized_attention", "xla", {"form": "int8"}, "why")
    found = kernels.targets(
        [
            row("decode_attention", 0.9),
            row("decode_attention", 0.86),
            row("decode_attention", None),
            row("decode_attention", 0.2, large=False),
            row("quantized_attention", 0.75, form="int8"),
            row("quantized_attention", 0.1, form="4 bits per token"),
            row("gather_attention", 0.7, rows=2048),
            row("codebook_attention", 0.5, 3.0, "codebook", kept=0.5),
            row("codebook_attention", 0.5, 5.0, "codebook", kept=0.8),
            row("decode_attention", 0.9, 4.0, "codebook"),
            row("choosing", 0.1, 1.0, "step"),
            row("clusterkv step", 0.1, 5.0, "step"),
        ],
        [lost, other],
    )
    assert [(t["measured"], t["met"], t["shapes"], t["failed"]) for t in found] == [
        (0.86, True, 3, 0), (0.75, True, 1, 0), (0.7, False, 1, 1), (1.25, False, 2, 0),
        (0.2, False, 1, 0),
    ]  # fmt: skip
