"""Projections of queries and keys to the few channels that predict attention scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from kvjax.calibration import Calibration
from kvjax.protocol import KVTransform, Needs


@dataclass(frozen=True)
class InfiniGenCalibration(Calibration):
    """Projections of queries and keys to the few channels by which `InfiniGen` predicts attention.

    The model reads the sample with the full cache. In each KV head, the rotated queries q of its
    group are the rows of one matrix, and A holds the right singular vectors of that matrix. A is
    orthogonal, so it changes no product of a query and a key, `qA · kA = q · k`, but it gathers
    most of the product in few channels. Let k be the head's rotated keys. The projection P has the
    columns of A for the `n = max(1, int(channels · D))` channels with the largest `Σ |q A|`, and
    for the n channels with the largest `Σ |k A|`: at most 2n channels per head, padded with zeros
    to the largest number that a head has. Model and sample determine it, except for the channels'
    signs. A sample should have several times as many tokens as a head has channels.

    Args:
      projections: P of every layer and KV head, from D channels to r, `[layers, H, D, r]`.

    Raises:
      TypeError: `projections` is not an array of floats.
      ValueError: the array does not have four axes, is empty, has more than D channels, or holds a
        number that is not finite.

    Example:
      >>> import numpy as np
      >>> from kvjax.transforms.infinigen.projections import InfiniGenCalibration
      >>> calibration = InfiniGenCalibration(np.ones((4, 2, 16, 3), np.float32))
      >>> calibration.shape, calibration.head_dim, calibration.channels
      ((4, 2), 16, 3)
      >>> calibration == InfiniGenCalibration(np.ones((4, 2, 16, 3), np.float32))
      True
    """

    projections: Float[np.ndarray, "N H D r"]

    def __post_init__(self):
        array = np.asarray(self.projections)
        if not np.issubdtype(array.dtype, np.floating):
            raise TypeError(f"projections must be an array of floats, got {self.projections!r:.80}")
        if array.ndim != 4 or not array.size or array.shape[3] > array.shape[2]:
            raise ValueError(
                "projections must be [layers, KV heads, head_dim, channels], none of them 0 and "
                f"channels at most head_dim, got {array.shape}"
            )
        if not np.isfinite(array).all():
            raise ValueError("projections must be finite, got NaN or infinity")
        super().__post_init__()

    head_dim = property(lambda self: self.projections.shape[2])
    channels = property(lambda self: self.projections.shape[3])


@dataclass(frozen=True)
class WithQueries(KVTransform):
    """The full cache, with the queries of so many tokens when a prompt is complete."""

    tokens: int

    @property
    def needs(self) -> Needs:
        """The queries of so many tokens."""
        return Needs(query_window=self.tokens)


def find_projections(
    observed: Sequence[Sequence[tuple[np.ndarray, ...]]], share: float
) -> InfiniGenCalibration:
    """Finds the strongest channels of every head, over all texts.

    Args:
      observed: of each text and layer, queries `[Q, T, D]`, their positions `[T]`, keys `[H, S, D]`
        and theirs `[H, S]`; positions are -1 where there is none.
      share: share of the channels.
    """
    projections = [
        [partial_projection(*_of_head(texts, head), share) for head in range(len(texts[0][2]))]
        for texts in zip(*observed, strict=True)
    ]
    # A channel may be among the first n of queries and of keys, so that heads differ in number.
    most = max(p.shape[1] for heads in projections for p in heads)
    padded = [[np.pad(p, ((0, 0), (0, most - p.shape[1]))) for p in x] for x in projections]
    return InfiniGenCalibration(np.array(padded))


def _of_head(
    texts: Sequence[tuple[np.ndarray, ...]], head: int
) -> tuple[Float[np.ndarray, "M D"], Float[np.ndarray, "N D"]]:
    """Returns the queries and the keys of a KV head, of all tokens of all texts."""
    queries, keys = [], []
    for query, query_position, key, position in texts:
        groups = query.reshape(len(key), -1, *query.shape[1:])  # [H, G, T, D]
        queries.append(groups[head][:, query_position >= 0].reshape(-1, key.shape[-1]))
        keys.append(key[head][position[head] >= 0])
    return np.concatenate(queries), np.concatenate(keys)


def partial_projection(
    queries: Float[np.ndarray, "M D"], keys: Float[np.ndarray, "N D"], share: float
) -> Float[np.ndarray, "D r"]:
    """Computes P of one KV head: the strongest channels of its skewed queries and keys.

    A is the matrix of the queries' right singular vectors, by descending singular value. With
    `n = max(1, int(share · D))`, P consists of the n columns of A with the largest `Σ |q A|` and
    the n columns with the largest `Σ |k A|`, in the order of A. Ties go to the lower column. The
    sign of a column is arbitrary.

    Args:
      queries: rotated queries of all query heads of the group.
      keys: rotated keys.
      share: share of the D channels.

    Example:
      >>> import numpy as np
      >>> from kvjax.transforms.infinigen.projections import partial_projection
      >>> queries, keys = np.diag([3.0, 9.0, 2.0, 1.0]), np.array([[0.0, 0.0, 5.0, 0.0]])
      >>> np.abs(partial_projection(queries, keys, 0.25)).T.tolist()
      [[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]
    """
    queries, keys = (np.asarray(x, np.float64) for x in (queries, keys))
    # The triangular factor of a QR decomposition has the same right singular vectors, and at most D
    # rows.
    triangle = np.linalg.qr(queries, mode="r")
    skew = np.linalg.svd(triangle)[2].T
    count = max(1, int(share * len(skew)))
    strongest = [
        np.argsort(-np.abs(x @ skew).sum(axis=0), kind="stable")[:count] for x in (queries, keys)
    ]
    return skew[:, np.union1d(*strongest)]
