"""Projections of queries and keys to the few channels that predict attention scores."""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from jaxtyping import Float

from kvjax.files import write_whole
from kvjax.serialization import static_value

NAME = "infinigen_projections"  # name of the array in a file


@static_value
@dataclass(frozen=True, eq=False, repr=False)
class InfiniGenCalibration:
    """Projections of queries and keys to a few channels; `calibrate_infinigen` computes them.

    Calibrations with equal numbers are equal, and they are hashable.

    Args:
      projections: P of every layer and KV head, from D channels to r, `[layers, H, D, r]` float32.
        A head with fewer than r channels has columns of zeros at the end. The array is copied.

    Raises:
      TypeError: `projections` is no array of floats.
      ValueError: the array does not have four axes, is empty, has more than D channels, or holds a
        number that is not finite.

    Example:
      >>> import numpy as np
      >>> from kvjax.transforms.infinigen.projections import InfiniGenCalibration
      >>> calibration = InfiniGenCalibration(np.ones((4, 2, 16, 3), np.float32))
      >>> calibration.num_layers, calibration.kv_heads, calibration.head_dim, calibration.channels
      (4, 2, 16, 3)
      >>> calibration == InfiniGenCalibration(np.ones((4, 2, 16, 3), np.float32))
      True
    """

    projections: Float[np.ndarray, "N H D r"]
    _digest: bytes = field(init=False)

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
        copy = np.array(array, np.float32, order="C")
        copy.setflags(write=False)
        # Compiled code is looked up by transform at every call, and so by this value: comparing
        # digests is quick.
        digest = hashlib.sha256(repr(copy.shape).encode() + copy.tobytes()).digest()
        object.__setattr__(self, "projections", copy)
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
        """Writes an .npz file, at exactly this path."""
        content = io.BytesIO()
        np.savez(content, **{NAME: self.projections})
        write_whole(Path(path), content.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike) -> InfiniGenCalibration:
        """Reads a file that `save` wrote.

        Raises:
          OSError: there is no such file.
          ValueError: `save` did not write it.
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
