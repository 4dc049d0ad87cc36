"""Decoders that are to have the same parameters."""

from __future__ import annotations

import numpy as np
from flax import nnx


def parameters(model) -> dict:
    return {path: leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}


def assert_equal(model, other) -> None:
    """Bit for bit."""
    ours, theirs = parameters(model), parameters(other)
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        assert value.dtype == theirs[path].dtype, path
        np.testing.assert_array_equal(
            np.asarray(value).view(np.uint8), np.asarray(theirs[path]).view(np.uint8), err_msg=path
        )
