"""Operations of a compressed KV cache, each with its XLA reference. Depends on jax alone.

Each file named here holds one operation, with its XLA reference. Its Pallas kernel, if it has one,
is in the same file or in one that operations share, such as `attention/kernel.py`. Operations with
a kernel take an `implementation`: None takes the best that can run, and a named one never falls
back.
"""

from pallas_kernels.attention.codebook import codebook_attention
from pallas_kernels.attention.decode import decode_attention
from pallas_kernels.attention.gather import gather_attention
from pallas_kernels.attention.prompt import (
    column_maxima,
    column_sums,
    prompt_attention,
    prompt_attention_and_maxima,
    prompt_attention_and_sums,
)
from pallas_kernels.attention.quantized import quantized_attention
from pallas_kernels.base.logits import Mask, Queries, Seen
from pallas_kernels.base.rotation import Turn
from pallas_kernels.formats.bits import (
    Encoded,
    dequantise_groups,
    dequantise_slots,
    quantise_groups,
    quantise_slots,
    quantized_logits,
    quantized_mix,
)
from pallas_kernels.formats.codebook import References, codebook_logits, codebook_mix
from pallas_kernels.formats.hadamard import hadamard_transform
from pallas_kernels.formats.packed_bits import hamming_distance, pack_bits
from pallas_kernels.grouping.greedy_cover import greedy_cover
from pallas_kernels.grouping.kmeans import kmeans
from pallas_kernels.grouping.nearest_entries import nearest_entries
from pallas_kernels.grouping.segment_merge import segment_merge
from pallas_kernels.grouping.segment_sum import segment_sum
from pallas_kernels.grouping.slot_pairs import join_anchors, pair_cosine, pair_distance
from pallas_kernels.grouping.soft_matching import soft_matching
from pallas_kernels.recall.cluster_selection import build_indices, rank_clusters
from pallas_kernels.recall.host_rows import host_rows
from pallas_kernels.recall.page_bounds import page_bounds, page_moments
from pallas_kernels.recall.page_scores import page_scores

__all__ = [
    "Encoded",
    "Mask",
    "Queries",
    "References",
    "Seen",
    "Turn",
    "build_indices",
    "codebook_attention",
    "codebook_logits",
    "codebook_mix",
    "column_maxima",
    "column_sums",
    "decode_attention",
    "dequantise_groups",
    "dequantise_slots",
    "gather_attention",
    "greedy_cover",
    "hadamard_transform",
    "hamming_distance",
    "host_rows",
    "join_anchors",
    "kmeans",
    "nearest_entries",
    "pack_bits",
    "page_bounds",
    "page_moments",
    "page_scores",
    "pair_cosine",
    "pair_distance",
    "prompt_attention",
    "prompt_attention_and_maxima",
    "prompt_attention_and_sums",
    "quantise_groups",
    "quantise_slots",
    "quantized_attention",
    "quantized_logits",
    "quantized_mix",
    "rank_clusters",
    "segment_merge",
    "segment_sum",
    "soft_matching",
]
