"""Initial weights near an induction head, so that a small model on two cores finds one at once.

From the usual random weights the heads that retrieval needs form late: with a vocabulary of 2,048
none had formed after 1,000 steps. A start that resembles the trained weights (mimetic
initialisation, arXiv 2305.09828) takes that wait away. What it resembles here is the two-layer
circuit of arXiv 2209.11895: a head of the first layer looks at the token before, and writes what it
was through a rotation R of the residual stream; heads of later layers compare the current token
with what R brought, and copy the token they find. Everything else starts random and small, and
training is free to change it all.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from kvjax.models import Decoder
from kvjax.models.rope_scaling import make_rope

_QUIET = 0.05  # of output projections: other heads and the MLPs must not drown the embeddings
_MATCH = 1.4  # of queries and keys that compare tokens
_COPY = 0.12  # of what is written, about the size of an embedding's channel
_NEAR, _PAIRS = 2.0, 4  # queries that look one token back: size, and number of fast channel pairs


def start_near_induction(model: Decoder, seed: int) -> None:
    """Changes a decoder's random weights in place, as the module says.

    Every KV head's first query head is such a head, a looking-back one in the first layer. The
    embeddings get a common mean, which gives the first layer something that is the same at every
    token.
    """
    config = model.config
    rng = np.random.default_rng((seed, 1))
    hidden, dim = config.hidden_size, config.head_dim
    group = config.query_heads // config.kv_heads
    mean = _unit(rng.normal(size=hidden))
    table = rng.normal(size=(config.vocab_size, hidden)) / np.sqrt(hidden) + mean
    model.embed.embedding.set_value(jnp.asarray(table, jnp.float32))
    carried = _orthogonal(rng, hidden)
    for index, layer in enumerate(model.layers):
        down = layer.mlp.down_proj.kernel
        down.set_value(_QUIET * down[...])
        attention, basis = layer.attention, _orthogonal(rng, hidden)
        linears = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
        q, k, v, o = (np.array(linear.kernel[...]) for linear in linears)
        o *= _QUIET
        for head in range(config.kv_heads):
            part = basis[:, head * dim : (head + 1) * dim]
            keys = slice(head * dim, (head + 1) * dim)
            queries = slice(head * group * dim, head * group * dim + dim)
            v[:, keys] = part
            if index == 0:
                query, key = _look_back(model)
                q[:, queries], k[:, keys] = np.outer(mean, query), np.outer(mean, key)
                o[queries] = _COPY * part.T @ carried
            else:
                q[:, queries], k[:, keys] = _MATCH * part, _MATCH * carried.T @ part
                o[queries] = _COPY * part.T
        for linear, kernel in zip(linears, (q, k, v, o), strict=True):
            linear.kernel.set_value(jnp.asarray(kernel, jnp.float32))


def _look_back(model: Decoder) -> tuple[np.ndarray, np.ndarray]:
    """A query and a key, the same for all tokens, that agree best one position apart.

    The fast channel pairs tell neighbours apart; the query is turned one position back.
    """
    dim = model.config.head_dim
    key = np.zeros(dim, np.float32)
    key[:_PAIRS] = _NEAR
    back = jnp.array([[-1]])
    query = make_rope(model.config.rope, back).rotate(jnp.asarray(key)[None, None, None], back)
    return np.asarray(query)[0, 0, 0], key


def _orthogonal(rng: np.random.Generator, size: int) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(size, size)))[0]


def _unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)
