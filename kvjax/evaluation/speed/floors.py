"""Operations that reading a prompt takes at least, and the room of the caches for it."""

from __future__ import annotations

from typing import Any

import jax

from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.prompt_checks import bucket


def cache_room(
    model: LanguageModel | FunctionalModel, prompt_tokens: int, new_tokens: int
) -> dict[str, Any]:
    """Returns the sizes for which `generate` makes caches, as arguments of `kvjax.read`.

    Example:
      >>> from kvjax.evaluation.speed.floors import cache_room
      >>> from kvjax.models import abstract_decoder
      >>> from kvjax.models.shapes import shape_config
      >>> cache_room(abstract_decoder(shape_config("llama-3.1-8b", 1)), 2000, 30)
      {'max_prompt': 2048, 'max_new': 64}
    """
    positions = getattr(model, "max_positions", None)
    return {
        "max_prompt": bucket(prompt_tokens, positions, None),
        "max_new": bucket(new_tokens, None, None),
    }


def prompt_flops(model: LanguageModel | FunctionalModel, tokens: int) -> int | None:
    """Counts the floating-point operations of matrix products that read one row.

    The products are those of every token with the weights of the layers, and those of attention
    with the full cache, over the tokens that each token sees. The logits of the last token are left
    out.

    Args:
      model: as for `kvjax.generate`; its parameters may be shapes.
      tokens: number of tokens of the row.

    Returns:
      The number of operations; None for a model that does not show its parts.

    Example:
      >>> from kvjax.evaluation.speed.floors import prompt_flops
      >>> from kvjax.models import abstract_decoder
      >>> from kvjax.models.shapes import shape_config
      >>> prompt_flops(abstract_decoder(shape_config("llama-3.1-8b")), 2048) / 1e12
      29.68...
    """
    functional = as_functional(model)
    if functional.parts is None:
        return None
    total = 0
    windows = functional.windows or (None,) * functional.num_layers
    layers = functional.parts.split(functional.params)
    for layer_params, window in zip(layers, windows, strict=True):
        matrices = sum(x.size for x in jax.tree.leaves(layer_params) if x.ndim >= 2)
        span = tokens if window is None else min(window, tokens)
        # Pairs of a query and a key that it sees: a triangle, then `span` keys per query.
        pairs = span * (span + 1) // 2 + (tokens - span) * span
        total += 2 * tokens * matrices + 4 * pairs * functional.query_heads * functional.head_dim
    return total
