"""Documents: prompts at which a method's probe looks once more."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from kvjax.compose.wrappers import by_head_groups
from kvjax.devices import put_by_rows
from kvjax.generation.groups import Group
from kvjax.messages import brief
from kvjax.protocol import Asking, KVTransform, Needs, Probe


class Tokenizer(Protocol):
    """Turns texts into token ids, as tokenizers of `transformers` do."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Returns the token ids of a text."""
        ...


Document = bool | Tokenizer
"""Whether prompts are documents. A tokenizer: they are, and probes may ask with words."""


class Pieces(NamedTuple):
    """Tokens that look at the documents of a group, in pieces, padded.

    Args:
      tokens: token ids, `[G, P, R]`.
      positions: their positions, which go on behind the document; -1 marks padding.
    """

    tokens: Int[Array, "G P R"]
    positions: Int[Array, "G P R"]


def check_document(document: object) -> None:
    """Raises TypeError unless this says whether prompts are documents."""
    if not (document is None or isinstance(document, bool) or hasattr(document, "encode")):
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
    needs = {tx.needs for layer in set(layers) for tx in by_head_groups(layer)}
    return functools.reduce(Needs.union, needs, Needs()).probe


def pieces_of(
    probe: Probe, asking: Asking, group: Group, prompts: Sequence[Sequence[int]],
    length: Int[np.ndarray, " B"], mesh: Mesh | None,
) -> Pieces | None:  # fmt: skip
    """Makes the tokens that look at the documents of a group; None: none do.

    Args:
      prompts: of all rows.
      length: tokens of each row with its document, `[B]`.
    """
    rows = range(len(prompts)) if group.rows is None else group.rows
    documents = [list(prompts[row]) for row in rows]
    tokens = probe.pieces(documents, group.tokens.shape[1], asking)
    if tokens is None:
        return None
    there = tokens >= 0
    positions = length[list(rows)][:, None, None] + there.cumsum(-1) - 1
    positions = np.where(there, positions, -1).astype(np.int32)
    return Pieces(put_by_rows(np.maximum(tokens, 0), mesh), put_by_rows(positions, mesh))
