"""What reading a prompt takes at least, and the room that caches are given for it."""

from __future__ import annotations

import jax

from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.prompt_checks import bucket


def cache_room(
    model: LanguageModel | FunctionalModel, prompt_tokens: int, new_tokens: int
) -> dict[str, int]:
    """What `generate` makes caches for, as `max_prompt` and `max_new` of `kvjax.read`.

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
    """Floating-point operations of the matrix products that read one row with the full cache.

    Weights of the layers with every token, and attention with the tokens that each one sees. The
    logits of the last token are left out.

    Args:
      model: as for `kvjax.generate`; its parameters may be shapes.
      tokens: of the row.

    Returns:
      Their number; None for a model that does not show its parts.

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
    for of_layer, window in zip(functional.parts.split(functional.params), windows, strict=True):
        matrices = sum(x.size for x in jax.tree.leaves(of_layer) if x.ndim >= 2)
        most = tokens if window is None else min(window, tokens)
        pairs = most * (most + 1) // 2 + (tokens - most) * most  # of a query and a key that it sees
        total += 2 * tokens * matrices + 4 * pairs * functional.query_heads * functional.head_dim
    return total
