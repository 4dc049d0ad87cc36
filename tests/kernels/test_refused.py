"""Arguments that do not fit are refused before anything is computed: a case of each refusal."""

from __future__ import annotations

import numpy as np
import pytest

import pallas_kernels as ops


def floats(*shape):
    return np.zeros(shape, np.float32)


def ints(*shape):
    return np.zeros(shape, np.int32)


QUERY = floats(2, 2, 1, 1, 64)  # rows, KV heads, query heads of each, tokens, channels
KEYS = floats(2, 2, 45, 64)
QUERIES = ops.Queries(QUERY, ints(2, 1))
SEEN = ops.Seen(floats(2, 2, 45), ints(2, 2, 45))
MASK = {"mask": ops.Mask(1.0)}
INDEX = ints(2, 2, 3)


def gathered(k=KEYS, index=INDEX):
    return [QUERIES, k, KEYS, SEEN._replace(index=index)]


ENCODED = ops.Encoded(floats(2, 2, 45, 64), floats(2, 2, 45), None)
BOOK = ops.References(floats(2, 1, 9, 64), ints(2, 2, 45), None)
RANKED = [floats(1, 2, 1, 4), floats(1, 2, 5, 4), ints(1, 2, 5)]
LISTED = ints(1, 2, 5)
STORE = (floats(1, 2, 5, 4),)
TOKENS, CLUSTERS = floats(1, 1, 5, 2), (floats(1, 1, 3, 2), floats(1, 1, 3))
ROWS = floats(1, 2, 4, 3)
CASES = [
    (ops.gather_attention, gathered(), {**MASK, "implementation": "cuda"},
     r"\('xla', 'pallas', 'interpret'\), got 'cuda'"),
    (ops.gather_attention, gathered(k=floats(2, 2, 45, 32)), MASK,
     r"k must have shape \(2, 2, 45, 64\), got \(2, 2, 45, 32\)"),
    (ops.gather_attention, gathered(index=ints(2, 4, 3)), MASK,
     r"\(2, 2\), got \(2, 4, 3\)"),
    (ops.gather_attention, gathered(index=None), MASK, r"\(2, 2\), got None"),
    (ops.decode_attention, gathered(), MASK,
     r"gather_attention takes an index, got one of shape \(2, 2, 3\)"),
    (ops.decode_attention, [QUERIES, KEYS, KEYS, SEEN._replace(end=ints(2))], MASK,
     r"end must be \[B, H\] = \(2, 2\), got \(2,\)"),
    (ops.quantized_attention,
     [QUERIES, ENCODED._replace(values=floats(2, 2, 45, 32)), ENCODED, SEEN], MASK,
     r"k.values must have shape \(2, 2, 45, 64\), got \(2, 2, 45, 32\)"),
    (ops.codebook_attention, [QUERIES, BOOK._replace(entries=floats(2, 2, 9, 64)), BOOK, SEEN],
     MASK, r"k.entries must be \[B, 1, E, D\]"),
    (ops.prompt_attention,
     [QUERIES, KEYS, KEYS, SEEN._replace(turn=ops.Turn(floats(1, 32), SEEN.position))], MASK,
     "must be rotated already"),
    (ops.prompt_attention, [QUERIES, KEYS, floats(2, 2, 44, 64), SEEN], MASK,
     r"v must have shape \(2, 2, 45, 64\), got \(2, 2, 44, 64\)"),
    *((operation, [QUERIES, KEYS, SEEN, floats(2, 2, 2)], MASK,
       r"lse must have shape \(2, 2, 1, 1\), got \(2, 2, 2\)")
      for operation in (ops.column_sums, ops.column_maxima)),
    (ops.prompt_attention_and_maxima, [QUERIES, KEYS, KEYS, SEEN, floats(2, 2, 2)],
     MASK, r"elsewhere must have shape \(2, 2, 1, 1\), got \(2, 2, 2\)"),
    (ops.rank_clusters, RANKED, {"group_reduce": "sum"}, "'mean', 'max'.*got 'sum'"),
    (ops.rank_clusters, [RANKED[0], floats(1, 2, 5, 3), RANKED[2]], {},
     r"centroids must have shape \(1, 2, 5, 4\), got \(1, 2, 5, 3\)"),
    (ops.build_indices, [LISTED, LISTED, floats(1, 2, 6), floats(1, 2)], {"length": 4},
     r"starts must have shape \(1, 2, 5\), got \(1, 2, 6\)"),
    (ops.build_indices, [LISTED, floats(1, 2, 4), floats(1, 2, 4), floats(1, 2)], {"length": 4},
     "order must rank at most 4 clusters, got 5"),
    (ops.page_scores, [floats(1, 2, 1, 4), floats(1, 2, 5, 4), floats(1, 2, 6, 4)], {},
     r"high must have shape \(1, 2, 5, 4\), got \(1, 2, 6, 4\)"),
    (ops.host_rows, [(), (), LISTED, LISTED], {}, "at least 1, got 0 and 0"),
    (ops.host_rows, [STORE, (floats(1, 2, 6, 3),), floats(1, 2, 6), floats(1, 2, 6)], {},
     r"rows must have shape \(1, 2, 6, 4\), got \(1, 2, 6, 3\)"),
    (ops.kmeans, [TOKENS, floats(1, 1, 5), *CLUSTERS], {"metric": "dot"},
     r"'cosine', 'l2', 'inner_product'.*'dot'"),
    (ops.kmeans, [TOKENS, floats(1, 1, 4), *CLUSTERS], {},
     r"members must have shape \(1, 1, 5\), got \(1, 1, 4\)"),
    (ops.soft_matching, [floats(1, 1, 4, 2), floats(1, 1)], {"chunk": 1}, "at least 2, got 1"),
    (ops.soft_matching, [floats(1, 4, 2), floats(1, 1)], {"chunk": 2},
     r"keys must be \[B, H, N, D\], got \(1, 4, 2\)"),
    (ops.segment_sum, [floats(1, 1, 4), floats(1, 1, 3)], {},
     r"same B, H and N, got \(1, 1, 4\) and \(1, 1, 3\)"),
    (ops.segment_merge, [floats(1, 1, 4, 1), floats(1, 1, 4), floats(4)], {},
     r"weights must have shape \(1, 1, 4\), got \(4,\)"),
    (ops.pair_cosine, [ROWS, floats(1, 1, 5), LISTED], {},
     r"first must have shape \(1, 2\) and a length, got"),
    (ops.join_anchors, [ROWS, LISTED, floats(1, 2, 4)], {"threshold": 0.5},
     r"pairs must have shape \(1, 2, 5\), got \(1, 2, 4\)"),
    (ops.nearest_entries, [floats(1, 2, 3), floats(1, 2, 4), floats(1)], {},
     "the same B, and as many channels, got"),
    (ops.greedy_cover, [floats(1, 5, 3), floats(1, 5), floats(1, 5)], {"theta": 0.9, "capacity": 0},
     "capacity must be at least 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "arguments", "options", "message"), CASES)
def test_refused(operation, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        operation(*arguments, **options)
