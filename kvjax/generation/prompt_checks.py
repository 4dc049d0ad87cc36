"""Checks prompts and turns, and chooses the lengths that prompts are padded to."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, overload

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from kvjax.checks import check_count
from kvjax.compose.ring import Ring
from kvjax.compose.walks import walk
from kvjax.compose.wrappers import by_head_groups
from kvjax.devices import mesh_of
from kvjax.generation.context import Context
from kvjax.generation.documents import Document, probe_of
from kvjax.generation.fingerprints import Fingerprint, differences
from kvjax.generation.model import FunctionalModel
from kvjax.messages import brief
from kvjax.protocol import Extent, KVTransform

_END_TOKENS = 8  # end tokens are padded to a multiple of it, so that few numbers are compiled

Rows = Sequence[Sequence[int] | None]  # token ids of each row; None: the row takes no part


class Sized(Protocol):
    """The sizes that prompts are checked against: those of a model or of its configuration."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        ...

    @property
    def max_positions(self) -> int | None:
        """Most tokens of a row; None: any number."""
        ...


@overload
def as_rows(prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]: ...
@overload
def as_rows(prompts: Rows) -> Rows: ...
def as_rows(prompts: object) -> Rows:
    """Makes lists of prompts that are lists or arrays; does not check the tokens of rows."""
    if isinstance(prompts, np.ndarray | jax.Array):
        prompts = np.asarray(prompts).tolist()
    if isinstance(prompts, str):
        raise TypeError(f"prompts are token ids, got the text {prompts!r:.40}")
    if not isinstance(prompts, Sequence):
        raise TypeError(
            f"prompts must be a list with the token ids of each row, got {brief(prompts)}"
        )
    arrays = np.ndarray | jax.Array
    return [np.asarray(row).tolist() if isinstance(row, arrays) else row for row in prompts]


def check_prompts(
    model: Sized,
    prompts: Sequence[Sequence[int]],
    layers: tuple[KVTransform, ...],
    max_new: int,
    piece: int | None = None,
) -> None:
    """Raises what `generate` would raise for these prompts, before any weight has been loaded.

    Args:
      model: a model, or the configuration of one.
      prompts, max_new: prompts and `max_new_tokens` of `generate`.
      layers: one transform per layer.
      piece: as in `kvjax.read`.
    """
    if not len(prompts):
        raise ValueError("generate needs at least one prompt, got none")
    for row, prompt in enumerate(prompts):
        check_row(model, row, prompt)
    check_positions(model, layers, max(len(prompt) for prompt in prompts), max_new, piece)


def check_positions(
    model: Sized,
    layers: tuple[KVTransform, ...],
    longest: int,
    max_new: int,
    piece: int | None = None,
) -> None:
    """Raises ValueError if a prompt and the new tokens take more positions than the model has.

    Args:
      longest: tokens of the longest prompt.
      model, layers, max_new, piece: as in `check_prompts`.
    """
    limit = model.max_positions
    if limit is None:
        return
    none, count, new = (np.full(1, x) for x in (0, longest, max_new))
    if _positions(layers, longest, none, none, count, new, piece) > limit:
        raise ValueError(
            f"the model has {limit} positions, got a prompt of {longest} tokens and "
            f"{max_new} new ones: {_fewer_positions(layers)}"
        )


def _positions(
    layers: Iterable[KVTransform],
    max_prompt: int,
    length: Int[np.ndarray, " B"],
    written: Int[np.ndarray, " B"],
    count: Int[np.ndarray, " B"],
    new: Int[np.ndarray, " B"],
    piece: int | None,
) -> Int[np.ndarray, " B"]:
    """Returns how many positions a turn takes in each row, in the layer that takes most.

    Keys that are rotated at their rank in the cache (`Needs.reposition`) take as many as the cache
    holds at once: what has been kept, and a piece or a new token.

    Args:
      max_prompt: of the caches.
      length, written: tokens so far, and those of them that the model wrote.
      count, new: tokens of the prompt, and those that the model will write.
      piece: tokens of the prompt that are read at a time; None: all.
    """
    tokens, at_once = length + count, np.minimum(count, piece or count)
    before, after = (Extent(max_prompt, int(x.max())) for x in (written, written + new))
    most = []
    for part in dict.fromkeys(part for layer in layers for part in by_head_groups(layer)):
        if part.needs.reposition:
            reading = np.minimum(tokens - at_once, part.extent(before).total) + at_once
            most.append(np.maximum(reading, np.minimum(tokens + new, part.extent(after).total)))
        else:
            most.append(tokens + new)
    return np.max(most, axis=0)


def repositions(layers: Iterable[KVTransform]) -> bool:
    """Returns whether all layers rotate keys at their rank, so that a text of any length fits."""
    return not list(_with_own_positions(layers))


def _with_own_positions(layers: Iterable[KVTransform]) -> Iterator[KVTransform]:
    """Yields the methods that rotate keys at the positions of their tokens."""
    parts = (part for layer in layers for part in by_head_groups(layer))
    return (part for part in parts if not part.needs.reposition)


def _fewer_positions(layers: Iterable[KVTransform]) -> str:
    """Says how a text can be read for which a model has too few positions."""
    methods = list(_with_own_positions(layers))
    if not methods:
        return (
            "what the cache holds at once must fit into them, so take smaller pieces (piece=, "
            "--piece), a shorter turn or a smaller budget"
        )
    # Layers with windows have rings whatever the method is.
    rings = [method for method in methods if isinstance(method, Ring)]
    said = f"{brief((rings or methods)[0])} keeps tokens at these: take a model with more"
    return said if rings else (
        f"{said}, or read in pieces (piece=, --piece) with streaming_llm(reposition=True), whose "
        "tokens have positions in the cache"
    )  # fmt: skip


def check_turn(
    model: FunctionalModel,
    context: Context,
    prompts: Rows | None,
    max_new: int | Int[np.ndarray, " B"],
    document: Document | None = None,
    piece: int | None = None,
) -> None:
    """Raises what `generate` would raise for a further turn of this context.

    Args:
      max_new: new tokens of every row, or of each row.
      document: as in `generate`.
      piece: as in `kvjax.read`.
    """
    check_of_model(context, model)
    size = context.size
    if prompts is None:
        count = np.zeros(context.rows, int)
    else:
        if len(prompts) != context.rows and (context.rows > 1 or not len(prompts)):
            raise ValueError(
                f"prompts must be of the context's {context.rows} rows, got {len(prompts)}"
            )
        for row, prompt in enumerate(prompts):
            if prompt is not None:
                check_row(model, row, prompt)
        count = np.array([len(prompt or ()) for prompt in prompts])
        if not count.any():
            raise ValueError("a turn needs a prompt of one row at least, got None for all")
    active = count > 0 if count.any() else np.ones(len(count), bool)
    for name, tokens, more, most in (
        ("max_prompt", context.prompt_tokens, count, size.max_prompt),
        ("max_new", context.new_tokens, active * max_new, size.max_new),
    ):
        # A context of one row is repeated for all prompts.
        total = np.broadcast_to(np.asarray(tokens), count.shape) + more
        if (total[active] > most).any():
            row = int(np.argmax(np.where(active, total, -1)))
            raise ValueError(
                f"the context has {name} = {most}, and row {row} would need {total[row]}: "
                f"{total[row] - more[row]} so far and {more[row]} more (kvjax.read takes a larger "
                f"{name})"
            )
    limit = model.max_positions
    if limit is not None:
        both = context.length, context.new_tokens
        so_far, written = (np.broadcast_to(np.asarray(x), count.shape) for x in both)
        new = active * max_new
        taken = _positions(context.layers, size.max_prompt, so_far, written, count, new, piece)
        if (taken[active] > limit).any():
            row = int(np.argmax(np.where(active, taken, -1)))
            raise ValueError(
                f"the model has {limit} positions, and row {row} would need {taken[row]}: "
                f"{so_far[row]} tokens so far and {count[row] + new[row]} more: "
                f"{_fewer_positions(context.layers)}"
            )
    check_longest_turn(context.layers, size.max_prompt, size.max_new, count, document)


def check_longest_turn(
    layers: Sequence[KVTransform],
    max_prompt: int,
    max_new: int,
    count: Int[np.ndarray, " B"],
    document: Document | None,
) -> None:
    """Raises ValueError if prompts that are not documents are longer than a method has room for.

    Args:
      layers, max_prompt, max_new: as in `longest_turn`.
      count: tokens of each row's prompt.
      document: as in `generate`; None: they are not.
    """
    limited = longest_turn(layers, max_prompt, max_new)
    if limited is None or (document and probe_of(layers)):
        return
    most, method = limited
    if (count > most).any():
        row = int(np.argmax(count))
        raise ValueError(
            f"a turn that is not a document must have at most {most} tokens to fit into the cache "
            f"of {brief(method)}, got {count[row]} in row {row}"
        )


def longest_turn(
    layers: Iterable[KVTransform], max_prompt: int, max_new: int
) -> tuple[int, KVTransform] | None:
    """Returns how many tokens a turn may have that is not a document, and the method that says so.

    Args:
      layers: one transform per layer.
      max_prompt, max_new: of the caches.

    Returns:
      The least number of all methods; None: no method has one.
    """
    parts = [part for layer in dict.fromkeys(layers) for part in walk(layer)]
    extent = Extent(max_prompt, max_new)
    # A method comes behind the wrappers around it, so the loop begins with the innermost part.
    turns = ((part.extent(extent).turn, part) for part in reversed(parts))
    limited = ((turn, part) for turn, part in turns if turn is not None)
    return min(limited, key=operator.itemgetter(0), default=None)


def check_of_model(context: Context, model: FunctionalModel) -> None:
    """Raises TypeError or ValueError unless the model can go on from the context."""
    check_context(context)
    context.check_there()
    check_same_model(context, model)
    made_for, mesh = context.size.mesh, mesh_of(model.params)
    if made_for != mesh:
        raise ValueError(
            "the context must lie where the model does, its caches were made for "
            f"{_shown(made_for)}, the model is on {_shown(mesh)}"
        )


def check_context(context: object) -> None:
    """Raises TypeError unless this is a context."""
    if not isinstance(context, Context):
        raise TypeError(
            "context must be a kvjax.Context, as kvjax.read and kvjax.load_context return it, got "
            f"{brief(context)}"
        )


def check_same_model(context: Context, model: FunctionalModel) -> None:
    """Raises ValueError unless the model computes the same as the context's model."""
    there, here = context.fingerprint, Fingerprint.of(model)
    if there != here and (differing := differences(there.content, here.content)):
        raise ValueError(f"the context must be of this model: its {differing}")


def _shown(mesh: Mesh | None) -> str:
    return "one device" if mesh is None else f"a mesh of {dict(mesh.shape)}"


def check_row(model: Sized, row: int, prompt: Sequence[int]) -> None:
    """Raises unless the prompt of a row is a sequence of tokens that the model knows."""
    if isinstance(prompt, str):
        raise TypeError(f"prompts are token ids, got the text {prompt!r:.40} in row {row}")
    ids = np.asarray(prompt)
    if ids.ndim != 1:
        raise TypeError(f"each prompt must be a sequence of token ids, got {prompt!r:.40}")
    if not ids.size:
        raise ValueError(f"a prompt must have at least one token, row {row} is empty")
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"token ids must be integers, got {ids.dtype} in row {row}")
    if ids.min() < 0 or ids.max() >= model.vocab_size:
        wrong = ids[(ids < 0) | (ids >= model.vocab_size)][0]
        raise ValueError(f"token ids must lie in [0, {model.vocab_size}), got {wrong} in row {row}")


def end_token_array(model: object, end_tokens: Sequence[int] | None) -> Int[np.ndarray, " E"]:
    """Returns end tokens, padded with -1.

    Args:
      end_tokens: token ids; None: the `eos_token_ids` of the model's `config`, if there are any.
    """
    if end_tokens is None:
        end_tokens = getattr(getattr(model, "config", None), "eos_token_ids", ())
    if isinstance(end_tokens, str) or not isinstance(end_tokens, Iterable):
        raise TypeError(f"end_tokens must be a sequence of token ids, got {end_tokens!r:.40}")
    for token in end_tokens:
        # For Python, True is the integer 1.
        is_whole = isinstance(token, int | np.integer) and not isinstance(token, bool)
        if not is_whole or not 0 <= token < 2**31:
            raise ValueError(f"end tokens must be token ids from 0 to 2**31 - 1, got {token!r}")
    places = max(-(-len(end_tokens) // _END_TOKENS), 1) * _END_TOKENS
    return np.array([*end_tokens, *[-1] * (places - len(end_tokens))], np.int32)


def bucket(length: int, max_positions: int | None, buckets: Sequence[int] | None) -> int:
    """Returns the smallest bucket that holds a prompt of `length` tokens.

    Args:
      max_positions: positions of the model, above which no default bucket goes; None: no limit.
      buckets: lengths to choose from. None: the multiples of 64 up to 256, then four per power of
        two, which pad a prompt by less than a quarter of its length.
    """
    if buckets is not None:
        _check_buckets(buckets)
        fitting = [size for size in buckets if size >= length]
        if not fitting:
            raise ValueError(f"the longest bucket must hold {length} tokens, got {tuple(buckets)}")
        return min(fitting)
    step = max(64, 2 ** (length.bit_length() - 3))
    size = -(-length // step) * step
    return size if max_positions is None else max(length, min(size, max_positions))


def _check_buckets(buckets: object) -> None:
    """Raises TypeError or ValueError unless these are lengths to choose from."""
    if isinstance(buckets, str) or not isinstance(buckets, Iterable):
        raise TypeError(f"buckets must be a sequence of lengths, got {brief(buckets)}")
    for length in buckets:
        check_count("a length of buckets", length, 1)
