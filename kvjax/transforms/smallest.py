"""Chooses a composition for a share of the full cache's bytes."""

from __future__ import annotations

import math

import jax

from kvjax.attention.init_cache import init_cache
from kvjax.attention.layer import RestSizes
from kvjax.attention.resting import rest
from kvjax.cache.nbytes import nbytes
from kvjax.checks import check_count, check_number
from kvjax.compose.by_head import ByHead
from kvjax.compose.chain import chain
from kvjax.messages import brief
from kvjax.protocol import Full, KVTransform
from kvjax.storage.quantize.transform import GROUP, Quantize, wide_group
from kvjax.transforms.own_queries import OwnQueries

_TOKENS = 4096  # of the caches whose bytes are counted
# Forms, and the share of the tokens below which more tokens in the next form answer better
# (docs/results/documents.md, "Answers against bytes").
_FOUR_BITS = 0.25
_FEW_BITS = {Quantize(2, key_bits=4): 0.2, Quantize(2, key_bits=3): 0.0}


def smallest(share: float, *, head_dim: int, room: int = 256) -> KVTransform:
    """Returns a composition for documents that takes a share of the full cache's bytes at rest.

    The share is of the bytes that the full cache takes in bfloat16. Room for questions comes on
    top. Where the share allows it, every token stays: in 8 bits, or with keys in 8 bits and values
    in 4, or in 4 bits. A smaller share keeps the tokens that `OwnQueries` scores best, and `ByHead`
    shares them among heads: in 4 bits; if only less than a quarter of the tokens would fit so,
    with values in 2 bits; and if less than a fifth would fit so, with keys in 3. How well each form
    answers is measured in docs/results/documents.md, under "Answers against bytes".

    Args:
      share: share of the bytes, in (0, 1].
      head_dim: channels of the model's keys and values.
      room: slots in each head for questions and answers of earlier turns; 256.

    Raises:
      TypeError, ValueError: `share` is not a number in (0, 1], or so small that it leaves less than
        a ten-thousandth of the tokens; `head_dim` is odd or below 2.

    Example:
      >>> import kvjax
      >>> kvjax.unparse(kvjax.smallest(0.6, head_dim=64))
      'quantize'
      >>> kvjax.unparse(kvjax.smallest(0.06, head_dim=64))
      "by_head(chain(own_queries(budget=0.2612), quantize(bits=2, key_axis='token', key_bits=4)))"
    """
    check_number("share", share, 0.0, 1.0)
    check_count("head_dim", head_dim, 2)
    group, large = math.gcd(GROUP, head_dim), wide_group(head_dim)
    group = None if group == GROUP else group
    full = bytes_of_slot(Full(), head_dim)
    four_bits = Quantize(4, large, "token")
    with_eight = Quantize(8), Quantize(4, group, key_bits=8)
    for form in (*with_eight, Quantize(4, group, "token"), four_bits):
        if bytes_of_slot(form, head_dim) <= share * full:
            return form

    def budget(form: Quantize) -> float:
        scored = chain(OwnQueries(0.5, room=0), form)
        return math.floor(1e4 * share * full / bytes_of_slot(scored, head_dim)) / 1e4

    ladder = {four_bits: 0.0}
    if head_dim % 8 == 0:  # 3 and 2 bits need channels in eights
        ladder = {four_bits: _FOUR_BITS, **_FEW_BITS}
    form = next(form for form, least in ladder.items() if budget(form) >= least)
    kept = budget(form)
    if kept == 0:
        raise ValueError(f"share must leave a ten-thousandth of the tokens, got {brief(share)}")
    return ByHead(chain(OwnQueries(kept, room=room), form))


def bytes_of_slot(transform: KVTransform, head_dim: int) -> float:
    """Returns the bytes of a slot of one head at rest, with all that stands beside its key."""
    cache = jax.eval_shape(
        lambda: init_cache(
            transform, batch=1, kv_heads=1, head_dim=head_dim, max_prompt=_TOKENS, max_new=0,
            dtype="bfloat16",
        )
    )  # fmt: skip
    slots = cache.kv.slots
    sizes = RestSizes(slots, 1, 1, slots)
    return nbytes(rest.eval_shape(cache, (sizes,))) / slots
