"""Documents: prompts at which a method's probe looks once more."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Int

from kvjax.compose.wrappers import needs_of
from kvjax.devices import mesh_of, put_by_rows
from kvjax.generation.groups import Group, Looking, Pieces
from kvjax.generation.model import FunctionalModel
from kvjax.messages import brief
from kvjax.protocol import Asking, KVTransform, Needs, Probe


class Tokenizer(Protocol):
    """Turns texts into token ids, as tokenizers of `transformers` do."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Returns the token ids of a text."""
        ...


Document = bool | Tokenizer
"""Whether prompts are documents. A tokenizer: they are, and probes may ask with words."""


def check_document(document: object) -> None:
    """Raises TypeError unless this says whether prompts are documents."""
    # A string has `encode`, too.
    encodes = hasattr(document, "encode") and not isinstance(document, str)
    if not (document is None or isinstance(document, bool) or encodes):
        raise TypeError(f"document must be True, False or a tokenizer, got {brief(document)}")


def words_of(document: Document | None) -> Callable[[str], Sequence[int]] | None:
    """Returns the function from a text to the token ids with which a probe asks; None: no words."""
    if document is None or isinstance(document, bool):
        return None
    return functools.partial(document.encode, add_special_tokens=False)


def probe_of(layers: Sequence[KVTransform]) -> Probe | None:
    """Returns the probe of a model's layers; None: no method looks at documents once more.

    Raises:
      ValueError: layers have probes that do not go together.
    """
    return functools.reduce(Needs.union, map(needs_of, set(layers)), Needs()).probe


def looked_at(
    groups: list[Group],
    prompts: Sequence[Sequence[int] | np.ndarray],
    length: Int[np.ndarray, " B"],
    document: Document,
    model: FunctionalModel,
    layers: tuple[KVTransform, ...],
    whole: Int[np.ndarray, " B"] | None = None,
) -> list[Group]:
    """Returns the groups with how a probe looks at their prompts, if these are documents.

    Args:
      prompts: of all rows.
      length: tokens of each row with its prompt.
      whole: tokens of each row's document, of which the prompt is a piece; None: it is all of it.
    """
    check_document(document)
    probe = probe_of(layers) if document else None
    if probe is None:
        return groups
    longest = max(int(length[row]) for row, prompt in enumerate(prompts) if len(prompt))
    asking, mesh = Asking(model, words_of(document), longest), mesh_of(model.params)
    whole = np.array(list(map(len, prompts)), np.int32) if whole is None else whole

    def looking(group: Group) -> Looking:
        rows = list(range(len(prompts)) if group.rows is None else group.rows)
        documents = [list(prompts[row]) for row in rows]
        tokens = probe.pieces(documents, group.tokens.shape[1], asking)
        of_rows = put_by_rows(whole[rows], mesh)
        if tokens is None:
            return Looking(None, of_rows)
        _check_pieces(tokens, len(rows), asking.model.vocab_size, type(probe).__name__)
        there = tokens >= 0
        positions = length[rows][:, None, None] + there.cumsum(-1, dtype=np.int32) - 1
        arrays = np.maximum(tokens, 0), np.where(there, positions, -1)
        return Looking(Pieces(*(put_by_rows(x, mesh) for x in arrays)), of_rows)

    return [group._replace(looking=looking(group)) for group in groups]


def _check_pieces(tokens: object, rows: int, vocabulary: int, whose: str) -> None:
    """Raises TypeError or ValueError unless `tokens` are the tokens of pieces."""
    said = f"{whose}.pieces must return integers [{rows} documents, pieces, tokens] in NumPy"
    if not isinstance(tokens, np.ndarray):
        raise TypeError(f"{said} or None, got {type(tokens).__name__}")
    if tokens.dtype.kind != "i" or tokens.ndim != 3 or len(tokens) != rows:
        raise ValueError(f"{said}, got {tokens.dtype} of shape {tokens.shape}")
    if tokens.size and tokens.max() >= vocabulary:
        raise ValueError(
            f"{said}, below {vocabulary}, the size of the vocabulary, got {tokens.max()}"
        )
