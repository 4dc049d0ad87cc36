"""Decoders without weights: configurations by name, and parameters that are shapes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from kvjax.messages import brief
from kvjax.regular_files import read_json

from .config import DecoderConfig
from .decoder import Decoder
from .families import FAMILIES, check_raw_config, parse_config
from .placement import weight_placement
from .tensor_names import ParameterPath

_LLAMA_3_1 = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "hidden_act": "silu",
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


def _llama_3_1(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate}
    return _LLAMA_3_1 | sizes | {"num_hidden_layers": layers, "num_attention_heads": heads}


SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _llama_3_1(4096, 14336, 32, 32),
    "llama-3.1-70b": _llama_3_1(8192, 28672, 80, 64),
    "llama-3.1-405b": _llama_3_1(16384, 53248, 126, 128),
}
"""What `config.json` says of models that are known by name."""


def shape_config(given: str | os.PathLike[str]) -> DecoderConfig:
    """The configuration of a model of which no weights are needed.

    Args:
      given: a folder with `config.json`, such a file by itself, or a name of `SHAPES`. How the
        weights are stored (`quantization_config`) is not looked at.

    Raises:
      ValueError: it is none of them, or what `read_config` refuses of a configuration.

    Example:
      >>> from kvjax.models.shapes import shape_config
      >>> shape_config("llama-3.1-70b").num_layers
      80
    """
    path = Path(given)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        raw = {k: x for k, x in read_json(path).items() if k != "quantization_config"}
        check_raw_config(raw, path)
        return _parsed(raw, path)
    name = os.fspath(given)
    if name not in SHAPES:
        raise ValueError(
            "model must be a folder with config.json, such a file, or one of "
            f"{', '.join(SHAPES)}, got {brief(name)}"
        )
    return _parsed(SHAPES[name], path)


def _parsed(raw: Mapping[str, Any], path: Path) -> DecoderConfig:
    return parse_config(raw, FAMILIES[raw["model_type"]], path)


def abstract_decoder(
    config: DecoderConfig,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    mesh: Mesh | AbstractMesh | None = None,
) -> Decoder:
    """A decoder whose parameters are shapes, with the place of each on a mesh.

    Args:
      config: what the decoder is made of.
      dtype: of the weights.
      mesh: as in `from_pretrained`; its devices need not be there (`AbstractMesh`).

    Example:
      >>> from kvjax.models import abstract_decoder
      >>> from kvjax.models.shapes import shape_config
      >>> model = abstract_decoder(shape_config("llama-3.1-70b"))
      >>> model.layers[0].mlp.up_proj.kernel.get_value().shape
      (8192, 28672)
    """
    graphdef, parameters = abstract_parameters(config, dtype)
    rule = None if mesh is None else weight_placement(config, mesh)
    for path, variable in parameters.items() if rule is not None else ():
        x = variable.get_value()
        value = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rule(path))
        parameters[path] = variable.replace(value)
    return nnx.merge(graphdef, nnx.from_flat_state(parameters))


def abstract_parameters(
    config: DecoderConfig, dtype: DTypeLike
) -> tuple[nnx.GraphDef, dict[ParameterPath, nnx.Variable]]:
    """A decoder without weights: its graph, and its parameters as shapes, by their paths."""
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    )
    return graphdef, dict(nnx.to_flat_state(state))
