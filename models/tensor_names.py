"""Names of a checkpoint's tensors, and their places in the decoder."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .config import DecoderConfig

ParameterPath = tuple[Any, ...]  # of texts and numbers, for which Flax has a type of its own
"""Path of a parameter in the decoder's NNX state: `("layers", 0, "mlp", "up_proj", "bias")`."""


class Place(NamedTuple):
    """Where a part of a checkpoint's tensor goes: into a parameter, or into some of its rows.

    Attributes:
      path: path of the parameter.
      rows: what the part fills along the parameter's leading axes, where this is not all of it. The
        rows of the tensor follow each other in the order of these axes.
    """

    path: ParameterPath
    rows: tuple[range, ...] = ()


class Weight(NamedTuple):
    """Places of a checkpoint's tensor in the decoder.

    Attributes:
      parts: places that the tensor fills, one after the other along its first axis. A fused tensor
        fills several; most fill one.
    """

    parts: tuple[Place, ...]


@dataclass(frozen=True)
class TensorNames:
    """Names of a family's tensors; the defaults are those of Llama.

    Names are those of modules; the checkpoint appends `.weight` and `.bias`.

    Args:
      embed, norm, head: embedding table, last norm and output projection.
      layers: prefix of the layers' names, before their number.
      norms: name in a layer → norm of `DecoderLayer` or of its attention.
      linears: name in a layer → the projections that its tensor holds, in their order.
    """

    embed: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    layers: str = "model.layers"
    norms: Mapping[str, str] = field(
        default_factory=lambda: {
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "mlp_norm",
        }
    )
    linears: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {**SEPARATE})

    def weights(self, config: DecoderConfig) -> dict[str, Weight]:
        """Returns every tensor name that a checkpoint may have, and its place in the decoder.

        The output projection is included even if it is tied to the embedding: then both names have
        the same place.

        Example:
          >>> from kvjax.models import DecoderConfig, RopeConfig
          >>> from kvjax.models.tensor_names import TensorNames
          >>> config = DecoderConfig(
          ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
          ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128)
          >>> TensorNames().weights(config)["model.layers.1.mlp.up_proj.weight"].parts[0].rows
          (range(0, 64), range(1, 2))
        """
        table = Weight((Place(("embed", "embedding")),))
        head = Weight((Place(("lm_head", "kernel")),))
        weights = {f"{self.embed}.weight": table}
        for index in range(config.num_layers):
            layer, prefix = ("layers", index), f"{self.layers}.{index}"
            for name, norm in self.norms.items():
                path = (*layer, *norm.split("."), "scale")
                weights[f"{prefix}.{name}.weight"] = Weight((Place(path),))
            for name, linears in self.linears.items():
                places = [_place(linear, config) for linear in linears]
                for kind, parameter in (("weight", "kernel"), ("bias", "bias")):
                    if kind == "bias" and not _has_bias(config, linears[0]):
                        continue
                    weights[f"{prefix}.{name}.{kind}"] = Weight(
                        tuple(Place((*layer, *path, parameter), rows) for path, rows in places)
                    )
        weights[f"{self.norm}.weight"] = Weight((Place(("norm", "scale")),))
        weights[f"{self.head}.weight"] = table if config.tie_embeddings else head
        return weights

    def among(self, stored: Collection[str]) -> TensorNames:
        """Returns these names with the prefix that they have in a checkpoint.

        A decoder that was saved without its output projection has no `model.` before its names. A
        decoder that was saved inside another module has more, such as `language_model.model.` or
        `_orig_mod.model.`. The name of the embedding table shows the prefix.

        Example:
          >>> from kvjax.models.tensor_names import TensorNames
          >>> names = TensorNames().among(["embed_tokens.weight", "layers.0.mlp.up_proj.weight"])
          >>> names.layers, names.head
          ('layers', 'lm_head')
          >>> TensorNames().among(["a.model.embed_tokens.weight"]).layers
          'a.model.layers'
        """
        # Checkpoints leave out or extend the first part of the name ("model.").
        base, _, table = self.embed.partition(".")
        before = _before(table, stored)
        if before is None:
            return self
        base_names = {
            key: before + getattr(self, key).removeprefix(f"{base}.")
            for key in ("embed", "norm", "layers")
        }
        # The head is outside of that module, so its prefix is found separately.
        *_, head = self.head.split(".")
        before_head = _before(head, stored)
        usual = self.head if before_head is None else before_head + head
        return replace(self, **base_names, head=usual)


def _before(name: str, stored: Collection[str]) -> str | None:
    """Returns the prefix of this name in a checkpoint; None if it is not there exactly once."""
    matches = [full for full in stored if f".{full}".endswith(f".{name}.weight")]
    return matches[0].removesuffix(f"{name}.weight") if len(matches) == 1 else None


def _place(linear: str, config: DecoderConfig) -> Place:
    """Returns the place of a projection within its block: several share a kernel."""
    module, name = linear.split(".")
    queries = config.query_heads // config.kv_heads * config.head_dim  # rows of a KV head
    rows = {
        "q_proj": range(queries),
        "k_proj": range(queries, queries + config.head_dim),
        "v_proj": range(queries + config.head_dim, queries + 2 * config.head_dim),
    }
    if name in rows:
        return Place((module, "qkv_proj"), (range(config.kv_heads), rows[name]))
    if name in ("gate_proj", "up_proj"):
        part = int(name == "up_proj")
        rows_of_all = range(config.intermediate_size)
        return Place((module, "gate_up_proj"), (rows_of_all, range(part, part + 1)))
    return Place((module, name))


def _has_bias(config: DecoderConfig, linear: str) -> bool:
    if linear.startswith("mlp."):
        return config.mlp_bias
    if linear == "attention.o_proj" and config.output_bias is not None:
        return config.output_bias
    return config.attention_bias


SEPARATE = {
    "self_attn.q_proj": ("attention.q_proj",),
    "self_attn.k_proj": ("attention.k_proj",),
    "self_attn.v_proj": ("attention.v_proj",),
    "self_attn.o_proj": ("attention.o_proj",),
    "mlp.gate_proj": ("mlp.gate_proj",),
    "mlp.up_proj": ("mlp.up_proj",),
    "mlp.down_proj": ("mlp.down_proj",),
}
"""Projections of a layer with a tensor each."""

FUSED_QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
"""Parts of a fused projection of attention: all query heads, key heads, and value heads."""

FUSED_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
"""Parts of a fused projection of the MLP."""

QK_NORMS = {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}
"""Norms of queries and keys."""
