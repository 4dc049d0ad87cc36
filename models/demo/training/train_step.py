"""How the bundled model learns: its forward pass with a gradient, the loss and one step."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.models import Decoder
from kvjax.models.rope_scaling import make_rope

from .tasks import ANSWER, TEXT

_TEXT_WEIGHT = 0.5
# Probabilities are computed again for the gradient instead of being kept.
_attend = jax.checkpoint(partial(jax.nn.dot_product_attention, is_causal=True))


class Metrics(NamedTuple):
    """Of one step: losses in nats per token, share of answer tokens that were the likeliest."""

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
    """The decoder's logits without a cache, differentiable.

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
    """Cross-entropy of answers plus half that of text, each a mean over its own tokens."""
    decoder = nnx.merge(graphdef, params)
    logits = forward(decoder, batch["tokens"][:, :-1], batch["positions"])
    targets, marks = batch["tokens"][:, 1:], batch["marks"][:, 1:]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)

    def mean(values: Array, mark: int) -> Array:
        chosen = marks == mark
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
    """One step of the optimizer on one batch (see `Tasks.batch`)."""
    gradient, metrics = jax.grad(loss, has_aux=True)(state.params, graphdef, batch)
    updates, inner = optimizer.update(gradient, state.optimizer, state.params)
    return TrainState(optax.apply_updates(state.params, updates), inner), metrics
