"""Heads that keep their whole cache, and what a budget then leaves for the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from kvjax.checks import check_count
from kvjax.compose.wrappers import HeadGroups
from kvjax.protocol import Full, KVTransform


@dataclass(frozen=True)
class OutlierHeads:
    """KV heads that keep their whole cache; `calibrate_outlier_heads` finds them.

    Args:
      heads: pairs (layer, KV head), the most outlying first.
      num_layers, kv_heads: of the model.

    Raises:
      TypeError: no tuple of pairs of ints, a count that is no int.
      ValueError: a head outside the model or named twice, or no head left over.

    Example:
      >>> import kvjax
      >>> outliers = kvjax.OutlierHeads(((0, 1), (3, 0)), num_layers=4, kv_heads=2)
      >>> layers = kvjax.bind(kvjax.Chelsea(budget=0.5, outlier_heads=outliers), 4)
      >>> [type(layer).__name__ for layer in layers]
      ['HeadGroups', 'Chelsea', 'Chelsea', 'HeadGroups']
    """

    heads: tuple[tuple[int, int], ...]
    num_layers: int
    kv_heads: int

    def __post_init__(self):
        check_count("num_layers", self.num_layers, 1)
        check_count("kv_heads", self.kv_heads, 1)
        if not isinstance(self.heads, tuple) or not all(map(_is_pair, self.heads)):
            raise TypeError(f"heads must be a tuple of (layer, KV head) pairs, got {self.heads!r}")
        model = f"a model of {self.num_layers} layers with {self.kv_heads} KV heads"
        for layer, head in self.heads:
            if not (0 <= layer < self.num_layers and 0 <= head < self.kv_heads):
                raise ValueError(f"heads must lie in {model}, got {(layer, head)}")
        if len(set(self.heads)) < len(self.heads):
            raise ValueError(f"heads must name each head once, got {self.heads}")
        if len(self.heads) >= self.total:
            raise ValueError(f"heads must leave some of {model} over, got all {self.total}")

    total = property(lambda self: self.num_layers * self.kv_heads)  # heads of the model

    def with_layers(self, layers: tuple[int, ...]) -> OutlierHeads:
        """All heads of these layers, and as many of the first others as there were heads."""
        if len(set(layers)) < len(layers) or not all(0 <= i < self.num_layers for i in layers):
            raise ValueError(
                f"keep_layers must name some of {self.num_layers} layers, each once, got {layers}"
            )
        first = tuple((layer, head) for layer in layers for head in range(self.kv_heads))
        others = tuple(head for head in self.heads if head not in first)
        heads = first + others[: max(len(self.heads) - len(first), 0)]
        return OutlierHeads(heads, self.num_layers, self.kv_heads)

    def remaining(self, budget: int | float, minimum: int = 1) -> float | RemainingBudget:
        """What an average budget B leaves for each of the other heads, so that the total stays.

        With N heads, n of them whole, and T tokens of a row, that is `(N · B - n · T) / (N - n)`:
        of a share `B = f · T` another share.

        Raises:
          TypeError: no number.
          ValueError: a share that the whole heads use up.

        Example:
          >>> import kvjax
          >>> round(kvjax.OutlierHeads(((0, 1),), num_layers=2, kv_heads=4).remaining(0.3), 3)
          0.2
        """
        whole, heads = len(self.heads), self.total
        if isinstance(budget, int | np.integer):
            return RemainingBudget(int(budget), whole, heads, minimum)
        if not isinstance(budget, float | np.floating):
            raise TypeError(f"outlier heads need a budget that is a number, got {budget!r}")
        if budget * heads <= whole:
            raise ValueError(
                f"{whole} of {heads} heads keep everything: a budget of {budget} leaves nothing "
                f"for the others, expected more than {whole / heads:.4g}"
            )
        return (float(budget) * heads - whole) / (heads - whole)

    def split(self, layer: int, transform: KVTransform) -> KVTransform:
        """A layer of which the outlier heads keep everything and the others have `transform`."""
        whole = tuple(head for head in range(self.kv_heads) if (layer, head) in self.heads)
        others = tuple(head for head in range(self.kv_heads) if head not in whole)
        if not (whole and others):
            return Full() if whole else transform
        return HeadGroups(((whole, Full()), (others, transform)))


@dataclass(frozen=True)
class RemainingBudget:
    """What an average number of slots leaves for each head where some heads keep everything.

    Of all rows it is that of the longest one: whole heads store that many slots, whatever a row
    has.

    Args:
      average: slots per head B.
      whole, heads: n and N.
      minimum: the smallest workable number of slots.

    Example:
      >>> import numpy as np
      >>> from kvjax.transforms.chelsea.outlier_heads import RemainingBudget
      >>> RemainingBudget(200, whole=4, heads=100, minimum=81)(np.array([10, 1000])).tolist()
      [166, 166]
    """

    average: int
    whole: int
    heads: int
    minimum: int

    def __call__(self, lengths: Int[np.ndarray, " L"]) -> Int[np.ndarray, " L"]:
        """`⌊(N · B - n · T) / (N - n)⌋`, T being the greatest of these lengths."""
        tokens = int(lengths.max())
        left = (self.heads * self.average - self.whole * tokens) // (self.heads - self.whole)
        if left < self.minimum:
            raise ValueError(
                f"{self.whole} of {self.heads} heads keep all of up to {tokens} tokens: a budget "
                f"of {self.average} leaves {left} slots for each of the others, expected at least "
                f"{self.minimum}"
            )
        return np.full(lengths.shape, left)


def _is_pair(head: object) -> bool:
    return isinstance(head, tuple) and len(head) == 2 and all(isinstance(i, int) for i in head)
