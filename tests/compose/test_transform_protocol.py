"""Transforms as values, and a user's own transform through every part of the protocol."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import (
    H2O,
    Every,
    Full,
    HeadGroups,
    PerLayer,
    PyramidKV,
    SnapKV,
    StreamingLLM,
    WhenFull,
    bind,
    chain,
)
from kvjax.budgets.layers import LayerBudget
from kvjax.compose.chain import Chain
from kvjax.kit import Extent, Mark
from kvjax.protocol import Needs, Stage
from kvjax.registry import METHODS
from kvjax.transforms.pyramidkv import PyramidBudget
from tests.references.attention import softmax_attention
from tests.references.rope import rope as rotate
from tests.support.attending import (
    HEAD_DIM,
    INV_FREQ,
    KV_HEADS,
    QUERY_HEADS,
    Tokens,
    decode,
    live_count,
    new_cache,
    prompt,
    right,
    run,
    slots_of,
    the_rope,
)
from tests.support.marks import some_slow
from tests.support.tolerances import close

SNAP = SnapKV(budget=12, window=4, kernel=3)
LENGTHS, WIDTH = (24, 17, 5), 24

# --- a transform is a value -----------------------------------------------------------------------


def half_full(layer: int, num_layers: int):
    return Full() if layer < num_layers // 2 else SNAP


def budget_of(kind) -> int | float:
    """What `parse` is given for a method."""
    return 0.5 if "reserve" in {field.name for field in dataclasses.fields(kind)} else 128


REGISTERED = {name: kvjax.parse(name, budget_of(kind)) for name, kind in METHODS.items()}
VALUES = {
    **REGISTERED,
    "share": SnapKV(budget=0.25, window=16, pooling="avg", group_reduce="max"),
    "every": Every(SNAP, steps=4),
    "when_full": WhenFull(PyramidKV(budget=16), room=4),
    "chain": chain(SNAP, H2O(budget=8)),
    "groups": HeadGroups((((1, 2), SNAP), ((0,), Full()))),
    "layer of a pyramid": bind(PyramidKV(budget=64), 4)[1],
}
every_value = pytest.mark.parametrize("name", VALUES)


@every_value
def test_prints_as_the_expression_that_makes_it(name):
    value = VALUES[name]
    inner = {kind.__name__: kind for kind in (Chain, LayerBudget, PyramidBudget)}
    public = {name: getattr(kvjax, name) for name in kvjax.__all__}
    again = eval(repr(value), {**public, **inner})
    assert again == value and hash(again) == hash(value) and repr(again) == repr(value)


@every_value
def test_is_an_immutable_hashable_value(name):
    value = VALUES[name]
    assert {value: 1}[dataclasses.replace(value)] == 1
    assert all(value != other for key, other in VALUES.items() if key != name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.budget = 3


@pytest.mark.parametrize("name", [n for n, v in REGISTERED.items() if hasattr(v, "budget")])
def test_replace_gives_another_budget(name):
    small, large = (dataclasses.replace(REGISTERED[name], budget=b) for b in (128, 256))
    assert small == REGISTERED[name] != large
    with pytest.raises(ValueError, match="got 0"):
        dataclasses.replace(large, budget=0)
    if small.stage == Stage.RECALL:  # keeps everything: its budget is that of what it looks at
        return

    def slots(tx):
        return bind(tx, 2)[0].extent(Extent(1000, 10)).prompt

    assert slots(small) < slots(large)


OF_NO_PAPER = "full", "own_queries"


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_a_card_and_names_its_deviations(name):
    kind = METHODS[name]
    assert kind.card.acts and kind.card.when and (kind.card.paper or name in OF_NO_PAPER)
    for section in ("Example:",) + (("Deviations from the paper:",) if name != "full" else ()):
        assert section in kind.__doc__
    assert kvjax.parse(name, budget_of(kind)) == REGISTERED[name]


def test_equal_transforms_share_compiled_code():
    traces = []

    def counted(tx, x):
        traces.append(tx)
        return x

    call = jax.jit(counted, static_argnums=0)
    for _ in range(3):
        call(chain(SnapKV(budget=12, window=4, kernel=3), H2O(budget=8)), 1.0)
    assert len(traces) == 1
    call(chain(SNAP, H2O(budget=9)), 1.0)
    assert len(traces) == 2


def test_one_token_is_not_everything():
    """1 == 1.0, and equal values would share compiled code."""
    token, everything = kvjax.InfiniGen(budget=1), kvjax.InfiniGen(budget=1.0)
    assert token != everything and chain(SNAP, token) != chain(SNAP, everything)
    assert token == kvjax.InfiniGen(budget=1) and {token: 1}[kvjax.InfiniGen(budget=1)]


# --- layers and chains ----------------------------------------------------------------------------


def test_layers_that_turn_dense():
    per_layer = PerLayer(half_full)
    assert bind(per_layer, 4) == (Full(), Full(), SNAP, SNAP)
    both = chain(SNAP, H2O(budget=8))
    assert bind(chain(per_layer, H2O(budget=8)), 4) == (Full(), Full(), both, both)
    assert bind(Every(per_layer, steps=4), 2) == (Full(), Every(SNAP, steps=4))
    assert bind(WhenFull(per_layer, room=4), 2) == (Full(), WhenFull(SNAP, room=4))
    groups = HeadGroups((((0,), per_layer), ((1,), SNAP)))
    assert bind(groups, 2)[0] == HeadGroups((((0,), Full()), ((1,), SNAP)))


@pytest.mark.parametrize("stores", [kvjax.Quantize(8), kvjax.Codebook()], ids=repr)
def test_what_turns_dense_is_stored_as_the_chain_says(stores):
    per_layer = PerLayer(half_full)
    assert bind(chain(per_layer, stores), 4)[1:3] == (stores, chain(SNAP, stores))
    reading = chain(kvjax.Quantize(8), kvjax.ClusterKV(64))
    assert bind(reading, 3)[:2] == (kvjax.Quantize(8), kvjax.Quantize(8))
    assert bind(reading, 3)[2].parts[1] == bind(kvjax.ClusterKV(64), 3)[2]
    groups = chain(HeadGroups((((0,), SNAP), ((1,), Full()))), stores)
    assert bind(groups, 1)[0] == HeadGroups((((0,), chain(SNAP, stores)), ((1,), stores)))


def test_chains_are_flat_and_without_the_identity():
    a, b, c = SNAP, H2O(budget=8), StreamingLLM(budget=8)
    assert chain(a, chain(b, c)) == chain(chain(a, b), c) == chain(a, Full(), b, c)
    assert chain(a) == chain(Full(), a) == a
    assert chain() == chain(Full(), Full()) == Full()


def test_a_chain_with_head_groups_splits_as_a_whole():
    whole = chain(HeadGroups((((0,), SNAP), ((1,), Full()))), H2O(budget=8))
    expected = HeadGroups((((0,), chain(SNAP, H2O(budget=8))), ((1,), Full())))
    assert bind(whole, 2) == (expected, expected)


def test_layers_of_a_pyramid_in_wrappers_and_chains():
    layers = bind(PyramidKV(budget=16, window=4), 3)
    assert bind(Every(PyramidKV(budget=16, window=4), steps=4), 3) == tuple(
        Every(layer, steps=4) for layer in layers
    )
    last = H2O(budget=64)
    assert bind(chain(PyramidKV(budget=16, window=4), last), 3) == tuple(
        chain(layer, last) for layer in layers
    )


# --- reading a selection --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pages(kvjax.KVTransform):
    """Reads the `count` pages of `size` neighbouring slots that look best, and the newest token.

    A page's score is the highest inner product of any of its live keys with any query head.
    """

    count: int
    size: int = 4

    stage = Stage.RECALL

    def select(self, view, state, query):
        kv = view.cache
        live = view.per_slot(kv.log_mass, -jnp.inf) > -jnp.inf
        if view.index is None:
            keys = kv.k.read()
            position = kv.position
        else:
            keys = kv.k.read(jnp.maximum(view.index, 0))
            position = view.per_slot(kv.position, -1)
        batch, heads, slots = live.shape
        grouped = query.reshape(batch, heads, kv.group, -1, query.shape[-1])
        score = jnp.einsum("bhgtd,bhsd->bhgts", grouped, keys).max((2, 3))
        pad = -slots % self.size
        score = jnp.where(live, score, -jnp.inf)
        score = jnp.pad(score, ((0, 0), (0, 0), (0, pad)), constant_values=-np.inf)
        best = jax.lax.top_k(score.reshape(batch, heads, -1, self.size).max(-1), self.count)[1]
        inside = best[..., None] * self.size + jnp.arange(self.size)[None, None, None]
        index = inside.reshape(batch, heads, -1)
        newest = position.argmax(-1, keepdims=True)
        there = jnp.pad(live, ((0, 0), (0, 0), (0, pad)))
        chosen = jnp.take_along_axis(there, index, axis=-1) & (index != newest)
        index = jnp.concatenate((jnp.where(chosen, index, -1), newest), axis=-1)
        return view.take(index.astype(jnp.int32)), state


@dataclasses.dataclass(frozen=True)
class Observe(kvjax.KVTransform):
    """Writes down what attention each slot received in the last decode step."""

    needs = property(lambda self: Needs(decode_mass=True))

    def init(self, cache, layer):
        return cache.with_column("seen", jnp.zeros((*cache.shape, cache.group))), ()

    def on_step(self, cache, state, step) -> tuple[Mark, tuple]:
        mass = step.mass.reshape(*cache.shape[:2], cache.group, -1)
        return Mark({"seen": jnp.moveaxis(mass, 2, -1)}), state


READERS = {
    "pages": Pages(count=2),
    "pages of pages": chain(Pages(count=3), Pages(count=1, size=3)),
    "after eviction": chain(SNAP, Pages(count=2)),
    "observed": chain(Observe(), Pages(count=2)),
    "observed after eviction": chain(Observe(), SNAP, Pages(count=1)),
}
DECODE = 3


@pytest.fixture(scope="module")
def tokens():
    return Tokens.random()


@functools.partial(jax.jit, static_argnums=0)
def selected(transform, before, q, k, v, positions):
    """The slots that `select` chooses once the new tokens are in, by calling it directly."""
    rope = the_rope()
    kv, slots = kvjax.kit.append(before.kv, rope.rotate(k, positions), v, positions)
    view, _ = transform.select(kvjax.kit.View(kv, slots), before.state, rope.rotate(q, positions))
    return kv, view.index


@pytest.mark.parametrize("name", READERS)
@pytest.mark.slow
def test_reading_equals_attention_over_the_chosen_slots(name, tokens):
    transform = READERS[name]
    ragged = run(transform, tokens, right([0, 0, 0], LENGTHS, WIDTH), DECODE)
    chosen_fewer = False
    for step in range(DECODE):
        before = ragged.all_caches[step]
        now = np.array(LENGTHS)[:, None] + step
        arrays = tokens.at(now)
        kv, index = jax.device_get(selected(transform, before, *arrays))
        keys, values = kv.k.read(), kv.v.read()
        for row, head in np.ndindex(3, KV_HEADS):
            slots = index[row, head]
            slots = slots[slots >= 0]
            assert len(set(slots.tolist())) == len(slots)
            chosen_fewer |= len(slots) < int(kv.live[row, head].sum())
            heads = slice(head * 2, head * 2 + 2)
            data = (x[row, head][slots] for x in (keys, values))
            place, mass = (x[row, head][slots] for x in (kv.position, kv.log_mass))
            q = rotate(np.asarray(arrays[0])[row, heads], now[row], INV_FREQ)
            expected, p = softmax_attention(q, *data, now[row], place, mass)
            close(ragged.outs[step][row, heads], expected, what=f"step {step}, row {row}")
            if "seen" in kv.columns:
                seen = np.asarray(ragged.caches[step].kv.column("seen"))[row, head]
                scattered = np.zeros_like(seen)
                scattered[slots] = p.sum(1).T
                close(seen, scattered, what="mass of the slots that were read")
    assert chosen_fewer, "the selection must leave something out"


@pytest.mark.parametrize("name", some_slow(READERS, "observed"))
def test_reading_keeps_everything(name, tokens):
    """A recall method reads a selection: it evicts nothing, and the prompt is attended in full."""
    without = {"after eviction": SNAP, "observed after eviction": SNAP}.get(name, Full())
    positions = right([0, 0, 0], LENGTHS, WIDTH)
    mine, plain = (run(tx, tokens, positions, 1) for tx in (READERS[name], without))
    close(mine.prompt_out, plain.prompt_out)
    for row, head in np.ndindex(3, KV_HEADS):
        a, b = (slots_of(c.caches[-1], row, head)["position"] for c in (mine, plain))
        np.testing.assert_array_equal(a, b)


def test_views_compose_indices_only():
    cache = kvjax.init_cache(Full(), batch=1, kv_heads=1, head_dim=2, max_prompt=6, max_new=0).kv
    position = jnp.arange(6, dtype=jnp.int32)[None, None] * 10
    cache = cache.replace(position=position, log_mass=jnp.zeros((1, 1, 6)))
    view = kvjax.kit.View(cache, jnp.zeros((1, 1, 1), jnp.int32))
    assert view.per_slot(position, -1) is position
    first = view.take(jnp.array([[[5, -1, 2, 0]]]))
    second = first.take(jnp.array([[[3, 1, 0, -1]]]))
    np.testing.assert_array_equal(second.index, [[[0, -1, 5, -1]]])
    np.testing.assert_array_equal(second.per_slot(position, -1), [[[0, -1, 50, -1]]])
    mass = jnp.array([[[[1.0, 2.0, 4.0, 8.0]]]])
    np.testing.assert_array_equal(second.to_slots(mass), [[[[1.0, 0, 0, 0, 0, 4.0]]]])
    assert second.cache is cache


# --- head groups ----------------------------------------------------------------------------------

OUT_OF_ORDER = HeadGroups((((2, 0), SNAP), ((1,), Full()), ((3,), H2O(budget=8))))


@pytest.mark.slow
def test_head_groups_equal_a_loop_over_heads():
    """Groups out of order, each a few heads: every head as if it were alone with its transform."""
    heads, group = 4, 2
    tokens = Tokens.random(kv_heads=heads, query_heads=heads * group, seed=5)
    positions, sizes = right([0, 0, 0], LENGTHS, WIDTH), {"kv_heads": heads, "query_heads": 8}
    together = run(OUT_OF_ORDER, tokens, positions, 4, **sizes)
    transform_of = {head: tx for members, tx in OUT_OF_ORDER.groups for head in members}
    for head, tx in transform_of.items():
        queries = slice(head * group, (head + 1) * group)
        own = Tokens(tokens.q[:, queries], tokens.k[:, [head]], tokens.v[:, [head]])
        alone = run(tx, own, positions, 4, kv_heads=1, query_heads=group)
        close(together.prompt_out[:, queries], alone.prompt_out, what=f"head {head}")
        for step in range(4):
            close(together.outs[step][:, queries], alone.outs[step], what=f"head {head}, {step}")


def test_head_groups_store_fewer_bytes():
    sizes = {"kv_heads": 4, "query_heads": 8}

    def bytes_of(tx):
        return kvjax.nbytes(jax.eval_shape(lambda: new_cache(tx, **sizes)))

    full, per_head = bytes_of(Full()), bytes_of(Full()) / 4
    grouped = HeadGroups((((0, 1), StreamingLLM(budget=8)), ((2, 3), Full())))
    cache = new_cache(grouped, **sizes)
    assert [part.kv.shape for part in cache] == [(3, 2, 9), (3, 2, 44)]
    assert 2 * per_head < bytes_of(grouped) < 0.65 * full
    assert bytes_of(grouped) == kvjax.nbytes(cache)


# --- wrappers -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_compresses_at_its_steps_and_only_then(tokens):
    positions, length = right([0, 0, 0], LENGTHS, WIDTH), 24
    ragged = run(Every(SNAP, steps=3), tokens, positions, 7)
    live = [int(live_count(cache)[0, 0]) for cache in ragged.all_caches]
    assert live == [12, 13, 14, 12, 13, 14, 12, 13]
    newest = slots_of(ragged.caches[2], 0, 0)["position"][-4:]
    np.testing.assert_array_equal(newest, length + 3 - np.arange(4, 0, -1))


def test_when_full_compresses_only_rows_that_are_full(tokens):
    positions = right([0, 0, 0], LENGTHS, WIDTH)
    ragged = run(WhenFull(SNAP, room=3), tokens, positions, 11)
    live = np.array([live_count(cache)[:, 0] for cache in ragged.all_caches])
    long = [12, 13, 14] + [12, 13, 14] * 3
    assert live[:, 0].tolist() == live[:, 1].tolist() == long
    assert live[:, 2].tolist() == [*range(5, 15), 12, 13]


# --- what attend accepts --------------------------------------------------------------------------


def test_float32_activations_over_a_bfloat16_cache(tokens):
    """A cache may be stored in fewer bits than the model computes in."""
    positions, now = right([0, 0, 0], LENGTHS, WIDTH), np.array(LENGTHS)[:, None]

    def both(transform):
        cache = new_cache(transform, dtype=jnp.bfloat16)
        out, cache = prompt(transform, cache, tokens, positions)
        return out, *decode(transform, cache, tokens, now)

    for transform in (Full(), SNAP, H2O(budget=8), StreamingLLM(budget=8, reposition=True)):
        out, step, cache = jax.eval_shape(functools.partial(both, transform))
        assert out.dtype == step.dtype == jnp.float32
        assert cache.kv.k.dtype == jnp.bfloat16


def test_several_tokens_at_once_while_decoding(tokens):
    """Allowed where nothing is evicted: the same as one after the other."""
    positions = right([0, 0, 0], LENGTHS, WIDTH)
    one_by_one = run(SNAP, tokens, positions, 3)
    now = np.array(LENGTHS)[:, None] + np.arange(3)[None]
    out, cache = decode(SNAP, one_by_one.prompt_cache, tokens, now)
    close(out, np.concatenate(one_by_one.outs, axis=2))
    for row, head in np.ndindex(3, KV_HEADS):
        a, b = (slots_of(c, row, head) for c in (cache, one_by_one.caches[-1]))
        for name in a:
            close(a[name], b[name])


@pytest.mark.slow
def test_attend_under_vmap(tokens):
    """Pure functions: a leading axis may be mapped."""
    q, k, v, positions = tokens.at(right([0, 0, 0], LENGTHS, WIDTH)[:, :8])

    def one(q, k, v, positions):
        cache = new_cache(SNAP, 1)
        return kvjax.attend(cache, q, k, v, positions, phase="prompt", rope=the_rope())[0]

    rows = tuple(x[:, None] for x in (q, k, v, positions))
    mapped = jax.jit(jax.vmap(one))(*rows)
    out, _ = prompt(SNAP, new_cache(SNAP), tokens, right([0, 0, 0], LENGTHS, WIDTH)[:, :8])
    close(mapped[:, 0], out)
    assert out.shape == (3, QUERY_HEADS, 8, HEAD_DIM)


class Around(kvjax.kit.Wrapper):
    """A wrapper of a user's own that changes nothing."""


def test_a_wrapper_of_head_groups_is_refused():
    """It would lose the groups: they have a cache each, and `init_cache` looks for them by type."""
    groups = kvjax.HeadGroups((((1,), kvjax.StreamingLLM(12)), ((0,), kvjax.StreamingLLM(20))))
    for transform in (Around(groups), kvjax.PerLayer(lambda *_: Around(groups))):
        (layer,) = kvjax.bind(transform, num_layers=1)
        with pytest.raises(ValueError, match="around the transforms of HeadGroups, one by one"):
            kvjax.init_cache(layer, batch=1, kv_heads=2, head_dim=4, max_prompt=32, max_new=4)
    (layer,) = kvjax.bind(Around(kvjax.StreamingLLM(12)), num_layers=1)
    kvjax.init_cache(layer, batch=1, kv_heads=2, head_dim=4, max_prompt=32, max_new=4)
