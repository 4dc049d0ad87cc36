"""Decoder language models in Flax NNX whose attention is kvjax, with Hugging Face loading."""

from .config import DecoderConfig, LayerConfig, RopeConfig
from .decoder import Decoder
from .families import read_config
from .loading import from_pretrained, load_tokenizer, random_decoder

__all__ = [
    "Decoder",
    "DecoderConfig",
    "LayerConfig",
    "RopeConfig",
    "from_pretrained",
    "load_tokenizer",
    "random_decoder",
    "read_config",
]
