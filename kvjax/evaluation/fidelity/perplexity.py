"""Likelihood of a text that follows a compressed context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention.dropped import check_dropped
from kvjax.attention.flush import flush_interval
from kvjax.attention.layer import Cache
from kvjax.checks import check_count
from kvjax.compiled_code import compiled
from kvjax.devices import automatic
from kvjax.generation.compiler import Compiler
from kvjax.generation.context import Context
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.prompt_checks import Rows, check_turn
from kvjax.generation.sampling import most_likely
from kvjax.generation.steps import decode_step, pad, scan_steps
from kvjax.generation.turns import further_turn
from kvjax.protocol import KVTransform

_STEPS = 8  # short answers are padded to a multiple of it


@automatic()
def context_nll(
    model: LanguageModel | FunctionalModel,
    context: Context,
    tokens: Int[np.ndarray, "B M"],
) -> Float[np.ndarray, "B M"]:
    """Returns the negative log-likelihood, in nats, of tokens that follow a context.

    The tokens are fed one at a time through decode steps, so that methods which compress while
    decoding do so. Entry j is `-log p(tokens[:, j] | everything before)`. Perplexity is the
    exponential of the mean. The context is not changed. If its method flushes every M tokens, no
    written tokens may be waiting for a flush.

    Args:
      model: the model that has read the context.
      context: a context from `kvjax.read` or `kvjax.evaluation.ReadOnce`, with room for the tokens.
      tokens: token ids `[B, M]`, without padding, one row for each row of the context.

    Raises:
      TypeError, ValueError: the tokens are not integers, have another shape than `[B, M]` or
        another number of rows than the context, or are outside the vocabulary; written tokens of
        the context wait for a flush; or the tokens do not fit, as for a turn of `kvjax.generate`.

    Example:
      >>> import kvjax
      >>> import numpy as np
      >>> from kvjax.evaluation import context_nll
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128))
      >>> tokens = np.arange(40).reshape(1, 40)
      >>> prompts, tx = tokens[:, :32].tolist(), kvjax.SnapKV(16, window=8)
      >>> context = kvjax.read(model, prompts, transform=tx, max_new=8)
      >>> context_nll(model, context, tokens[:, 32:]).shape
      (1, 8)
    """
    functional = as_functional(model)
    tokens = _check_tokens(functional, tokens)
    if len(tokens) != context.rows:
        raise ValueError(
            f"tokens must have the context's {context.rows} rows, got {len(tokens)} of them"
        )
    check_turn(functional, context, None, tokens.shape[1] - 1)
    return _losses(functional, context, tokens, np.full(len(tokens), tokens.shape[1]))[0]


@automatic()
def answer_nll(
    model: LanguageModel | FunctionalModel,
    context: Context,
    answers: Sequence[Sequence[int]],
    questions: Rows | None = None,
) -> Float[np.ndarray, " B"]:
    """Returns the mean negative log-likelihood, in nats per token, of answers to questions.

    A question is read as a further turn, as `kvjax.generate` reads it. The answer's tokens then go
    through decode steps, as in `context_nll`, so methods that select or evict while decoding do so.
    The context is not changed.

    Args:
      model: the model that has read the context.
      context: a context from `kvjax.read` or `kvjax.evaluation.ReadOnce`, with room for questions
        and answers. One of a single row takes any number of questions.
      answers: token ids of each row's answer, at least one.
      questions: token ids of each row's question; None: the context ends with them.

    Raises:
      TypeError, ValueError: there is not an answer for each row, an answer is empty or has tokens
        outside the vocabulary, or questions or answers do not fit, as for a turn of
        `kvjax.generate`.

    Example:
      >>> import kvjax
      >>> from kvjax.evaluation import answer_nll
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128))
      >>> document = kvjax.read(model, [list(range(48))], transform="snapkv(budget=40)", max_new=8)
      >>> answer_nll(model, document, [[1, 2], [3]], questions=[[7, 8, 9], [10, 11]]).shape
      (2,)
    """
    losses = answer_losses(model, context, answers, questions)
    return losses.nats / [len(answer) for answer in answers]


class AnswerLosses(NamedTuple):
    """Losses of answers: the result of `answer_losses`.

    Args:
      nats: negative log-likelihood of each whole answer, in nats, `[B]`.
      greedy: whether each token of the answer is the most likely one, so that a greedy choice would
        write the answer, `[B]`.

    Example:
      >>> import numpy as np
      >>> from kvjax.evaluation import AnswerLosses
      >>> choices = AnswerLosses(nats=np.array([6.0, 2.5, 4.0]), greedy=np.array([False] * 3))
      >>> int(choices.nats.argmin())  # the likeliest of three answers to one question
      1
    """

    nats: Float[np.ndarray, " B"]
    greedy: Bool[np.ndarray, " B"]


@automatic()
def answer_losses(
    model: LanguageModel | FunctionalModel,
    context: Context,
    answers: Sequence[Sequence[int]],
    questions: Rows | None = None,
) -> AnswerLosses:
    """Returns the loss of whole answers to questions, and whether a greedy choice writes them.

    Args:
      model, context, answers, questions: as in `answer_nll`, which is the mean over the tokens.

    Raises:
      TypeError, ValueError: as `answer_nll`.

    Example:
      >>> import kvjax
      >>> from kvjax.evaluation import answer_losses
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128))
      >>> written = kvjax.generate(model, [[1, 2, 3]], max_new_tokens=4, end_tokens=()).tokens
      >>> answer_losses(model, kvjax.read(model, [[1, 2, 3]], max_new=4), written).greedy.tolist()
      [True]
    """
    functional = as_functional(model)
    for answer in answers:
        check_count("tokens of an answer", len(answer), 1)
        _check_tokens(functional, [answer])
    rows = context.rows if questions is None else len(questions)
    if len(answers) != rows:
        raise ValueError(f"there must be an answer for each of {rows} rows, got {len(answers)}")
    lengths = np.array([len(answer) for answer in answers])
    check_turn(functional, context, questions, lengths - 1)
    if questions is not None:
        # Reading the questions donates the caches.
        context = context.take(range(rows) if context.rows == rows else [0] * rows).awake()
        context = further_turn(functional, context, questions, None, Compiler())
    # Answers of other lengths then share compiled code. As for prompts, there are four lengths per
    # power of two.
    longest = int(lengths.max())
    step = max(_STEPS, 2 ** (longest.bit_length() - 3))
    tokens, positions = pad(answers, -(-longest // step) * step)
    nats, likely = _losses(functional, context, tokens, lengths)
    there = positions >= 0
    return AnswerLosses(np.where(there, nats, 0).sum(1, np.float64), (likely | ~there).all(1))  # pyright: ignore[reportArgumentType]  # several answers give an array


def _losses(
    model: FunctionalModel,
    context: Context,
    tokens: Int[np.ndarray, "B M"],
    count: Int[np.ndarray, " B"],
) -> tuple[Float[np.ndarray, "B M"], Bool[np.ndarray, "B M"]]:
    """Returns the losses of the first `count` tokens of each row; the others mean nothing.

    A second array says of each token whether it is the most likely one.

    Raises:
      RuntimeError: as `kvjax.check_dropped`.
      ValueError: written tokens of the context wait for a flush.
    """
    if flush_interval(context.held) is not None and int(context.waiting):
        raise ValueError(
            "context must be from kvjax.read or kvjax.evaluation.ReadOnce, got one in which "
            f"{int(context.waiting)} written tokens wait for a flush"
        )
    inputs = jnp.asarray(tokens, jnp.int32), jnp.asarray(count, jnp.int32)
    state = context.caches, *inputs, context.length, context.logits
    caches, nats, likely = _nll(context.layers, model, *state)
    check_dropped(caches)
    return np.asarray(nats), np.asarray(likely)


def _check_tokens(model: FunctionalModel, tokens: object) -> np.ndarray:
    """Checks shape and range of token ids, and returns them as an array."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 2:
        raise ValueError(f"tokens must have the shape [B, M], got {list(tokens.shape)}")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(f"tokens must be integers, got {tokens.dtype}")
    check_count("batch", len(tokens), 1)
    check_count("tokens of a row", tokens.shape[1], 1)
    outside = tokens[(tokens < 0) | (tokens >= model.vocab_size)]
    if outside.size:
        raise ValueError(f"tokens must lie in [0, {model.vocab_size}), got {outside[0]}")
    return tokens


@compiled(static_argnums=0)
def _nll(
    layers: tuple[KVTransform, ...],
    model: FunctionalModel,
    caches: tuple[Cache, ...],
    tokens: Int[Array, "B M"],
    count: Int[Array, " B"],
    length: Int[Array, " B"],
    logits: Float[Array, "B V"],
) -> tuple[tuple[Cache, ...], Float[Array, "B M"], Bool[Array, "B M"]]:
    def step(logits, caches, inputs):
        token, position = inputs
        losses = _token_losses(logits, token)
        return *decode_step(model, layers, caches, token, position), losses

    # The last token is predicted and not fed: nothing comes after it. Padding is not fed either.
    place = jnp.arange(tokens.shape[1] - 1)[:, None]
    positions = jnp.where(place < count[None] - 1, length[None] + place, -1)
    logits, caches, losses = scan_steps(step, logits, caches, (tokens[:, :-1].T, positions))
    last = _token_losses(logits, tokens[:, -1])
    nats, likely = (jnp.concatenate((x, y[None])).T for x, y in zip(losses, last, strict=True))
    return caches, nats, likely


def _token_losses(
    logits: Float[Array, "B V"], token: Int[Array, " B"]
) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """Returns the negative log-likelihood of a token, and whether it is the most likely one."""
    log_probability = jax.nn.log_softmax(logits.astype(jnp.float32))
    nats = -jnp.take_along_axis(log_probability, token[:, None], axis=-1)[:, 0]
    return nats, most_likely(logits)[0] == token
