"""Trains the bundled model: `python -m kvjax.models.demo.train --out DIR`.

Stages of growing length, each with its mix of tasks; the weights of every stage are kept as Hugging
Face folders, and an interrupted training goes on where its last checkpoint was. The same seed,
text and versions give the same weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from tokenizers import Tokenizer

from kvjax.evaluation.tasks import wording
from kvjax.models import Decoder, DecoderConfig, random_decoder
from kvjax.transforms.random import check_seed

from .corpus import BOS, EOS, file_documents, python_documents, split_documents, train_tokenizer
from .export import save_pretrained
from .initial import start_near_induction
from .recipe import CONFIG, STAGES, Stage, make_optimizer
from .tasks import Tasks
from .training import Metrics, TrainState, train_step
from .words import FreeWords

_SAVE_EVERY, _REPORT_EVERY = 250, 50


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
    held_out = {*wording.HELD_OUT_ADJECTIVES, *wording.HELD_OUT_NOUNS}
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    stream = np.concatenate([np.array(text.ids, np.int32) for text in encoded])
    return Tasks(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids, stream,
        FreeWords.of(tokenizer.get_vocab(), held_out),
        vocab=tokenizer.get_vocab_size(), special=2,
        bos=tokenizer.token_to_id(BOS), eos=tokenizer.token_to_id(EOS),
    )  # fmt: skip


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
                state, metrics = train_step(state, batch, graphdef=graphdef, optimizer=optimizer)
                if step % _REPORT_EVERY == 0 or step == start + stage.steps - 1:
                    report(_line(stage, step, metrics))
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
    check_seed(seed)
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


def _line(stage: Stage, step: int, metrics: Metrics) -> str:
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
