"""A small model and a command that compares methods on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from kvjax.cli.main import main
from kvjax.evaluation.cells.grid import Cell
from kvjax.evaluation.comparison.compare import _Measure
from kvjax.models import DecoderConfig, RopeConfig, random_decoder
from kvjax.models.demo.training.export import save_pretrained
from tests.support.comparisons import draw_nothing
from tests.support.small_comparisons import TEXT, made_up


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A Llama of one layer with a token per byte."""
    alphabet = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({sign: i for i, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    config = DecoderConfig(
        vocab_size=len(alphabet), hidden_size=16, intermediate_size=16, num_layers=1, query_heads=2,
        kv_heads=1, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=512,
        tie_embeddings=True, bos_token_id=0, eos_token_ids=(1,),
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    save_pretrained(random_decoder(config), tokenizer, path)
    return path


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def command(folder, text, tmp_path):
    """`kvjax compare` with a small grid, in which options can be changed."""

    def run(*flags: str, **changes) -> int:
        options = {
            "model": folder, "text": text, "method": "h2o,streaming_llm(budget=64)",
            "budget": "0.25,0.5", "lengths": "192,256", "depths": "0,1",
            "tasks": "needle,perplexity,attention", "question": "inside", "cases": 4,
            "out": tmp_path / "out", **changes,
        }  # fmt: skip
        return main(["compare", *flags, *(f"--{name}={value}" for name, value in options.items())])

    return run


@pytest.fixture
def measured(monkeypatch) -> list:
    """Replaces the measurements by numbers that follow from the cell; the cells measured.

    Pictures are not drawn.
    """
    draw_nothing(monkeypatch)
    cells = []

    def unit(self, unit, candidates):
        for one in candidates:
            cells.append(Cell(*unit, *one.key))
            yield one, made_up(cells[-1])

    monkeypatch.setattr(_Measure, "unit", unit)
    monkeypatch.setattr(_Measure, "_rows", lambda self, length: 4)
    return cells
