"""Trains the bundled model: `python -m kvjax.models.demo.train --out DIR`.

Stages of growing length, each with its mix of tasks; the weights of every stage are kept as Hugging
Face folders, and an interrupted training goes on where its last checkpoint was. The same seed,
text and versions give the same weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tokenizers import Tokenizer

from kvjax.budgets import check_count
from kvjax.evaluation import wording
from kvjax.models import Decoder, DecoderConfig, RopeConfig, random_decoder

from .corpus import BOS, EOS, file_documents, python_documents, split_documents, train_tokenizer
from .export import save_pretrained
from .initial import start_near_induction
from .tasks import Mix, Tasks
from .training import Metrics, TrainState, train_step

CONFIG = DecoderConfig(
    vocab_size=2048, hidden_size=128, intermediate_size=256, num_layers=4, query_heads=8,
    kv_heads=4, head_dim=32, rope=RopeConfig(rotary_dim=32, theta=500_000.0), max_positions=8448,
    tie_embeddings=True, bos_token_id=0, eos_token_ids=(1,),
)  # fmt: skip
"""The bundled model: prompts of 8,192 tokens, and room for answers."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the training.

    Args:
      name: of its folder.
      length: tokens of a sequence.
      rows: sequences of a batch.
      steps: how many batches.
      rate, last_rate: learning rate at its start and its end, linear between.
      mix: what the sequences are.
    """

    name: str
    length: int
    rows: int
    steps: int
    rate: float
    last_rate: float
    mix: Mix


_RETRIEVAL = {"segments": 0.2, "lists": 0.15, "chains": 0.1}
_ANY_WORDS = Mix(**_RETRIEVAL, questions=16, positions=8192, free=0.6)
STAGES = (
    Stage("1-segments", 256, 16, 300, 1e-4, 2e-3, Mix(1.0, 0.0, 0.0, 1, 0)),
    Stage("2-needles", 512, 8, 1200, 2e-3, 1.5e-3, Mix(**_RETRIEVAL, questions=6, positions=4096)),
    Stage("3-1024", 1024, 4, 1200, 1.5e-3, 8e-4, Mix(**_RETRIEVAL, questions=10, positions=8192)),
    Stage("4-2048", 2048, 2, 700, 8e-4, 3e-4, Mix(**_RETRIEVAL, questions=16, positions=8192)),
    Stage("5-4096", 4096, 1, 150, 3e-4, 2e-5, Mix(**_RETRIEVAL, questions=24, positions=8192)),
    Stage("6-any-words", 2048, 2, 350, 5e-4, 2e-5, _ANY_WORDS),
)
"""The bundled model's training."""

_WARM_UP = 200
_SAVE_EVERY, _REPORT_EVERY = 250, 50


def learning_rate(stages: Sequence[Stage]) -> optax.Schedule:
    """Linear within each stage; the first comes to its last rate within `_WARM_UP` steps."""
    lengths = [_WARM_UP, *(stage.steps for stage in stages[1:])]
    parts = [
        optax.linear_schedule(stage.rate, stage.last_rate, steps)
        for stage, steps in zip(stages, lengths, strict=True)
    ]
    ends = itertools.accumulate(stage.steps for stage in stages[:-1])
    return optax.join_schedules(parts, list(ends))


def make_optimizer(stages: Sequence[Stage]) -> optax.GradientTransformation:
    """AdamW with clipped gradients and the stages' learning rate."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(learning_rate(stages), b1=0.9, b2=0.98, weight_decay=0.05),
    )


def make_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """A tokenizer for the texts and for what questions are made of."""
    rng = np.random.default_rng(0)
    names = (
        wording.TRAINING_ADJECTIVES + wording.HELD_OUT_ADJECTIVES
        + wording.TRAINING_NOUNS + wording.HELD_OUT_NOUNS
    )  # fmt: skip
    values = rng.integers(10**5, 10**6, (len(names), 20))
    keyed = [
        asked.needle(name, str(value))
        for asked in wording.WORDINGS
        for name, row in zip(names, values, strict=True)
        for value in row
    ]
    return train_tokenizer([*texts, *keyed], vocab_size)


def make_tasks(tokenizer: Tokenizer, texts: Sequence[str]) -> Tasks:
    """Sequences from these texts."""
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    stream = np.concatenate([np.array(text.ids, np.int32) for text in encoded])
    return Tasks(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids, stream,
        free_words(tokenizer),
        vocab=tokenizer.get_vocab_size(), special=2,
        bos=tokenizer.token_to_id(BOS), eos=tokenizer.token_to_id(EOS),
    )  # fmt: skip


def free_words(tokenizer: Tokenizer) -> list[str]:
    """Words that are one token each, without those that are held out."""
    held_out = {*wording.HELD_OUT_ADJECTIVES, *wording.HELD_OUT_NOUNS}
    found = (re.fullmatch("Ġ([a-z]{3,})", token) for token in tokenizer.get_vocab())
    return sorted({match[1] for match in found if match} - held_out)


def train(
    out: Path,
    texts: Sequence[str],
    *,
    config: DecoderConfig = CONFIG,
    stages: Sequence[Stage] = STAGES,
    seed: int = 0,
    report: Any = print,
) -> Decoder:
    """Trains a model, from the start or from the last checkpoint in `out`.

    Args:
      out: folder for checkpoints, the stages' weights and at the end the model.
      texts: what to train on.
      config: of the model.
      stages: of the training.
      seed: of the weights and the sequences.
      report: gets one line of progress at a time.

    Returns:
      The trained decoder. It is in `out/model` too, each stage's in `out/stages`.

    Raises:
      TypeError: the seed is no integer.
      ValueError: `out` holds a training with other settings or text, or there is too little text;
        nothing is written then.
    """
    out = Path(out).resolve()
    _check(config, texts, seed)
    settings = _settings(config, stages, seed, texts)
    for name, given in settings.items():
        _check_kept(out / name, given)
    tokenizer = _kept_tokenizer(out / "tokenizer.json", texts, config.vocab_size)
    tasks, optimizer = make_tasks(tokenizer, texts), make_optimizer(stages)
    _check_tokens(tasks, config, stages)
    out.mkdir(parents=True, exist_ok=True)
    for name, given in {**settings, "tokenizer.json": tokenizer.to_str(pretty=True)}.items():
        if not (out / name).exists():
            (out / name).write_text(given, encoding="utf-8")
    model = random_decoder(config, seed)
    start_near_induction(model, seed)
    graphdef, params = nnx.split(model)
    state = TrainState(params, optimizer.init(params))
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager(out / "checkpoints", options=options) as manager:
        done = manager.latest_step() or 0
        if done:
            state = manager.restore(done, args=ocp.args.StandardRestore(state))
            report(f"resumed at step {done:,}")
        start = 0
        for stage in stages:
            for step in range(max(done, start), start + stage.steps):
                rng = np.random.default_rng((seed, step))
                batch = tasks.batch(rng, stage.rows, stage.length, stage.mix)
                began = time.perf_counter()
                state, metrics = train_step(state, batch, graphdef=graphdef, optimizer=optimizer)
                if step % _REPORT_EVERY == 0 or step == start + stage.steps - 1:
                    report(_line(stage, step, metrics, time.perf_counter() - began))
                if (step + 1) % _SAVE_EVERY == 0 or step == start + stage.steps - 1:
                    manager.save(step + 1, args=ocp.args.StandardSave(state))
            start += stage.steps
            if done <= start:  # equal: perhaps interrupted just before the weights were written
                model = nnx.merge(graphdef, state.params)
                save_pretrained(model, tokenizer, out / "stages" / stage.name)
    model = nnx.merge(graphdef, state.params)
    save_pretrained(model, tokenizer, out / "model")
    return model


def _settings(
    config: DecoderConfig, stages: Sequence[Stage], seed: int, texts: Sequence[str]
) -> dict[str, str]:
    """The files that say what a folder's training is: name and content."""
    settings = {
        "config": dataclasses.asdict(config),
        "stages": [dataclasses.asdict(stage) for stage in stages],
        "seed": seed,
    }
    text = hashlib.sha256("".join(texts).encode()).hexdigest()
    return {"settings.json": json.dumps(settings, indent=1), "text.sha256": text}


def _check_kept(path: Path, given: str) -> None:
    if path.exists() and path.read_text(encoding="utf-8") != given:
        what = "text" if path.suffix == ".sha256" else "settings"
        raise ValueError(f"{path.parent} holds a training with other {what}: see {path}")


def _check(config: DecoderConfig, texts: Sequence[str], seed: int) -> None:
    check_count("seed", seed, 0)
    if seed >= 2**32:  # JAX would drop the upper bits
        raise ValueError(f"seed must be below 2**32, got {seed}")
    if not config.tie_embeddings:
        raise ValueError("tie_embeddings must be True, got False")
    if not texts:
        raise ValueError("there is no text to train on")


def _check_tokens(tasks: Tasks, config: DecoderConfig, stages: Sequence[Stage]) -> None:
    if tasks.vocab > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tasks.vocab} tokens, vocab_size must be as many, "
            f"got {config.vocab_size}"
        )
    longest = max(stage.length for stage in stages)
    if len(tasks.stream) <= longest:
        raise ValueError(f"the text must have more than {longest} tokens, got {len(tasks.stream)}")


def _kept_tokenizer(path: Path, texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """The tokenizer of an earlier start, else a new one."""
    if path.exists():
        return Tokenizer.from_file(str(path))
    return Tokenizer.from_str(make_tokenizer(texts, vocab_size).to_str())


def _line(stage: Stage, step: int, metrics: Metrics, seconds: float) -> str:
    answers, text, accuracy = (float(value) for value in metrics)
    return (
        f"{stage.name} step {step:,}: answers {answers:.3f} nats, {accuracy:.1%} right; "
        f"text {text:.3f} nats; {time.strftime('%H:%M:%S')}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m kvjax.models.demo.train", description="Trains kvjax's bundled model."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for all results")
    parser.add_argument("--text", type=Path, help="UTF-8 text (default: Python's documentation)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        documents = python_documents() if args.text is None else file_documents(args.text)
        texts, _ = split_documents(documents)
        train(args.out, texts, seed=args.seed, report=lambda line: print(line, flush=True))
    except (OSError, ValueError) as error:
        print(f"train: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
