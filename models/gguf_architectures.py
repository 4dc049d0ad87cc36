"""Architectures of GGUF files: their metadata as a `config.json`, and their tensors.

Metadata become the content of a Hugging Face `config.json`, which the family's reader then checks
as it checks that of a folder. Two kinds of tensors are stored differently than by Hugging Face.
Where rotated pairs are neighbours (Llama, SmolLM3), the rows of queries and keys are in another
order. Norms of Gemma are stored with the 1 that they add.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kvjax.messages import brief

from .config import MOST_LAYERS, DecoderConfig, RopeConfig, is_finite
from .families import FAMILIES, Family, what_is_missing
from .gguf_header import GgufHeader
from .gguf_special_tokens import end_tokens
from .gguf_tensors import read_gguf_tensors
from .hf_config import FULL, SLIDING
from .rope_scaling import make_rope, yarn_magnitude
from .tensor_names import FUSED_GATE_UP, FUSED_QKV, TensorNames

_FREQS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (_FREQS, _LONG, _SHORT)  # belong to the configuration, and are not weights
_HARMLESS = ("rope.scaling.finetuned", "tensor_data_layout", "pooling_type")
_AS_MODEL_TYPES = {"mistral3": "ministral3"}  # names that Hugging Face uses for something else
_PARTLY_ROTATED = ("phi3", "chatglm", "glm4")


class Architecture(NamedTuple):
    """Reader of the GGUF files of one `general.architecture`.

    Attributes:
      model_type: Hugging Face name of most of its models.
      names: names of tensors in its files.
      biases: options of `config.json` → tensors; an option is true if the first layer has one.
      options: further options of `config.json`, from the metadata.
      change: name, stored tensor and configuration → the tensor in the form of Hugging Face; None:
        the form is the same.
    """

    model_type: str
    names: TensorNames
    biases: Mapping[str, Sequence[str]] = {}
    options: Callable[[Metadata], dict[str, Any]] = lambda metadata: {}
    change: Callable[[str, np.ndarray, DecoderConfig], np.ndarray] | None = None


class Metadata:
    """Metadata of an architecture, looked up by names without the architecture's prefix.

    Args:
      header: header of the file.
    """

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.architecture = architecture_name(header)
        self._used: set[str] = set()

    def error(self, message: str) -> ValueError:
        """Returns a ValueError with the file's name before the message."""
        return ValueError(f"{self.header.path}: {message}")

    def get(self, name: str) -> Any:
        """Returns the value of this name, else llama.cpp's default; None without one."""
        key = f"{self.architecture}.{name}"
        self._used.add(key)
        value = self.header.metadata.get(key)
        if value is not None:
            return value
        default = (DEFAULTS | OWN_DEFAULTS.get(self.architecture, {})).get(name)
        return default(self) if callable(default) else default

    def number(self, name: str, *, integer: bool = False, positive: bool = False) -> Any:
        """Returns a number from 0 on. It may be a list of equal ones, one for each layer.

        Raises:
          ValueError: the value is something else, or is missing and has no default.
        """
        value, key = self.get(name), f"{self.architecture}.{name}"
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if not isinstance(value, int if integer else int | float) or isinstance(value, bool):
            shown = "it is missing" if value is None else f"got {brief(value)}"
            raise self.error(f"{key} must be {'an integer' if integer else 'a number'}, {shown}")
        if value < 0 or (positive and not value) or not is_finite(value):
            least = "above" if positive else "of at least"
            raise self.error(f"{key} must be a finite number {least} 0, got {value}")
        return value

    def size(self, name: str) -> int:
        """Returns an integer from 0 on."""
        return self.number(name, integer=True)

    def width_of_heads(self) -> int:
        """Returns the width of the model divided by the number of query heads."""
        hidden, heads = self.size("embedding_length"), self.size("attention.head_count")
        if heads < 1 or hidden % heads:
            raise self.error(
                f"{self.architecture}.embedding_length must be a multiple of "
                f"{self.architecture}.attention.head_count, got {hidden} and {heads}"
            )
        return hidden // heads

    def rows_of_table(self) -> int:
        """Returns the vocabulary size: the rows of the embedding table."""
        table = self.header.tensors.get("token_embd.weight")
        if table is None:
            raise self.error("tensor token_embd.weight is missing")
        return table.shape[0]

    def layers(self) -> int:
        """Returns the number of layers, limited since settings are made for each of them."""
        layers = self.size("block_count")
        if not 1 <= layers <= MOST_LAYERS:
            raise self.error(
                f"{self.architecture}.block_count must be from 1 to {MOST_LAYERS}, got {layers}"
            )
        return layers

    def has(self, name: str) -> bool:
        """Returns whether the first layer has a tensor of this name."""
        return f"blk.0.{name}" in self.header.tensors

    def check_all_used(self) -> None:
        """Raises ValueError if the file has an entry about its model that was never read."""
        for key, value in self.header.metadata.items():
            name = key.removeprefix(f"{self.architecture}.")
            if name == key or key in self._used or name in _HARMLESS:
                continue
            full = name.removesuffix("_swa")  # the name without the mark of layers with a window
            if full != name and full in DEFAULTS and self.get(full) == value:
                continue
            if name in ONLY and ONLY[name] == value:
                continue
            reason = ": mixtures of experts are not supported" if "expert" in name else ""
            raise self.error(f"metadata entry {key} is not supported, got {brief(value)}{reason}")


DEFAULTS: dict[str, Any] = {
    "vocab_size": Metadata.rows_of_table,
    "attention.head_count_kv": lambda file: file.get("attention.head_count"),
    "attention.key_length": Metadata.width_of_heads,
    "attention.value_length": Metadata.width_of_heads,
    "attention.sliding_window": 0,  # none
    "rope.dimension_count": lambda file: file.get("attention.key_length"),
    "rope.freq_base": 10_000.0,
    "rope.scaling.type": "linear",
    "rope.scaling.factor": lambda file: file.get("rope.scale_linear"),  # its former name
    "rope.scale_linear": 0.0,  # not stretched
    "rope.scaling.original_context_length": lambda file: file.get("context_length"),
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": lambda file: yarn_magnitude(
        file.number("rope.scaling.factor")
    ),
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
"""Optional keys → llama.cpp's defaults.

They are the defaults of `load_hparams` in src/llama-model.cpp and of `llama_hparams` in
src/llama-hparams.h. All other keys that are read are required.
"""

OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "attention.sliding_window": 4096,
        "attention.sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        "attention.sliding_window_pattern": 6,
        "final_logit_softcapping": 0.0,  # none
        "rope.freq_base_swa": 10_000.0,
    },
    "olmo2": {"attention.sliding_window_pattern": 4},
}
"""Defaults of single architectures: `load_arch_hparams` in src/models/gemma2.cpp and so on."""

ONLY: dict[str, Any] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_group_count": 0,
    "expert_group_used_count": 0,
    "nextn_predict_layers": 0,
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,
    "embedding_scale": 0.0,
    "residual_scale": 0.0,
    "logit_scale": 0.0,
    "rope.scaling.alpha": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": -1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
"""Keys that decoders here do not support → llama.cpp's default, the only value allowed."""

_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Options of `config.json` → the keys that they come from, without the architecture's prefix."""

_SIZES = (
    "hidden_size", "intermediate_size", "max_position_embeddings", "vocab_size",
    "num_attention_heads", "num_key_value_heads", "head_dim",
)  # fmt: skip


def architecture_name(header: GgufHeader) -> str:
    """Returns the name of a file's architecture.

    Raises:
      ValueError: it is missing or not supported. The message says which ones are, and what it
        would need if that is known.
    """
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        model_type = name.replace("-", "_") if isinstance(name, str) else ""
        raise ValueError(
            f"{header.path}: general.architecture {brief(name)} is not supported"
            f"{what_is_missing(_AS_MODEL_TYPES.get(model_type, model_type))}; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return name


def architecture_of(header: GgufHeader) -> Architecture:
    """Returns the architecture of a file."""
    name = architecture_name(header)
    if name == "chatglm" and "blk.0.attn_qkv.weight" in header.tensors:
        return ARCHITECTURES[name]._replace(names=_names(_BEFORE, linears=_FUSED))
    return ARCHITECTURES[name]


def family_of(header: GgufHeader, raw: Mapping[str, Any]) -> Family:
    """Returns the family of the configuration, with the file's names of tensors and keys."""
    name = architecture_name(header)
    keys = {option: f"{name}.{key}" for option, key in _KEYS.items()}
    keys |= {option: f"tokenizer.ggml.{option}" for option in ("bos_token_id", "eos_token_id")}
    config = FAMILIES[raw["model_type"]].config
    return Family(config, architecture_of(header).names, keys=keys)


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Returns the `config.json` of a Hugging Face folder with the same model.

    Args:
      header: header of the file.

    Raises:
      ValueError: the architecture is not supported; an entry is missing, of the wrong type, or not
        supported by the decoder. The message names the file and the entry.
    """
    metadata = Metadata(header)
    channels, values = (metadata.size(f"attention.{x}_length") for x in ("key", "value"))
    if values != channels:
        raise metadata.error(
            f"{metadata.architecture}.attention.value_length must be the {channels} channels of a "
            f"key ({metadata.architecture}.attention.key_length), got {values}"
        )
    raw = {
        **{option: metadata.size(_KEYS[option]) for option in _SIZES},
        "num_hidden_layers": metadata.layers(),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _dtype(header),
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(header.metadata),
    }
    raw |= _rope(metadata, channels)
    architecture = architecture_of(header)
    raw["model_type"] = architecture.model_type
    raw |= {option: any(map(metadata.has, names)) for option, names in architecture.biases.items()}
    raw |= architecture.options(metadata)
    metadata.check_all_used()
    return raw


def _dtype(header: GgufHeader) -> str:
    """Returns the dtype of the weights; for quantised ones, that of the original model."""
    types = {tensor.dtype for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return {"F32": "float32", "F16": "float16"}.get("".join(types), "bfloat16")


def _rope(metadata: Metadata, channels: int) -> dict[str, Any]:
    """Returns theta, the share of rotated channels, and how the context was stretched."""
    options: dict[str, Any] = {"rope_theta": metadata.number("rope.freq_base")}
    rotated = metadata.size("rope.dimension_count")
    partly = metadata.architecture in _PARTLY_ROTATED and 0 < rotated <= channels
    if rotated != channels and not partly:
        raise metadata.error(
            f"{metadata.architecture}.rope.dimension_count must be the {channels} channels of a "
            f"head, got {rotated}"
        )
    if partly:
        share = rotated / channels
        # A fraction is rounded up, since the number of channels is rounded down again later.
        options["partial_rotary_factor"] = math.nextafter(share, 1.0) if share < 1 else share
    scaling = _stored_factors(metadata, options["rope_theta"], rotated) or _scaling(metadata)
    return options | ({"rope_scaling": scaling} if scaling else {})


def _scaling(metadata: Metadata) -> dict[str, Any]:
    """Returns `rope_scaling` from the metadata; empty if the context was not stretched."""
    rope_type = metadata.get("rope.scaling.type")
    factor = metadata.number("rope.scaling.factor")
    if rope_type not in ("none", "linear", "yarn"):
        raise metadata.error(
            f"{metadata.architecture}.rope.scaling.type {brief(rope_type)} is not supported "
            f"without the tensors {_LONG} and {_SHORT}; supported: none, linear, yarn"
        )
    original = metadata.size("rope.scaling.original_context_length")
    if rope_type == "none" or not factor:
        return {}
    if rope_type == "linear":
        return {"rope_type": "linear", "factor": factor}
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": metadata.number("rope.scaling.yarn_attn_factor", positive=True),
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", positive=True),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", positive=True),
    }


def _stored_factors(metadata: Metadata, theta: float, rotated: int) -> dict[str, Any]:
    """Returns `rope_scaling` from tensors of a factor per rotated pair; empty without them."""
    header = metadata.header
    names = [name for name in ROPE_TENSORS if name in header.tensors]
    if not names:
        return {}
    if names not in ([_FREQS], [_LONG, _SHORT]):
        raise metadata.error(
            f"tensors of rope factors must be {_FREQS}, or {_LONG} and {_SHORT}, got "
            f"{', '.join(names)}"
        )
    for name in names:
        tensor = header.tensors[name]
        if tensor.dtype != "F32" or tensor.shape != (rotated // 2,):
            raise metadata.error(
                f"tensor {name} must have type F32 and shape {[rotated // 2]}, got "
                f"{tensor.dtype} and {list(tensor.shape)}"
            )
    factors = [tensor.tolist() for _, tensor in read_gguf_tensors(header, names)]
    for name in ("type", "original_context_length"):  # marked as read: the tensors replace them
        metadata.get(f"rope.scaling.{name}")
    if names == [_FREQS]:
        llama3, larger = _llama3(factors[0], theta), 1.0
    else:
        llama3, larger = {}, metadata.number("rope.scaling.attn_factor", positive=True)
    return llama3 or {
        "rope_type": "longrope",
        "long_factor": factors[0],
        "short_factor": factors[-1],
        "attention_factor": larger,
    }


def _llama3(factors: list[float], theta: float) -> dict[str, Any]:
    """Returns the settings of Llama 3.1 to 3.3 if these are their factors; else empty.

    Files hold the factors of pairs and not the four numbers that they come from. Only the first of
    these numbers differs between the models.
    """
    scaling = {"factor": max(factors), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    original = 8192
    try:
        plain = RopeConfig(rotary_dim=2 * len(factors), theta=theta)
        stretched = replace(plain, type="llama3", original_max_positions=original, **scaling)
    except (TypeError, ValueError):  # the reader of the configuration raises it
        return {}
    before, after = (np.asarray(make_rope(x, original).inv_freq) for x in (plain, stretched))
    if not np.allclose(before / after, factors, rtol=1e-4, atol=0):
        return {}
    return {"rope_type": "llama3", "original_max_position_embeddings": original, **scaling}


def _llama(metadata: Metadata) -> dict[str, Any]:
    window = metadata.size("attention.sliding_window")
    # llama.cpp ignores the window of a Mistral, but the model was trained with it.
    return {"model_type": "mistral", "sliding_window": window} if window else {}


def _phi3(metadata: Metadata) -> dict[str, Any]:
    original = metadata.size("rope.scaling.original_context_length")
    return {
        "sliding_window": metadata.size("attention.sliding_window") or None,
        "original_max_position_embeddings": original,
    }


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.number("final_logit_softcapping"),
        "sliding_window": metadata.size("attention.sliding_window"),
        "query_pre_attn_scalar": _query_scalar(metadata, layers=46),
        "layer_types": _layer_types(metadata),
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    window = metadata.size("attention.sliding_window")
    types = _layer_types(metadata)
    return {
        "final_logit_softcapping": metadata.number("final_logit_softcapping") or None,
        "rope_local_base_freq": metadata.number("rope.freq_base_swa"),
        "sliding_window": window or None,
        "query_pre_attn_scalar": _query_scalar(metadata, layers=62),
        "layer_types": types if window else [FULL] * len(types),
    }


def _query_scalar(metadata: Metadata, layers: int) -> int:
    """Returns Gemma's `query_pre_attn_scalar`, which files leave out.

    It is the width of a head. In the models of 27 billion parameters, which are recognised by their
    number of layers, it is the model's width divided by the number of heads.
    """
    if metadata.layers() != layers:
        return metadata.size("attention.key_length")
    return metadata.size("embedding_length") // max(metadata.size("attention.head_count"), 1)


def _olmo2(metadata: Metadata) -> dict[str, Any]:
    window, types = metadata.size("attention.sliding_window"), _layer_types(metadata)
    olmo3 = {"model_type": "olmo3", "sliding_window": window, "layer_types": types}
    return olmo3 if window else {}


def _layer_types(metadata: Metadata) -> list[str]:
    """Returns the type of each layer, with or without the window.

    The file has a list with a truth value for each layer, or an integer n: each n-th layer has no
    window; 0: all layers have one.
    """
    key, layers = "attention.sliding_window_pattern", metadata.layers()
    slides = metadata.get(key)
    if type(slides) is int and slides >= 0:
        slides = [not slides or (index + 1) % slides != 0 for index in range(layers)]
    if not isinstance(slides, list) or not all(isinstance(value, bool) for value in slides):
        raise metadata.error(
            f"{metadata.architecture}.{key} must be an integer from 0 or a list of truth values, "
            f"got {brief(slides)}"
        )
    if len(slides) != layers:
        raise metadata.error(
            f"{metadata.architecture}.{key} must have a value for each of "
            f"{metadata.architecture}.block_count = {layers} layers, got {len(slides)}"
        )
    return [SLIDING if has_window else FULL for has_window in slides]


def _halves(name: str, tensor: np.ndarray, config: DecoderConfig) -> np.ndarray:
    """Reorders rows of queries and keys as in Hugging Face: rotated pairs are halves of a head.

    In the file they are neighbours.
    """
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", name)
    if match is None:
        return tensor
    heads = config.query_heads if match[1] == "q" else config.kv_heads
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _less_one(name: str, tensor: np.ndarray, config: DecoderConfig) -> np.ndarray:
    """Subtracts 1 from norms that multiply by `1 + w`: the file has the sum, Hugging Face w."""
    if not name.endswith("norm.weight"):
        return tensor
    return np.subtract(tensor, np.float32(1), out=tensor)


def _names(*norms: Mapping[str, str], linears: Mapping[str, tuple[str, ...]]) -> TensorNames:
    return TensorNames(
        embed="token_embd",
        norm="output_norm",
        head="output",
        layers="blk",
        norms={name: norm for part in norms for name, norm in part.items()},
        linears=linears,
    )


_BEFORE = {"attn_norm": "attention_norm", "ffn_norm": "mlp_norm"}
_AFTER = {"post_attention_norm": "attention_post_norm", "post_ffw_norm": "mlp_post_norm"}
_QK = {"attn_q_norm": "attention.q_norm", "attn_k_norm": "attention.k_norm"}

_QKV = {f"attn_{x}": (f"attention.{x}_proj",) for x in "qkv"}
_OUT = {"attn_output": ("attention.o_proj",)}
_PLAIN = _QKV | _OUT | {f"ffn_{x}": (f"mlp.{x}_proj",) for x in ("gate", "up", "down")}
_FUSED_MLP = _OUT | {"ffn_up": FUSED_GATE_UP, "ffn_down": ("mlp.down_proj",)}
_FUSED = {"attn_qkv": FUSED_QKV} | _FUSED_MLP
_BIAS = {"attention_bias": ("attn_q.bias",)}
_BIASES = {**_BIAS, "mlp_bias": ("ffn_up.bias",)}
_GLM_BIAS = {"attention_bias": ("attn_q.bias", "attn_qkv.bias")}

_LLAMA = _names(_BEFORE, linears=_PLAIN)
_GLM = _QKV | _FUSED_MLP
_GEMMA2 = _names(_BEFORE, _AFTER, linears=_PLAIN)
_GEMMA3 = _names(_BEFORE, _AFTER, _QK, linears=_PLAIN)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _LLAMA, _BIASES, _llama, _halves),
    "qwen2": Architecture("qwen2", _LLAMA),
    "qwen3": Architecture("qwen3", _names(_BEFORE, _QK, linears=_PLAIN), _BIAS),
    "phi3": Architecture("phi3", _names(_BEFORE, linears=_FUSED), options=_phi3),
    "gemma2": Architecture("gemma2", _GEMMA2, _BIAS, _gemma2, _less_one),
    "gemma3": Architecture("gemma3_text", _GEMMA3, _BIAS, _gemma3, _less_one),
    "chatglm": Architecture("glm", _names(_BEFORE, linears=_GLM), _GLM_BIAS),
    "glm4": Architecture("glm4", _names(_BEFORE, _AFTER, linears=_GLM), _BIAS),
    "olmo2": Architecture("olmo2", _names(_AFTER, _QK, linears=_PLAIN), _BIAS, _olmo2),
    "smollm3": Architecture("smollm3", _LLAMA, _BIASES, change=_halves),
}
"""Supported architectures, by their `general.architecture`."""
