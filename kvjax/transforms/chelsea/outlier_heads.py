"""Outlier heads, which keep their whole cache, and the budget that remains for the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from kvjax.calibration import Calibration
from kvjax.checks import check_count
from kvjax.compose.wrappers import HeadGroups
from kvjax.protocol import Full, KVTransform
from kvjax.serialization import static_value


@static_value
@dataclass(frozen=True)
class OutlierHeads(Calibration):
    """KV heads that keep their whole cache: those whose keys resemble each other least.

    The model reads the sample with the full cache. In each KV head, every token of set A has an
    edge to the most similar token of set B, as in Chelsea's first pass; sinks and recent tokens are
    in neither set. A head's score is the share of A whose edge is not above `outlier_threshold`,
    averaged over the texts. The outliers are the `outlier_share` of all heads with the highest
    scores, at least one head; ties go to the lower head. The paper samples WikiText-2.

    Args:
      heads: pairs (layer, KV head), the most outlying first.
      num_layers, kv_heads: numbers of layers and KV heads of the model.

    Raises:
      TypeError: `heads` is not a tuple of pairs of ints; a count is not an int.
      ValueError: a head lies outside the model or is named twice, or all heads are named.

    Example:
      >>> import kvjax
      >>> outliers = kvjax.kit.OutlierHeads(((0, 1), (3, 0)), num_layers=4, kv_heads=2)
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
        super().__post_init__()

    total = property(lambda self: self.num_layers * self.kv_heads)  # heads of the model

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and KV heads of the model."""
        return self.num_layers, self.kv_heads

    def with_layers(self, layers: tuple[int, ...]) -> OutlierHeads:
        """Adds all heads of these layers, and drops the last others so that the number stays.

        If the layers have more heads than there were outliers, only theirs remain.
        """
        if len(set(layers)) < len(layers) or not all(0 <= i < self.num_layers for i in layers):
            raise ValueError(
                f"keep_layers must name some of {self.num_layers} layers, each once, got {layers}"
            )
        of_layers = tuple((layer, head) for layer in layers for head in range(self.kv_heads))
        outside = tuple(head for head in self.heads if head not in of_layers)
        heads = of_layers + outside[: max(len(self.heads) - len(of_layers), 0)]
        return OutlierHeads(heads, self.num_layers, self.kv_heads)

    def remaining(self, budget: int | float, minimum: int = 1) -> float | RemainingBudget:
        """Returns the budget of each other head at which the average over all heads is B.

        With N heads, n of them outliers, and T tokens of a row, it is `(N · B - n · T) / (N - n)`.
        For a share, `B = f · T`, it is a share again.

        Raises:
          TypeError: `budget` is not a number.
          ValueError: the outlier heads use up the whole share.

        Example:
          >>> import kvjax
          >>> round(kvjax.kit.OutlierHeads(((0, 1),), num_layers=2, kv_heads=4).remaining(0.3), 3)
          0.2
        """
        outliers, heads = len(self.heads), self.total
        if isinstance(budget, int | np.integer):
            return RemainingBudget(int(budget), outliers, heads, minimum)
        if not isinstance(budget, float | np.floating):
            raise TypeError(f"outlier heads need a budget that is a number, got {budget!r}")
        if budget * heads <= outliers:
            raise ValueError(
                f"{outliers} of {heads} heads keep everything: a budget of {budget} leaves nothing "
                f"for the others, expected more than {outliers / heads:.4g}"
            )
        return (float(budget) * heads - outliers) / (heads - outliers)

    def split(self, layer: int, transform: KVTransform) -> KVTransform:
        """Returns a layer's transform: `Full` for the outlier heads, `transform` for the others."""
        outliers = tuple(head for head in range(self.kv_heads) if (layer, head) in self.heads)
        regular = tuple(head for head in range(self.kv_heads) if head not in outliers)
        if not (outliers and regular):
            return Full() if outliers else transform
        return HeadGroups(((outliers, Full()), (regular, transform)))


@static_value
@dataclass(frozen=True)
class RemainingBudget:
    """Slots that an average budget leaves for each head where some heads keep everything.

    All rows have the budget of the longest one, because a head that keeps everything stores that
    many slots in every row.

    Args:
      average: B, slots per head.
      whole, heads: n and N, numbers of heads that keep everything and of all heads.
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
        """Returns `⌊(N · B - n · T) / (N - n)⌋`, where T is the greatest of these lengths."""
        tokens = int(lengths.max())
        slots = (self.heads * self.average - self.whole * tokens) // (self.heads - self.whole)
        if slots < self.minimum:
            raise ValueError(
                f"{self.whole} of {self.heads} heads keep all of up to {tokens} tokens: a budget "
                f"of {self.average} leaves {slots} slots for each of the others, expected at least "
                f"{self.minimum}"
            )
        return np.full(lengths.shape, slots)


def _is_pair(head: object) -> bool:
    return isinstance(head, tuple) and len(head) == 2 and all(isinstance(i, int) for i in head)
