"""The repetition of a prompt: an instruction and the prompt once more, in pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from kvjax.checks import check_count
from kvjax.compose.wrappers import by_head_groups
from kvjax.devices import put_by_rows
from kvjax.generation.groups import Group
from kvjax.protocol import KVTransform

_OVERLAP = 8  # tokens of the piece before, after which a further piece is asked to begin
_MULTIPLE = 8  # lengths of pieces are multiples of it, so that few are compiled
_LEAST = 32  # tokens of the shortest piece by which a prompt is repeated


@dataclass(frozen=True)
class Repetition:
    """Instruction with which a prompt is repeated, for methods that look at its repetition.

    A long prompt is repeated in pieces, each of which sees the prompt and itself.

    Args:
      first: token ids between the prompt and its first piece; none by default.
      further: token ids before a further piece; the last 8 tokens of the piece before follow them.
      piece: tokens of a piece at most; 2,048, where the authors' code has 2,000. Pieces are shorter
        where the model has fewer positions behind the prompt.

    Raises:
      TypeError, ValueError: `piece` is no int, or below 1.

    Example:
      >>> import kvjax
      >>> kvjax.Repetition(first=(5, 6)).piece
      2048

    References:
      Kim et al., KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, arXiv
      2505.23416.
    """

    first: tuple[int, ...] = ()
    further: tuple[int, ...] = ()
    piece: int = 2048

    def __post_init__(self):
        check_count("piece", self.piece, 1)

    @classmethod
    def of(cls, tokenizer: Any) -> Repetition:
        """Returns the instruction of the authors' code, in the tokens of a model.

        There the end of a chat message follows it; here two line ends, or before further pieces
        nothing, since a document need not be in a chat.

        Args:
          tokenizer: tokenizer of the model, from `transformers`.
        """
        texts = (
            "\n\nRepeat the previous context exactly.\n\n",
            "\n\nRepeat the part of the previous context exactly, starting with",
        )
        return cls(*(tuple(tokenizer(x, add_special_tokens=False).input_ids) for x in texts))

    @property
    def longest_instruction(self) -> int:
        """Most tokens before a piece."""
        return max(len(self.first), len(self.further) + _OVERLAP)

    def fitting(self, length: int, max_positions: int | None) -> Repetition:
        """Returns the repetition whose pieces fit behind a prompt, into the model's positions.

        Args:
          length: tokens of the prompt, and of all before it.
          max_positions: of the model; None: no limit.

        Raises:
          ValueError: a piece would have fewer than 32 tokens.
        """
        if max_positions is None:
            return self
        piece = min(self.piece, max_positions - length - self.longest_instruction)
        if piece < min(_LEAST, self.piece):
            most = max_positions - self.longest_instruction - min(_LEAST, self.piece)
            raise ValueError(
                f"a prompt that is repeated may have {most} tokens at most, so that the model's "
                f"{max_positions} positions have room for the instruction and a piece of it, got "
                f"{length}"
            )
        return dataclasses.replace(self, piece=piece)


class Pieces(NamedTuple):
    """Pieces of the repetitions of a group's prompts, padded.

    Args:
      tokens: token ids, `[G, P, R]`.
      positions: their positions, which go on behind the prompt; -1 marks padding.
    """

    tokens: Int[Array, "G P R"]
    positions: Int[Array, "G P R"]


def wants_repetition(layers: Sequence[KVTransform]) -> bool:
    """Tells whether any layer's transform looks at the prompt's repetition."""
    return any(tx.needs.repetition for layer in layers for tx in by_head_groups(layer))


def pieces_of(
    repetition: Repetition,
    group: Group,
    prompts: Sequence[Sequence[int]],
    length: Int[np.ndarray, " B"],
    mesh: Mesh | None,
) -> Pieces:
    """Cuts the prompts of a group into the pieces in which they are repeated.

    Args:
      prompts: of all rows.
      length: tokens of each row with its prompt, `[B]`.
    """
    width, piece = group.tokens.shape[1], repetition.piece
    numbers = range(len(prompts)) if group.rows is None else group.rows
    count = -(-width // piece)
    before = repetition.longest_instruction if count > 1 else len(repetition.first)
    size = -(-(min(piece, width) + before) // _MULTIPLE) * _MULTIPLE
    tokens = np.zeros((len(numbers), count, size), np.int32)
    positions = np.full(tokens.shape, -1, np.int32)
    for place, row in enumerate(numbers):
        prompt = list(prompts[row])
        for number, start in enumerate(range(0, len(prompt), piece)):
            asked = repetition.first
            if number:
                asked = (*repetition.further, *prompt[max(start - _OVERLAP, 0) : start])
            ids = [*asked, *prompt[start : start + piece]]
            tokens[place, number, : len(ids)] = ids
            positions[place, number, : len(ids)] = length[row] + np.arange(len(ids))
    return Pieces(put_by_rows(tokens, mesh), put_by_rows(positions, mesh))
