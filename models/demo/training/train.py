"""Trains the bundled model: `python -m kvjax.models.demo.training.train --out DIR`.

Stages of growing length, each with its mix of tasks. The same seed, Python and versions give the
same weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from kvjax.evaluation.tasks import wording
from kvjax.models import Decoder, DecoderConfig, random_decoder

from .corpus import (
    BOS,
    EOS,
    python_documents,
    split_documents,
    train_tokenizer,
    without_known_paragraphs,
)
from .export import save_pretrained
from .initial import start_near_induction
from .recipe import CONFIG, STAGES, Stage, make_optimizer
from .tasks import Tasks
from .train_step import TrainState, train_step
from .words import FreeWords

_REPORT_EVERY = 50  # steps


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
    texts: Sequence[str],
    *,
    config: DecoderConfig = CONFIG,
    stages: Sequence[Stage] = STAGES,
    seed: int = 0,
    report: Callable[[str], object] = print,
) -> tuple[Decoder, Tokenizer]:
    """Trains a model and its tokenizer.

    Args:
      texts: what to train on.
      config: of the model; its embeddings are tied.
      stages: of the training.
      seed: of the weights and the sequences.
      report: gets one line of progress at a time.
    """
    tokenizer = Tokenizer.from_str(make_tokenizer(texts, config.vocab_size).to_str())
    tasks, optimizer = make_tasks(tokenizer, texts), make_optimizer(stages)
    model = random_decoder(config, seed)
    start_near_induction(model, seed)
    graphdef, params = nnx.split(model)
    state, step = TrainState(params, optimizer.init(params)), 0
    for stage in stages:
        for left in reversed(range(stage.steps)):
            rng = np.random.default_rng((seed, step))
            batch = tasks.batch(rng, stage.rows, stage.length, stage.mix)
            state, metrics = train_step(state, batch, graphdef=graphdef, optimizer=optimizer)
            if step % _REPORT_EVERY == 0 or not left:
                answers, text, accuracy = map(float, metrics)
                report(
                    f"{stage.name} step {step:,}: answers {answers:.3f} nats, {accuracy:.1%} "
                    f"right; text {text:.3f} nats; {time.strftime('%H:%M:%S')}"
                )
            step += 1
    return nnx.merge(graphdef, state.params), tokenizer


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m kvjax.models.demo.training.train",
        description="Trains kvjax's bundled model on Python's documentation.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    texts, held_out = split_documents(python_documents())
    args.out.mkdir(parents=True, exist_ok=True)
    unseen = without_known_paragraphs(held_out, texts)
    (args.out / "held_out.txt").write_text(unseen, encoding="utf-8")
    model, tokenizer = train(texts, seed=args.seed, report=lambda line: print(line, flush=True))
    save_pretrained(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
