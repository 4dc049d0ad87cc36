"""Operations of a compressed KV cache, each with its XLA reference. Depends on jax alone.

One file per operation: its documented function, its reference, and (where there is one) its Pallas
kernel. `implementation=None` takes the best that can run; a named one never falls back.
"""

from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.prompt_attention import column_sums, prompt_attention

__all__ = ["column_sums", "decode_attention", "prompt_attention"]
