"""Head groups read a further prompt together, as each of them would by itself."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import kvjax
from kvjax.attention.joined_heads import can_join
from kvjax.compiled_code import clear_compiled_functions
from kvjax.generation import groups, observe, prompt_pass
from kvjax.generation.observe import slots_together
from tests.generation.test_generate import RAGGED
from tests.generation.test_observe import LAYERS, PROFILE, SIZES, model
from tests.support.attending import numbers, parts, slots_of
from tests.support.marks import some_slow
from tests.support.tolerances import close
from tests.support.words import Words

KVZIP = kvjax.KVzip(0.3, room=64, piece=8)
SNAPKV = kvjax.SnapKV(0.4, window=4)
CLUSTERS = kvjax.ClusterKV(16, tokens_per_cluster=4, sinks=2, dense_layers=())


def by_head(base):
    return kvjax.ByHead(base, PROFILE)


METHODS = {
    "kvzip": by_head(KVZIP),
    "kvzip in 8 bits": by_head(kvjax.chain(KVZIP, kvjax.Quantize(8))),
    "kvzip in 4 bits": by_head(kvjax.chain(KVZIP, kvjax.Quantize(4, group=8))),
    "own_queries": by_head(kvjax.OwnQueries(0.3, room=64, piece=8)),
    "everything": by_head(kvjax.KVzip(1.0, room=64)),
    "snapkv": by_head(SNAPKV),
    "snapkv again": by_head(kvjax.Every(SNAPKV, steps=4)),
    "snapkv when full": by_head(kvjax.WhenFull(SNAPKV, room=8)),
    "quest": kvjax.chain(by_head(SNAPKV), kvjax.Quest(12, page=4)),
    "clusters": kvjax.chain(by_head(KVZIP), CLUSTERS),
}
KINDS = {"kvzip in 8 bits": "8 bits", "kvzip in 4 bits": "4 bits"}
# Of each row: a further prompt, or none.
TURNS = [[[7, 3, 9, 1, 4], None, [11, 2]], [[5, 9, 2], [8], [1, 6, 3, 3]], [None, [4, 4], None]]


def programs() -> tuple[int, int, int]:
    return (
        prompt_pass._read_layer._cache_size(), observe.join_layer._cache_size(),
        observe.compress_layer._cache_size(),
    )  # fmt: skip


def alone(monkeypatch) -> None:
    """Makes each group read by itself from now on."""
    monkeypatch.setattr(observe, "can_join", lambda cache: False)


def conversation(transform, turns=TURNS, document=None) -> list:
    """The contexts and results after each turn."""
    context = kvjax.read(model(), RAGGED, transform=transform, max_prompt=96, max_new=20)
    results = []
    for turn in turns:
        result = kvjax.generate(
            model(), turn, context=context, max_new_tokens=6, end_tokens=(), document=document
        )
        context = result.context
        results.append(result)
    return results


def same(one, other, kind: str) -> None:
    """Checks that tokens are equal, and the slots of every head, wherever they stand."""
    assert one.tokens == other.tokens
    one, other = one.context, other.context
    close(one.logits, other.logits, kind)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for layer, *caches in zip(one.layers, one.caches, other.caches, strict=True):
        for first, second in zip(*(parts(layer, cache) for cache in caches), strict=True):
            for row, place in np.ndindex(first.cache.kv.shape[:2]):
                slots, expected = (slots_of(part.cache, row, place) for part in (first, second))
                for name in expected:
                    where = f"row {row}, head {first.heads[place]}: {name}"
                    close(slots[name], expected[name], kind, where)
            states = (jax.tree.leaves(part.cache.state) for part in (first, second))
            for state, expected in zip(*states, strict=True):
                close(numbers(state), numbers(expected), kind)
            np.testing.assert_array_equal(first.cache.kv.length, second.cache.kv.length)


# What a group keeps in other ways; all others run before a release.
KEPT = {"kvzip in 4 bits", "quest", "snapkv"}


@pytest.mark.parametrize("name", some_slow(METHODS, exhaustive={*METHODS} - KEPT))
def test_turns_are_those_of_groups_alone(name, monkeypatch):
    """Ragged rows, of which some take no part; several turns, with answers between them."""
    transform = METHODS[name]
    together, after = conversation(transform), programs()
    assert after[1] and after[2]
    alone(monkeypatch)
    for one, other in zip(together, conversation(transform), strict=True):
        same(one, other, KINDS.get(name, "accumulated"))
    assert programs()[1:] == after[1:]


@pytest.mark.parametrize("name", some_slow(["kvzip", "own_queries"], exhaustive={"own_queries"}))
def test_further_documents_are_those_of_groups_alone(name, monkeypatch):
    """They are looked at or noted."""
    turns = [[[7, 3, 9, 1, 4] * 3, [6, 2] * 9, None], [[5, 9, 2], None, [8]]]
    words = Words((1, 2), (3,))
    observe.join_layer.clear_cache()
    together = conversation(METHODS[name], turns, words)
    assert programs()[1]
    alone(monkeypatch)
    for one, other in zip(together, conversation(METHODS[name], turns, words), strict=True):
        same(one, other, KINDS.get(name, "accumulated"))


@pytest.mark.exhaustive
def test_rows_that_are_read_in_groups(monkeypatch):
    monkeypatch.setattr(groups, "_TOKENS_PER_SHAPE", 0)
    turns, read_in = [[None, [5], [7] * 20]], []
    grouped = kvjax.generation.turns.grouped
    monkeypatch.setattr(
        kvjax.generation.turns, "grouped",
        lambda *args: read_in.append(grouped(*args)) or read_in[-1],
    )  # fmt: skip
    monkeypatch.setattr(kvjax.generation.turns, "bucket", lambda size, *args: 32 if size > 8 else 8)
    together = conversation(METHODS["kvzip in 8 bits"], turns)
    assert [len(several) for several in read_in] == [1, 2]
    alone(monkeypatch)
    for one, other in zip(together, conversation(METHODS["kvzip in 8 bits"], turns), strict=True):
        same(one, other, "8 bits")


@pytest.mark.slow
def test_what_is_stored_stays_bit_for_bit():
    """In rows with a question and in rows without, whatever reads with them."""
    context = kvjax.read(model(), RAGGED, transform=METHODS["kvzip in 8 bits"], **SIZES)
    turn = [[7, 3, 9], None, [11, 2]]
    after = kvjax.generate(model(), turn, context=context, max_new_tokens=1).context
    kept = 0
    for layer, *caches in zip(context.layers, context.caches, after.caches, strict=True):
        for old, new in zip(*(parts(layer, cache) for cache in caches), strict=True):
            for row, place in np.ndindex(old.cache.kv.shape[:2]):
                a, b = (slots_of(part.cache, row, place) for part in (old, new))
                places = {position: n for n, position in enumerate(b["position"].tolist())}
                for n, position in enumerate(a["position"].tolist()):
                    for name in ("k", "v", "log_mass"):
                        np.testing.assert_array_equal(a[name][n], b[name][places[position]])
                    kept += 1
            for x, y in zip(*(jax.tree.leaves(p.cache.kv) for p in (old, new)), strict=True):
                np.testing.assert_array_equal(np.asarray(x)[1], np.asarray(y)[1])
    assert kept > 100


@pytest.mark.slow
def test_one_program_of_a_block_and_none_for_the_next_question():
    clear_compiled_functions()  # other tests may have read the same prompt
    compiled: list[str] = []
    context = kvjax.read(model(), RAGGED, transform=METHODS["snapkv"], **SIZES)
    layouts = len(set(context.layers))
    assert layouts > 2
    first = programs()
    assert first[0] == 1
    question = [[7, 3, 9], None, [11, 2]]
    kvjax.generate(model(), question, context=context, on_compile=compiled.append, max_new_tokens=2)
    after = programs()
    assert after[0] == first[0] + 1
    assert {name.rsplit(" layer ")[0] for name in compiled} >= {
        "the heads of", "the prompt pass of", "the decision of a layer", "the compression of",
    }  # fmt: skip
    kvjax.generate(model(), [[5], [6, 1], None], context=context, max_new_tokens=2)
    assert programs() == after


def test_a_question_without_room_is_refused():
    context = kvjax.read(
        model(), RAGGED, transform=by_head(kvjax.KVzip(0.3, room=0)), max_prompt=96, max_new=20
    )
    with pytest.raises(ValueError, match=r"at most 0 tokens .* got 2 in row 1"):
        kvjax.generate(model(), [[5], [6, 1], None], context=context, max_new_tokens=2)


def test_slots_are_those_of_the_largest_rectangle():
    sizes = {"batch": 1, "kv_heads": 2, "head_dim": 8, "max_prompt": 4000, "max_new": 0}

    def caches(transform):
        layers = kvjax.bind(transform, LAYERS)
        return [kvjax.init_cache(tx, layer=n, **sizes) for n, tx in enumerate(layers)]

    joined = caches(METHODS["snapkv"])
    every = [part.kv.slots for cache in joined for part in cache]
    assert slots_together(joined) == (max(every), max(every) + 4000 - min(every))
    crushed = by_head(kvjax.KVCrush(SNAPKV))  # has no method for all heads: bits are of a rectangle
    assert all(map(can_join, caches(crushed)))
    others = kvjax.HeadGroups((((0,), kvjax.Full()), ((1,), kvjax.H2O(20))))
    apart = [*caches(others), *caches(kvjax.Full())]
    assert not any(map(can_join, apart))
    assert slots_together(apart) == (0, 0)
