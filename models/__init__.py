"""Decoder language models in Flax NNX whose attention is kvjax, with Hugging Face loading."""

from kvjax.generation.chat import chat_end_tokens
from kvjax.generation.model import FunctionalModel, LanguageModel, LayeredModel, ModelParts

from .checkpoints import read_config
from .config import DecoderConfig, LayerConfig, RopeConfig
from .decoder import Decoder
from .loading import from_pretrained, load_tokenizer, random_decoder
from .placement import on_mesh
from .sampling_settings import load_sampling
from .shapes import abstract_decoder

__all__ = [
    "Decoder",
    "DecoderConfig",
    "FunctionalModel",
    "LanguageModel",
    "LayerConfig",
    "LayeredModel",
    "ModelParts",
    "RopeConfig",
    "abstract_decoder",
    "chat_end_tokens",
    "from_pretrained",
    "load_sampling",
    "load_tokenizer",
    "on_mesh",
    "random_decoder",
    "read_config",
]
