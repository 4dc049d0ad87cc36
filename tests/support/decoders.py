"""Random decoders that say something, and decoders that are to have the same parameters."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx

from kvjax.models import Decoder


def louder(decoder: Decoder) -> Decoder:
    """The decoder with weights that are large enough for its text to vary."""
    graph, state = nnx.split(decoder)
    return nnx.merge(graph, jax.tree.map(lambda x: x * 2.0 if x.ndim > 1 else x, state))


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
