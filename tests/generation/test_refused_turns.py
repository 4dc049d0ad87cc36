"""A turn that is refused leaves the context as it was, and the next one works."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass

import jax
import numpy as np
import pytest

import kvjax
from kvjax.generation import groups
from kvjax.generation.model import as_functional
from kvjax.models import random_decoder
from kvjax.protocol import KVTransform
from tests.generation import test_rings
from tests.generation.test_context import LAYERED
from tests.generation.test_generate import CONFIG, RAGGED, model
from tests.generation.test_heads_together import METHODS as BY_HEAD
from tests.generation.test_observe import model as model_of_four_layers
from tests.support.cases import BUDGET, OUTLIERS, chelsea
from tests.support.marks import some_slow
from tests.support.words import Words

SIZES = {"max_prompt": 128, "max_new": 32}
TURN = [[7, 3], None, [5, 9, 2]]
MOMENTS = ("prompt", "flush", "select", "step")

wrong: set[str] = set()  # moments at which `Raises` raises


@dataclass(frozen=True)
class Raises(KVTransform):
    """A method that keeps everything, until the test says that it goes wrong.

    Args:
      number: of the test, since what has been traced is not traced again.
    """

    number: int

    def extent(self, extent):
        return extent.every(4)

    def on_prompt(self, cache, state, step):
        if step.moment in wrong:
            raise ValueError(f"wrong at a {step.moment}")
        return None, state

    on_flush = on_step = on_prompt

    def select(self, view, state, query):
        if "select" in wrong:
            raise ValueError("wrong at a select")
        return view, state


@dataclass(frozen=True)
class LastRaises:
    """Function of a `PerLayer`: a method in all layers but the last one."""

    method: KVTransform
    number: int

    def __call__(self, layer: int, num_layers: int) -> KVTransform:
        if layer == num_layers - 1:
            return Raises(self.number)
        return kvjax.bind(self.method, num_layers)[layer]


numbers = itertools.count()


def last_raises(method: KVTransform) -> kvjax.PerLayer:
    """The method in all layers but the last one, where `Raises` is."""
    return kvjax.PerLayer(LastRaises(method, next(numbers)))


@functools.cache
def model_of_three_layers():
    """A random decoder with the layers that calibrations of the cases are of."""
    return random_decoder(dataclasses.replace(CONFIG, num_layers=3), seed=3)


def refused(language_model, context, prompts, message: str, **options) -> None:
    """Expects that a turn is refused, and that no array of the context has been given away."""
    options = {"max_new_tokens": 6, **options}
    for call in (kvjax.generate, kvjax.stream):
        with pytest.raises(ValueError, match=message):
            call(language_model, prompts, context=context, donate=True, **options)
        assert not any(x.is_deleted() for x in jax.tree.leaves(context))


def goes_wrong(language_model, transform, prompts=TURN, **options) -> None:
    """Lets the last layer go wrong at each moment. Afterwards the turn works."""
    context = kvjax.read(language_model, RAGGED, transform=last_raises(transform), **SIZES)
    try:
        for moment in MOMENTS:
            wrong.add(moment)
            refused(language_model, context, prompts, f"wrong at a {moment}", **options)
            wrong.clear()
    finally:
        wrong.clear()
    options = {"max_new_tokens": 6, **options}
    expected = kvjax.generate(language_model, prompts, context=context, **options)
    after = kvjax.generate(language_model, prompts, context=context, donate=True, **options)
    assert after.tokens == expected.tokens


# Heads that keep everything leave room for others in caches of `SIZES`.
ROOMY = {"outlier_heads": chelsea(4 * BUDGET, recent=2, outlier_heads=OUTLIERS)}


# What a layer has beside its slots; all others run before a release.
BESIDE = {"chelsea", "clusterkv", "h2o_codebook"}


@pytest.mark.parametrize("name", some_slow(LAYERED, "full", "h2o", exhaustive={*LAYERED} - BESIDE))
def test_no_array_is_lost_whatever_the_other_layers_do(name):
    goes_wrong(model_of_three_layers(), {**LAYERED, **ROOMY}[name])


@pytest.mark.slow
def test_a_turn_of_fewer_rows_that_are_read_in_groups(monkeypatch):
    divided = lambda widths: [[0], [2]] if 0 in widths else [None]  # noqa: E731
    monkeypatch.setattr(groups, "row_groups", divided)
    goes_wrong(model(), kvjax.SnapKV(20, window=4))


@pytest.mark.slow
def test_a_model_that_does_not_show_its_parts():
    whole = dataclasses.replace(as_functional(model()), parts=None)
    goes_wrong(whole, kvjax.SnapKV(20, window=4))


@pytest.mark.slow
def test_a_turn_that_is_repeated():
    goes_wrong(model(), kvjax.KVzip(0.3, room=16), document=Words((5, 6)))


@pytest.mark.parametrize(
    "name",
    some_slow(("snapkv", "kvzip", "kvzip in 8 bits"), exhaustive={"snapkv", "kvzip"}),
)
def test_head_groups_that_are_joined_and_cut(name):
    goes_wrong(model_of_four_layers(), BY_HEAD[name])


def test_going_on_without_a_prompt():
    """The loop is traced before it takes the caches over."""
    context = kvjax.read(model(), RAGGED, transform=last_raises(kvjax.Full()), **SIZES)
    try:
        wrong.add("step")
        with pytest.raises(ValueError, match="wrong at a step"):
            kvjax.generate(model(), None, context=context, donate=True, max_new_tokens=6)
    finally:
        wrong.clear()
    assert not any(x.is_deleted() for x in jax.tree.leaves(context))


def test_a_first_prompt_is_refused_before_a_layer_has_read_it():
    layers = []
    try:
        wrong.add("step")
        with pytest.raises(ValueError, match="wrong at a step"):
            kvjax.generate(
                model(), RAGGED, transform=last_raises(kvjax.H2O(20)),
                max_new_tokens=7, on_layer=layers.append,
            )  # fmt: skip
    finally:
        wrong.clear()
    assert layers == []


@dataclass(frozen=True)
class Counts(KVTransform):
    """A method that counts how often it is traced."""

    name: str

    def on_prompt(self, cache, state, step):
        traced.append(step.moment)
        return None, state

    on_step = on_prompt


traced: list[str] = []


def test_nothing_is_traced_twice():
    context = kvjax.read(model(), RAGGED, transform=Counts("first"), **SIZES)
    assert traced.count("prompt") == 1
    traced.clear()
    for _ in range(2):
        kvjax.generate(model(), TURN, context=context, max_new_tokens=6)
        assert traced == ["prompt", "step"]


# Turns that are longer than the room of a method


ROOM = 16
BY_HEADS = kvjax.ByHead(kvjax.KVzip(0.3, room=ROOM), BY_HEAD["kvzip"].profile)
ROOMS = {
    "plain": (model, kvjax.KVzip(20, room=ROOM)),
    "share": (model, kvjax.KVzip(0.3, room=ROOM)),
    "in a wrapper": (model, kvjax.Every(kvjax.KVzip(20, room=ROOM), steps=4)),
    "in a chain": (model, kvjax.chain(kvjax.KVzip(20, room=ROOM), kvjax.Quantize())),
    "by head": (model_of_four_layers, BY_HEADS),
    "windows": (functools.partial(test_rings.model, "gemma"), kvjax.KVzip(0.2, room=ROOM)),
}


@pytest.mark.parametrize("name", some_slow(ROOMS, "plain", "by head", "windows"))
@pytest.mark.parametrize("buckets", [None, (ROOM, ROOM + 1)], ids=["padded", "exact"])
def test_tokens_decide_whether_a_question_fits(name, buckets):
    make, transform = ROOMS[name]
    context = kvjax.read(make(), RAGGED, transform=transform, **SIZES)
    for count in (1, ROOM - 1, ROOM):
        questions = [[3] * count, None, [4] * min(count, 2)]
        answer = kvjax.generate(
            make(), questions, context=context, max_new_tokens=2, buckets=buckets
        )
        kept = [set(x[0, 0].tolist()) for x in positions(answer.context)]
        assert any(where >= {*range(53, 53 + count)} for where in kept), "it stays whole"
    message = rf"at most {ROOM} tokens .* KVzip\(.*, got {ROOM + 1} in row 2"
    refused(make(), context, [[3], None, [4] * (ROOM + 1)], message, buckets=buckets)


def positions(context) -> list[np.ndarray]:
    """Positions of all head groups of all layers, -1 where a slot is free."""
    parts = jax.tree.leaves(context.caches, is_leaf=lambda x: isinstance(x, kvjax.LayerCache))
    return [np.where(part.kv.live, part.kv.position, -1) for part in parts]


def test_a_turn_that_is_repeated_has_no_limit():
    context = kvjax.read(model(), RAGGED, transform=kvjax.KVzip(20, room=0), **SIZES)
    longer = [[3] * 40, None, None]
    kvjax.generate(model(), longer, context=context, max_new_tokens=2, document=True)
    refused(model(), context, [[3], None, None], "at most 0 tokens")


@pytest.mark.parametrize("call", [kvjax.read, kvjax.generate])
def test_a_first_prompt_that_is_not_a_document_has_the_limit_too(call):
    """The method would keep its newest tokens alone, and nobody would know."""
    options, layers = {"transform": kvjax.KVzip(20, room=ROOM), "document": False}, []
    with pytest.raises(ValueError, match=rf"at most {ROOM} tokens .* got 53 in row 0"):
        call(model(), RAGGED, on_layer=layers.append, **options)
    assert not layers
    context = kvjax.read(model(), [RAGGED[0][:ROOM]], **options)
    assert (positions(context)[0] >= 0).sum(-1).tolist() == [[ROOM] * CONFIG.kv_heads]


def test_methods_without_a_room_take_any_turn():
    context = kvjax.read(model(), RAGGED, transform=kvjax.SnapKV(20, window=4), **SIZES)
    assert kvjax.generate(model(), [[3] * 70, None, None], context=context, max_new_tokens=2)


# Several documents


@pytest.mark.parametrize("name", some_slow(("share", "by head"), "share"))
def test_what_later_documents_hold(name):
    """Each one gets its share of all documents, as `read` and `generate` read them."""
    make, transform = ROOMS[name]
    transform = transform if name == "by head" else kvjax.KVzip(0.3, room=ROOM, window=2)
    context = kvjax.read(make(), [RAGGED[0][:20]], transform=transform, **SIZES)
    edges = [0, 20]
    for count, repeated in ((10, False), (30, True), (5, False), (30, True)):
        context = kvjax.generate(
            make(), [RAGGED[0][:count]], context=context, max_new_tokens=1, donate=True,
            document=True if repeated else None,
        ).context  # fmt: skip
        edges += [edges[-1] + count, edges[-1] + count + 1]
    held = np.zeros(len(edges) - 1)
    for part in positions(context):
        for head in part[0]:
            counts = np.histogram(head[head >= 0], edges)[0]
            held += counts
            assert (counts[[0, 3, 7]] > 0).all()
    held = (held / sum(part.shape[1] for part in positions(context)))[[0, 3, 7]]
    if name == "by head":  # the shares of heads differ
        assert held.sum() == pytest.approx(0.3 * 80, abs=2)
    else:
        assert held.tolist() == [7, 9, 9]
