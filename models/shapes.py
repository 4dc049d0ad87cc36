"""Decoders without weights: configurations by name, and parameters as shapes."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from kvjax.checks import check_count
from kvjax.files import read_json
from kvjax.messages import brief, did_you_mean

from .checkpoints import read_config
from .config import DecoderConfig
from .decoder import Decoder
from .families import FAMILIES, check_model_type, parse_config
from .packaged import PACKAGED, find_packaged
from .placement import weight_placement
from .tensor_names import ParameterPath


def _llama_3(
    hidden: int, intermediate: int, layers: int, heads: int, factor: float = 8.0, tied: bool = False
) -> dict[str, Any]:
    """Returns a `config.json` of Llama 3.1 or 3.2, with a context stretched from 8,192 tokens."""
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    return {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_scaling": scaling, "tie_word_embeddings": tied, "hidden_act": "silu",
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _llama_3(4096, 14336, 32, 32),
    "llama-3.1-70b": _llama_3(8192, 28672, 80, 64),
    "llama-3.1-405b": _llama_3(16384, 53248, 126, 128),
    "llama-3.2-1b": _llama_3(2048, 8192, 16, 32, factor=32.0, tied=True),
    "mistral-7b-v0.2": {
        "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "qwen2-7b": {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584,
        "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "use_sliding_window": False, "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "glm-4-9b-chat": {
        "model_type": "chatglm", "padded_vocab_size": 151552, "hidden_size": 4096,
        "ffn_hidden_size": 13696, "num_layers": 40, "num_attention_heads": 32,
        "multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 128,
        "seq_length": 131072, "layernorm_epsilon": 1.5625e-07, "rope_ratio": 500,
        "original_rope": True, "rmsnorm": True, "post_layer_norm": True,
        "apply_residual_connection_post_layernorm": False, "add_bias_linear": False,
        "add_qkv_bias": True, "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
        "tie_word_embeddings": True, "hidden_act": "silu",
    },
}  # fmt: skip
"""Content of `config.json` for models that are known by name."""


def shape_config(model: str | os.PathLike[str], layers: int | None = None) -> DecoderConfig:
    """Reads the configuration of a model whose weights are not needed.

    Args:
      model: a folder with `config.json`, such a file by itself, a GGUF file (only its header is
        read), a name of `SHAPES`, or that of a packaged model, such as `"smollm2"`. The storage of
        a folder's weights (`quantization_config`) is ignored.
      layers: number of layers to keep, from the first on; None: all.

    Raises:
      TypeError, ValueError: `model` is not one of these, its package is not installed,
        `read_config` refuses its configuration, or it does not have as many layers.

    Example:
      >>> from kvjax.models.shapes import shape_config
      >>> shape_config("llama-3.1-70b").num_layers, shape_config("llama-3.1-70b", 2).num_layers
      (80, 2)
    """
    config = _full_config(model)
    if layers is None:
        return config
    check_count("layers", layers, 1, most=config.num_layers)
    return dataclasses.replace(config, num_layers=layers, layers=config.layers[:layers])


def _full_config(model: str | os.PathLike[str]) -> DecoderConfig:
    path, name = Path(model), os.fspath(model)
    if path.is_dir():
        path /= "config.json"
    elif name in PACKAGED and not path.is_file():
        path = find_packaged(name)
    # Recognised by content: `is_gguf` is true of any file, and this may be a `config.json`.
    if path.is_file() and _begins_as_gguf(path):
        return read_config(path)
    if not path.is_file() and name not in SHAPES:
        known = (*SHAPES, *PACKAGED)
        raise ValueError(
            "a model must be a folder with config.json, such a file, a GGUF file, or one of "
            f"{', '.join(known)}, got {brief(name)}{did_you_mean(name, known)}"
        )
    raw = read_json(path) if path.is_file() else SHAPES[name]
    check_model_type(raw, path)
    return parse_config(raw, FAMILIES[raw["model_type"]], path)


def _begins_as_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False  # the reader of the file raises the error


def abstract_decoder(
    config: DecoderConfig,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    mesh: Mesh | AbstractMesh | None = None,
) -> Decoder:
    """Makes a decoder whose parameters are shapes, each with its placement on a mesh.

    Args:
      config: configuration of the decoder.
      dtype: dtype of the weights.
      mesh: as in `from_pretrained`; its devices need not exist (`AbstractMesh`).

    Example:
      >>> from kvjax.models import abstract_decoder
      >>> from kvjax.models.shapes import shape_config
      >>> model = abstract_decoder(shape_config("llama-3.1-70b"))
      >>> model.layers[0].mlp.gate_up_proj.kernel.get_value().shape
      (28672, 2, 8192)
    """
    graphdef, parameters = abstract_parameters(config, dtype)
    if mesh is not None:
        rule = weight_placement(config, mesh)
        for path, variable in parameters.items():
            x = variable.get_value()
            placed = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rule(path))
            parameters[path] = variable.replace(placed)
    return nnx.merge(graphdef, nnx.from_flat_state(parameters))


def abstract_parameters(
    config: DecoderConfig, dtype: DTypeLike
) -> tuple[nnx.GraphDef, dict[ParameterPath, nnx.Variable]]:
    """Returns a decoder without weights: its graph, and its parameters as shapes by path."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=None)))
    return graphdef, dict(nnx.to_flat_state(state))
