"""What the bundled model is and how it is trained: its size, stages and optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import optax

from kvjax.models import DecoderConfig, RopeConfig

from .tasks import Mix

CONFIG = DecoderConfig(
    vocab_size=2048, hidden_size=128, intermediate_size=256, num_layers=4, query_heads=8,
    kv_heads=4, head_dim=32, rope=RopeConfig(rotary_dim=32, theta=500_000.0), max_positions=8448,
    tie_embeddings=True, bos_token_id=0, eos_token_ids=(1,),
)  # fmt: skip
"""The bundled model: prompts of 8,192 tokens, and room for answers."""


@dataclass(frozen=True)
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


_MIX = Mix(segments=0.2, lists=0.15, chains=0.1, questions=6, positions=4096, free=0.5)
STAGES = (
    Stage("1-segments", 256, 16, 300, 1e-4, 2e-3, Mix(1.0, 0.0, 0.0, 1, 0)),
    Stage("2-needles", 512, 8, 1500, 2e-3, 1.5e-3, _MIX),
    Stage("3-1024", 1024, 4, 1200, 1.5e-3, 8e-4, replace(_MIX, questions=10, positions=8192)),
    Stage("4-2048", 2048, 2, 900, 8e-4, 2e-4, replace(_MIX, questions=16, positions=8192)),
    Stage("5-4096", 4096, 1, 150, 2e-4, 1e-5, replace(_MIX, questions=24, positions=8192)),
)
"""The bundled model's training."""

_WARM_UP = 200


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
