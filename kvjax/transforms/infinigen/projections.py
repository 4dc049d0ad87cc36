"""Directions in which few channels of queries and keys say what attention will look at."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from zipfile import BadZipFile

import numpy as np
from jaxtyping import Float

NAME = "infinigen_projections"  # of the array in a file


@dataclass(frozen=True, eq=False, repr=False)
class InfiniGenCalibration:
    """Projections of queries and keys to few channels; `calibrate_infinigen` finds them.

    It is a value: equal where the numbers are, and hashable.

    Args:
      projections: P of every layer and KV head, D channels to r, `[layers, H, D, r]` float32. A
        head with fewer than r has columns of zeros at the end. The array is copied.

    Raises:
      TypeError: no array of floats.
      ValueError: not four axes, an empty one, more than D channels, or a number that is not finite.

    Example:
      >>> import numpy as np
      >>> from kvjax.transforms.infinigen.projections import InfiniGenCalibration
      >>> found = InfiniGenCalibration(np.ones((4, 2, 16, 3), np.float32))
      >>> found.num_layers, found.kv_heads, found.head_dim, found.channels
      (4, 2, 16, 3)
      >>> found == InfiniGenCalibration(np.ones((4, 2, 16, 3), np.float32))
      True
    """

    projections: Float[np.ndarray, "N H D r"]
    _digest: bytes = field(init=False)

    def __post_init__(self):
        given = np.asarray(self.projections)
        if not np.issubdtype(given.dtype, np.floating):
            raise TypeError(f"projections must be an array of floats, got {self.projections!r:.80}")
        if given.ndim != 4 or not given.size or given.shape[3] > given.shape[2]:
            raise ValueError(
                "projections must be [layers, KV heads, head_dim, channels], none of them 0 and "
                f"channels at most head_dim, got {given.shape}"
            )
        if not np.isfinite(given).all():
            raise ValueError("projections must be finite, got NaN or infinity")
        own = np.array(given, np.float32, order="C")
        own.setflags(write=False)
        # Compiled code is looked up by transform, and so by this value, at every call.
        digest = hashlib.sha256(repr(own.shape).encode() + own.tobytes()).digest()
        object.__setattr__(self, "projections", own)
        object.__setattr__(self, "_digest", digest)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, InfiniGenCalibration):
            return NotImplemented
        return self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        return (
            f"InfiniGenCalibration(layers={self.num_layers}, kv_heads={self.kv_heads}, "
            f"head_dim={self.head_dim}, channels={self.channels}, id={self._digest.hex()[:8]})"
        )

    num_layers = property(lambda self: self.projections.shape[0])
    kv_heads = property(lambda self: self.projections.shape[1])
    head_dim = property(lambda self: self.projections.shape[2])
    channels = property(lambda self: self.projections.shape[3])

    def save(self, path: str | os.PathLike) -> None:
        """Writes one .npz file, at exactly this path."""
        with open(path, "wb") as file:
            np.savez(file, **{NAME: self.projections})

    @classmethod
    def load(cls, path: str | os.PathLike) -> InfiniGenCalibration:
        """What `save` wrote.

        Raises:
          OSError: no such file.
          ValueError: a file of something else.
        """
        with open(path, "rb") as file:
            try:
                with np.load(file, allow_pickle=False) as arrays:
                    return cls(arrays[NAME])
            except (AttributeError, EOFError, KeyError, TypeError, ValueError, BadZipFile) as error:
                raise ValueError(
                    f"{os.fspath(path)!r} is no file that InfiniGenCalibration.save wrote"
                ) from error


def partial_projection(
    queries: Float[np.ndarray, "M D"], keys: Float[np.ndarray, "N D"], share: float
) -> Float[np.ndarray, "D r"]:
    """P of one KV head: the strongest channels of its skewed queries and keys.

    A is the matrix of the queries' right singular vectors, by descending singular value. Of its
    columns stay the `n = max(1, int(share · D))` of the largest `Σ |q A|` and the n of the largest
    `Σ |k A|` (ties to the lower column), in their order.

    Args:
      queries: rotated queries of all query heads of the group. The sign of a column is free.
      keys: rotated keys.

    Example:
      >>> import numpy as np
      >>> from kvjax.transforms.infinigen.projections import partial_projection
      >>> queries, keys = np.diag([3.0, 9.0, 2.0, 1.0]), np.array([[0.0, 0.0, 5.0, 0.0]])
      >>> np.abs(partial_projection(queries, keys, 0.25)).T.tolist()
      [[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]
    """
    queries, keys = (np.asarray(x, np.float64) for x in (queries, keys))
    # The triangular factor has the same right singular vectors, and at most D rows.
    triangle = np.linalg.qr(queries, mode="r")
    skew = np.linalg.svd(triangle)[2].T
    count = max(1, int(share * len(skew)))
    strongest = [
        np.argsort(-np.abs(x @ skew).sum(axis=0), kind="stable")[:count] for x in (queries, keys)
    ]
    return skew[:, np.union1d(*strongest)]
