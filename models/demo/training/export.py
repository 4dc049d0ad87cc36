"""Writes a trained decoder as a Hugging Face folder that `transformers` reads too."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save
from tokenizers import Tokenizer

from kvjax.models import Decoder
from kvjax.models.tensor_names import TensorNames

from .corpus import BOS, EOS


def save_pretrained(model: Decoder, tokenizer: Tokenizer, folder: Path) -> None:
    """Saves configuration, bfloat16 weights and tokenizer of a Llama with tied embeddings."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    _write_json(folder / "config.json", {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.query_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0],
        "dtype": "bfloat16",
    })  # fmt: skip
    _write_json(folder / "generation_config.json", {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0],
        "do_sample": False,
    })  # fmt: skip
    _write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
    })  # fmt: skip
    tokenizer.save(str(folder / "tokenizer.json"))
    parameters = dict(nnx.to_flat_state(nnx.state(model)))
    tensors = {}
    for name, weight in TensorNames().weights(config).items():
        if name == "lm_head.weight":
            continue  # tied: the embedding is stored once
        (place,) = weight.parts
        value = np.asarray(parameters[place.path].get_value())
        for axis, rows in enumerate(place.rows):  # of a kernel that several projections share
            value = value.take(rows, axis=axis)
        if place.rows:
            value = value.reshape(-1, value.shape[-1])
        tensors[name] = np.ascontiguousarray(value.astype(jnp.bfloat16))
    # `save_file` would make a file that only its owner can read.
    content = save(tensors, metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(content)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
