"""Compositions whose KVzip has no more room than later turns can use."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvjax.checks import check_count
from kvjax.compose.walks import MethodHeads, map_methods
from kvjax.protocol import KVTransform, check_transform
from kvjax.transforms.kvzip.kvzip import KVzip


def with_room(transform: KVTransform, tokens: int) -> KVTransform:
    """Returns the composition in which the `room` of every `KVzip` is at most so many tokens.

    Args:
      transform: any.
      tokens: most tokens of all prompts that come after the document.

    Raises:
      TypeError, ValueError: no transform, or `tokens` below 1.

    Example:
      >>> import kvjax
      >>> from kvjax.transforms.kvzip.room import with_room
      >>> kvjax.unparse(with_room(kvjax.chain(kvjax.KVzip(0.2), kvjax.Quantize()), tokens=64))
      'chain(kvzip(budget=0.2, room=64), quantize)'
    """
    check_transform(transform, "with_room")
    check_count("tokens", tokens, 1)
    return map_methods(_WithRoom(tokens), transform)


@dataclass(frozen=True)
class _WithRoom:
    """Gives a method no more room than this; a function for `map_methods`."""

    tokens: int

    def __call__(self, method: KVTransform, heads: MethodHeads) -> KVTransform:
        if not isinstance(method, KVzip):
            return method
        return dataclasses.replace(method, room=min(method.room, self.tokens))
