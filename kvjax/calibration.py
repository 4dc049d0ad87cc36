"""What is found out about a model once, on sample text, before anything is compressed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.budgets import check_count, check_number
from kvjax.generate import check_prompts
from kvjax.layer_cache import Cache, init_cache
from kvjax.model import FunctionalModel, LanguageModel, as_functional
from kvjax.outlier_heads import OutlierHeads
from kvjax.transform import Full
from pallas_kernels import soft_matching


def calibrate_outlier_heads(
    model: LanguageModel | FunctionalModel,
    sample: Sequence[Sequence[int]],
    threshold: float,
    fraction: float = 0.04,
    *,
    chunk: int = 256,
    sinks: int = 16,
    recent: int = 64,
) -> OutlierHeads:
    """The heads whose keys resemble each other least: those that Chelsea is to leave alone.

    The model reads the sample with the full cache. In each KV head, sinks and recent tokens apart,
    every token of set A has an edge to its most similar one of set B, as in Chelsea's first pass.
    A head's score is the share of A whose edge is not above `threshold`, averaged over the rows;
    the `fraction` of all heads with the highest score, at least one, are the outliers.

    Args:
      model: as for `kvjax.generate`.
      sample: token ids of each row; rows may differ in length. The paper samples WikiText-2.
      threshold: cosine below which an edge does not count; between the similarities of most heads
        and those of the outliers.
      fraction: share of heads, rounded to the nearest count; 0.04 as in the paper.
      chunk, sinks, recent: numbers of tokens, as in `Chelsea`.

    Returns:
      What `Chelsea` takes as `outlier_heads`, the highest score first, ties to the lower head.

    Raises:
      TypeError, ValueError: what `kvjax.generate` raises for prompts, a row that is too short to
        have any A and B between sinks and recent tokens, a threshold outside (-1, 1], a fraction
        outside (0, 1] or one that leaves no head over.

    Example:
      >>> import kvjax
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128))
      >>> found = kvjax.calibrate_outlier_heads(model, [list(range(64))], 0.9, sinks=4, recent=8)
      >>> len(found.heads), found.num_layers, found.kv_heads
      (1, 2, 2)

    References:
      Hu et al., Efficient Long-Context LLM Inference via KV Cache Clustering, arXiv 2506.11418,
      appendix B.
    """
    functional = as_functional(model)
    for name, value, least in (("chunk", chunk, 2), ("sinks", sinks, 0), ("recent", recent, 0)):
        check_count(name, value, least)
    check_number("threshold", threshold, above=-1, most=1)
    check_number("fraction", fraction, above=0, most=1)
    check_prompts(functional, sample, (Full(),), 0)
    lengths = np.array([len(row) for row in sample])
    if lengths.min() < sinks + recent + 2:
        raise ValueError(
            f"every row of the sample must have at least sinks + recent + 2 = "
            f"{sinks + recent + 2} tokens, got {lengths.min()}"
        )
    place = np.arange(lengths.max(), dtype=np.int32)
    positions = np.where(place < lengths[:, None], place, -1)
    tokens = np.zeros_like(positions)
    tokens[positions >= 0] = np.concatenate(sample)
    sizes = {"kv_heads": functional.kv_heads, "query_heads": functional.query_heads}
    sizes |= {"head_dim": functional.head_dim, "max_prompt": len(place), "max_new": 0}
    empty = init_cache(Full(), batch=len(sample), **sizes)
    scores = _scores(
        functional.apply, (chunk, sinks, recent),
        functional.params, (empty,) * functional.num_layers, tokens, positions, threshold,
    )  # fmt: skip
    count = max(1, round(fraction * scores.size))
    ranked = np.argsort(-np.asarray(scores), axis=None, kind="stable")[:count]
    heads = tuple(divmod(int(head), functional.kv_heads) for head in ranked)
    return OutlierHeads(heads, functional.num_layers, functional.kv_heads)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _scores(
    apply: Callable,
    matching: tuple[int, int, int],
    params,
    caches: tuple[Cache, ...],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    threshold: Float[Array, ""],
) -> Float[Array, "N H"]:
    """Share of A without an edge above the threshold, per layer and KV head."""
    length = positions.max(-1) + 1
    _, caches = apply(
        params, tokens, positions, caches,
        layers=(Full(),) * len(caches), phase="prompt", last=True, logits_at=length[:, None] - 1,
    )  # fmt: skip
    keys = (cache.kv.k.read() for cache in caches)
    return jnp.stack([unmatched_share(each, length, matching, threshold) for each in keys])


def unmatched_share(
    keys: Float[Array, "B H S D"],
    length: Int[Array, " B"],
    matching: tuple[int, int, int],
    threshold: Float[Array, ""],
) -> Float[Array, " H"]:
    """Share of set A without an edge above the threshold, averaged over the rows.

    Args:
      keys: in position order, padded on the right to S.
      length: tokens of each row.
      matching: chunk, sinks and recent tokens.
    """
    chunk, sinks, recent = matching
    count = jnp.broadcast_to((length - sinks - recent)[:, None], keys.shape[:2])
    similarity, _ = soft_matching(keys[:, :, sinks:], count, chunk=chunk)
    edges = similarity > -jnp.inf
    unmatched = edges & (similarity <= threshold)
    return (unmatched.sum(-1) / edges.sum(-1)).mean(0)
