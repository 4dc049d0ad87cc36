"""What every method and every composition must hold, whatever it decides."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CaM, Every, KVCrush, Quantize, WhenFull, chain
from kvjax.attention.resting import rest, rounded, sizes_at_rest, sizes_of, wake
from kvjax.budgets.budgets import slots_for
from kvjax.compose.chain import parts_of
from kvjax.compose.foreseen import rewrites
from kvjax.generation.steps import scan_steps
from tests.support.attending import (
    HEAD_DIM,
    KV_HEADS,
    MAX_NEW,
    MAX_PROMPT,
    QUERY_HEADS,
    SIZE,
    Pin,
    Tokens,
    attend,
    attended,
    decode,
    flushed,
    left,
    live_count,
    middle,
    new_cache,
    one_layer,
    parts,
    prompt,
    right,
    run,
    same_arrays,
    shapes_of_run,
    slots_of,
    structure,
    the_rope,
)
from tests.support.cases import (
    BUDGET,
    CASES,
    COVERING,
    GROUP,
    chelsea,
    compositions,
    every_case,
    evicts_alone,
    evicts_from_short_rows,
    has_books,
    holds_its_budget,
    kinds,
    names,
    names_heads,
    registered,
    selects,
    snapkv,
)
from tests.support.marks import slow, some_slow
from tests.support.tolerances import close

LENGTHS, WIDTH, STEPS = (24, 17, 5), 24, 8


def merges(transform) -> bool:
    """Whether a slot may come to stand for several tokens."""
    evicting = [part for part in parts_of(transform) if part.stage == kvjax.kit.Stage.EVICT]
    everything = any(rewrites(part, "prompt", "flush", "step") for part in evicting)
    return everything and not isinstance(transform, CaM)


# Numbers of dtypes and shapes that all methods treat alike: of those that evict, merge, select,
# compress now and then, and encode. Of all others, shapes and dtypes.
REPRESENTATIVES = ("full", "h2o", "chelsea", "clusterkv", "every", "quantize", "infinigen")


def encoding(name: str) -> Quantize | None:
    """What a case stores keys and values with; None: as they are."""
    transform = CASES[name]
    chained = getattr(transform, "parts", (transform,))
    return next((part for part in chained if isinstance(part, Quantize)), None)


def loss(name: str) -> str:
    """The tolerance of what storing alone may change."""
    encoded = encoding(name)
    return "float32" if encoded is None else f"{encoded.bits} bits"


def slot_bytes(name: str) -> int:
    """Bytes of a slot's key and value."""
    encoded = encoding(name)
    if has_books(name):
        return 2 * (2 + 4)  # an index, a magnitude
    if encoded is None:
        return 2 * HEAD_DIM * 4
    eight = HEAD_DIM + 4
    four = HEAD_DIM // 2 + 2 * HEAD_DIM // GROUP * 4  # scale and least value of each group
    values = eight if encoded.bits == 8 else four
    return values + (eight if encoded.key_bits == 8 else values)


@functools.cache
def tokens() -> Tokens:
    return Tokens.random()


@functools.cache
def standard(name: str):
    """The run that most tests look at: ragged rows padded at the right, then some decoding."""
    return run(CASES[name], tokens(), right([0, 0, 0], LENGTHS, WIDTH), STEPS)


def every_part(name: str, cache) -> list:
    return parts(CASES[name], cache)


def same_slots(name, cache, rows, other, other_rows, kind="float32", positions_only=False):
    """Rows of two caches hold the same tokens with the same masses, keys, values and columns."""
    for part, twin in zip(every_part(name, cache), every_part(name, other), strict=True):
        for row, other_row in zip(rows, other_rows, strict=True):
            for head in range(len(part.heads)):
                mine = slots_of(part.cache, row, head)
                theirs = slots_of(twin.cache, other_row, head)
                what = f"{name}, row {row}, head {part.heads[head]}"
                np.testing.assert_array_equal(mine["position"], theirs["position"], what)
                for column in () if positions_only else mine:
                    close(mine[column], theirs[column], kind, f"{what}, {column}")


# --- what it computes -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", kinds(COVERING, "full"))
def test_lossless_when_the_budget_covers_everything(name):
    shape = {"max_prompt": 10, "max_new": 8}
    positions = right([0], [10], 10)
    row = tokens().rows([0])
    full = run(kvjax.Full(), row, positions, 8, **shape)
    mine = run(COVERING[name], row, positions, 8, **shape)
    close(mine.prompt_out, full.prompt_out, what="prompt")
    for step, (out, expected) in enumerate(zip(mine.outs, full.outs, strict=True)):
        close(out, expected, loss(name), f"step {step}")
    for part in parts(COVERING[name], mine.caches[-1]):
        assert (live_count(part.cache) == 18).all()
        assert (np.asarray(part.cache.kv.dropped) == 0).all()


@pytest.mark.parametrize(
    "name", names([name for name in CASES if not selects(name)], "full", "snapkv")
)
def test_output_is_attention_over_what_was_live(name):
    ragged = standard(name)
    positions = right([0, 0, 0], LENGTHS, WIDTH)
    empty = new_cache(CASES[name])
    close(ragged.prompt_out, attended(CASES[name], empty, tokens(), positions), what="prompt")
    for step in (0, 1, STEPS - 1):
        before, now = ragged.all_caches[step], np.array(LENGTHS)[:, None] + step
        expected = attended(CASES[name], before, tokens(), now)
        close(ragged.outs[step], expected, what=f"step {step}")


@pytest.mark.parametrize("name", names(n for n in CASES if not evicts_from_short_rows(n)))
def test_a_row_within_its_budget_loses_nothing(name):
    full, mine = standard("full"), standard(name)
    for step in range(BUDGET - LENGTHS[2]):
        close(mine.outs[step][2], full.outs[step][2], loss(name), f"step {step}")
    same = every_part("full", full.caches[BUDGET - LENGTHS[2] - 1])[0].cache
    for part in every_part(name, mine.caches[BUDGET - LENGTHS[2] - 1]):
        for own, head in enumerate(part.heads):
            kept = slots_of(part.cache, 2, own)["position"]
            np.testing.assert_array_equal(kept, slots_of(same, 2, head)["position"])


@pytest.mark.parametrize("name", names(COVERING))
def test_decoding_may_start_from_an_empty_cache(name):
    cache, expected = new_cache(CASES[name]), new_cache(kvjax.Full())
    for step in range(BUDGET - 2):
        now = np.full((3, 1), step)
        out, cache = decode(CASES[name], cache, tokens(), now)
        cache = flushed(cache, step + 1)
        full, expected = decode(kvjax.Full(), expected, tokens(), now)
        if not evicts_from_short_rows(name):
            close(out, full, loss(name), f"step {step}")
        for part in every_part(name, cache):
            assert (np.asarray(part.cache.kv.position).max(-1) == step).all(), "newest is lost"


# --- slots ----------------------------------------------------------------------------------------


@every_case
def test_live_slots_never_exceed_what_was_promised(name):
    ragged = standard(name)
    for part in every_part(name, ragged.prompt_cache):
        assert (live_count(part.cache) <= part.extent.prompt).all()
    for step, cache in enumerate(ragged.all_caches):
        for part in every_part(name, cache):
            kv = part.cache.kv
            assert kv.slots == kv.capacity == part.extent.total
            assert (live_count(part.cache) <= part.extent.total).all(), f"step {step}"
            assert (np.asarray(kv.dropped) == 0).all(), f"step {step}"
            if holds_its_budget(name):
                assert (live_count(part.cache) <= BUDGET).all(), f"step {step}"


@every_case
def test_bookkeeping_of_slots(name):
    for step, cache in enumerate(standard(name).all_caches):
        for part in every_part(name, cache):
            kv = part.cache.kv
            live, position = np.asarray(kv.live), np.asarray(kv.position)
            np.testing.assert_array_equal(position == -1, ~live)
            np.testing.assert_array_equal(np.asarray(kv.log_mass) == -np.inf, ~live)
            used = np.where(live, np.arange(1, kv.slots + 1), 0).max(-1)
            np.testing.assert_array_equal(kv.used, used)
            np.testing.assert_array_equal(kv.length, np.array(LENGTHS) + step)
            newest = np.array(LENGTHS)[:, None] + step - 1
            assert (position.max(-1) == newest).all(), "a method keeps each row's newest token"
            assert not (np.asarray(kv.pinned) & ~live).any()
            for payload in (kv.k, kv.v):
                assert np.isfinite(np.asarray(payload.read())).all(), "free slots stay finite"


@every_case
def test_evicting_conserves_the_mass_of_what_is_kept_and_merging_all_of_it(name):
    for step, cache in enumerate(standard(name).all_caches):
        for part in every_part(name, cache):
            mass = np.exp(np.asarray(part.cache.kv.log_mass, np.float64)).sum(-1)
            if merges(part.transform):
                tokens_so_far = np.array(LENGTHS)[:, None] + step
                close(mass, np.broadcast_to(tokens_so_far, mass.shape))
            else:
                close(mass, live_count(part.cache), "exact")


PINNED = [name for name in CASES if evicts_alone(name) and not evicts_from_short_rows(name)]


@pytest.mark.parametrize("name", kinds(PINNED, "streaming_llm"))
def test_pinned_slots_survive(name):
    transform, pinned = chain(Pin((3, 9)), CASES[name]), {3, 9}
    ragged = run(transform, tokens(), right([0, 0, 0], LENGTHS, WIDTH), STEPS)
    for step, cache in enumerate(ragged.all_caches):
        assert (np.asarray(cache.kv.dropped) == 0).all(), f"step {step}"
        for row, length in enumerate(LENGTHS):
            for head in range(KV_HEADS):
                kept = set(slots_of(cache, row, head)["position"].tolist())
                assert {p for p in pinned if p < length} <= kept, f"step {step}, row {row}"
    if holds_its_budget(name):
        assert live_count(ragged.caches[-1]).max() == BUDGET + len(pinned)


# --- static structure -----------------------------------------------------------------------------


@every_case
def test_a_call_changes_no_structure_shape_or_dtype(name):
    before, ragged = structure(new_cache(CASES[name])), standard(name)
    for cache in ragged.all_caches:
        assert structure(cache) == before
    q = tokens().at(right([0, 0, 0], LENGTHS, WIDTH))[0]
    assert ragged.prompt_out.shape == q.shape and ragged.prompt_out.dtype == q.dtype
    assert ragged.outs[0].shape == (3, QUERY_HEADS, 1, HEAD_DIM)


@every_case
def test_nothing_is_compiled_twice(name):
    transform = CASES[name]
    again = one_layer({**registered(), **compositions(BUDGET)}[name])
    assert again == transform and hash(again) == hash(transform)

    def turn(transform, lengths, steps):
        positions = right([0, 0, 0], lengths, WIDTH)
        _, cache = prompt(transform, new_cache(transform), tokens(), positions)
        for step in range(steps):
            _, cache = decode(transform, cache, tokens(), np.array(lengths)[:, None] + step)

    turn(transform, LENGTHS, 1)
    compiled = attend._cache_size()
    turn(again, (20, 3, 11), 3)
    assert attend._cache_size() == compiled


@pytest.mark.parametrize("name", names(CASES, "pyramidinfer"))
def test_a_compiled_loop_of_steps_equals_steps_and_uses_up_its_cache(name):
    transform, ragged = CASES[name], standard(name)
    steps = [tokens().at(np.array(LENGTHS)[:, None] + step) for step in range(STEPS)]
    inputs = jax.tree.map(lambda *x: np.stack(x), *steps)

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(cache, inputs):
        def step(nothing, cache, x):
            out, cache = kvjax.attend(cache, *x, phase="decode", rope=the_rope())
            return nothing, cache, out

        return scan_steps(step, (), cache, inputs)[1:]

    _, donated = prompt(transform, new_cache(transform), tokens(), right([0, 0, 0], LENGTHS, WIDTH))
    cache, outs = loop(donated, inputs)
    close(outs, np.stack(ragged.outs))
    assert structure(cache) == structure(ragged.prompt_cache)
    same_slots(name, cache, range(3), ragged.caches[-1], range(3))
    for part in every_part(name, donated):
        kv = part.cache.kv
        gone = jax.tree.leaves((kv.k, kv.v, kv.columns, kv.position, kv.log_mass))
        assert all(leaf.is_deleted() for leaf in gone)


@every_case
def test_a_fresh_cache_can_be_donated(name):
    """No two of its arrays share a buffer."""
    leaves = jax.tree.leaves(kvjax.init_cache(CASES[name], **SIZE))
    keys = [jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    arrays = [jax.random.key_data(x) if key else x for x, key in zip(leaves, keys, strict=True)]
    assert len({x.unsafe_buffer_pointer() for x in arrays}) == len(arrays)


@pytest.mark.slow
def test_jit_equals_eager():
    """One method is enough: what is not jitted is compiled primitive by primitive."""
    name, step = "h2o", 3
    ragged = standard(name)
    q, k, v, positions = tokens().at(np.array(LENGTHS)[:, None] + step)
    out, cache = kvjax.attend(
        ragged.caches[step - 1], q, k, v, positions, phase="decode", rope=the_rope()
    )
    close(out, ragged.outs[step])
    assert structure(cache) == structure(ragged.prompt_cache)
    same_slots(name, cache, range(3), ragged.caches[step], range(3))


@every_case
def test_bytes_are_those_of_the_arrays(name):
    transform, ragged = CASES[name], standard(name)
    priced = jax.eval_shape(lambda: new_cache(transform))
    alive = [x for x in jax.tree.leaves(ragged.caches[-1]) if hasattr(x, "nbytes")]
    assert kvjax.nbytes(priced) == kvjax.nbytes(ragged.caches[-1]) == sum(x.nbytes for x in alive)
    least = 0
    for part in every_part(name, ragged.prompt_cache):
        slots = 3 * len(part.heads) * part.extent.total
        least += slots * (slot_bytes(name) + 4 + 4 + 1)  # position, mass, pinned
    assert kvjax.nbytes(priced) >= least
    if name == "full":
        assert kvjax.nbytes(priced) == least + 2 * 4 * 3 * KV_HEADS + 4 * 3  # used, dropped, length
    elif not (selects(name) or has_books(name)):
        assert kvjax.nbytes(priced) < kvjax.nbytes(jax.eval_shape(lambda: new_cache(kvjax.Full())))


# --- rows, padding, chunks, turns -----------------------------------------------------------------


@every_case
def test_padding_may_stand_anywhere(name):
    """At the left of row 1, and between the tokens of row 2."""
    transform, ragged = CASES[name], standard(name)
    positions = left(LENGTHS, WIDTH)
    positions[2] = middle(LENGTHS, WIDTH)[2]
    out, cache = prompt(transform, new_cache(transform), tokens(), positions)
    out = np.asarray(out)
    for row, length in enumerate(LENGTHS):
        valid = positions[row] >= 0
        close(out[row][:, valid], ragged.prompt_out[row][:, :length], what=f"row {row}")
        close(out[row][:, ~valid], np.zeros_like(out[row][:, ~valid]), "exact")
    same_slots(name, cache, range(3), ragged.prompt_cache, range(3))
    step_out, cache = decode(transform, cache, tokens(), np.array(LENGTHS)[:, None])
    close(step_out, ragged.outs[0])
    same_slots(name, cache, range(3), ragged.caches[0], range(3))


@every_case
def test_a_row_among_others_equals_the_row_alone(name):
    """The other rows stay empty, so that nothing is compiled for one row."""
    ragged, length = standard(name), LENGTHS[1]
    positions = right([0, 0, 0], (0, 0, length), WIDTH)
    alone = run(CASES[name], tokens().rows([0, 2, 1]), positions, STEPS)
    close(ragged.prompt_out[1][:, :length], alone.prompt_out[2][:, :length])
    same_slots(name, ragged.prompt_cache, [1], alone.prompt_cache, [2])
    for step in range(STEPS):
        close(ragged.outs[step][1], alone.outs[step][2], what=f"step {step}")
        same_slots(name, ragged.caches[step], [1], alone.caches[step], [2])


@every_case
def test_an_empty_step_changes_nothing(name):
    """A row that is done gets padding; it keeps its slots and gives 0."""
    ragged = standard(name)
    now = np.array(LENGTHS)[:, None] + STEPS
    now[1] = -1
    out, cache = decode(CASES[name], ragged.caches[-1], tokens(), now)
    close(np.asarray(out)[1], np.zeros_like(out[1]), "exact")
    same_slots(name, cache, [1], ragged.caches[-1], [1], "exact")


@every_case
def test_a_rest_changes_nothing(name):
    """Neither a bit of what is stored nor what a later step gives, with rows that wait."""
    before = standard(name).caches[-1]
    (sizes,), (least,) = sizes_of((before,)), sizes_at_rest((before,))
    at_rest = rest(before, least)
    live = [np.asarray(part.cache.kv.live) for part in every_part(name, before)]
    for slots, size, most in zip(live, least, sizes, strict=True):
        places = np.where(slots, np.arange(slots.shape[2]) + 1, 0)
        assert size.slots == min(rounded(int(places.max())), most.slots)
        assert size.packed == min(rounded(int(places.max(-1).sum())), slots.size)
    assert kvjax.nbytes(at_rest) < kvjax.nbytes(before)
    after = wake(at_rest, sizes)
    assert structure(after) == structure(before)
    same_slots(name, after, range(3), before, range(3), "exact")
    for part, twin in zip(every_part(name, after), every_part(name, before), strict=True):
        same_arrays(part.cache.state, twin.cache.state)
    now = np.array(LENGTHS)[:, None] + STEPS
    (out, cache), (expected, other) = (
        decode(CASES[name], each, tokens(), now) for each in (after, before)
    )
    close(out, expected, "exact")
    same_slots(name, cache, range(3), other, range(3), "exact")


@every_case
def test_rows_are_independent_and_in_any_order(name):
    """Row 1 becomes another row, of another length, full of NaN: rows 0 and 2 don't notice."""
    ragged, order = standard(name), [2, 0, 1]
    other = Tokens(*(x.copy() for x in tokens().rows(order)))
    for x in other:
        x[2] = np.nan
    changed = run(CASES[name], other, right([0, 0, 0], (5, 24, 9), WIDTH), 4)
    mine, rows = order[:2], [0, 1]
    close(changed.prompt_out[rows], ragged.prompt_out[mine])
    for step in range(4):
        close(changed.outs[step][rows], ragged.outs[step][mine])
        same_slots(name, changed.caches[step], rows, ragged.caches[step], mine)


@pytest.mark.parametrize("name", kinds(CASES, "full"))
def test_chunks_equal_the_whole(name):
    """Windows span chunks, and the last chunk is nothing but padding for the short row."""
    transform, ragged = CASES[name], standard(name)
    positions = right([0, 0, 0], LENGTHS, WIDTH)
    outs, cache = [], new_cache(transform)
    for start in range(0, WIDTH, 8):
        chunk, last = positions[:, start : start + 8], start == WIDTH - 8
        before = structure(cache)
        out, cache = prompt(transform, cache, tokens(), chunk, last=last)
        outs.append(np.asarray(out))
        if start == 8:
            assert structure(cache) == before, "one compiled function from the second chunk on"
    close(np.concatenate(outs, axis=2), ragged.prompt_out)
    assert structure(cache) == structure(ragged.prompt_cache)
    same_slots(name, cache, range(3), ragged.prompt_cache, range(3))
    step_out, cache = decode(transform, cache, tokens(), np.array(LENGTHS)[:, None])
    close(step_out, ragged.outs[0])
    same_slots(name, cache, range(3), ragged.caches[0], range(3))


@every_case
def test_a_further_turn(name):
    transform, first = CASES[name], standard(name)
    steps, counts = 4, (8, 6, 1)
    before, starts = first.caches[steps - 1], np.array(LENGTHS) + steps
    positions = right(starts, counts, WIDTH)
    out, cache = prompt(transform, before, tokens(), positions)
    close(out, attended(transform, before, tokens(), positions))
    assert structure(cache) == structure(before)
    for part in every_part(name, cache):
        everything = part.transform.extent(kvjax.kit.Extent(MAX_PROMPT, MAX_NEW))
        generated = steps if everything.prompt == MAX_PROMPT else 0
        assert (live_count(part.cache) <= part.extent.prompt + generated).all()
        assert (np.asarray(part.cache.kv.dropped) == 0).all()
        if name == "full":
            total = np.broadcast_to((starts + counts)[:, None], (3, KV_HEADS))
            np.testing.assert_array_equal(live_count(part.cache), total)
    now = (starts + counts)[:, None]
    for step in range(MAX_NEW - steps):
        expected = attended(transform, cache, tokens(), now)
        out, cache = decode(transform, cache, tokens(), now)
        cache = flushed(cache, step + 1)
        if not selects(name):
            close(out, expected)
        for part in every_part(name, cache):
            assert (np.asarray(part.cache.kv.dropped) == 0).all()
        now = now + 1


# --- small and unusual shapes ---------------------------------------------------------------------


# bfloat16 in, bfloat16 stored; the prompt is shorter than the covering budget, G = 1.
HALF = {"query_heads": KV_HEADS, "max_prompt": 10, "max_new": 4, "dtype": jnp.bfloat16}
# Q = H = 1, a prompt of one token (shorter than any window), room for few new ones.
SINGLE = {"kv_heads": 1, "query_heads": 1, "max_prompt": 1, "max_new": 3}
FAST = ("chelsea", "full", "h2o", "quantize", "streaming_llm")


@pytest.mark.parametrize("name", kinds(CASES, *FAST))
def test_shapes_of_bfloat16_one_head_and_no_new_tokens(name):
    covering = COVERING.get(name, CASES[name])
    row = Tokens.random(rows=1, query_heads=KV_HEADS, seed=3)
    shapes = shapes_of_run(covering, row, right([0], [10], 10), **HALF)
    assert shapes.prompt_out.dtype == shapes.out.dtype == jnp.bfloat16
    assert len({structure(cache) for cache in shapes.caches}) == 1
    for part in parts(covering, shapes.caches[-1]):
        assert part.cache.kv.k.dtype == part.cache.kv.v.dtype == jnp.bfloat16
        assert part.cache.kv.log_mass.dtype == jnp.float32
    if not names_heads(name):
        row = Tokens.random(rows=1, kv_heads=1, query_heads=1, seed=4)
        shapes = shapes_of_run(CASES[name], row, np.array([[0]]), **SINGLE)
        assert shapes.prompt_out.shape == shapes.out.shape == (1, 1, 1, HEAD_DIM)
        assert len({structure(cache) for cache in shapes.caches}) == 1
    cache = jax.eval_shape(lambda: new_cache(CASES[name], max_new=0))
    assert all(part.extent.total <= MAX_PROMPT for part in every_part(name, cache))
    shapes = shapes_of_run(CASES[name], tokens(), right([0, 0, 0], LENGTHS, WIDTH), max_new=0)
    assert structure(shapes.caches[1]) == structure(cache)


@pytest.mark.parametrize("name", names(REPRESENTATIVES, "full"))
def test_bfloat16_and_as_many_query_heads_as_kv_heads(name):
    transform = COVERING[name]
    row = Tokens.random(rows=1, query_heads=KV_HEADS, seed=3)
    mine = run(transform, row, right([0], [10], 10), 4, **HALF)
    for part in parts(transform, mine.caches[-1]):
        assert (np.asarray(part.cache.kv.dropped) == 0).all()
    empty = new_cache(transform, 1, **{**HALF, "dtype": jnp.float32})
    exact = attended(transform, empty, row, right([0], [10], 10))
    close(mine.prompt_out, exact, "bfloat16")


@pytest.mark.parametrize(
    "name", names([n for n in REPRESENTATIVES if not names_heads(n)], "full", "quantize")
)
def test_one_head_one_token(name):
    transform = CASES[name]
    row = Tokens.random(rows=1, kv_heads=1, query_heads=1, seed=4)
    mine = run(transform, row, np.array([[0]]), 3, **SINGLE)
    full = run(kvjax.Full(), row, np.array([[0]]), 3, **SINGLE)
    close(mine.prompt_out, full.prompt_out)
    for step in range(3):
        assert (np.asarray(mine.caches[step].kv.dropped) == 0).all()
        assert int(mine.caches[step].kv.position.max()) == step + 1
        close(mine.outs[step], full.outs[step], loss(name))


# --- capacity of compositions ---------------------------------------------------------------------

TIGHT = {
    "h2o, then fewer": chain(kvjax.H2O(budget=10), snapkv(6)),
    "when_full in a chain": chain(snapkv(8), WhenFull(snapkv(10), room=3)),
    "every in a chain": chain(snapkv(8), Every(snapkv(10), steps=3)),
    "when_full, then fewer": chain(WhenFull(snapkv(10), room=3), snapkv(6)),
    "every beyond the prompt": Every(snapkv(20), steps=3),
    "when_full beyond the prompt": WhenFull(snapkv(20), room=3),
    "every of two": Every(chain(snapkv(10), snapkv(6)), steps=3),
    "every, then decoding": chain(Every(snapkv(10), steps=3), kvjax.H2O(budget=8)),
    "chelsea, then fewer": chain(chelsea(10), snapkv(6)),
    "fewer, then chelsea": chain(snapkv(6), chelsea(8)),
    "crushed": KVCrush(snapkv(8), 2),
    "crushed, then decoding": chain(KVCrush(snapkv(8), 3), kvjax.H2O(budget=6)),
    "decoding, then crushed": chain(kvjax.H2O(budget=8), KVCrush(snapkv(5), 2)),
    "crushed, then when_full": chain(KVCrush(snapkv(8), 3), WhenFull(snapkv(6), room=2)),
    "crushed, then every": chain(KVCrush(snapkv(8), 3), Every(snapkv(6), steps=2)),
    "crushed, then chelsea": chain(KVCrush(snapkv(9), 2), chelsea(8)),
    "crushed twice": chain(KVCrush(snapkv(8), 3), KVCrush(kvjax.H2O(budget=6), 2)),
    "a crushed when_full": KVCrush(WhenFull(snapkv(6), room=2), 3),
    "every of crushed": Every(KVCrush(snapkv(6), 3), steps=2),
    "every of crushed, decoding": chain(Every(KVCrush(snapkv(7), 2), steps=3), kvjax.H2O(budget=6)),
    "crushed values": CaM(KVCrush(kvjax.H2O(budget=6), 2), prompt=True),
    "two that decode": chain(kvjax.H2O(budget=10), kvjax.StreamingLLM(budget=7)),
}


# One for each wrapper around and beside another method; all others run before a release.
TIGHTEST = {
    "h2o, then fewer", "when_full in a chain", "every, then decoding", "fewer, then chelsea",
    "decoding, then crushed", "a crushed when_full", "every of crushed, decoding", "crushed values",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", some_slow(TIGHT, "when_full beyond the prompt", exhaustive={*TIGHT} - TIGHTEST)
)
def test_a_composition_has_room_for_what_it_keeps(name):
    transform, row = TIGHT[name], tokens().rows([0])
    tight = run(transform, row, right([0], [12], 12), 11, max_prompt=12, max_new=12)
    for step, cache in enumerate(tight.all_caches):
        assert (np.asarray(cache.kv.dropped) == 0).all(), f"step {step}: {cache.kv.dropped} lost"
        assert int(cache.kv.position.max()) == 11 + step


# --- budgets that are shares ----------------------------------------------------------------------


def share_of(fraction: float, length: int, minimum: int) -> int:
    """methods.md: B = min(L, max(⌊f·L⌋, m))."""
    return min(length, max(int(fraction * length // 1), minimum))


@pytest.mark.parametrize("minimum", [1, 2, 5, 33])
@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.29, 0.5, 1 / 3, 0.999, 1.0])
def test_a_share_of_every_length(fraction, minimum):
    lengths = np.arange(300)
    expected = [share_of(fraction, int(n), minimum) for n in lengths]
    np.testing.assert_array_equal(slots_for(fraction, lengths, minimum), expected)


def test_a_numpy_budget_is_a_budget():
    numpy_budget = dataclasses.replace(snapkv(), budget=np.int64(16))
    assert numpy_budget.extent(kvjax.kit.Extent(32, 1)).prompt == 16
    assert kvjax.H2O(budget=np.float32(0.5)).extent(kvjax.kit.Extent(32, 9)).total == 17


# --- a prompt in pieces, and dtypes that must not leak into the cache -----------------------------


@pytest.mark.parametrize("budget", [*slow(16), 32])
def test_decoding_waits_for_the_last_chunk(budget):
    """Also where the capacity alone would not tell that the prompt is unfinished."""
    transform = snapkv(budget)
    cache = new_cache(transform)
    _, cache = prompt(transform, cache, tokens(), right([0, 0, 0], (8, 8, 8), 8), last=False)
    with pytest.raises(ValueError, match="last=True"):
        decode(transform, cache, tokens(), [8, 8, 8])
    _, cache = prompt(transform, cache, tokens(), right([8, 8, 8], (8, 8, 8), 8))
    decode(transform, cache, tokens(), [16, 16, 16])


def test_positions_of_a_small_dtype_count_in_int32():
    row = Tokens.random(rows=1, length=128)
    q, k, v, positions = row.at(np.arange(128)[None])
    cache = new_cache(kvjax.Full(), 1, max_prompt=128)
    _, cache = attend(cache, q, k, v, positions.astype(jnp.int8), phase="prompt", rope=the_rope())
    assert cache.kv.length.tolist() == [128] and cache.kv.length.dtype == jnp.int32


def test_repositioned_keys_are_not_compared_with_older_queries():
    transform = chain(kvjax.StreamingLLM(budget=16, reposition=True), Every(snapkv(8), steps=4))
    with pytest.raises(ValueError, match="reposition"):
        new_cache(transform)
