"""The three attention operations against float64, and the memory that a call may take."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from pallas_kernels import column_sums, decode_attention, prompt_attention
from tests.references.attention import softmax_attention
from tests.support.attending import attend, new_cache
from tests.support.tolerances import close

blocks = importlib.import_module("pallas_kernels.attention.prompt_blocks")
HUGE = 1e30  # in free slots; in bfloat16 it is still finite


@dataclass(frozen=True)
class Shape:
    """One call. Small blocks are 4 queries by 8 slots, so that nothing here is a multiple."""

    group: int = 2
    tokens: int = 9
    slots: int = 21
    small: bool = True
    shuffled: bool = True
    padded: bool = True
    dtype: str = "float32"
    options: dict = field(default_factory=dict, hash=False)


GRID = {
    "one of everything": Shape(group=1, tokens=1, slots=1, shuffled=False, padded=False),
    "fewer than a block": Shape(tokens=3, slots=5),
    "several blocks": Shape(),
    "multiples of the blocks": Shape(group=1, tokens=8, slots=16, padded=False),
    "four query heads": Shape(group=4, tokens=6, slots=19),
    "slots in order": Shape(shuffled=False),
    "window": Shape(options={"window": 4}),
    "window of one": Shape(options={"window": 1}, shuffled=False),
    "window, in order": Shape(tokens=17, slots=37, options={"window": 5}, shuffled=False),
    "soft cap": Shape(options={"soft_cap": 0.9}, group=1),
    "everything": Shape(group=4, options={"window": 6, "soft_cap": 1.7}),
    "default blocks": Shape(small=False, tokens=150, slots=300),
    "bfloat16": Shape(dtype="bfloat16"),
    "bfloat16, window": Shape(dtype="bfloat16", group=1, options={"window": 7}),
}


@pytest.fixture(params=GRID, ids=GRID.keys())
def case(request, monkeypatch):
    shape = GRID[request.param]
    if shape.small:
        monkeypatch.setattr(blocks, "QUERY_BLOCK", 4)
        monkeypatch.setattr(blocks, "KEY_BLOCK", 8)
    return Case(shape)


class Case:
    """Arguments of a call, and what must come out of it in float64."""

    def __init__(self, shape: Shape, rows: int = 2, heads: int = 2, dim: int = 8):
        rng = np.random.default_rng(3)
        group, tokens, slots = shape.group, shape.tokens, shape.slots
        self.kind = shape.dtype
        self.dtype = jnp.dtype(shape.dtype)
        q = rng.normal(size=(rows, heads, group, tokens, dim))
        k, v = rng.normal(size=(2, rows, heads, slots, dim))
        bias = np.log(rng.integers(1, 5, size=(rows, heads, slots)))
        # Live slots hold distinct positions; the newest queries stand at the newest positions.
        position = np.tile(np.arange(slots), (rows, heads, 1))
        query = np.tile(np.arange(slots - tokens, slots), (rows, 1))
        if tokens > slots:
            query = np.tile(np.arange(tokens), (rows, 1))
        if shape.shuffled:
            position = rng.permuted(position, axis=-1)
        if shape.padded:
            free = rng.random(position.shape) < 0.3
            free[0, 0] = False
            free[-1, -1] = True  # this head has no live slot at all: its rows see nothing
            query[0, ::3] = -1
            bias, position = np.where(free, -np.inf, bias), np.where(free, -1, position)
            k = np.where(free[..., None], HUGE * np.sign(k), k)
            v = np.where(free[..., None], HUGE, v)
        self.q, self.k, self.v = (jnp.asarray(x, self.dtype) for x in (q, k, v))
        self.bias = jnp.asarray(bias, jnp.float32)
        self.query, self.position = (jnp.asarray(x, jnp.int32) for x in (query, position))
        self.options = {"scale": 0.6, **shape.options}

    def expected(self):
        """Output, log-sum-exp and probabilities."""
        q, k, v = (np.asarray(x, np.float64) for x in (self.q, self.k, self.v))
        out, lse = np.zeros(q.shape), np.full(q.shape[:-1], -np.inf)
        probabilities = np.zeros((*q.shape[:-1], k.shape[2]))
        for b, h in np.ndindex(q.shape[:2]):
            one = (q[b, h], k[b, h], v[b, h], np.asarray(self.query)[b])
            place, mass = np.asarray(self.position)[b, h], np.asarray(self.bias)[b, h]
            out[b, h], p = softmax_attention(*one, place, mass, **self.options)
            probabilities[b, h] = p
            lse[b, h] = self.log_sum_exp(b, h, p, place, mass)
        return out, lse, probabilities

    def log_sum_exp(self, b, h, p, place, mass):
        """From any one slot that a row sees: its logit - log(its probability)."""
        q, k = np.asarray(self.q, np.float64)[b, h], np.asarray(self.k, np.float64)[b, h]
        k = np.where(place[:, None] >= 0, k, 0)
        logits = self.options["scale"] * np.einsum("gtd,sd->gts", q, k)
        if cap := self.options.get("soft_cap"):
            logits = cap * np.tanh(logits / cap)
        best = p.argmax(-1)[..., None]
        top = np.take_along_axis(p, best, -1)[..., 0]
        logit = np.take_along_axis(logits + np.where(place >= 0, mass, 0), best, -1)[..., 0]
        return np.where(top > 0, logit - np.log(np.where(top > 0, top, 1)), -np.inf)


def quick(function):
    return jax.jit(function)


@pytest.mark.fast_cases("slots in order", "soft cap", "window", "window of one")
def test_prompt_attention(case):
    args = (case.q, case.k, case.v, case.bias, case.query, case.position)
    out, lse = quick(lambda *x: prompt_attention(*x, **case.options))(*args)
    expected, expected_lse, p = case.expected()
    assert out.dtype == case.dtype and lse.dtype == jnp.float32
    close(out, expected, case.kind, "output")
    close(lse, expected_lse, case.kind, "log-sum-exp")
    blind = p.sum(-1) == 0
    assert (np.asarray(out, np.float32)[blind] == 0).all()
    assert (np.asarray(lse)[blind] == -np.inf).all()


def test_decode_attention(case):
    args = (case.q, case.k, case.v, case.bias, case.query, case.position)
    out, lse, p = quick(lambda *x: decode_attention(*x, **case.options))(*args)
    expected, expected_lse, expected_p = case.expected()
    assert out.dtype == case.dtype and lse.dtype == p.dtype == jnp.float32
    close(out, expected, case.kind, "output")
    close(lse, expected_lse, case.kind, "log-sum-exp")
    close(p, expected_p, case.kind, "probabilities")
    assert (np.asarray(p)[expected_p == 0] == 0).all(), "what is not seen gets exactly nothing"


def test_column_sums(case):
    _, lse, p = case.expected()
    args = (case.q, case.k, case.bias, jnp.asarray(lse, jnp.float32), case.query, case.position)
    sums = quick(lambda *x: column_sums(*x, **case.options))(*args)
    assert sums.dtype == jnp.float32
    close(sums, p.sum(3), case.kind)


@pytest.mark.parametrize("tokens", [1, 5])
def test_one_function_of_the_same_arguments(tokens):
    """Prompt and decode attention agree, and the column sums are those of the probabilities."""
    case = Case(Shape(tokens=tokens, slots=40))
    args = (case.q, case.k, case.v, case.bias, case.query, case.position)
    out, lse = quick(lambda *x: prompt_attention(*x, **case.options))(*args)
    again, lse_again, p = quick(lambda *x: decode_attention(*x, **case.options))(*args)
    close(out, again)
    close(lse, lse_again)
    rows = (case.q, case.k, case.bias, lse, case.query, case.position)
    close(quick(lambda *x: column_sums(*x, **case.options))(*rows), np.asarray(p).sum(3))


def test_column_sums_are_float32_whatever_the_default_is():
    """With 64-bit types enabled too: they are added to a float32 column of the cache."""
    case = Case(Shape(tokens=3, slots=5))
    args = (case.q, case.k, case.bias, jnp.zeros(case.q.shape[:-1]), case.query, case.position)
    with jax.enable_x64(True):
        assert jax.eval_shape(lambda *x: column_sums(*x, scale=1.0), *args).dtype == jnp.float32


def test_large_logits_do_not_overflow():
    case = Case(Shape(tokens=5, slots=20, padded=False))
    case.q = np.asarray(case.q) * np.float32(1e3)
    args = (case.q, case.k, case.v, case.bias, case.query, case.position)
    out, lse = quick(lambda *x: prompt_attention(*x, **case.options))(*args)
    expected, _, p = case.expected()
    close(out, expected, "bfloat16")  # the logits themselves carry a rounding of 1e-7 · 1e4
    assert np.isfinite(np.asarray(lse)).all()
    rows = (case.q, case.k, case.bias, lse, case.query, case.position)
    sums = quick(lambda *x: column_sums(*x, **case.options))(*rows)
    close(sums, p.sum(3), "bfloat16")


def test_an_unknown_implementation_raises():
    case = Case(Shape(tokens=2, slots=4))
    args = (case.q, case.k, case.v, case.bias, case.query, case.position)
    with pytest.raises(ValueError, match=r"'xla'.*'nonsense'"):
        decode_attention(*args, scale=1.0, implementation="nonsense")
    named = quick(lambda *x: decode_attention(*x, scale=1.0, implementation="xla"))(*args)
    default = quick(lambda *x: decode_attention(*x, scale=1.0))(*args)
    for a, b in zip(named, default, strict=True):
        np.testing.assert_array_equal(a, b)


def test_attend_hands_the_implementation_down():
    cache = new_cache(kvjax.Full())
    q, kv = (np.ones((3, heads, 1, 8), np.float32) for heads in (4, 2))
    for phase in ("prompt", "decode"):
        with pytest.raises(ValueError, match=r"'xla'.*'nonsense'"):
            attend(
                kvjax.Full(), cache, q, kv, kv, np.zeros((3, 1), np.int32),
                phase=phase, implementation="nonsense",
            )  # fmt: skip


# --- memory, as compiled --------------------------------------------------------------------------

MIB = 1 << 20


def temporary_bytes(transform, kv_heads: int, query_heads: int, tokens: int, length: int, phase):
    """Bytes of temporaries of one donated call, and bytes of its cache. Nothing runs."""
    cache = jax.eval_shape(
        lambda: kvjax.init_cache(
            transform,
            batch=1,
            kv_heads=kv_heads,
            query_heads=query_heads,
            head_dim=64,
            max_prompt=length,
            max_new=64,
            dtype=jnp.float32,
        )
    )

    def rows(heads):
        return jax.ShapeDtypeStruct((1, heads, tokens, 64), jnp.float32)

    call = jax.jit(
        lambda cache, *x: kvjax.attend(transform, cache, *x, phase=phase), donate_argnums=0
    )
    positions = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    arguments = (cache, rows(query_heads), rows(kv_heads), rows(kv_heads), positions)
    compiled = call.lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes, kvjax.nbytes(cache)


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.fast_cases("2")
def test_a_long_prompts_scores_take_little_memory(kv_heads):
    """H2O's whole prompt pass: the attention matrix of 16,384 tokens and 8 heads has 8 GiB."""
    transform = kvjax.H2O(budget=1024)
    temporary, _ = temporary_bytes(transform, kv_heads, 8, 16_384, 16_384, "prompt")
    assert temporary < 512 * MIB, f"{temporary / MIB:.0f} MiB"


def test_a_long_prompts_observation_takes_little_memory():
    temporary, _ = temporary_bytes(kvjax.SnapKV(budget=1024), 2, 8, 16_384, 16_384, "prompt")
    assert temporary < 512 * MIB, f"{temporary / MIB:.0f} MiB"


@pytest.mark.parametrize(
    "transform",
    [
        kvjax.Full(),
        kvjax.H2O(budget=8192),
        kvjax.StreamingLLM(budget=8192),
        # 8,192 slots, a multiple of the blocks: else the step that compresses pads the keys.
        kvjax.Every(kvjax.SnapKV(budget=8160), steps=32),
        kvjax.WhenFull(kvjax.SnapKV(budget=8160), room=32),
    ],
    ids=["full", "h2o", "streaming_llm", "every", "when_full"],
)
def test_a_decode_step_copies_no_cache(transform):
    temporary, cache = temporary_bytes(transform, 8, 8, 1, 16_384, "decode")
    assert temporary < 0.1 * cache, f"{temporary / MIB:.1f} of {cache / MIB:.1f} MiB"
