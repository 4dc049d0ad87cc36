"""A few documents and a small tokenizer for tests of the bundled model's training."""

import functools
from pydoc_data.topics import topics

from tokenizers import Tokenizer

from kvjax.models import DecoderConfig, RopeConfig, demo
from kvjax.models.demo.training import train

TINY = DecoderConfig(
    vocab_size=512, hidden_size=32, intermediate_size=32, num_layers=2, query_heads=4, kv_heads=2,
    head_dim=8, rope=RopeConfig(rotary_dim=8, theta=500_000.0), max_positions=256,
    tie_embeddings=True, bos_token_id=0, eos_token_ids=(1,),
)  # fmt: skip


@functools.cache
def texts() -> tuple[str, ...]:
    return tuple(topics[name] + "\n\n" for name in sorted(topics)[:12])


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    return train.make_tokenizer(texts(), TINY.vocab_size)


@functools.cache
def bundled_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo.directory() / "tokenizer.json"))
