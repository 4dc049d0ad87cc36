"""What every way of storing keys and values must hold, whatever its form.

Rows are read, written, moved, encoded and attended to; what is stored is what the arrays weigh.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.payload import Dense, Slots
from kvjax.storage.codebook.payload import Book, CodebookPayload
from kvjax.storage.encoded_attention import EncodedPayload
from kvjax.storage.offload.payload import Offloaded
from kvjax.storage.quantize.payload import Form
from kvjax.storage.recent import Recent
from pallas_kernels import Mask, Queries, Seen
from tests.references.attention import softmax_attention
from tests.references.rope import rope as rotate
from tests.support.attending import INV_FREQ, structure, the_rope
from tests.support.marks import slow, some_slow
from tests.support.tolerances import close

SHAPE = B, H, S, D = 2, 2, 18, 8
LIVE = np.array([[13, 10], [10, 13]])  # slots of each row and head that hold a token
SIZE, GROUP, BOOKED = 8, 4, 3  # new rows between two flushes: of groups, and of a book
GROUPED = SIZE + GROUP - 1
FLOAT, INT = 4, 4


def recent(size: int) -> int:
    """Bytes of the rows that are kept as they came."""
    return B * H * (size * (D * FLOAT + INT) + INT)


# An empty payload; the bytes of one; how far a row may be from what was stored, of its largest
# number: half a step of 127, a sixteenth, or half a step of 15 of the distance of two numbers.
PAYLOADS = {
    "dense": (lambda: Dense(jnp.zeros(SHAPE)), B * H * S * D * FLOAT, 0),
    "offloaded": (
        lambda: Offloaded.zeros(Dense(jnp.zeros(SHAPE)), SIZE),
        B * H * (S + SIZE) * D * FLOAT + recent(SIZE), 0,
    ),
    "offloaded, 4 bits": (
        lambda: Offloaded.zeros(Form(4, GROUP).empty(SHAPE, jnp.float32), SIZE),
        B * H * ((S + 2 * SIZE) * (D // 2 + 2 * D // GROUP * FLOAT) + (SIZE + 1) * INT), 1 / 15,
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
        lambda: Form(4, GROUP, "channel", GROUPED).empty(SHAPE, jnp.float32),
        # 18 slots take 5 groups of 4.
        B * H * (20 * D // 2 + 2 * 20 // GROUP * D * FLOAT) + recent(GROUPED), 2 / 15,
    ),
    "4 bits, grouped values": (
        lambda: Form(4, GROUP, "token", GROUPED).empty(SHAPE, jnp.float32),
        B * H * 20 * (D // 2 + 2 * D // GROUP * FLOAT) + recent(GROUPED), 1 / 15,
    ),
    "codebook": (
        lambda: CodebookPayload.zeros(SHAPE, jnp.float32, Book(0.999, 60, True, BOOKED)),
        B * ((60 + BOOKED * H) * D * FLOAT + H * S * (2 + FLOAT) + 3 * INT), 1e-6,
    ),
}  # fmt: skip
every_payload = pytest.mark.parametrize(
    "name", some_slow(PAYLOADS, *(name for name in PAYLOADS if name != "codebook"))
)


make = jax.jit(lambda name: PAYLOADS[name][0](), static_argnums=0)
read = jax.jit(lambda payload, *index: payload.read(*index))
write = jax.jit(lambda payload, slots, rows: payload.write(slots, rows))
flush = jax.jit(lambda payload, steps, *moves: payload.flush(steps, *moves), static_argnums=1)
encode = jax.jit(lambda payload, rows, slots: payload.encode(payload, rows, rows, slots)[0])


def rows_of(count: int = S, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(B, H, count, D)).astype(np.float32)


def slots_of(rows=(True, True)) -> Slots:
    slot = np.broadcast_to(np.arange(S, dtype=np.int32), (B, H, S))
    live = slot < LIVE[..., None]
    return Slots(np.where(live, slot, -1), live, np.array(rows))


def encoded(payload, values, rows=(True, True)):
    """The payload after the end of a prompt in which these rows had tokens."""
    return encode(payload, values, slots_of(rows))


@functools.cache
def stored(name: str, seed: int = 0):
    """A payload that holds `rows_of(seed=seed)` in its live slots, after a prompt's end."""
    return encoded(make(name), rows_of(seed=seed))


def near(name: str, got, rows) -> None:
    """As near as the form allows, of the largest number there is."""
    worst = np.abs(np.asarray(got, np.float64) - np.asarray(rows, np.float64)).max()
    # A group of slots of a channel, or of channels of a token, spans at most twice the largest.
    assert worst <= 1.01 * PAYLOADS[name][2] * float(np.abs(rows).max()) + 1e-12, worst


def host(x):
    return np.asarray(jax.device_get(x))


def same(one, other, row: int) -> None:
    """Everything that is stored of a row is exactly the same."""
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(host(x)[row], host(y)[row])


def fill_up(payload, counts, seed: int = 7):
    """`counts[b]` new rows for every row, one at a time, and what all slots then hold."""
    rows, new = host(read(payload)).copy(), rows_of(max(counts), seed)
    for step in range(max(counts)):
        there = np.array(counts)[:, None] > step
        slots = np.where(there, LIVE + step, S)
        payload = write(payload, slots[..., None], new[:, :, step : step + 1])
        for row, head in np.argwhere(slots < S):
            rows[row, head, slots[row, head]] = new[row, head, step]
    return payload, rows


@every_payload
def test_bytes_are_those_of_the_arrays(name):
    own, (empty, expected, _) = make(name), PAYLOADS[name]
    assert kvjax.nbytes(own) == kvjax.nbytes(stored(name)) == expected
    assert kvjax.nbytes(jax.eval_shape(empty)) == expected
    assert sum(x.nbytes for x in jax.tree.leaves(stored(name))) == expected
    assert structure(own) == structure(stored(name))


@every_payload
def test_read(name):
    payload, live = stored(name), host(slots_of().live)
    assert payload.shape == SHAPE and payload.dtype == jnp.float32
    rows = read(payload)
    assert rows.shape == SHAPE and rows.dtype == jnp.float32
    near(name, host(rows)[live], host(rows_of())[live])
    index = np.random.default_rng(1).integers(S, size=(B, 2 * H, 5))  # two lists a head
    expected = np.take_along_axis(np.repeat(host(rows), 2, axis=1), index[..., None], axis=2)
    np.testing.assert_array_equal(read(payload, index), expected)
    twice = np.concatenate([index] * 5, axis=2)  # a list may be longer than there are slots
    np.testing.assert_array_equal(read(payload, twice), np.concatenate([expected] * 5, axis=2))


@every_payload
def test_write(name):
    """Some slots, none where the number is S; others are read as they were."""
    payload, new = stored(name), rows_of(2, seed=3)
    slots = np.array([[[14, S], [15, 17]], [[S, S], [17, 14]]])
    if payload.room is None:
        slots[0, 0, 0] = 3
    written = write(payload, slots, new)
    assert structure(written) == structure(payload)
    before, after = host(read(payload)), host(read(written)).copy()
    for row, head, token in np.ndindex(B, H, 2):
        slot = slots[row, head, token]
        if slot < S:
            near(name, after[row, head, slot], new[row, head, token])
            after[row, head, slot] = before[row, head, slot]
    np.testing.assert_array_equal(after, before)


@every_payload
def test_a_slot_that_is_written_again(name):
    payload, slot = stored(name), np.full((B, H, 1), 14)
    for seed in (3, 4):
        new = rows_of(1, seed)
        payload = write(payload, slot, new)
    near(name, read(payload, slot), new)
    near(name, host(read(payload))[:, :, 14:15], new)
    if payload.room is not None:
        payload = flush(payload, SIZE)
        near(name, read(payload, slot), new)


@every_payload
def test_write_all(name):
    """With other rows, and with what was read, which changes nothing."""
    payload, new = stored(name), rows_of(seed=4)
    filled = write(payload, None, new)
    assert structure(filled) == structure(payload)
    near(name, read(filled), new)
    rows = read(payload)
    close(read(write(payload, None, rows)), rows, "reference")


@every_payload
@pytest.mark.parametrize("waiting", [0, 2])
def test_a_prompt_of_another_row(name, waiting):
    """What a row without tokens has stored, encoded or not, stays bit for bit."""
    payload, _ = fill_up(stored(name), (waiting, waiting))
    before = host(read(payload))
    rows = np.stack((rows_of(seed=5)[0], before[1]))
    again = encoded(payload, rows, rows=(True, False))
    assert structure(again) == structure(payload)
    live = host(slots_of().live)[0]
    after = host(read(again))
    near(name, after[0][live], rows[0][live])
    np.testing.assert_array_equal(after[1], before[1])
    if not name.startswith("offloaded"):  # which brings all rows to host memory, as they are
        same(again, payload, row=1)


@every_payload
def test_flush(name):
    """Rows with room are left alone; in others new rows are encoded, and nothing else changes."""
    payload, most = stored(name), {"codebook": BOOKED}.get(name, 5)
    filled, expected = fill_up(payload, (most, 1))
    before, steps = host(read(filled)), most - 1
    if payload.room is not None:
        steps = int(filled.room[0]) + 1
        assert int(filled.room[1]) >= steps
    flushed = flush(filled, steps)
    assert structure(flushed) == structure(payload)
    assert flushed.room is None or (np.asarray(flushed.room) >= steps).all()
    after = host(read(flushed))
    np.testing.assert_array_equal(after[1], before[1])
    if isinstance(payload, EncodedPayload):
        bodies = (flushed, filled)
        if payload.recent is not None:
            bodies = (dataclasses.replace(x, recent=None) for x in bodies)
        same(*bodies, row=1)
    for row, head in np.ndindex(B, H):
        encoded_before = LIVE[row, head] // GROUP * GROUP
        old, new = slice(encoded_before), slice(encoded_before, LIVE[row, head] + (most, 1)[row])
        np.testing.assert_array_equal(after[row, head, old], before[row, head, old])
        near(name, after[row, head, new], expected[row, head, new])


@every_payload
def test_new_rows_move(name):
    """Among the slots of new rows, or among all where every row is by itself; and then a flush."""
    payload, _ = fill_up(stored(name), (3, 3))
    first, count = LIVE[..., None], 3
    if payload.room is None:
        first, count = np.zeros((B, H, 1), int), S
    rng = np.random.default_rng(6)
    slots = first + np.arange(count)
    source = first + rng.permuted(np.tile(np.arange(count), (B, H, 1)), axis=-1)
    # A last move is none.
    moves = tuple(np.concatenate((x, np.full((B, H, 1), S)), -1) for x in (source, slots))
    moved = flush(payload, 0, moves)
    expected = host(read(payload)).copy()
    picked = np.take_along_axis(expected, source[..., None], axis=2)
    np.put_along_axis(expected, slots[..., None], picked, axis=2)
    np.testing.assert_array_equal(read(moved), expected)
    room = payload.room
    steps = 1 if room is None else int(room.max()) + 1
    flushed = host(read(flush(moved, steps)))
    live = np.arange(S) < (LIVE + 3)[..., None]
    near(name, flushed[live], expected[live])


# Rows that are encoded in groups have recent ones beside them.
@pytest.mark.parametrize(
    ("name", "turned", "kernel"),
    [
        ("dense", True, False), ("offloaded", False, False), ("4 bits, channel", True, False),
        *slow(*((name, True, True) for name in [*PAYLOADS][2:]), ("8 bits", False, True)),
    ],
)  # fmt: skip
def test_attention(name, turned, kernel):
    """As over the rows that are read, in float64: by products, and by the kernel."""
    keys, values = (fill_up(stored(name, seed), (2, 1), seed + 1)[0] for seed in (0, 2))
    rng = np.random.default_rng(8)
    live = np.arange(S) < (LIVE + np.array([[2], [1]]))[..., None]
    position = rng.permuted(np.tile(np.arange(S), (B, H, 1)), axis=-1)
    log_mass = np.where(live, rng.normal(size=live.shape), -np.inf)
    q = rng.normal(size=(B, H, 2, 1, D)).astype(np.float32)
    positions = np.array([[40], [9]])
    seen = Seen(
        log_mass.astype(np.float32), np.where(live, position, -1), live.sum(-1),
        turn=the_rope().at(position) if turned else None,
    )  # fmt: skip
    kinds = ("xla", "interpret") if kernel and isinstance(keys, EncodedPayload) else ("xla",)
    whole = [np.asarray(host(read(x)), np.float64) for x in (keys, values)]
    for kind in kinds:
        out, p = map(host, attend(keys, values, q, seen, positions, kind))
        for row, head in np.ndindex(B, H):
            there = live[row, head]
            k, v = (x[row, head][there] for x in whole)
            where = position[row, head][there]
            k = rotate(k, where, INV_FREQ) if turned else k
            expected, weights = softmax_attention(
                q[row, head].astype(np.float64), k, v, positions[row], where,
                log_mass[row, head][there],
            )  # fmt: skip
            close(out[row, head], expected, what=kind)
            close(p[row, head][..., there], weights, what=kind)
            assert not p[row, head][..., ~there].any()


@functools.partial(jax.jit, static_argnums=5)
def attend(keys, values, q, seen, positions, implementation):
    return keys.attention(
        values, Queries(q, positions), seen, Mask(D**-0.5), probabilities=True,
        implementation=implementation,
    )  # fmt: skip


def test_recent_rows_of_heads_and_padding():
    """A token that any head stores takes a place in each; padding takes none."""
    recent = Recent.empty((1, 2, 6, 1), jnp.float32, size=4)
    new = np.array([[[2, 6, 3], [6, 6, 5]]]), np.ones((1, 2, 3, 1), np.float32)
    recent = jax.jit(Recent.add)(recent, *new)
    assert recent.slots.tolist() == [[[2, 3, 6, 6], [6, 5, 6, 6]]]
    assert recent.count.tolist() == [[2, 2]] and recent.room.tolist() == [2]
    assert jax.jit(Recent.places)(recent, np.array([[[2, 3], [2, 5]]])).tolist() == [
        [[0, 1], [-1, 1]]
    ]
    left = jax.jit(Recent.without_first)(recent, np.array([[1, 0]]))
    assert left.slots.tolist() == [[[3, 6, 6, 6], [6, 5, 6, 6]]] and left.room.tolist() == [2]
    assert (np.asarray(jax.jit(Recent.cleared)(recent, np.array([True])).slots) == 6).all()
