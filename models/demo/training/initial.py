"""Initial weights near an induction head, so that a small model on two cores finds one at once.

From the usual random weights, the heads that retrieval needs form late: with a vocabulary of 2,048
none had formed after 1,000 steps. A start that resembles the trained weights (mimetic
initialisation, arXiv 2305.09828) avoids that wait. Here it resembles the two-layer circuit of
arXiv 2209.11895. Heads of the first layer look one and two tokens back, and write the token that
they find through two rotations of the residual stream. Half of the heads of later layers compare
the current token with the one before another token; half compare the token before with the one two
before. Both copy the token that they find. All other weights start random and small, and training
may change all weights.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from kvjax.models import Decoder
from kvjax.models.rope_scaling import make_rope

_QUIET = 0.05  # factor of output projections, so that the embeddings prevail
_MATCH = 1.4  # factor of queries and keys that compare tokens
_COPY = 0.12  # factor of what heads write, about the size of an embedding's channel
_NEAR, _PAIRS = 2.0, 4  # size of queries that look back, and their number of fast channel pairs


def start_near_induction(model: Decoder, seed: int) -> None:
    """Changes a decoder's random weights in place, as described above.

    In the first layer, each KV head's first query head looks one token back, and its second looks
    two back. In later layers the first compares tokens. The embeddings get a common mean, so that
    the first layer has a component that is the same at every token.
    """
    config = model.config
    rng = np.random.default_rng((seed, 1))
    hidden, dim = config.hidden_size, config.head_dim
    group = config.query_heads // config.kv_heads
    mean = _unit(rng.normal(size=hidden))
    table = rng.normal(size=(config.vocab_size, hidden)) / np.sqrt(hidden) + mean
    model.embed.embedding.set_value(jnp.asarray(table, jnp.float32))
    one_back, two_back = _orthogonal(rng, hidden), _orthogonal(rng, hidden)
    for index, layer in enumerate(model.layers):
        down = layer.mlp.down_proj.kernel
        down.set_value(_QUIET * down[...])
        attention, basis = layer.attention, _orthogonal(rng, hidden)
        joined = np.array(attention.qkv_proj.kernel[...])  # [H, (G + 2) · D, C]
        parts = np.split(joined, (group * dim, (group + 1) * dim), axis=1)
        q, k, v = (part.reshape(-1, hidden).T for part in parts)  # inputs before outputs, as below
        o = np.array(attention.o_proj.kernel[...]).T
        o *= _QUIET
        for head in range(config.kv_heads):
            part = basis[:, head * dim : (head + 1) * dim]
            keys = slice(head * dim, (head + 1) * dim)
            first, second = (
                slice(i * dim, (i + 1) * dim) for i in (head * group, head * group + 1)
            )
            v[:, keys] = part
            if index == 0:
                k[:, keys] = np.outer(mean, _nearby(model, 0))
                looks = ((first, 1, one_back), (second, 2, two_back))
                for queries, back, carried in looks[:group]:
                    q[:, queries] = np.outer(mean, _nearby(model, back))
                    o[queries] = _COPY * part.T @ carried
            elif head % 2 == 0:
                q[:, first], k[:, keys] = _MATCH * part, _MATCH * one_back.T @ part
                o[first] = _COPY * part.T
            else:
                q[:, first], k[:, keys] = _MATCH * one_back.T @ part, _MATCH * two_back.T @ part
                o[first] = _COPY * part.T
        parts = [part.T.reshape(config.kv_heads, -1, hidden) for part in (q, k, v)]
        attention.qkv_proj.kernel.set_value(jnp.asarray(np.concatenate(parts, 1), jnp.float32))
        attention.o_proj.kernel.set_value(jnp.asarray(o.T, jnp.float32))


def _nearby(model: Decoder, back: int) -> np.ndarray:
    """Returns a query that agrees best with the key `back` positions before; for 0 the key.

    Both are the same for all tokens. The fast channel pairs tell neighbours apart. The query is
    the key rotated back by `back` positions.
    """
    key = np.zeros(model.config.head_dim, np.float32)
    key[:_PAIRS] = _NEAR
    position = jnp.array([[-back]])
    rope = make_rope(model.config.rope, model.config.max_positions)
    return np.asarray(rope.rotate(jnp.asarray(key)[None, None, None], position))[0, 0, 0]


def _orthogonal(rng: np.random.Generator, size: int) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(size, size)))[0]


def _unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)
