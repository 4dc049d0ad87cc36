"""What the command line shows without a model: a small random one and a text for it to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvjax.models import Decoder

PROMPT_TOKENS = 2048
_VOCABULARY = 128  # one token per ASCII character
_PASSAGE = """\
The harbour master kept a ledger of everything that came in with the tide: rope, lemons, letters
for people who had moved away. In spring the ledger was thin and he knew each line by heart. By
autumn it filled three shelves, and when somebody asked for a parcel he had to walk along them
with a lamp. So he made a rule. Of every week he would keep the first page, since it said how the
week began, the last page, since it was the one people asked about, and of the rest only the lines
that somebody had come to look at. Nobody noticed. The shelves stayed short, and the lamp lasted
longer.

"""


def bundled_prompt() -> str:
    """A short text, repeated to `PROMPT_TOKENS` ASCII characters."""
    return (_PASSAGE * (PROMPT_TOKENS // len(_PASSAGE) + 1))[:PROMPT_TOKENS]


def encode(text: str) -> list[int]:
    """The random model's tokens: ASCII codes, that of `?` for every other character."""
    return list(text.encode("ascii", errors="replace"))


def decode(tokens: Sequence[int]) -> str:
    """The random model's text, a middle dot for every character that cannot be printed."""
    return "".join(chr(token) if 32 <= token < 127 else "·" for token in tokens)


def random_model(seed: int = 0) -> Decoder:
    """A decoder of two million random weights, with one token per ASCII character.

    Large enough for the cache to matter: at `PROMPT_TOKENS` tokens a decode step spends most of its
    time on attention.
    """
    # Imported here: the library itself does without kvjax.models.
    from kvjax.models import DecoderConfig, RopeConfig, random_decoder

    head_dim = 32
    config = DecoderConfig(
        vocab_size=_VOCABULARY, hidden_size=256, intermediate_size=512, num_layers=4,
        query_heads=8, kv_heads=4, head_dim=head_dim, rope=RopeConfig(rotary_dim=head_dim),
        max_positions=8192,
    )  # fmt: skip
    return random_decoder(config, seed)
