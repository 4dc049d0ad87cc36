"""`kvjax bench`: its tables, its JSON, and what it refuses before a weight is made."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest
from flax import nnx
from rich.filesize import decimal

from kvjax.cli import bench_command
from kvjax.cli.bench_table import print_report
from kvjax.evaluation.speed import speed
from kvjax.evaluation.speed.machine import Machine
from kvjax.evaluation.speed.speed import Speed
from tests.cli.commands import console, error, output

SMALL = ("--tokens", "128", "--new", "4", "--rounds", "1")
RECORD = {
    "model", "random_weights", "layers", "model_layers", "dtype", "rounds", "environment",
    "bandwidth_bytes_per_s", "products_per_s", "weight_bytes", "results",
}  # fmt: skip


@pytest.mark.slow
def test_json_of_a_shape(capsys, tinystories):
    words = ["bench", "--shape", tinystories, "--layers", 1, "--method", "snapkv,full", *SMALL]
    record = json.loads(output(capsys, *words, "--budget", 64, "--json"))
    assert set(record) == RECORD
    assert record["random_weights"] and (record["layers"], record["model_layers"]) == (1, 2)
    assert record["dtype"] == "float32"
    fields = {field.name for field in dataclasses.fields(Speed)} | {"budget"}
    assert all(set(row) == fields for row in record["results"])
    full, snapkv = record["results"]
    assert (snapkv["prompt_tokens"], snapkv["new_tokens"]) == (128, 4)
    assert (full["method"], full["budget"]) == ("full", None)
    assert (snapkv["method"], snapkv["budget"]) == ("snapkv", 64)
    assert full["tpot_over_full"] == full["ttft_over_full"] == 1
    assert full["resident_bytes"] == record["weight_bytes"] + full["cache_bytes"]


def test_the_tables_of_a_model(capsys, monkeypatch, model, tinystories):
    """On a machine whose rates are known, as they take long to measure."""
    monkeypatch.setattr(speed, "measure_machine", lambda dtype: Machine(5e10, 4e11))
    words = ["bench", "--model", tinystories, "--method", "full", "--rounds", "1"]
    said = " ".join(output(capsys, *words, "--tokens", "64", "--new", "2").split())
    weights = sum(array.nbytes for array in jax.tree.leaves(nnx.state(model)))
    assert said.startswith(f"tinystories-656k, 2 layers, weights of {decimal(weights)} in float32")
    assert "batch 1, 64 tokens a row, 2 new ones." in said
    assert "reads 50.0 GB per second and makes 400 Gflop/s" in said


@pytest.mark.parametrize(
    ("options", "dtype", "size"),
    [((), "float32", 4), (("--dtype", "bfloat16"), "bfloat16", 2)],
    ids=["float32", "bfloat16"],
)
def test_what_does_not_fit_into_memory(capsys, monkeypatch, no_weights, options, dtype, size):
    monkeypatch.setattr(bench_command, "free_memory", lambda: 10**8)
    # The methods that are measured by default change two layers, too.
    found = error(capsys, "bench", "--shape", "smollm2-135m", "--layers", 2, *options)
    # Of all weights the tied embedding is the largest, and three more such arrays are drawn from.
    embedding = 49152 * 576
    layer = 2 * 576 * (9 + 3) * 64 + 3 * 576 * 1536 + 2 * 576
    needed = decimal(size * (4 * embedding + 2 * layer + 576))
    assert f"smollm2-135m with 2 layers in {dtype} and the caches of full need {needed}" in found
    assert "100.0 MB are free: give fewer --layers" in found


CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512,
    "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
ROW = {
    "method": "full", "budget": None, "batch": 3, "prompt_tokens": 2048, "new_tokens": 4,
    "ttft_s": 1.0, "tpot_s": 0.002, "tokens_per_s": 1500.0, "end_to_end_s": 1.006,
    "end_to_end_tokens_per_s": 11.93, "compile_s": 2.5, "ttft_over_full": 1.0,
    "tpot_over_full": 1.0, "end_to_end_over_full": 0.75, "step_bytes": 10**6,
    "step_floor_s": 0.001, "ttft_floor_s": None, "cache_bytes": 10**6,
    "full_cache_bytes": 2 * 10**6, "resident_bytes": 3 * 10**6, "host_bytes": 0,
    "peak_bytes": None, "ttft_rounds_s": [1.0, 1.5], "tpot_rounds_s": [0.006, 0.002],
}  # fmt: skip
SETTING = {
    "model": "small", "random_weights": True, "layers": 2, "model_layers": 32, "dtype": "float32",
    "rounds": 2, "bandwidth_bytes_per_s": 5e10, "products_per_s": 4e11, "weight_bytes": 2 * 10**6,
}  # fmt: skip


def test_the_tables_say_how_far_rounds_differ():
    terminal = console(80)
    print_report(terminal, {**SETTING, "results": [ROW, {**ROW, "host_bytes": 10**5}]})
    shown = " ".join(terminal.export_text().split())
    assert "small, 2 of 32 layers, random weights of 2.0 MB in float32" in shown
    assert "in float32; batch 3, 2,048 tokens a row, 4 new ones." in shown
    assert "reads 50.0 GB per second and makes 400 Gflop/s" in shown
    assert "the fastest of 2 rounds, of which the slowest took up to 3.0 times as long" in shown
    assert "full 1 1.00 2 1.00 1.01 0.75 11.9" in shown
    assert "full - - 1 2.00 2.5" in shown, "a floor that is not known is a dash"
    assert "full 1.0 MB 50.0% 100.0 kB 3.0 MB -" in shown and "in host" in shown


def test_one_round_is_not_compared_with_itself():
    terminal = console(80)
    print_report(terminal, {**SETTING, "rounds": 1, "results": [ROW]})
    shown = " ".join(terminal.export_text().split())
    assert "Times are those of one round; of full" in shown and "slowest" not in shown


def test_sizes_that_vary_have_columns():
    method = "chain(clusterkv(tokens_per_cluster=80), offload)"
    sizes = [(128_000, 64), (128_000, 1024), (4096, 64), (4096, 1024)]
    rows = [
        {**ROW, "method": name, "prompt_tokens": tokens, "new_tokens": new, "ttft_s": 123.4}
        for tokens, new in sizes
        for name in ("full", method)
    ]
    for width in (80, 100, 120):
        terminal = console(width)
        print_report(terminal, {**SETTING, "results": rows})
        lines = terminal.export_text().splitlines()
        assert max(map(len, lines)) <= width
        headings = [line.split() for line in lines if line.startswith(" method")]
        # Times, floors and bytes have a table each, unless the terminal is narrow.
        assert width == 80 or len(headings) == 3
        assert all(heading[1:3] == ["tokens", "new"] for heading in headings)
        starts = [line.split()[1:3] for line in lines if line.startswith(" full")]
        assert starts == len(headings) * [[f"{tokens:,}", f"{new:,}"] for tokens, new in sizes]


@pytest.mark.slow
def test_lists_of_tokens(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ["bench", "--shape", tmp_path, "--layers", 1, "--method", "snapkv", "--rounds", 1]
    words += ["--batch", 2, "--tokens", "100,128", "--new", "4,80", "--budget", 32, "--json"]
    rows = json.loads(output(capsys, *words))["results"]
    sizes = [(100, 4), (100, 80), (128, 4), (128, 80)]
    assert [(row["prompt_tokens"], row["new_tokens"]) for row in rows[::2]] == sizes
    assert [row["method"] for row in rows] == 4 * ["full", "snapkv"]
    for row in rows:
        seconds = row["ttft_rounds_s"][0] + (row["new_tokens"] - 1) * row["tpot_rounds_s"][0]
        assert row["end_to_end_s"] == seconds
        assert row["end_to_end_tokens_per_s"] == 2 * row["new_tokens"] / seconds
    # 100 and 128 tokens are padded to the same shape.
    compiled = [row["compile_s"] for row in rows]
    assert compiled[:4] == compiled[4:] and compiled[0] != compiled[2]


def test_numbers_of_tokens_that_are_refused(capsys, no_weights):
    assert "--new must be at least 2, got 1" in error(capsys, "bench", "--new", "64,1")
    assert "--tokens must be at most" in error(capsys, "bench", "--tokens", "64,1000000")
    assert "numbers between commas" in error(capsys, "bench", "--tokens", "64,")
