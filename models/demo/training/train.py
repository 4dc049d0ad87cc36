"""Trains the bundled model: `python -m kvjax.models.demo.training.train --out DIR`.

There are stages of growing length, each with its mix of tasks. Equal seeds, Python and package
versions give equal weights.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer

from kvjax.evaluation.tasks import wording
from kvjax.models import Decoder, DecoderConfig, RopeConfig, random_decoder
from kvjax.models.rope_scaling import make_rope

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
from .tasks import ANSWER, TEXT, Mix, Tasks
from .words import FreeWords

_REPORT_EVERY = 50  # steps

CONFIG = DecoderConfig(
    vocab_size=2048, hidden_size=128, intermediate_size=256, num_layers=4, query_heads=8,
    kv_heads=4, head_dim=32, rope=RopeConfig(rotary_dim=32, theta=500_000.0), max_positions=8448,
    tie_embeddings=True, bos_token_id=0, eos_token_ids=(1,),
)  # fmt: skip
"""Configuration of the bundled model: prompts of 8,192 tokens, and room for answers."""


@dataclass(frozen=True)
class Stage:
    """A part of the training.

    Args:
      name: name in reports of progress.
      length: tokens of a sequence.
      rows: sequences of a batch.
      steps: number of batches.
      rate, last_rate: learning rate at the stage's start and end, linear between.
      mix: mix of the sequences.
    """

    name: str
    length: int
    rows: int
    steps: int
    rate: float
    last_rate: float
    mix: Mix


_MIX = Mix(segments=0.2, lists=0.15, chains=0.1, questions=6, positions=4096, free=0.5)
STAGES = (
    Stage("1-segments", 256, 16, 300, 1e-4, 2e-3, Mix(1.0, 0.0, 0.0, 1, 0)),
    Stage("2-needles", 512, 8, 1500, 2e-3, 1.5e-3, _MIX),
    Stage("3-1024", 1024, 4, 1200, 1.5e-3, 8e-4, replace(_MIX, questions=10, positions=8192)),
    Stage("4-2048", 2048, 2, 900, 8e-4, 2e-4, replace(_MIX, questions=16, positions=8192)),
    Stage("5-4096", 4096, 1, 150, 2e-4, 1e-5, replace(_MIX, questions=24, positions=8192)),
)
"""Training of the bundled model."""

_WARM_UP = 200


def make_optimizer(stages: Sequence[Stage]) -> optax.GradientTransformation:
    """Makes AdamW with clipped gradients, and a learning rate that is linear within each stage.

    The first stage reaches its last rate within `_WARM_UP` steps.
    """
    lengths = [_WARM_UP, *(stage.steps for stage in stages[1:])]
    parts = [
        optax.linear_schedule(stage.rate, stage.last_rate, steps)
        for stage, steps in zip(stages, lengths, strict=True)
    ]
    ends = itertools.accumulate(stage.steps for stage in stages[:-1])
    rate = optax.join_schedules(parts, list(ends))
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b1=0.9, b2=0.98, weight_decay=0.05)
    )


_TEXT_WEIGHT = 0.5
# The gradient recomputes probabilities, so that they need not be kept.
_attend = jax.checkpoint(partial(jax.nn.dot_product_attention, is_causal=True))


class Metrics(NamedTuple):
    """Losses of a step in nats per token, and share of answer tokens that were the likeliest."""

    answers: Float[Array, ""]
    text: Float[Array, ""]
    accuracy: Float[Array, ""]


class TrainState(NamedTuple):
    """Everything that a step changes."""

    params: nnx.State
    optimizer: optax.OptState


def forward(
    decoder: Decoder, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]
) -> Float[Array, "B T V"]:
    """Computes the decoder's logits without a cache, differentiably.

    `prompt_attention` skips blocks in a loop of dynamic length, which has no gradient.
    """
    x = decoder.embed(tokens)
    rope = make_rope(decoder.config.rope, decoder.config.max_positions)
    for block in decoder.layers:
        q, k, v = block.attention.project(block.attention_norm(x))
        heads = rope.rotate(q, positions), rope.rotate(k, positions), v
        out = _attend(*(jnp.swapaxes(x, 1, 2) for x in heads))
        x = x + block.attention.merge(jnp.swapaxes(out, 1, 2))
        x = x + block.mlp(block.mlp_norm(x))
    return decoder.logits(decoder.norm(x))


def loss(
    params: nnx.State, graphdef: nnx.GraphDef, batch: dict[str, Array]
) -> tuple[Float[Array, ""], Metrics]:
    """Returns cross-entropy of answers plus half that of text, each a mean over its tokens."""
    decoder = nnx.merge(graphdef, params)
    logits = forward(decoder, batch["tokens"][:, :-1], batch["positions"])
    targets, marks = batch["tokens"][:, 1:], batch["marks"][:, 1:]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)

    def mean(values: Array, mark: int) -> Array:
        chosen = marks == mark
        # A batch may have no token with this mark.
        return jnp.sum(jnp.where(chosen, values, 0.0)) / jnp.maximum(
            jnp.sum(chosen.astype(jnp.float32)), 1.0
        )

    right = (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
    metrics = Metrics(mean(nll, ANSWER), mean(nll, TEXT), mean(right, ANSWER))
    return metrics.answers + _TEXT_WEIGHT * metrics.text, metrics


@partial(jax.jit, static_argnames=("graphdef", "optimizer"), donate_argnames="state")
def train_step(
    state: TrainState,
    batch: dict[str, Array],
    *,
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Metrics]:
    """Takes one step of the optimizer on a batch (see `Tasks.batch`)."""
    gradient, metrics = jax.grad(loss, has_aux=True)(state.params, graphdef, batch)
    updates, inner = optimizer.update(gradient, state.optimizer, state.params)
    return TrainState(optax.apply_updates(state.params, updates), inner), metrics  # pyright: ignore[reportArgumentType]  # Optax knows no NNX


def make_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Makes a tokenizer for the texts and for the words of questions."""
    rng = np.random.default_rng(0)
    names = (
        wording.TRAINING_ADJECTIVES + wording.HELD_OUT_ADJECTIVES
        + wording.TRAINING_NOUNS + wording.HELD_OUT_NOUNS
    )  # fmt: skip
    values = rng.integers(10**5, 10**6, (len(names), 20))
    keyed = [
        sentences.needle(name, str(value))
        for sentences in wording.WORDINGS
        for name, row in zip(names, values, strict=True)
        for value in row
    ]
    return train_tokenizer([*texts, *keyed], vocab_size)


def make_tasks(tokenizer: Tokenizer, texts: Sequence[str]) -> Tasks:
    """Makes tasks from these texts."""
    held_out = {*wording.HELD_OUT_ADJECTIVES, *wording.HELD_OUT_NOUNS}
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    stream = np.concatenate([np.array(text.ids, np.int32) for text in encoded])
    return Tasks(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids, stream,
        FreeWords.of(tokenizer.get_vocab(), held_out),
        vocab=tokenizer.get_vocab_size(), special=2,
        bos=tokenizer.token_to_id(BOS), eos=tokenizer.token_to_id(EOS),  # pyright: ignore[reportArgumentType]  # it has both
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
      texts: texts to train on.
      config: configuration of the model; its embeddings are tied.
      stages: stages of the training.
      seed: seed of the weights and the sequences.
      report: called with one line of progress at a time.
    """
    tokenizer = Tokenizer.from_str(make_tokenizer(texts, config.vocab_size).to_str())
    tasks, optimizer = make_tasks(tokenizer, texts), make_optimizer(stages)
    model = random_decoder(config, seed)
    start_near_induction(model, seed)
    graphdef, params = nnx.split(model)
    state, step = TrainState(params, optimizer.init(params)), 0
    for stage in stages:
        for steps_left in reversed(range(stage.steps)):
            rng = np.random.default_rng((seed, step))
            batch = tasks.batch(rng, stage.rows, stage.length, stage.mix)
            state, metrics = train_step(state, batch, graphdef=graphdef, optimizer=optimizer)
            if step % _REPORT_EVERY == 0 or not steps_left:
                answers, text, accuracy = map(float, metrics)
                report(
                    f"{stage.name} step {step:,}: answers {answers:.3f} nats, {accuracy:.1%} "
                    f"right; text {text:.3f} nats; {time.strftime('%H:%M:%S')}"
                )
            step += 1
    return nnx.merge(graphdef, state.params), tokenizer


def main() -> None:
    """Runs the command line."""
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
