"""What every way of storing keys and values must hold, whatever its form.

Rows are read, moved, written and filled in; what is stored is what the arrays weigh.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.payload import Dense
from kvjax.storage.offload import Offloaded
from kvjax.storage.quantized import Form
from kvjax.storage.references import Book, CodebookPayload
from tests.support.attending import structure
from tests.support.tolerances import close

SHAPE = B, H, S, D = 2, 2, 18, 8
START, TAIL, GROUP = 10, 8, 4  # slots from START on are the tail, where there is one
FLOAT, INT = 4, 4

# An empty payload; the bytes of one; how far a row may be from what was stored, of its largest
# number: half a step of 127, a sixteenth, or half a step of 15 of the distance of two numbers.
PAYLOADS = {
    "dense": (lambda: Dense.zeros(SHAPE, jnp.float32), B * H * S * D * FLOAT, 0),
    "offloaded": (
        lambda: Offloaded.zeros(SHAPE, TAIL, jnp.float32), B * H * (S + TAIL) * D * FLOAT + INT, 0
    ),
    "8 bits": (lambda: Form(8).empty(SHAPE, jnp.float32), B * H * S * (D + FLOAT), 0.5 / 127),
    "float8": (
        lambda: Form("float8").empty(SHAPE, jnp.float32), B * H * S * (D + FLOAT), 1 / 16
    ),
    "4 bits, token": (
        lambda: Form(4, GROUP).empty(SHAPE, jnp.float32),
        B * H * S * (D // 2 + 2 * D // GROUP * FLOAT), 1 / 15,
    ),
    "4 bits, channel": (
        lambda: Form(4, GROUP, "channel", TAIL).empty(SHAPE, jnp.float32),
        # The first group of slots may begin before slot 0.
        B * H * (24 * D // 2 + 2 * 24 // GROUP * D * FLOAT + TAIL * D * FLOAT) + INT, 2 / 15,
    ),
    "codebook": (
        lambda: CodebookPayload.zeros(SHAPE, jnp.float32, Book(0.999, 60, True, 3)),
        B * (60 * D * FLOAT + H * S * (2 + FLOAT) + 2 * INT)
        + B * H * 3 * (D * FLOAT + INT) + INT,  # rows of three steps that are not encoded yet
        1e-6,
    ),
}  # fmt: skip
SLOW = {"codebook"}  # to be compiled
every_payload = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PAYLOADS]
)
# They begin a tail for new tokens, and write nowhere else.
WITH_TAIL = ("offloaded", "4 bits, channel")


def rows_of(count: int = S, seed: int = 0) -> jnp.ndarray:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(B, H, count, D)), jnp.float32)


def stored(name: str):
    """A payload that holds `rows_of()`."""
    return PAYLOADS[name][0]().open().fill(rows_of()).close(jnp.int32(START))


def near(name: str, got, rows) -> None:
    """As near as the form allows, of the largest number there is."""
    worst = np.abs(np.asarray(got, np.float64) - np.asarray(rows, np.float64)).max()
    # A group of slots of a channel, or of channels of a token, spans at most twice the largest.
    assert worst <= 1.01 * PAYLOADS[name][2] * float(jnp.abs(rows).max()) + 1e-12, worst


def host(x):
    return np.asarray(jax.device_get(x))


@every_payload
def test_bytes_are_those_of_the_arrays(name):
    empty, expected, _ = PAYLOADS[name]
    assert kvjax.nbytes(empty()) == kvjax.nbytes(stored(name)) == expected
    assert kvjax.nbytes(jax.eval_shape(empty)) == expected
    assert sum(x.nbytes for x in jax.tree.leaves(stored(name))) == expected


@every_payload
def test_read(name):
    payload = stored(name)
    assert payload.shape == SHAPE and payload.dtype == jnp.float32
    rows = payload.read()
    assert rows.shape == SHAPE and rows.dtype == jnp.float32
    near(name, rows, rows_of())
    index = jnp.asarray(
        np.random.default_rng(1).integers(S, size=(B, 2 * H, 5))
    )  # two lists a head
    expected = np.take_along_axis(np.repeat(host(rows), 2, axis=1), host(index)[..., None], axis=2)
    np.testing.assert_array_equal(payload.read(index), expected)


@every_payload
def test_take(name):
    """More slots and fewer; a form that encodes slots together encodes them anew."""
    payload = stored(name)
    for count in (5, 25):
        index = jnp.asarray(np.random.default_rng(2).integers(S, size=(B, H, count)))
        taken = payload.take(index)
        expected = np.take_along_axis(host(payload.read()), host(index)[..., None], axis=2)
        assert taken.shape == (B, H, count, D)
        if name == "4 bits, channel":
            near(name, taken.read(), jnp.asarray(expected))
        else:
            np.testing.assert_array_equal(taken.read(), expected)


@every_payload
def test_write(name):
    """Some slots, none where the number is S; others are read as they were."""
    payload, new = stored(name), rows_of(2, seed=3)
    slots = np.array([[[11, S], [12, 17]], [[S, S], [17, 10]]])
    if name not in WITH_TAIL:
        slots[0, 0, 0] = 3
    written = jax.jit(lambda p, slots, rows: p.write(slots, rows))(payload, slots, new)
    assert structure(written) == structure(payload)
    before, after = host(payload.read()), host(written.read()).copy()
    for row, head, token in np.ndindex(B, H, 2):
        slot = slots[row, head, token]
        if slot < S:
            near(name, jnp.asarray(after[row, head, slot]), new[row, head, token])
            after[row, head, slot] = before[row, head, slot]
    np.testing.assert_array_equal(after, before)


@every_payload
def test_fill(name):
    """With other rows, and with what was read, which changes nothing."""
    payload, new = stored(name), rows_of(seed=4)
    filled = payload.fill(new)
    assert structure(filled) == structure(payload)
    near(name, filled.read(), new)
    kind = "reference" if name in ("codebook", "4 bits, channel", "4 bits, token") else "exact"
    close(payload.fill(payload.read()).read(), payload.read(), kind)


@every_payload
def test_a_prompt(name):
    """Opened for a prompt, filled, moved, and closed: the same form, in a prompt or not."""
    payload = stored(name)
    opened = payload.open()
    np.testing.assert_array_equal(opened.read(), payload.read())
    assert opened.shape == SHAPE and opened.open().shape == SHAPE
    index = jnp.asarray(np.random.default_rng(5).integers(S, size=(B, H, S)))
    moved = opened.take(index).close(jnp.int32(START))
    assert structure(moved) == structure(payload)
    expected = np.take_along_axis(host(opened.read()), host(index)[..., None], axis=2)
    near(name, moved.read(), jnp.asarray(expected))


@every_payload
def test_a_tail(name):
    """What is in it as rows, and what it is when it is sorted and ends."""
    payload, size = stored(name), S - START
    np.testing.assert_array_equal(
        payload.span(jnp.int32(START + 2), 4), payload.read()[:, :, START + 2 : START + 6]
    )
    rng = np.random.default_rng(6)
    index = jnp.asarray(rng.permuted(np.tile(np.arange(size), (B, H, 1)), axis=-1))
    settled = jax.jit(lambda p, index: p.settle(jnp.int32(START), index))(payload, index)
    before, after = host(payload.read()), host(settled.read())
    np.testing.assert_array_equal(after[:, :, :START], before[:, :, :START])
    expected = np.take_along_axis(before[:, :, START:], host(index)[..., None], axis=2)
    near(name, after[:, :, START:], jnp.asarray(expected))
