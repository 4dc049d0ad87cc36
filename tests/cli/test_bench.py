"""`kvjax bench`: its tables, its JSON, and what it refuses before a weight is made."""

from __future__ import annotations

import dataclasses
import json

from rich.filesize import decimal

from kvjax.cli import bench_command
from kvjax.cli.bench_table import print_report
from kvjax.evaluation.speed.speed import Speed
from tests.cli.commands import console, error, output

SMALL = ("--tokens", "128", "--new", "4", "--rounds", "1")
RECORD = {
    "model", "random_weights", "layers", "model_layers", "dtype", "prompt_tokens", "new_tokens",
    "rounds", "environment", "bandwidth_bytes_per_s", "products_per_s", "weight_bytes", "results",
}  # fmt: skip


def test_json_of_a_shape(capsys, tinystories):
    words = ["bench", "--shape", tinystories, "--layers", 1, "--method", "snapkv,full", *SMALL]
    record = json.loads(output(capsys, *words, "--budget", 64, "--json"))
    assert set(record) == RECORD
    assert record["random_weights"] and (record["layers"], record["model_layers"]) == (1, 2)
    assert record["prompt_tokens"] == 128 and record["dtype"] == "float32"
    fields = {field.name for field in dataclasses.fields(Speed)} | {"budget"}
    assert all(set(row) == fields for row in record["results"])
    full, snapkv = record["results"]
    assert (full["method"], full["budget"]) == ("full", None)
    assert (snapkv["method"], snapkv["budget"]) == ("snapkv", 64)
    assert full["tpot_over_full"] == full["ttft_over_full"] == 1
    assert full["resident_bytes"] == record["weight_bytes"] + full["cache_bytes"]


def test_what_does_not_fit_into_memory(capsys, monkeypatch, no_weights):
    monkeypatch.setattr(bench_command, "free_memory", lambda: 10**8)
    # The methods that are measured by default change two layers, too.
    found = error(capsys, "bench", "--shape", "smollm2-135m", "--layers", 2)
    # Of all weights the tied embedding is the largest, and three more such arrays are drawn from.
    embedding = 49152 * 576
    layer = 2 * 576 * (9 + 3) * 64 + 3 * 576 * 1536 + 2 * 576
    needed = decimal(4 * (4 * embedding + 2 * layer + 576))
    assert f"smollm2-135m with 2 layers in float32 and the caches of full need {needed}" in found
    assert "100.0 MB are free: give fewer --layers" in found


def test_the_tables_say_how_far_rounds_differ():
    row = {
        "method": "full", "budget": None, "batch": 3, "ttft_s": 1.0, "tpot_s": 0.002,
        "tokens_per_s": 1500.0, "compile_s": 2.5, "ttft_over_full": 1.0, "tpot_over_full": 1.0,
        "step_bytes": 10**6, "step_floor_s": 0.001, "ttft_floor_s": None, "cache_bytes": 10**6,
        "full_cache_bytes": 2 * 10**6, "resident_bytes": 3 * 10**6, "host_bytes": 0,
        "peak_bytes": None, "ttft_rounds_s": [1.0, 1.5],
        "tpot_rounds_s": [0.006, 0.002],
    }  # fmt: skip
    record = {
        "model": "small", "random_weights": True, "layers": 2, "model_layers": 32,
        "dtype": "float32", "prompt_tokens": 2048, "new_tokens": 4, "rounds": 2,
        "bandwidth_bytes_per_s": 5e10, "products_per_s": 4e11, "weight_bytes": 2 * 10**6,
        "results": [row, {**row, "host_bytes": 10**5}],
    }  # fmt: skip
    terminal = console(80)
    print_report(terminal, record)
    shown = " ".join(terminal.export_text().split())
    assert "small, 2 of 32 layers, random weights of 2.0 MB in float32" in shown
    assert "reads 50.0 GB per second and makes 400 Gflop/s" in shown
    assert "of which the slowest took up to 3.0 times as long" in shown
    assert "full 3 1 1.00 - 2 1.00 1 1,500" in shown, "a floor that is not known is a dash"
    assert "full 3 2.5 1.0 MB 50.0% 100.0 kB 3.0 MB -" in shown and "in host" in shown
