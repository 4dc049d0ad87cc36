"""Quantised payloads: numbers against the reference, every call of a payload, and attention."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Quantize, chain
from kvjax.cache.payload import Dense, Slots
from kvjax.storage.quantize.channels import Channels
from kvjax.storage.quantize.payload import Form
from pallas_kernels import (
    Mask,
    Queries,
    Seen,
    dequantise_groups,
    dequantise_slots,
    quantise_groups,
    quantise_slots,
)
from pallas_kernels.formats.bits import narrowed, widened
from tests.references import hadamard
from tests.references import quantised as reference
from tests.references.attention import softmax_attention
from tests.references.rope import rope as rotate
from tests.support import attending
from tests.support.attending import (
    HEAD_DIM,
    KV_HEADS,
    MAX_NEW,
    MAX_PROMPT,
    Tokens,
    new_cache,
    one_layer,
    right,
    run,
    structure,
)
from tests.support.draws import normal
from tests.support.marks import slow
from tests.support.tolerances import close

LENGTHS, WIDTH, STEPS = (24, 17, 5), 24, 10
GROUP, RESIDUAL = 4, 8
FORMS = {
    "int8": Quantize(8),
    "float8": Quantize("float8"),
    "token": Quantize(4, group=GROUP, key_axis="token"),
    "channel": Quantize(4, group=GROUP, residual=RESIDUAL),
}


def wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


to_8_bits = jax.jit(quantise_slots, static_argnums=1)
from_8_bits = jax.jit(dequantise_slots)
to_4_bits = jax.jit(quantise_groups, static_argnums=(1, 2, 3))
from_4_bits = jax.jit(dequantise_groups, static_argnums=3)


# --- numbers --------------------------------------------------------------------------------------


def nearly(q, expected) -> None:
    """The same numbers; where x / scale lies in the middle of two, perhaps the other one."""
    off = np.abs(np.asarray(q, int) - np.asarray(expected, int))
    assert off.max() <= 1 and off.mean() < 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_against_the_reference(dtype):
    x = (3 * normal(2, 3, 40, 16)).astype(jnp.dtype(dtype))
    x[0, 1, 7] = 0
    q, scale = map(np.asarray, to_8_bits(x))
    expected, by = reference.quantise_int8(wide(x))
    nearly(q, expected)
    assert q.dtype == jnp.int8 and scale.dtype == jnp.float32 and scale[0, 1, 7] == 0
    close(scale, by, "rounding")
    rows = from_8_bits(q, scale)
    close(rows, reference.dequantise_int8(q, by), "reference")
    error = np.abs(wide(rows) - wide(x))
    assert (error <= reference.error_bound(by)[..., None] + 1e-6).all()


@pytest.mark.parametrize(
    ("axis", "group", "dtype"),
    [("token", 8, "float32"), ("channel", 10, "bfloat16"), ("token", 16, "float16")],
)
def test_groups_of_4_bits_against_the_reference(axis, group, dtype):
    x = (5 + 3 * normal(2, 3, 40, 16)).astype(jnp.dtype(dtype))
    x[0, 1, :20] = 26  # some groups are constant
    # Compiled, a division by 15 becomes a product, which float16 rounds to another number.
    encode = quantise_groups if dtype == "float16" else to_4_bits
    packed, scale, low = encode(x, group, axis)
    expected, least, by = reference.quantise_4bit(wide(x), group, axis, dtype)
    nearly(reference.unpack(np.asarray(packed)), expected)
    close(wide(low), least, "exact")
    close(wide(scale), by, dtype if dtype == "bfloat16" else "accumulated")
    assert scale.dtype == low.dtype == x.dtype and packed.shape == (2, 3, 40, 8)
    own = reference.unpack(np.asarray(packed)), wide(low), wide(scale)
    rows = from_4_bits(packed, scale, low, axis)
    close(rows, reference.dequantise_4bit(*own, group, axis), "reference")
    bound = np.maximum(
        reference.error_bound(wide(scale)), reference.rounding_excess(wide(low), wide(scale), dtype)
    )
    bound = reference.spread(bound, x.shape[-1 if axis == "token" else -2], group, axis)
    error = np.abs(wide(rows) - wide(x))
    assert (error <= bound * 1.001 + 1e-5).all()


@pytest.mark.parametrize("bits", [3, 2])
@pytest.mark.parametrize(("axis", "group"), [("token", 16), ("channel", 10)])
def test_fewer_bits_against_the_reference(bits, axis, group):
    x = 5 + 3 * normal(2, 40, 16)
    x[0, :20] = 26  # some groups are constant
    packed, scale, low = to_4_bits(x, group, axis, bits)
    rows = wide(x) if axis == "token" else wide(x).swapaxes(1, 2)
    groups = rows.reshape(*rows.shape[:2], -1, group)
    lines = np.apply_along_axis(reference.fitted_line, -1, groups, 2**bits - 1)
    lines = lines if axis == "token" else lines.swapaxes(1, 2)
    close(low, lines[..., 0], "accumulated")
    close(scale, lines[..., 1], "accumulated")
    # Each number is the nearest one.
    wide_low, by = (reference.spread(wide(each), 16 if axis == "token" else 40, group, axis)
                    for each in (low, scale))  # fmt: skip
    nearest = np.clip(np.rint(reference.over(wide(x) - wide_low, by)), 0, 2**bits - 1)
    nearly(reference.unpack(np.asarray(packed)), nearest)


@pytest.mark.parametrize("bits", [3, 2])
def test_a_fit_loses_less_than_the_extremes(bits):
    x = normal(400, 64)
    error = np.mean((wide(from_4_bits(*to_4_bits(x, 64, "token", bits))) - x) ** 2)
    least, most = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    step = (most - least) / (2**bits - 1)
    by_extremes = np.mean((least + step * np.rint((x - least) / step) - x) ** 2)
    # The best possible line for normally distributed numbers has 0.119 and 0.037.
    assert error < {3: 0.85, 2: 0.6}[bits] * by_extremes
    assert error < {3: 0.032, 2: 0.115}[bits]


@pytest.mark.parametrize("bits", [3, 2])
def test_numbers_of_few_bits_are_packed_densely_and_back(bits):
    numbers = np.random.default_rng(bits).integers(0, 2**bits, (3, 5, 24)).astype(np.uint8)
    packed = reference.pack(numbers)
    narrow = narrowed(jnp.asarray(packed), bits)
    assert narrow.shape == (3, 5, 24 * bits // 8) and narrow.dtype == jnp.uint8
    assert np.array_equal(widened(narrow, bits), packed)
    # No byte is left out: each number of a row changes it.
    for place in range(24):
        other = numbers.copy()
        other[..., place] ^= 1
        assert (narrowed(jnp.asarray(reference.pack(other)), bits) != narrow).sum() == 15


# --- payloads -------------------------------------------------------------------------------------

SHAPE = (2, 2, 18, 8)


encode = jax.jit(lambda own, rows, slots: own.encode(own, rows, rows, slots)[0])
read = jax.jit(lambda own, *index: own.read(*index))
write = jax.jit(lambda own, slots, rows: own.write(slots, rows))
flush_all = jax.jit(lambda own: own.flush(RESIDUAL))


def payload(form, dtype="float32", rows=None, count=10):
    """A payload after a prompt of so many tokens."""
    rows = normal(*SHAPE, dtype=dtype) if rows is None else rows
    new = RESIDUAL + GROUP - 1
    kinds = {
        "int8": Form(8), "float8": Form("float8"), "token": Form(4, GROUP),
        "channel": Form(4, GROUP, "channel", new),
        "residual": Form(4, GROUP, "token", new), "3-bit": Form(3, GROUP), "2-bit": Form(2, 8),
        "3-bit channel": Form(3, GROUP, "channel", new),
    }  # fmt: skip
    kinds |= {
        f"{name} relative": replace(kinds[name], relative=True)
        for name in ("int8", "token", "3-bit", "2-bit")
    }
    kinds |= {f"{name} rotated": replace(own, hadamard=True) for name, own in kinds.items()}
    return encoded(kinds[form].empty(SHAPE, dtype), rows, count)


def encoded(own, rows, count):
    """The payload after another prompt."""
    slot = np.broadcast_to(np.arange(SHAPE[2]), SHAPE[:3])
    slots = Slots(np.where(slot < count, slot, -1), slot < count, np.ones(SHAPE[0], bool))
    return encode(own, rows, slots)


@pytest.mark.parametrize(
    "form",
    [
        "int8", "float8", "token", "channel", "residual", "int8 rotated", "channel rotated",
        "3-bit channel", "2-bit relative rotated",
    ],
)  # fmt: skip
def test_an_empty_payload_is_encoded_zeros_that_nobody_encodes(form):
    """Encoding constants is done when code is compiled, and takes seconds per thousand slots."""
    own = payload(form).form
    empty = own.empty(SHAPE, "float32")
    zeros = encoded(empty, np.zeros(SHAPE, np.float32), 0)
    assert structure(empty) == structure(zeros)
    jax.tree.map(np.testing.assert_array_equal, empty, zeros)
    made = jax.make_jaxpr(lambda: own.empty(SHAPE, "float32"))()
    assert {str(equation.primitive) for equation in made.eqns} == {"broadcast_in_dim"}


def through_groups(rows, axis: str, rotated: bool) -> np.ndarray:
    """Rows as they are read from groups of 4 bits, by the reference."""
    basis = hadamard.rotate if rotated else wide
    q, low, scale = reference.quantise_4bit(basis(rows), GROUP, axis)
    return basis(reference.dequantise_4bit(q, low, scale, GROUP, axis))


@pytest.mark.parametrize(
    ("form", "count"),
    [("channel", 0), ("channel rotated", 13), ("residual", 8), ("residual rotated", 3)],
)
def test_whole_groups_of_slots_are_encoded(count, form):
    """Counted from slot 0; the others stay as they came until their group is whole."""
    rows = normal(*SHAPE)
    own = payload(form, rows=rows, count=count)
    axis = own.form.axis

    def check(own, count):
        whole, stored = count // GROUP * GROUP, np.asarray(read(own))
        if whole:
            expected = through_groups(rows[:, :, :whole], axis, own.form.hadamard)
            close(stored[:, :, :whole], expected, "reference")
        np.testing.assert_array_equal(stored[:, :, whole:count], rows[:, :, whole:count])
        assert (np.asarray(own.recent.count) == count - whole).all()

    check(own, count)
    most = min(RESIDUAL, 18 - count)
    for slot in range(count, count + most):
        own = write(own, np.full((2, 2, 1), slot), rows[:, :, slot : slot + 1])
        np.testing.assert_array_equal(np.asarray(read(own))[:, :, slot], rows[:, :, slot])
    flushed = flush_all(own)
    assert (np.asarray(flushed.room) >= RESIDUAL).all()
    check(flushed, count + most)


# --- what keys are relative to --------------------------------------------------------------------

channels_of = jax.jit(Channels.of)


@pytest.mark.parametrize("count", [0, 1, 2, 9, 18])
def test_channels_against_the_reference(count):
    keys = normal(*SHAPE) * 10.0 ** np.arange(-4, 4) + np.arange(8)
    keys[..., 5] = 7
    live = np.broadcast_to(np.arange(SHAPE[2]) < count, SHAPE[:3])
    got = channels_of(np.where(live[..., None], keys, np.nan).astype(np.float32), live)
    for row, head in np.ndindex(SHAPE[:2]):
        mean, scale = reference.channels(keys[row, head, :count])
        close(got.mean[row, head], mean, "float32")
        close(got.scale[row, head], scale, "float32")


@pytest.mark.parametrize("interleaved", [False, True])
def test_channels_that_are_rotated_later(interleaved):
    """Scales go through a rotation of six of the eight channels."""
    keys, live = normal(*SHAPE) * np.arange(1, 9) + 30, np.ones(SHAPE[:3], bool)
    rope = kvjax.Rope(jnp.array([1.0, 0.3, 0.1]), interleaved=interleaved)
    pairs = [(0, 1), (2, 3), (4, 5)] if interleaved else [(0, 3), (1, 4), (2, 5)]
    got = channels_of(keys.astype(np.float32), live, rope)
    for row, head in np.ndindex(SHAPE[:2]):
        mean, scale = reference.channels(keys[row, head], pairs)
        close(got.mean[row, head], mean, "exact")
        close(got.scale[row, head], scale, "float32")
    scale, place = got.scale[:, :, None], np.arange(SHAPE[2])[None]
    turned = rope.rotate(jnp.asarray(keys, jnp.float32), place)
    close(scale * rope.rotate(jnp.asarray(keys / scale, jnp.float32), place), turned, "float32")


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_channels_of_any_size(size):
    keys, live = normal(*SHAPE), np.ones(SHAPE[:3], bool)
    got, plain = channels_of(size * keys, live), channels_of(keys, live)
    close(got.mean / np.float32(size), plain.mean)
    close(got.scale, plain.scale)


def test_a_key_that_is_no_number_says_nothing_of_others():
    keys, live = normal(*SHAPE), np.ones(SHAPE[:3], bool)
    keys[0, 0, 3, 2], keys[0, 1, 4, 0] = np.nan, np.inf
    got = channels_of(keys, live)
    for head, slot in ((0, 3), (1, 4)):
        mean, scale = reference.channels(np.delete(keys[0, head], slot, axis=0))
        close(got.mean[0, head], mean)
        close(got.scale[0, head], scale)


def test_channels_stay_as_long_as_anything_of_their_prompt_does():
    """And are those of another prompt as soon as nothing is left."""
    form = Form(8, relative=True, hadamard=True)
    first = encoded(form.empty(SHAPE, "float32"), 3 + normal(*SHAPE), 10)
    slot = np.broadcast_to(np.arange(18), SHAPE[:3])
    kept = np.asarray(read(first))
    rows = np.concatenate((kept[:, :, 3:5], 50 * normal(2, 2, 16, 8, seed=2)), axis=2)
    source = np.where(slot < 2, slot + 3, -1)
    source[1] = -1  # of the second row nothing is left
    slots = Slots(slot, slot >= 0, np.ones(2, bool), source)
    again = encode(first, rows, slots)
    for x, y in zip(jax.tree.leaves(first.channels), jax.tree.leaves(again.channels), strict=True):
        np.testing.assert_array_equal(x[0], y[0])
        assert (np.asarray(x[1]) != np.asarray(y[1])).any()
    for x, y in zip(first.encoded[:2], again.encoded[:2], strict=True):
        np.testing.assert_array_equal(x[0, :, 3:5], y[0, :, :2])


# --- attention ------------------------------------------------------------------------------------


@functools.cache
def tokens() -> Tokens:
    return Tokens.random(rows=len(LENGTHS))


@functools.cache
def standard(transform):
    return run(transform, tokens(), right([0] * len(LENGTHS), LENGTHS, WIDTH), STEPS)


def attending_to(own, index, implementation, soft_cap=None):
    """Outputs and probabilities of queries for the lists of `index` (None: for all slots)."""
    count, lists = 12, SHAPE[1] if index is None else index.shape[1]
    slot = np.broadcast_to(np.arange(SHAPE[2]), SHAPE[:3])
    bias = np.where(slot < count, 0.0, -np.inf).astype(np.float32)
    position = np.where(slot < count, slot, -1).astype(np.int32)
    seen = Seen(bias, position, np.full(SHAPE[:2], count, np.int32), index=index)
    q, at = normal(SHAPE[0], lists, 3, 1, SHAPE[3], seed=7), np.full((SHAPE[0], 1), 20, np.int32)
    mask = Mask(0.3, soft_cap=soft_cap)
    call = jax.jit(
        lambda k, v, q, seen: k.attention(
            v, Queries(q, at), seen, mask, probabilities=True, implementation=implementation
        )
    )
    return call(*(own if isinstance(own, tuple) else (own, own)), q, seen)


@pytest.mark.parametrize(
    ("form", "lists", "soft_cap", "implementation"),
    [
        ("int8 rotated", None, None, "interpret"), ("channel rotated", 4, None, "xla"),
        ("int8 relative rotated", 4, 3.0, "xla"), ("int8 relative rotated", None, 3.0, "interpret"),
        *slow(
            ("int8", 4, None, "interpret"), ("int8 rotated", 2, None, "xla"),
            ("channel", 2, None, "interpret"), ("channel", None, None, "xla"),
            ("channel rotated", None, None, "interpret"), ("int8 relative", None, 3.0, "xla"),
            ("int8 relative", 4, None, "interpret"), ("token relative", 4, 3.0, "interpret"),
            ("3-bit relative rotated", 4, None, "xla"),
            ("token relative", 4, None, "xla"),
        ),
    ],
)  # fmt: skip
def test_attention_is_that_over_what_is_read(form, lists, soft_cap, implementation):
    """To all slots and to lists, of KV heads and of query heads, with rows that are recent.

    Of keys that are relative to their channels a soft cap has to know the products with the mean.
    """
    rows = normal(*SHAPE)
    rows[..., 2] = 5 + 0.1 * rows[..., 2]
    rows[..., 4] *= 20
    own, values = payload(form, rows=rows), payload(form.split()[0], rows=normal(*SHAPE, seed=1))
    for slot in (10, 11):
        new = np.full((2, 2, 1), slot), normal(2, 2, 1, 8, seed=slot)
        own, values = write(own, *new), write(values, *new)
    index = None
    if lists is not None:
        draw = np.random.default_rng(4)
        index = draw.permuted(np.tile(np.arange(-1, 17), (2, lists, 1)), axis=-1)[..., :9]
        index[..., :7] = np.where(index[..., :7] % 8 == 3, -1, index[..., :7])
        index[..., -2:] = [11, 3]
    out, found = attending_to((own, values), index, implementation, soft_cap)
    dense = Dense(read(own)), Dense(read(values))
    expected, probabilities = attending_to(dense, index, "xla", soft_cap)
    close(out, expected)
    close(found, probabilities)
    if soft_cap is not None:
        free, _ = attending_to(dense, index, "xla")
        assert np.abs(np.asarray(free) - expected).max() > 0.01, "the cap changes nothing"


# --- under every method ---------------------------------------------------------------------------

ENOUGH = MAX_PROMPT + MAX_NEW
CALIBRATION = kvjax.kit.InfiniGenCalibration(
    np.random.default_rng(0).normal(size=(3, KV_HEADS, HEAD_DIM, 3))
)


READING = {
    "clusterkv": kvjax.ClusterKV(
        ENOUGH, tokens_per_cluster=4, sinks=2, interval=GROUP, new_clusters=2, dense_layers=()
    ),
    "quest": kvjax.Quest(ENOUGH, page=4, dense_layers=()),
    "infinigen": kvjax.InfiniGen(ENOUGH, alpha=None, calibration=CALIBRATION, dense_layers=()),
}


def in_groups(name: str, form: Quantize = FORMS["channel"]):
    """A method that selects, over keys in groups of slots."""
    return one_layer(chain(form, READING[name]))


LARGE = {  # forms, and what they may lose of a step's output
    "8 bits": (Quantize(8), 0.02), "float8": (Quantize("float8"), 0.045),
    "4 bits": (Quantize(4), 0.13), "4 bits, token": (Quantize(4, key_axis="token"), 0.17),
    "4 bits, keys in 8": (Quantize(4, key_bits=8), 0.1),
    "8 bits, late": (chain(kvjax.StreamingLLM(200, reposition=True), Quantize(8)), 0.025),
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "dtype", "options"),
    [
        ("8 bits", "float32", {}), ("4 bits", "float32", {}), ("4 bits, keys in 8", "float32", {}),
        *slow(
            ("8 bits", "bfloat16", {"soft_cap": 20.0}), ("float8", "float16", {"window": 50}),
            ("4 bits, token", "float16", {}), ("8 bits, late", "bfloat16", {"window": 50}),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_one_large_channel_of_the_keys(form, dtype, options):
    """As from a bias before RoPE: rotated or not, no other channel is rounded away."""
    transform, most = LARGE[form]
    count, width = 160, 64
    given = Tokens.random(1, count + 1, 2, 2, width)
    given.k[..., 1] += 300
    given.q[..., [1, 33]] *= 0.01
    frequencies = 1e4 ** -(np.arange(0, width, 2) / width)
    rope, place = kvjax.Rope(jnp.asarray(frequencies, jnp.float32)), np.arange(count + 1)
    q, k = (rotate(x.astype(np.float64), place, frequencies) for x in (given.q, given.k))
    kind = {"scale": width**-0.5, **options}
    expected = np.stack([
        softmax_attention(
            q[0, head, None, -1:], k[0, head], given.v[0, head].astype(np.float64), place[-1:],
            place, 0 * place, **kind,
        )[0][0]
        for head in range(2)
    ])  # fmt: skip
    size = {"kv_heads": 2, "query_heads": 2, "head_dim": width}
    for rotated in (True, False):
        tx = transform
        if isinstance(tx, Quantize):
            tx = replace(tx, rotate=rotated)
        elif not rotated:
            continue
        limits = {"max_prompt": count, "max_new": 1, "dtype": jnp.dtype(dtype)}
        cache = new_cache(tx, 1, **limits, **size, **options)
        call = functools.partial(attending.attend, rope=rope, **options)
        own = jnp.dtype(dtype)
        _, cache = call(cache, *given.at(place[None, :-1], own), phase="prompt")
        out, _ = call(cache, *given.at(place[None, -1:], own), phase="decode")
        error = np.linalg.norm(wide(out)[0] - expected) / np.linalg.norm(expected)
        assert 0 < error < most, (rotated, error)


@pytest.mark.parametrize(
    ("transform", "keys", "values"),
    [
        (Quantize(8), True, True),
        (Quantize(8, rotate="values"), False, True),
        (Quantize(8, rotate=False), False, False),
        (chain(kvjax.StreamingLLM(12, reposition=True), Quantize(8)), False, True),
        (chain(kvjax.StreamingLLM(12), Quantize(8)), True, True),
        (Quantize(4, group=GROUP), False, True),
        (Quantize(4, group=GROUP, key_axis="token"), True, True),
    ],
    ids=repr,
)
def test_what_is_rotated(transform, keys, values):
    kv = new_cache(transform).kv
    assert (kv.k.form.hadamard, kv.v.form.hadamard) == (keys, values)


@pytest.mark.parametrize(
    ("name", "group"), [*((name, GROUP) for name in READING), ("clusterkv", 8)]
)
@pytest.mark.slow
def test_reading_over_groups_of_slots(name, group):
    """Whole groups are encoded at a flush, also where the interval is not a multiple of it."""
    form = FORMS["channel"] if group == GROUP else Quantize(4, group=group)
    done, full = standard(in_groups(name, form)), standard(kvjax.Full())
    for out, other in zip(done.outs, full.outs, strict=True):
        assert 1e-4 < np.abs(out - other).max() < 0.35
    kv, lengths = done.caches[-1].kv, np.array(LENGTHS)[:, None]
    assert kv.interval == (GROUP if name == "clusterkv" else RESIDUAL)
    count = lengths + STEPS - (lengths + RESIDUAL) // group * group
    assert not kv.dropped.any()
    np.testing.assert_array_equal(kv.k.recent.count, np.repeat(count, KV_HEADS, axis=1))


@pytest.mark.parametrize("name", ["quest", *slow("infinigen")])
def test_an_index_is_of_keys_as_they_came(name):
    """Of the prompt and of new tokens, though they are encoded later."""
    done, exact = standard(in_groups(name)), standard(one_layer(READING[name]))
    for cache, other in zip(done.all_caches, exact.all_caches, strict=True):
        live = np.asarray(cache.kv.live)
        for column, values in cache.kv.columns.items():
            close(values.values[live], other.kv.column(column)[live], "rounding", column)
        own, others = map(jax.tree.leaves, (cache.state, other.state))
        for x, y in zip(own, others, strict=True):
            close(x, y, "rounding")


@pytest.mark.parametrize("form", ["float8", *slow("token", "channel")])
def test_a_step_decodes_blocks_only(form):
    """No array of the size of all decoded keys is made."""
    transform, slots, dim = FORMS[form], 8192, 64
    cache = new_cache(transform, 1, max_prompt=slots - 8, max_new=8, head_dim=dim)
    step = jax.jit(functools.partial(kvjax.attend, phase="decode"), donate_argnums=0)
    shapes = [(1, heads, 1, dim) for heads in (4, KV_HEADS, KV_HEADS)]
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    where = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    memory = step.lower(cache, *given, where).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * slots * KV_HEADS * dim / 2


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 1}, r"bits must be one of \(8, 4, 3, 2, 'float8'\), got 1"),
        ({"group": 32}, "group is an option of 4, 3 and 2 bits"),
        ({"residual": 128}, "residual is an option of 4, 3 and 2 bits with key_axis='channel'"),
        (
            {"bits": 4, "key_axis": "token", "residual": 128},
            "with bits=4, key_bits=None, key_axis='token'",
        ),
        ({"bits": 4, "residual": 100}, "multiple of group=32, got 100"),
        ({"bits": 4, "group": 48}, "multiple of group=48, got 128"),
        ({"key_bits": 4}, "key_bits is an option of 4, 3 and 2 bits"),
        ({"bits": 4, "key_bits": 4}, r"key_bits must be one of \(8, 3, 2\), got 4"),
        (
            {"bits": 4, "key_bits": 8, "key_axis": "token"},
            "option of keys in 4, 3 and 2 bits",
        ),
        ({"rotate": "keys"}, r"rotate must be one of \(True, False, 'values'\), got 'keys'"),
    ],
)
def test_what_is_not_offered(changes, words):
    with pytest.raises(ValueError, match=words):
        Quantize(**changes)


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize(("head_dim", "words"), [(7, "even head_dim.*7"), (10, "group=4, got 10")])
def test_a_head_dim_that_does_not_fit(head_dim, words, axis):
    transform = Quantize(4, group=GROUP, key_axis=axis)
    with pytest.raises(ValueError, match=words):
        new_cache(transform, head_dim=head_dim)
    assert new_cache(Quantize(8), head_dim=7).kv.k.shape[3] == 7
    with pytest.raises(ValueError, match="multiple of 8, got 12"):
        new_cache(Quantize(4, GROUP, axis, key_bits=3), head_dim=12)


def test_chains_that_cannot_work():
    channel, cluster = FORMS["channel"], READING["clusterkv"]
    with pytest.raises(ValueError, match="at most one part of a chain changes how"):
        chain(Quantize(8), channel)
    with pytest.raises(ValueError, match="fetches slots one by one: take key_axis='token'"):
        chain(Quantize(4, key_axis="channel"), cluster, kvjax.Offload())
    placed = chain(Quantize(4), cluster, kvjax.Offload()).parts[0]
    assert (placed.key_axis, placed.groups_slots) == ("token", False)
    with pytest.raises(ValueError, match="cannot follow"):
        chain(cluster, Quantize(8))
