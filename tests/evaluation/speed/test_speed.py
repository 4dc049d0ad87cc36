"""`measure_speed`: what a step reads, by hand; what a row holds; what is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import kvjax
from kvjax.evaluation import measure_speed, memory
from kvjax.evaluation.memory import free_memory, with_peak
from kvjax.evaluation.speed.floors import cache_room, prompt_flops
from kvjax.evaluation.speed.machine import Machine, environment, measure_machine
from kvjax.generation.model import as_functional
from kvjax.generation.planning import plan
from kvjax.models import DecoderConfig, RopeConfig, abstract_decoder, random_decoder

LAYERS, VOCAB, HIDDEN, MLP, QUERY_HEADS, HEADS, DIM = 2, 64, 32, 48, 4, 2, 8
CONFIG = DecoderConfig(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=MLP, num_layers=LAYERS,
    query_heads=QUERY_HEADS, kv_heads=HEADS, head_dim=DIM, rope=RopeConfig(rotary_dim=DIM),
    max_positions=512,
)  # fmt: skip
PROMPT, NEW = 256, 64
MACHINE = Machine(1e10, 1e11)
EMBEDDING = VOCAB * HIDDEN
MATRICES = 2 * HIDDEN * (QUERY_HEADS + HEADS) * DIM + 3 * HIDDEN * MLP  # of a layer
WEIGHTS = 2 * EMBEDDING + LAYERS * (MATRICES + 2 * HIDDEN) + HIDDEN
PAYLOAD = 2 * DIM * 4  # bytes of a slot's key and value
OF_SLOT, OF_HEAD, OF_ROW = 4 + 4 + 1, 4 + 4, 4  # position, mass, pin; used, dropped; length


def of_rows(slots: int, read: float, index_of_head: int = 0, index_of_row: int = 0) -> float:
    """Bytes that a step reads of a row's caches, `read` of its `slots` keys and values."""
    head = slots * OF_SLOT + read * PAYLOAD + OF_HEAD + index_of_head
    return LAYERS * (HEADS * head + OF_ROW + index_of_row)


SLOTS, PAGES, CLUSTERS = PROMPT + NEW, 20, 20
BY_HAND = {
    "full": ("full", of_rows(SLOTS, SLOTS), 0),
    "snapkv": ("snapkv(budget=64)", of_rows(64 + NEW, 64 + NEW), 0),
    # Two bounds of each page, mean and variance of the newest, and how many pages to read.
    "quest": (
        "quest(budget=96, page=16, dense_layers=())",
        of_rows(SLOTS, 96, (PAGES + 1) * 2 * DIM * 4, 4),
        0,
    ),
    # Of each cluster a centroid, its size and its start; their number, and that of sinks; the
    # budget of a row. The key of the draws and the sinks that a flush knows are those of all rows.
    "clusterkv": (
        "clusterkv(budget=96, tokens_per_cluster=16, sinks=16, interval=320, dense_layers=())",
        of_rows(SLOTS, 96, CLUSTERS * (DIM * 4 + 4 + 4) + 4 + 4, 4 + 4),
        LAYERS * (8 + 4 * QUERY_HEADS),
    ),
}


@pytest.mark.parametrize("method", BY_HAND)
@pytest.mark.parametrize("rows", [1, 3])
def test_bytes_that_a_step_reads_by_hand(method, rows):
    text, of_row, fixed = BY_HAND[method]
    room = cache_room(abstract_decoder(CONFIG), PROMPT, NEW)
    assert room == {"max_prompt": PROMPT, "max_new": NEW}
    planned = plan(
        abstract_decoder(CONFIG, dtype="float32"), kvjax.parse(text), dtype="float32",
        looked_up=4 * EMBEDDING, **room,
    )  # fmt: skip
    assert planned.step_bytes(rows) == 4 * (WEIGHTS - EMBEDDING) + rows * of_row + fixed


def test_operations_of_a_prompt_by_hand():
    tokens = 100
    for window in (None, 30):
        config = DecoderConfig(**{**vars(CONFIG), "sliding_window": window})
        pairs = sum(min(place, window or place) for place in range(1, tokens + 1))
        expected = LAYERS * (2 * tokens * MATRICES + 4 * pairs * QUERY_HEADS * DIM)
        assert prompt_flops(abstract_decoder(config), tokens) == expected
    model = as_functional(random_decoder(CONFIG))
    whole = kvjax.models.FunctionalModel(**{**vars(model), "parts": None})
    assert prompt_flops(whole, 100) is None


@pytest.fixture(scope="module")
def report():
    model, seen = random_decoder(CONFIG), []
    methods = {"snapkv": kvjax.SnapKV(64)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvjax.evaluation.speed.speed.measure_machine", lambda dtype: MACHINE)
        found = measure_speed(
            model, methods, prompt_tokens=[PROMPT], new_tokens=[8], batches=(1, 2), rounds=2,
            looked_up=4 * EMBEDDING, on_progress=lambda *told: seen.append(told),
        )  # fmt: skip
    return found, seen


@pytest.mark.slow
def test_figures_of_a_row_fit_together(report):
    found, seen = report
    expected = [(1, "full"), (1, "snapkv"), (2, "full"), (2, "snapkv")]
    assert [(row.batch, row.method) for row in found.rows] == expected
    assert found.weight_bytes == 4 * WEIGHTS and found.machine == MACHINE
    total = 2 * 2 * 3  # methods, batches, and a first run before two rounds
    assert seen[1] == (0, total, "full · 1 row, 256 + 8 tokens") and seen[-1] == (
        total,
        total,
        "done",
    )
    assert seen == sorted(seen, key=lambda told: told[0])
    full = {row.batch: row for row in found.rows if row.method == "full"}
    for row in found.rows:
        assert row.ttft_s == min(row.ttft_rounds_s) and row.tpot_s == min(row.tpot_rounds_s)
        assert len(row.ttft_rounds_s) == len(row.tpot_rounds_s) == 2 and row.tpot_s > 0
        assert row.tokens_per_s == row.batch / row.tpot_s
        totals = [a + 7 * b for a, b in zip(row.ttft_rounds_s, row.tpot_rounds_s, strict=True)]
        assert row.end_to_end_s == min(totals) >= row.ttft_s + 7 * row.tpot_s
        assert row.end_to_end_tokens_per_s == row.batch * 8 / row.end_to_end_s
        assert row.end_to_end_over_full == row.end_to_end_s / full[row.batch].end_to_end_s
        assert row.ttft_over_full == row.ttft_s / full[row.batch].ttft_s
        assert row.tpot_over_full == row.tpot_s / full[row.batch].tpot_s
        assert row.step_floor_s == row.step_bytes / found.machine.bandwidth > 0
        flops = prompt_flops(abstract_decoder(CONFIG), PROMPT)
        assert row.ttft_floor_s == pytest.approx(row.batch * flops / found.machine.products)
        assert row.resident_bytes == found.weight_bytes + row.cache_bytes - row.host_bytes
        assert row.full_cache_bytes == full[row.batch].cache_bytes
        assert row.peak_bytes is None or row.peak_bytes >= found.weight_bytes
        assert row.compile_s > 0
    one, two = full[1], full[2]
    # Twice the rows: twice the caches, and the weights once.
    read = found.weight_bytes - 4 * EMBEDDING
    assert two.step_bytes - read == 2 * (one.step_bytes - read)
    snapkv = found.rows[1]
    assert snapkv.step_bytes < one.step_bytes and snapkv.cache_bytes < 0.5 * one.cache_bytes


def test_prompts_are_cut_from_the_text(monkeypatch):
    prompts = []

    def generate(model, rows, **options):
        prompts.append(rows)
        raise InterruptedError

    monkeypatch.setattr("kvjax.evaluation.speed.speed.generate", generate)
    monkeypatch.setattr("kvjax.evaluation.speed.speed.measure_machine", lambda dtype: MACHINE)
    with pytest.raises(InterruptedError):
        measure_speed(
            random_decoder(CONFIG), {}, prompt_tokens=[4], new_tokens=[2], batches=(2,),
            text=[1, 2, 3],
        )  # fmt: skip
    assert prompts == [[[1, 2, 3, 1], [2, 3, 1, 2]]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"new_tokens": [8, 1]}, "a number of new_tokens must be at least 2, got 1"),
        ({"batches": ()}, "batches must have at least one"),
        ({"text": []}, "text must have at least one token"),
        ({"prompt_tokens": [64, 500]}, "the model has 512 positions"),
        ({"methods": {"full": kvjax.SnapKV(64)}}, "the method named 'full' must be kvjax.Full"),
    ],
)
def test_what_is_refused(options, message, monkeypatch):
    def compute(*args, **options):
        pytest.fail("something was computed")

    monkeypatch.setattr("kvjax.evaluation.speed.speed.generate", compute)
    monkeypatch.setattr("kvjax.evaluation.speed.speed.measure_machine", compute)
    given = {"prompt_tokens": [64], "methods": {"snapkv": kvjax.SnapKV(64)}} | options
    with pytest.raises(ValueError, match=message):
        measure_speed(random_decoder(CONFIG), **given)
    with pytest.raises(TypeError, match="prompt_tokens must be a list of numbers, got 64"):
        measure_speed(random_decoder(CONFIG), {}, prompt_tokens=64)
    # A mesh of one device counts as none, and there is one here.
    monkeypatch.setattr("kvjax.evaluation.speed.speed.mesh_of", lambda params: jax.devices())
    with pytest.raises(ValueError, match="measures one device, got a model on a mesh"):
        measure_speed(random_decoder(CONFIG), {})


def test_the_machine():
    machine = measure_machine("float32")
    assert 1e8 < machine.bandwidth < 1e14 and 1e8 < machine.products < 1e16
    assert environment()["device"] == jax.devices()[0].device_kind


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the process's memory is the host's")
def test_figures_that_a_system_does_not_tell(monkeypatch, tmp_path):
    """Neither of a missing table nor of a missing line; containers may forbid to reset a peak."""
    table = tmp_path / "status"
    table.write_text("Name:\tpython\nVmRSS:\t      12 kB\n")
    monkeypatch.setattr(memory, "_STATUS", table)
    monkeypatch.setattr(memory, "_MEMORY", tmp_path / "nowhere")
    assert memory.resident("VmRSS") == 12 * 1024 and free_memory() is None
    with pytest.raises(ValueError, match="status has no VmHWM"):
        memory.resident("VmHWM")
    for cannot_be_written in (tmp_path / "nowhere", tmp_path):
        monkeypatch.setattr(memory, "_FORGET", cannot_be_written)
        assert with_peak(lambda: 7) == (7, None)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the process's memory is the host's")
def test_the_peak_is_what_was_needed_at_most():
    _, grown = with_peak(lambda: None)
    if grown is None:
        pytest.skip("this system does not tell")
    assert grown < 2**22

    def run():
        np.ones(2**24)  # 128 MiB, freed at once
        return np.ones(2**23)  # 64 MiB

    found, grown = with_peak(run)
    assert found.nbytes == 2**26
    assert abs(grown - 2**27) < 2**22  # the system counts in batches of pages
    assert free_memory() > 0
