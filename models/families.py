"""The registry of model families, by the `model_type` of a Hugging Face `config.json`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.messages import brief, printable
from kvjax.regular_files import read_json

from .config import DecoderConfig
from .gemma import GEMMA2_NAMES, GEMMA3_NAMES, gemma2_config, gemma3_text_config
from .glm import CHATGLM_NAMES, GLM4_NAMES, GLM_NAMES, chatglm_config, glm4_config, glm_config
from .llama import LLAMA_NAMES, llama_config, mistral_config
from .ministral import MINISTRAL_NAMES, ministral_config
from .olmo import OLMO_NAMES, olmo2_config, olmo3_config
from .phi3 import PHI3_NAMES, phi3_config
from .qwen import QWEN2_NAMES, QWEN3_NAMES, qwen2_config, qwen3_config
from .safetensors_files import tensor_names
from .smollm3 import SMOLLM3_NAMES, smollm3_config
from .tensor_names import TensorNames, Weight


class Family(NamedTuple):
    """How the checkpoints of one `model_type` are read.

    Attributes:
      config: content of `config.json` → `DecoderConfig`.
      names: how they name their tensors.
    """

    config: Callable[[Mapping[str, Any]], DecoderConfig]
    names: TensorNames

    def weights(self, config: DecoderConfig) -> dict[str, Weight]:
        """Every tensor name that a checkpoint may have, and its place."""
        return self.names.weights(config)

    def layers(self, names: Iterable[str]) -> int:
        """How many layers there are tensors of among these names."""
        beginning = re.compile(re.escape(self.names.layers) + r"\.(\d+)\.")
        return len({match[1] for match in map(beginning.match, names) if match})


FAMILIES: dict[str, Family] = {
    "llama": Family(llama_config, LLAMA_NAMES),
    "mistral": Family(mistral_config, LLAMA_NAMES),
    "ministral": Family(ministral_config, MINISTRAL_NAMES),
    "qwen2": Family(qwen2_config, QWEN2_NAMES),
    "qwen3": Family(qwen3_config, QWEN3_NAMES),
    "glm": Family(glm_config, GLM_NAMES),
    "glm4": Family(glm4_config, GLM4_NAMES),
    "chatglm": Family(chatglm_config, CHATGLM_NAMES),
    "phi3": Family(phi3_config, PHI3_NAMES),
    "gemma2": Family(gemma2_config, GEMMA2_NAMES),
    "gemma3_text": Family(gemma3_text_config, GEMMA3_NAMES),
    "smollm3": Family(smollm3_config, SMOLLM3_NAMES),
    "olmo2": Family(olmo2_config, OLMO_NAMES),
    "olmo3": Family(olmo3_config, OLMO_NAMES),
}
"""Supported model types."""

_EXPERTS = "mixtures of experts are not supported"
_RECURRENT = "linear attention and state spaces are not supported"
_IMAGES = "images and sound are not supported"
_UNSUPPORTED = {
    _EXPERTS: r".*moe.*|mixtral|gpt_oss|dbrx|jamba|grok.*|deepseek_v[234].*|llama4.*|minimax.*",
    _RECURRENT: r".*mamba.*|rwkv.*|qwen3_next|qwen3_5.*|recurrent_gemma|falcon_h1|bamba|zamba.*|"
    r"lfm[23].*|olmo_hybrid|nemotron_h|kimi_linear|granitemoehybrid",
    _IMAGES: r"gemma3n?|gemma4|mistral3|mllama|paligemma|.*llava.*|.*_vl.*|glm4v.*|phi4_multimodal|"
    r"qwen2_5_omni|qwen2_audio|pixtral|idefics.*|internvl",
    "LayerNorm is not supported": r"gpt2|gpt_neo.*|gptj|opt|bloom|mpt|falcon|phi|stablelm|"
    r"starcoder2|cohere2?|olmo",
    "queries that grow with their position are not supported": r"ministral3",
    "multipliers of the residual stream are not supported": r"granite|minicpm",
}
_UNSUPPORTED_OPTIONS = {
    "num_local_experts": _EXPERTS,
    "num_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "vision_config": _IMAGES,
    "audio_config": _IMAGES,
}


def _what_is_missing(raw: Mapping[str, Any]) -> str:
    """What a model type that is not supported would need, as far as it is known."""
    kind = raw.get("model_type")
    for reason, pattern in _UNSUPPORTED.items():
        if isinstance(kind, str) and re.fullmatch(pattern, kind):
            return f": {reason}"
    for option, reason in _UNSUPPORTED_OPTIONS.items():
        if raw.get(option):
            return f": {reason}"
    return ""


def read_raw_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of `config.json`, with the token ids of `generation_config.json` where it exists.

    Generation's end tokens win: chat models end at more tokens than their `config.json` says.

    Raises:
      ValueError: a file is unreadable, the model type is unknown, or the weights are quantised.
    """
    folder = Path(directory)
    raw = read_json(folder / "config.json")
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(
            f"{printable(folder / 'config.json')}: model_type {brief(kind)} is not supported"
            f"{_what_is_missing(raw)}; supported: {', '.join(FAMILIES)}"
        )
    quantization = raw.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ValueError(
            f"{printable(folder / 'config.json')}: quantization_config "
            f"({printable(method or 'unnamed')}) is not supported; "
            "supported are plain float32, float16 and bfloat16 weights"
        )
    if (folder / "generation_config.json").exists():
        generation = read_json(folder / "generation_config.json")
        for name in ("bos_token_id", "eos_token_id"):
            if generation.get(name) is not None:
                raw[name] = generation[name]
    return raw


def read_config(directory: str | os.PathLike[str]) -> DecoderConfig:
    """The configuration of the Hugging Face model in `directory`.

    Args:
      directory: a folder with `config.json`, and `generation_config.json` where it has one (its
        end tokens are then used).

    Returns:
      The `DecoderConfig`.

    Raises:
      ValueError: the file is missing or unreadable; its model type, rope type, activation or
        quantisation is not supported (the message says what is); a value is missing or wrong; a
        checkpoint in the folder is unreadable, or has fewer layers than the configuration says.

    Example:
      >>> from kvjax.models import read_config
      >>> read_config("llama-3.2-1b").num_layers  # doctest: +SKIP
      16
    """
    folder, raw = Path(directory), read_raw_config(directory)
    config = parse_config(raw, folder / "config.json")
    names = tensor_names(folder)
    if names is not None:
        check_layers(raw, config, names, folder / "config.json")
    return config


def parse_config(raw: Mapping[str, Any], source: Path) -> DecoderConfig:
    """The configuration in `raw`, as `read_raw_config` gives it; errors name the file `source`."""
    try:
        return FAMILIES[raw["model_type"]].config(raw)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{printable(source)}: {error}") from error


def check_layers(
    raw: Mapping[str, Any], config: DecoderConfig, names: Iterable[str], source: Path
) -> None:
    """Raises ValueError where a configuration has more layers than there are tensors of.

    Every layer costs memory before the first weight is read.
    """
    layers = FAMILIES[raw["model_type"]].layers(names)
    if config.num_layers > layers:
        raise ValueError(
            f"{printable(source)}: num_hidden_layers is {config.num_layers}, but the checkpoint "
            f"has tensors of {layers} layers"
        )
