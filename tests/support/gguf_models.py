"""GGUF files of small models of `transformers`, written as llama.cpp's converter does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

PERMUTED = ("llama", "smollm3")
WITH_ONE = ("gemma2", "gemma3")


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Channel `i` and channel `i + D / 2` of a head, which rotate together, become neighbours."""
    channels = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.stack([channels[:, 0], channels[:, 1]], axis=2).reshape(rows.shape)


def stored(arch: str, name: str, tensor: np.ndarray, config: Any) -> np.ndarray:
    """A tensor of Hugging Face as the GGUF file has it."""
    if arch in PERMUTED and "q_proj" in name:
        return permuted(tensor, config.num_attention_heads)
    if arch in PERMUTED and "k_proj" in name:
        return permuted(tensor, config.num_key_value_heads)
    return tensor + 1 if arch in WITH_ONE and name.endswith("norm.weight") else tensor


def gguf_names(arch: str, layers: int) -> Callable[[str], str]:
    """Hugging Face's name of a tensor → GGUF's, by the library's own table."""
    number = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    table = gguf.get_tensor_name_map(number, layers)

    def name_of(theirs: str) -> str:
        found = table.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert found is not None, theirs
        return found

    return name_of


def tensors_of(arch: str, model: Any) -> dict[str, np.ndarray]:
    """GGUF's names → the tensors of a model, tied ones once."""
    config = model.config
    name_of = gguf_names(arch, config.num_hidden_layers)
    given = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del given["lm_head.weight"]
    return {
        name_of(name): np.ascontiguousarray(stored(arch, name, tensor, config))
        for name, tensor in given.items()
    }


def add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    """What the metadata of all architectures say."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    ends = config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    for name, given in zip(
        ("bos", "eos", "eot", "eom"), (config.bos_token_id, *ends), strict=False
    ):
        if given is not None:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", given)


def add_rope(writer: gguf.GGUFWriter, config: Any) -> None:
    """Theta and the settings of stretched contexts; tensors of factors are the caller's."""
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def replace(writer: gguf.GGUFWriter, key: str, method: str | None = None, *value: Any) -> None:
    """Gives a metadata entry another value by this method of the writer, or takes it away."""
    for data in writer.kv_data:
        data.pop(key, None)
    if method is not None:
        getattr(writer, method)(key, *value)


def write(
    path: Path,
    arch: str,
    tensors: Mapping[str, np.ndarray],
    add: Callable[[gguf.GGUFWriter], None],
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """A GGUF file; `add` adds its metadata, and `types` has those of tensors to be quantised."""
    writer = gguf.GGUFWriter(path, arch)
    add(writer)
    for name, tensor in tensors.items():
        kind = (types or {}).get(name)
        encoded = tensor if kind is None else gguf.quantize(tensor, kind)
        writer.add_tensor(name, encoded, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(path: Path, arch: str, model: Any, add: Any = None, more: Any = None) -> Path:
    """The GGUF file of a model; `add(writer, config)` adds to its metadata, `more` are tensors."""

    def add_all(writer: gguf.GGUFWriter) -> None:
        add_sizes(writer, model.config)
        add_rope(writer, model.config)
        if add is not None:
            add(writer, model.config)

    return write(path, arch, {**tensors_of(arch, model), **(more or {})}, add_all)


def add_tokenizer(writer: gguf.GGUFWriter, model: str, described: dict, pre: str = "gpt-2") -> None:
    """The vocabulary of a `tokenizer.json`, as `"gpt2"` with merges or as `"llama"` with scores."""
    vocab = described["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    special = {token["content"] for token in described["added_tokens"]}
    merges = [
        merge if isinstance(merge, list) else merge.split(" ")
        for merge in described["model"]["merges"]
    ]
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    if model == "gpt2":
        writer.add_token_merges([" ".join(merge) for merge in merges])
        return
    ranks = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge), rank)
    writer.add_token_scores([-float(ranks.get(token, 0)) for token in tokens])
