"""What a prompt's repetition attends to, from the equations of KVzip (arXiv 2505.23416)."""

from __future__ import annotations

import numpy as np

from tests.references.attention import softmax_attention


def repetition(
    prompt: tuple[np.ndarray, np.ndarray, np.ndarray],
    pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]],
    **options,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Attention of each piece over the prompt and itself, of one row and one KV head.

        score[s] = max over pieces, query heads g and queries t of p[g, t, s]

    prompt: keys and values `[S, D]`, and positions `[S]`; pieces: queries `[G, T, D]`, keys and
    values `[T, D]`, and positions `[T]`, -1 for padding.
    Returns the outputs `[G, T, D]` of each piece, and the scores `[S]`.
    """
    k, v, position = prompt
    outs, score = [], np.zeros(len(k))
    for q, own_k, own_v, own_position in pieces:
        keys, values = np.concatenate((k, own_k)), np.concatenate((v, own_v))
        positions = np.concatenate((position, own_position))
        out, p = softmax_attention(q, keys, values, own_position, positions, **options)
        outs.append(out)
        score = np.maximum(score, p[..., : len(k)].max((0, 1)))
    return outs, score
