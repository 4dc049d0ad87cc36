"""Models that know nothing of kvjax but a cache that goes in and comes out."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import kvjax
from tests.support.marks import some_slow

VOCABULARY, WIDTH, LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 48, 32, 2, 4, 2, 8
SIZES = {"num_layers": LAYERS, "query_heads": QUERY_HEADS, "kv_heads": KV_HEADS,
         "head_dim": HEAD_DIM}  # fmt: skip
LARGE = linen.initializers.normal(0.5)  # with usual random weights a token would repeat itself
PROMPTS = [list(range(3, 37)), list(range(40, 20, -1))]


class TheirAttention(linen.Module):
    """Attention as they wrote it, which adds sinusoids to its input."""

    @linen.compact
    def __call__(self, x, segment_pos, cache):
        turns = 20.0 ** -(jnp.arange(0, WIDTH, 2) / WIDTH)
        angle = segment_pos[..., None].astype(jnp.float32) * turns[None, None]
        x = x + jnp.concatenate((jnp.sin(angle), jnp.cos(angle)), axis=-1)
        dense = functools.partial(linen.DenseGeneral, use_bias=False, kernel_init=LARGE)
        q, k, v = (
            dense((count, HEAD_DIM), name=name)(x)
            for name, count in (("q", QUERY_HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        out, cache = cache.attend(q, k, v, segment_pos)
        return linen.DenseGeneral(WIDTH, axis=(-2, -1), kernel_init=LARGE, name="out")(out), cache


class TheirModel(linen.Module):
    @linen.compact
    def __call__(self, tokens, segment_pos, caches):
        x, written = linen.Embed(VOCABULARY, WIDTH, name="embed")(tokens), []
        for layer, cache in enumerate(caches):
            added, cache = TheirAttention(name=f"layer_{layer}")(x, segment_pos, cache)
            x, written = x + added, [*written, cache]
        return x, tuple(written)


def head(params, x):
    return x @ params["params"]["embed"]["embedding"].T


def caches_of(method="full", rows=1, max_new=16):
    return kvjax.init_caches(
        method, **SIZES, batch=rows, max_prompt=40, max_new=max_new, dtype=jnp.float32
    )


@functools.cache
def params():
    one = jnp.zeros((1, 1), jnp.int32)
    guests = kvjax.guests.guest_caches(caches_of(), one)
    return TheirModel().init(jax.random.key(0), one, one, guests)


@functools.cache
def model(with_head=True):
    def whole(params, tokens, positions, caches):
        x, caches = TheirModel().apply(params, tokens, positions, caches)
        return head(params, x), caches

    forward, given = (TheirModel().apply, head) if with_head else (whole, None)
    return kvjax.guests.functional_model(
        forward, params(), head=given, **SIZES, vocab_size=VOCABULARY
    )


def their_loop(method: str, count: int = 12) -> list[int]:
    """Reads a prompt, feeds its last token once more, and goes on in a `while_loop`."""
    guests = kvjax.guests.guest_caches(kvjax.self_flushing(caches_of(method)))
    prompt = jnp.array([PROMPTS[0]])
    _, guests = TheirModel().apply(params(), prompt, jnp.arange(prompt.shape[1])[None], guests)

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(guests, text):
        def step(carry):
            number, guests, text = carry
            at = prompt.shape[1] - 1 + number
            x, guests = TheirModel().apply(params(), text[:, at][:, None], at[None, None], guests)
            return number + 1, guests, text.at[:, at + 1].set(head(params(), x)[:, 0].argmax(-1))

        return jax.lax.while_loop(lambda c: c[0] < count, step, (jnp.int32(0), guests, text))

    _, guests, text = loop(guests, jnp.pad(prompt, ((0, 0), (0, count))))
    kvjax.check_dropped(guests)
    return text[0, prompt.shape[1] :].tolist()


def test_their_loop_and_ours_write_one_text():
    kept = kvjax.generate(model(), PROMPTS, max_new_tokens=12, end_tokens=(), dtype="float32")
    assert their_loop("full") == kept.tokens[0] and len(set(kept.tokens[0])) > 3
    without_head = kvjax.generate(
        model(False), PROMPTS, max_new_tokens=12, end_tokens=(), dtype="float32"
    )
    assert without_head.tokens == kept.tokens


@pytest.mark.parametrize(
    "method",
    some_slow(
        ("every(snapkv(budget=12, window=4), steps=4)", "h2o(budget=9)"),
        exhaustive={"h2o(budget=9)"},
    ),
)
def test_their_loop_flushes_and_adds_nothing_twice(method):
    caches, prompt = caches_of(method), jnp.array([PROMPTS[0]])

    def call(tokens, positions, caches):
        guests = kvjax.guests.guest_caches(caches)
        x, guests = TheirModel().apply(params(), tokens, positions, guests)
        return head(params(), x), tuple(guest.cache for guest in guests)

    _, caches = call(prompt, jnp.arange(34)[None], caches)
    text, interval = PROMPTS[0][-1:], kvjax.flush_interval(caches)
    for step in range(12):
        new = jnp.array([text[-1:]]), jnp.array([[33 + step]])
        logits, caches = call(*new, caches)
        text.append(int(logits[0, -1].argmax()))
        if interval and step and step % interval == 0:
            caches = kvjax.flush(caches)
    assert their_loop(method) == text[1:]


def test_a_document_that_is_looked_at_once_more():
    kvzip = {"transform": kvjax.KVzip(budget=16, room=8), "max_prompt": 64, "dtype": "float32"}
    document = kvjax.read(model(), PROMPTS, **kvzip)
    answer = kvjax.generate(
        model(), [[1, 2], [3]], context=document, max_new_tokens=4, end_tokens=()
    )
    assert [len(row) for row in answer.tokens] == [4, 4]
    assert document.occupancy.kept_slots < sum(map(len, PROMPTS)) * LAYERS * KV_HEADS


def test_caches_without_positions_need_those_of_the_attention():
    (cache, *_), x = kvjax.guests.guest_caches(caches_of()), jnp.ones((1, 3, KV_HEADS, HEAD_DIM))
    with pytest.raises(ValueError, match="attend needs the positions of the tokens"):
        cache.attend(x, x, x)
    q = jnp.ones((1, 3, QUERY_HEADS, HEAD_DIM))
    out, _ = cache.attend(q, x, x, np.array([[0, 1, -1]]))
    assert out.shape == q.shape and not out[:, 2].any()
