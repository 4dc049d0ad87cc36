"""Reads long prompts in pieces, each of which is compressed before the next one is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from kvjax.generation.compiler import Compiler
from kvjax.generation.context import Context
from kvjax.generation.documents import Document, check_document, probe_of, words_of
from kvjax.generation.fingerprints import Fingerprint
from kvjax.generation.model import FunctionalModel
from kvjax.generation.prompt_checks import check_of_model, check_row, check_turn, longest_turn
from kvjax.generation.turns import Start, first_turn, further_turn
from kvjax.messages import brief
from kvjax.protocol import Asking

OnPiece = Callable[[Context], None]


def read_in_pieces(
    model: FunctionalModel,
    prompts: Sequence[Sequence[int]],
    start: Start | Context,
    piece: int,
    compiler: Compiler,
    document: Document,
    on_piece: OnPiece | None,
) -> Context:
    """Returns the awake context of prompts that are read in pieces, one turn after the other.

    Args:
      prompts: of each row.
      start: the settings of new caches, or an awake context that has read the first tokens of each
        row, which is donated.
      piece: tokens of a piece, to which the last one of a row is padded.
      document: as in `read`.
      on_piece: as in `read`.
    """
    whole = np.array(list(map(len, prompts)), np.int32)
    if isinstance(start, Context):
        context, is_new = start, False
    else:
        start = start._replace(widths=[min(width, piece) for width in start.widths])
        first = [prompt[:piece] for prompt in prompts]
        context = first_turn(model, first, start, compiler, document, whole=whole)
        is_new = True
        # `on_piece` may keep it, so that a later call must be able to refuse another model.
        context = dataclasses.replace(context, fingerprint=Fingerprint.of(model))
    while (more := _next_pieces(prompts, np.asarray(context.length), piece)) is not None:
        if is_new and on_piece is not None:
            on_piece(context)
        context = further_turn(model, context, more, [piece], compiler, document, whole=whole)
        is_new = True
    return context


def _next_pieces(
    prompts: Sequence[Sequence[int]], length: Int[np.ndarray, " B"], piece: int
) -> list[Sequence[int] | None] | None:
    """Returns the next piece of each row, None for a row that has none; None: no row has one."""
    pieces = [
        prompt[done : done + piece] or None
        for prompt, done in zip(prompts, length.tolist(), strict=True)
    ]
    return pieces if any(pieces) else None


def check_pieces(
    model: FunctionalModel,
    prompts: Sequence[Sequence[int]],
    start: Start | Context,
    piece: int,
    document: Document,
) -> None:
    """Raises ValueError for pieces that a method refuses, the last ones too.

    Raises TypeError if `document` does not say whether prompts are documents.
    """
    check_document(document)
    size, probe = start.size, probe_of(start.layers) if document else None
    if probe is not None:
        asking = Asking(model, words_of(document), max(map(len, prompts)))
        probe.pieces([list(prompt[-piece:]) for prompt in prompts], piece, asking)
        return
    limited = longest_turn(start.layers, size.max_prompt, size.max_new)
    if limited is None or piece <= limited[0]:
        return
    most, method = limited
    raise ValueError(
        f"a piece of prompts that are not documents must have at most {most} tokens to fit into "
        f"the cache of {brief(method)}, got piece={piece}"
    )


def check_pieces_so_far(
    model: FunctionalModel, context: Context, prompts: Sequence[Sequence[int]], piece: int
) -> None:
    """Raises ValueError for a context in which these prompts have not been begun.

    Raises TypeError or ValueError for a context that the model cannot go on from, and for prompts
    that are not token ids of the model.
    """
    check_of_model(context, model)
    if len(prompts) != context.rows:
        raise ValueError(
            f"prompts must be of the context's {context.rows} rows, got {len(prompts)}"
        )
    for row, prompt in enumerate(prompts):
        check_row(model, row, prompt)
    seen, rows = np.asarray(context.seen), zip(prompts, context.length.tolist(), strict=True)
    for row, (prompt, done) in enumerate(rows):
        if done > len(prompt) or context.new_tokens[row]:
            raise ValueError(
                f"the context must have begun these prompts, it has {done} tokens in row {row}, "
                f"whose prompt has {len(prompt)}"
            )
        if set(np.flatnonzero(seen[row])) != set(prompt[:done]):
            raise ValueError(f"the context has begun another prompt in row {row}")
    rest = [
        prompt[done:] or None for prompt, done in zip(prompts, context.length.tolist(), strict=True)
    ]
    if any(rest):
        check_turn(model, context, rest, 0, document=True, piece=piece)
