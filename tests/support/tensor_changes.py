"""Changes of a checkpoint's tensors, by name, for tests of what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Change = Callable[[dict[str, Any]], Any]


def remove(name: str) -> Change:
    """Returns a change that removes a tensor."""
    return lambda tensors: tensors.pop(name)


def put(name: str, value: Any) -> Change:
    """Returns a change that adds or replaces a tensor."""
    return lambda tensors: tensors.update({name: value})
