"""The probe of KVzip: an instruction, and the document once more, in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from kvjax.protocol import Asking
from kvjax.transforms.document_budget import Received

# The instruction of the authors' code, in which the end of a chat message follows. Here it is two
# line ends, or before further pieces nothing, since a document need not be in a chat.
FIRST = "\n\nRepeat the previous context exactly.\n\n"
FURTHER = "\n\nRepeat the part of the previous context exactly, starting with"
OVERLAP = 8  # tokens of the piece before, after which a further piece is asked to begin
MULTIPLE = 8  # lengths of pieces are multiples of it, so that few are compiled
LEAST = 32  # tokens of the shortest piece by which a document is repeated


@dataclass(frozen=True)
class Repetition(Received):
    """Repeats a document, in pieces if it is long, and notes what its tokens receive.

    Args:
      piece: tokens of a piece at most; 2,048, where the authors' code has 2,000. Pieces are shorter
        where the model has fewer positions behind the document.
    """

    piece: int = 2048

    instructions: ClassVar[tuple[str, ...]] = (FIRST, FURTHER)

    def pieces(
        self, documents: Sequence[Sequence[int]], width: int, asking: Asking
    ) -> Int[np.ndarray, "B P R"]:
        """Cuts documents into pieces, each with the instruction before it.

        Before a further piece, the instruction ends with the last 8 tokens of the piece before.

        Raises:
          ValueError: the model's positions leave no room for a piece of 32 tokens.
        """
        asked = [()] * 2 if asking.encode is None else map(asking.encode, self.instructions)
        first, further = map(tuple, asked)
        longest = max(len(first), len(further) + OVERLAP)
        piece = self._fitting(longest, asking)
        count = -(-width // piece)
        size = min(piece, width) + (longest if count > 1 else len(first))
        tokens = np.full((len(documents), count, -(-size // MULTIPLE) * MULTIPLE), -1, np.int32)
        for row, document in zip(tokens, documents, strict=True):
            for number, start in enumerate(range(0, len(document), piece)):
                before = (*further, *document[max(start - OVERLAP, 0) : start]) if number else first
                ids = [*before, *document[start : start + piece]]
                row[number, : len(ids)] = ids
        return tokens

    def _fitting(self, longest_instruction: int, asking: Asking) -> int:
        """Returns the tokens of a piece that fits behind the documents."""
        positions, least = asking.model.max_positions, min(LEAST, self.piece)
        if positions is None:
            return self.piece
        piece = min(self.piece, positions - asking.length - longest_instruction)
        if piece < least:
            raise ValueError(
                f"a prompt that is repeated may have {positions - longest_instruction - least} "
                f"tokens at most, so that the model's {positions} positions have room for the "
                f"instruction and a piece of it, got {asking.length}"
            )
        return piece
