"""The registry of model families, by the `model_type` of a Hugging Face `config.json`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.files import read_json
from kvjax.messages import brief

from .config import DecoderConfig
from .gemma import GEMMA2_NAMES, GEMMA3_NAMES, gemma2_config, gemma3_text_config
from .glm import (
    CHATGLM_KEYS,
    CHATGLM_NAMES,
    GLM4_NAMES,
    GLM_NAMES,
    chatglm_config,
    glm4_config,
    glm_config,
)
from .hf_config import read_token_ids, refuse
from .llama import llama_config, mistral_config
from .olmo import OLMO_NAMES, olmo2_config, olmo3_config
from .phi3 import PHI3_NAMES, phi3_config
from .plain_weights import check_folder, check_no_adapter
from .qwen import QWEN3_NAMES, qwen2_config, qwen3_config
from .smollm3 import smollm3_config
from .tensor_names import TensorNames


class Family(NamedTuple):
    """Reader of the checkpoints of one `model_type`.

    Attributes:
      config: content of `config.json` → `DecoderConfig`.
      names: names of tensors; by default those of Llama.
      keys: options of `config.json` → their names in files of another format.
    """

    config: Callable[[Mapping[str, Any]], DecoderConfig]
    names: TensorNames = TensorNames()
    keys: Mapping[str, str] = {}

    def as_in_file(self, message: str) -> str:
        """Replaces names of options in a message by those in the file."""

        def key(word: re.Match[str]) -> str:
            option = _FIELDS.get(word[0], word[0])
            return self.keys.get(option, option)

        return re.sub(r"\w+", key, message)


_FIELDS = {
    "num_layers": "num_hidden_layers",
    "query_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
    "theta": "rope_theta",
    "original_max_positions": "original_max_position_embeddings",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
}
"""Fields of `DecoderConfig` and `RopeConfig` → the options of `config.json` that they come from."""

_ONLY: dict[str, Any] = {
    "is_causal": True,
    "use_bidirectional_attention": False,
    "is_encoder_decoder": False,
    "attention_chunk_size": None,
    "kv_sharing_modes": None,
    "per_layer_config": {},
}
"""Options that `transformers` reads for every model type → the value that decoders here compute."""


FAMILIES: dict[str, Family] = {
    "llama": Family(llama_config),
    "mistral": Family(mistral_config),
    "ministral": Family(mistral_config),
    "qwen2": Family(qwen2_config),
    "qwen3": Family(qwen3_config, QWEN3_NAMES),
    "glm": Family(glm_config, GLM_NAMES),
    "glm4": Family(glm4_config, GLM4_NAMES),
    "chatglm": Family(chatglm_config, CHATGLM_NAMES, keys=CHATGLM_KEYS),
    "phi3": Family(phi3_config, PHI3_NAMES),
    "gemma2": Family(gemma2_config, GEMMA2_NAMES),
    "gemma3_text": Family(gemma3_text_config, GEMMA3_NAMES),
    "smollm3": Family(smollm3_config),
    "olmo2": Family(olmo2_config, OLMO_NAMES),
    "olmo3": Family(olmo3_config, OLMO_NAMES),
}
"""Supported model types."""

_EXPERTS = "mixtures of experts are not supported"
_RECURRENT = "linear attention and state spaces are not supported"
_IMAGES = "images and sound are not supported"
# Reason → pattern of the model types that it applies to; the first match is reported.
_UNSUPPORTED = {
    _EXPERTS: r".*moe.*|mixtral|gpt_oss|dbrx|jamba|grok.*|deepseek.*|llama4.*|minimax.*",
    _RECURRENT: r".*mamba.*|rwkv.*|qwen3_?next|qwen3_?5.*|recurrent_gemma|falcon_h1|bamba|zamba.*|"
    r"lfm[23].*|olmo_hybrid|nemotron_h|kimi_linear|granitemoehybrid",
    _IMAGES: r"gemma3n?|gemma4|mistral3|mllama|paligemma|.*llava.*|.*_vl.*|glm4v.*|phi4_multimodal|"
    r"qwen2_5_omni|qwen2_audio|pixtral|idefics.*|internvl",
    "LayerNorm is not supported": r"gpt2|gpt_?neo.*|gptj|opt|bloom|mpt|falcon|phi2?|stablelm|"
    r"starcoder2?|cohere2?|command_r|olmo",
    "queries that grow with their position are not supported": r"ministral3",
    "multipliers of the residual stream are not supported": r"granite|minicpm",
}
# Options that tell the same of model types with an unknown name.
_UNSUPPORTED_OPTIONS = {
    "num_local_experts": _EXPERTS,
    "num_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "vision_config": _IMAGES,
    "audio_config": _IMAGES,
}


def what_is_missing(model_type: object) -> str:
    """Returns what an unsupported model type would need; empty if that is not known."""
    for reason, pattern in _UNSUPPORTED.items():
        if isinstance(model_type, str) and re.fullmatch(pattern, model_type):
            return f": {reason}"
    return ""


def _missing_for(raw: Mapping[str, Any]) -> str:
    """Returns why a model is not supported, by its `model_type` or else by its options."""
    by_option = (reason for option, reason in _UNSUPPORTED_OPTIONS.items() if raw.get(option))
    return what_is_missing(raw.get("model_type")) or next((f": {x}" for x in by_option), "")


def read_raw_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads `config.json`, with the token ids of `generation_config.json` if it exists.

    End tokens for generation take precedence: chat models end at more tokens than their
    `config.json` says.

    Raises:
      ValueError: a file is unreadable, the model type is unknown, the weights are quantised, or
        there is an adapter.
    """
    folder = Path(directory)
    if not (folder / "config.json").exists():
        check_no_adapter(folder)
    raw = read_json(folder / "config.json")
    check_model_type(raw, folder / "config.json")
    check_folder(folder, raw)
    source = folder / "generation_config.json"
    if source.exists():
        generation = read_json(source)
        for name in ("bos_token_id", "eos_token_id"):
            try:
                read_token_ids(generation, name)
            except ValueError as error:
                raise ValueError(f"{source}: {error}") from error
            if generation.get(name) is not None:
                raw[name] = generation[name]
    return raw


def check_model_type(raw: Mapping[str, Any], source: Path) -> None:
    """Raises ValueError unless the model type is known."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"{source}: model_type {brief(model_type)} is not supported"
            f"{_missing_for(raw)}; supported: {', '.join(FAMILIES)}"
        )


def parse_config(raw: Mapping[str, Any], family: Family, source: Path) -> DecoderConfig:
    """Parses `raw`, a result of `read_raw_config`; errors name the file `source`."""
    try:
        refuse(raw, _ONLY)
        return family.config(raw)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{source}: {family.as_in_file(str(error))}") from error


def check_depth(family: Family, config: DecoderConfig, names: Iterable[str], source: Path) -> None:
    """Raises ValueError unless configuration and checkpoint have the same number of layers.

    Each layer costs memory before the first weight is read, and a model without some of its layers
    would silently compute something else.
    """
    # Sorted, so that messages do not depend on the order in the file.
    names = sorted(names)
    beginning = re.compile(re.escape(family.names.layers) + r"\.(\d+)\.")
    indices = {name: int(match[1]) for name in names if (match := beginning.match(name))}
    if not indices:
        raise ValueError(
            f"{source}: layers of this model type have tensors named "
            f"{family.names.layers}.0..., or with the same words before all names, but the "
            f"checkpoint has {', '.join(names[:3])}"
        )
    layers = len(set(indices.values()))
    beyond = next((name for name, index in indices.items() if index >= config.num_layers), None)
    if config.num_layers > layers or beyond is not None:
        message = (
            f"num_hidden_layers is {config.num_layers}, but the checkpoint has tensors of "
            f"{layers} layers"
        )
        unknown = f": {beyond} would be unknown" if beyond is not None else ""
        raise ValueError(f"{source}: {family.as_in_file(message)}{unknown}")
