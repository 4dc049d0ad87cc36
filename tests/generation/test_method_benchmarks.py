"""The benchmark of kept tokens, on a tiny random model."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax.models import DecoderConfig, RopeConfig, random_decoder

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CONFIG = DecoderConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_layers=2, query_heads=4, kv_heads=2,
    head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128,
)  # fmt: skip
LENGTHS, STEPS, BUDGET = (24, 9), 20, 12


@pytest.fixture(scope="module")
def kept_tokens():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("kept_tokens")


@pytest.fixture(scope="module")
def text(kept_tokens):
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, CONFIG.vocab_size, length).tolist() for length in LENGTHS]
    return kept_tokens.Text(random_decoder(CONFIG), prompts, 32, STEPS)


@pytest.fixture(scope="module")
def run(kept_tokens, text):
    return kept_tokens.record(kvjax.StreamingLLM(BUDGET, sinks=4), text)


def streaming(length: int, steps: int) -> list[int]:
    """What StreamingLLM keeps of a row after some steps: the sinks and the newest tokens."""
    tokens = list(range(length + steps))
    return tokens if len(tokens) <= BUDGET else tokens[:4] + tokens[4 - BUDGET :]


def test_kept_positions_are_those_of_the_method(run):
    assert run["checkpoints"].tolist() == [0, 16, 20]
    for layer in range(CONFIG.num_layers):
        positions, log_mass = run[f"positions_{layer}"], run[f"log_mass_{layer}"]
        assert positions.shape == log_mass.shape == (3, len(LENGTHS), 2, BUDGET)
        for check, steps in enumerate(run["checkpoints"]):
            for row, length in enumerate(LENGTHS):
                for head in range(2):
                    found = positions[check, row, head]
                    assert found[found >= 0].tolist() == streaming(length, int(steps))
        assert np.array_equal(log_mass, np.where(positions >= 0, 0.0, -np.inf))


def test_tokens_are_those_of_generate(run, text):
    result = kvjax.generate(
        text.model, text.prompts, transform=kvjax.StreamingLLM(BUDGET, sinks=4),
        max_new_tokens=STEPS, buckets=(32,),
    )  # fmt: skip
    assert run["tokens"].tolist() == run["fed"].tolist() == result.tokens


def test_differences_are_counted(kept_tokens, run):
    other = {name: each.copy() for name, each in run.items()}
    other["tokens"][1, 17] += 1
    other["fed"][1, 17] += 1
    other["positions_1"][1, 0, 1, 5] += 1  # after 16 steps, of a row that was fed the same
    other["positions_0"][2, 1, 0, 5] += 1  # after 20 steps, of the row that was not
    other["log_mass_0"][0, 0, 0, 3] += 0.25
    other["log_probability"][0, 3] += 0.5
    other["log_probability"][1, 18] += 2.0  # after token 17 was fed
    found = kept_tokens.compare(run, other)
    assert found.tokens == found.of_tokens - 1
    assert (found.first, found.margin) == (17, pytest.approx(run["margin"][1, 17]))
    assert found.log_probability == pytest.approx(0.5)
    assert (found.sets, found.of_sets) == (22, 24)
    assert (found.fed_sets, found.of_fed_sets, found.first_set) == (19, 20, 16)
    assert found.log_mass == pytest.approx(0.25)


def test_settings_are_those_of_methods(kept_tokens):
    for given in kept_tokens.METHODS.values():
        if isinstance(given, str):
            kvjax.bind(kvjax.parse(given, kept_tokens.BUDGET), 4)
