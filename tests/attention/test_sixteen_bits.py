"""In 16 bits every method gives what it gives in float32, but for a few roundings.

The tests of each method hold its float32 run against float64, within 1e-5, a fiftieth of a rounding
to float16. Here both runs get numbers that 16 bits hold exactly.
"""

from __future__ import annotations

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.references.attention import softmax_attention
from tests.support.attending import (
    Tokens,
    attend,
    flushed,
    new_cache,
    parts,
    prompt,
    right,
    slots_of,
)
from tests.support.cases import BUDGET, CASES, COVERING, KINDS, quantised
from tests.support.marks import some_slow
from tests.support.tolerances import roundings, within_roundings

LENGTHS, FURTHER, WIDTH, STEPS = (24, 17, 5), (5, 8, 3), 24, 8
# Roundings by which an output may differ: half of one is its own, and each of a token's key and
# value may have been rounded once or twice when it was merged.
MOST = 2.5
# What is merged, or rotated and waits to be encoded, is rounded, and a rounding may decide between
# two codes. Those of 8 bits are 2^-7 of the largest number apart, those of 4 bits up to 2 / 15, and
# those of 2 bits up to 2 / 3, which is 1,365 roundings to float16.
ENCODED = {
    "chelsea_quantize": 18.0, "kvmerger_quantize": 18.0, "h2o_quantize_token": 35.0,
    "snapkv_quantize_channel": 35.0, "quantize_channel_infinigen": 35.0,
    "snapkv_quantize_keys_in_8": 35.0, "quantize_clusterkv_offload": 35.0,
    "snapkv_quantize_keys_in_3": 1365.0,
}  # fmt: skip
# InfiniGen selects by an index in 16 bits. Here it selects all, so that only numbers are compared.
METHODS = {
    name: COVERING[name] if "infinigen" in name else CASES[name]
    for name in (
        *kvjax.registry.METHODS, "cam", "cam_prompt", "kvcrush_h2o", "every", "reposition",
        "h2o_codebook",
        "clusterkv_offload", *quantised(BUDGET),
    )
}  # fmt: skip


@functools.cache
def tokens(dtype: str) -> Tokens:
    """Numbers of a dtype."""
    rounded = (jnp.asarray(x, dtype) for x in Tokens.random(seed=4))
    return Tokens(*(np.asarray(x, np.float32) for x in rounded))


def outputs(name: str, numbers: str, dtype: str, implementation: str | None = None) -> dict:
    """What two turns give, by path, and what is stored then.

    Args:
      numbers: the dtype that holds all numbers of the tokens.
      dtype: of the tokens and the cache.
    """
    transform, lengths, found = METHODS[name], np.zeros(3, int), {}
    rope = kvjax.Rope(jnp.zeros(4))  # which turns nothing, so that keys stay what they are
    call = functools.partial(attend, implementation=implementation, rope=rope)
    cache = new_cache(transform, dtype=jnp.dtype(dtype), max_prompt=40, max_new=2 * STEPS)
    for turn, counts in (("first", LENGTHS), ("further", FURTHER)):
        positions = right(lengths, counts, WIDTH)
        out, cache = prompt(
            transform, cache, tokens(numbers), positions, dtype=dtype, rope=rope,
            implementation=implementation,
        )  # fmt: skip
        found[f"{turn} prompt"] = np.where(positions[:, None, :, None] < 0, 0, out)
        lengths, steps = lengths + counts, []
        for step in range(STEPS):
            out, cache = call(cache, *tokens(numbers).at(lengths[:, None], dtype), phase="decode")
            steps.append(np.asarray(out, np.float32))
            cache = flushed(cache, step + 1)
            lengths = lengths + 1
        found[f"{turn} steps"] = np.stack(steps)
    for number, part in enumerate(parts(transform, cache)):
        for row, head in itertools.product(range(3), range(len(part.heads))):
            for what, x in slots_of(part.cache, row, head, columns=False).items():
                found[f"{what} of part {number}, row {row}, head {head}"] = x
    return {path: np.asarray(x, np.float32) for path, x in found.items()}


in_float32 = functools.cache(functools.partial(outputs, dtype="float32"))


def compare(name: str, dtype: str, implementation: str | None = None) -> dict[str, float]:
    """How many roundings apart the two runs are, by path; they hold the same tokens."""
    expected, own = in_float32(name, dtype), outputs(name, dtype, dtype, implementation)
    for path in [path for path in expected if path.startswith("position")]:
        np.testing.assert_array_equal(own.pop(path), expected[path], path)
    return {path: roundings(own[path], expected[path], jnp.dtype(dtype)) for path in own}


DTYPES = ("bfloat16", "float16")
QUICK = ("full", "bfloat16"), ("chelsea", "bfloat16"), ("quantize", "float16")


# One case of each kind runs in one of the types in turn; all others before a release.
HALF = {
    (name, dtype)
    for number, name in enumerate(METHODS)
    for dtype in (DTYPES if name not in KINDS else DTYPES[number % 2 :][:1])
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    some_slow(itertools.product(METHODS, DTYPES), *QUICK, exhaustive=HALF),
)
def test_every_method(name, dtype):
    apart = compare(name, dtype)
    assert max(apart.values()) <= ENCODED.get(name, MOST), apart


# Each runs in one of the types in turn, and in the other one before a release.
KERNELS = ("full", "h2o", "chelsea", "clusterkv", "quest", "quantize")
OTHER_TYPE = {(name, DTYPES[(number + 1) % 2]) for number, name in enumerate(KERNELS)}


@pytest.mark.parametrize(
    ("name", "dtype"), some_slow(itertools.product(KERNELS, DTYPES), exhaustive=OTHER_TYPE)
)
def test_interpreted_kernels(name, dtype):
    apart = compare(name, dtype, "interpret")
    assert max(apart.values()) <= MOST, apart


@pytest.mark.parametrize(
    ("share", "phase", "implementation", "dtype"),
    some_slow(
        itertools.product((0.996, 0.9998), ("prompt", "decode"), ("xla", "interpret"), DTYPES),
        (0.9998, "decode", "xla", "float16"),
    ),
)
def test_beside_a_token_that_takes_nearly_all_attention(share, phase, implementation, dtype):
    """Its value is 0, as that of attention sinks nearly is: the output is all of the others'."""
    count = 600
    numbers = Tokens.random(rows=1, length=count, seed=6)
    q, k, v = 0.3 * numbers.q, 0.3 * numbers.k, 1 + 0.3 * numbers.v
    q[..., 0], k[..., 0], v[:, :, 0] = 1.0, 0.0, 0.0
    k[:, :, 0] = np.eye(8)[0] * np.log(share / (1 - share) * count)
    q, k, v = (np.asarray(jnp.asarray(x, dtype), np.float32) for x in (q, k, v))
    cache = new_cache(
        kvjax.Full(), 1, dtype=jnp.dtype(dtype), max_prompt=count, max_new=1, scale=1.0
    )
    call = functools.partial(attend, implementation=implementation, scale=1.0)
    where = np.arange(count)

    def at(*columns: int) -> list:
        return [jnp.asarray(x[:, :, slice(*columns)], dtype) for x in (q, k, v)]

    if phase == "prompt":
        out, _ = call(cache, *at(0, count), where[None], phase="prompt")
    else:
        _, cache = call(cache, *at(0, count - 1), where[None, :-1], phase="prompt")
        out, _ = call(cache, *at(count - 1, count), where[None, -1:], phase="decode")
    newest = [
        softmax_attention(
            q[0, 2 * h : 2 * h + 2, -1:], k[0, h], v[0, h], where[-1:], where, scale=1.0
        )
        for h in range(2)
    ]
    assert 0.9 * share < min(p[..., 0].min() for _, p in newest)
    expected = np.concatenate([out for out, _ in newest])
    within_roundings(out[0, :, -1:], expected, jnp.dtype(dtype), MOST)
