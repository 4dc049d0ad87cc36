"""The composition for a share of the full cache's bytes takes no more of them."""

from __future__ import annotations

import dataclasses

import jax
import pytest

import kvjax
from kvjax.attention.layer import RestSizes
from kvjax.attention.resting import rest


def bytes_of(transform: kvjax.KVTransform, head_dim: int, tokens: int = 8192) -> int:
    """Bytes at rest of a cache that is made for a document of so many tokens and nothing else."""
    sizes = {"batch": 1, "kv_heads": 2, "head_dim": head_dim, "max_prompt": tokens, "max_new": 0}
    cache = jax.eval_shape(lambda: kvjax.init_cache(transform, **sizes, dtype="bfloat16"))
    kept = RestSizes(cache.kv.slots, 0, 0, 2 * cache.kv.slots)
    return kvjax.nbytes(rest.eval_shape(cache, (kept,)))


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("share", [1, 0.6, 0.5, 0.4, 0.3, 0.1, 0.03])
def test_it_takes_no_more_than_its_share(share, head_dim):
    transform = kvjax.smallest(share, head_dim=head_dim, room=0)
    if isinstance(transform, kvjax.ByHead):
        transform = transform.base  # heads have the same budget in the mean
    taken = bytes_of(transform, head_dim) / bytes_of(kvjax.Full(), head_dim)
    # Means and scales of channels come on top, once for a head.
    assert taken <= share * 1.02
    if share < 0.3:
        assert taken > share * 0.98


def test_every_token_stays_where_there_are_bytes_for_it():
    kept = {share: kvjax.unparse(kvjax.smallest(share, head_dim=64)) for share in (0.6, 0.5, 0.4)}
    assert kept == {
        0.6: "quantize", 0.5: "quantize(bits=4, key_bits=8)",
        0.4: "quantize(bits=4, key_axis='token')",
    }  # fmt: skip


def test_few_tokens_have_fewer_bits():
    """Fewer bits begin below a quarter of the tokens in 4, and below a fifth in 4 and 2."""
    forms = {
        (share, head_dim): kvjax.unparse(kvjax.smallest(share, head_dim=head_dim).base.parts[1])
        for share in (0.1, 0.06, 0.03) for head_dim in (64, 96, 36)
    }  # fmt: skip
    assert forms == {
        (0.1, 64): "quantize(bits=4, group=64, key_axis='token')",
        (0.06, 64): "quantize(bits=2, key_axis='token', key_bits=4)",
        (0.03, 64): "quantize(bits=2, key_axis='token', key_bits=3)",
        (0.1, 96): "quantize(bits=4, group=48, key_axis='token')",
        (0.06, 96): "quantize(bits=2, key_axis='token', key_bits=4)",
        (0.03, 96): "quantize(bits=2, key_axis='token', key_bits=3)",
        (0.1, 36): "quantize(bits=4, group=36, key_axis='token')",
        (0.06, 36): "quantize(bits=4, group=36, key_axis='token')",
        (0.03, 36): "quantize(bits=4, group=36, key_axis='token')",
    }


def test_room_comes_on_top():
    small, large = (kvjax.smallest(0.1, head_dim=64, room=room).base for room in (0, 100))
    assert dataclasses.replace(small.parts[0], room=100) == large.parts[0]


@pytest.mark.parametrize(
    ("share", "error", "words"),
    [
        (0, ValueError, "got 0"),
        (1e-5, ValueError, "ten-thousandth.* got 1e-05"),
        (1.2, ValueError, "got 1.2"),
        ("a", TypeError, "got 'a'"),
    ],
)
def test_what_is_not_a_share(share, error, words):
    with pytest.raises(error, match=rf"share must .*{words}"):
        kvjax.smallest(share, head_dim=64)
