"""Whatever goes through a composition finds the methods in it, however they are nested."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

import kvjax
import kvjax.evaluation
from kvjax import Everywhere, HeadGroups, InfiniGen, PerLayer, Quantize, SnapKV, chain, plot
from kvjax.compose.walks import chosen, map_methods, walk
from kvjax.compose.wrappers import map_head_groups
from kvjax.generation.calibration import measured, with_named
from kvjax.generation.planning import plan
from kvjax.models.blocks import wants_prediction
from kvjax.protocol import Wrapper
from kvjax.serialization import from_json, to_json
from kvjax.transforms.infinigen.projections import InfiniGenCalibration
from tests.generation.test_generate import RAGGED, generate, model
from tests.support import cases
from tests.support.attending import same_arrays
from tests.support.marks import some_slow

LAYERS, WINDOW = 2, 8
FULL = kvjax.Full()
SELECTS = InfiniGen(budget=0.2, dense_layers=())
EVICTS, STORES = SnapKV(budget=24, window=8), Quantize(8)


@dataclasses.dataclass(frozen=True)
class Around(Wrapper):
    """A wrapper of one's own that changes nothing, and stands where its base does."""

    stage = property(lambda self: self.base.stage)


def not_first(inner: kvjax.KVTransform, first: kvjax.KVTransform = FULL) -> PerLayer:
    return PerLayer(Choice(first, inner))


@dataclasses.dataclass(frozen=True)
class Choice:
    first: kvjax.KVTransform
    others: kvjax.KVTransform

    def __call__(self, layer: int, num_layers: int) -> kvjax.KVTransform:
        return self.others if layer else self.first


def split(inner: kvjax.KVTransform) -> HeadGroups:
    return HeadGroups((((1,), inner), ((0,), SnapKV(budget=16, window=4))))


COMPOSITIONS: dict[str, kvjax.KVTransform] = {
    "alone": SELECTS,
    "chain": chain(EVICTS, STORES, SELECTS),
    "everywhere": Everywhere(SELECTS),
    "everywhere of a chain": Everywhere(chain(EVICTS, SELECTS)),
    "chain of everywhere": chain(EVICTS, Everywhere(SELECTS)),
    "everywhere twice": Everywhere(Everywhere(chain(STORES, SELECTS))),
    "a wrapper of one's own": Around(chain(STORES, Around(SELECTS))),
    "per layer": not_first(SELECTS, EVICTS),
    "per layer in per layer": not_first(not_first(Everywhere(chain(EVICTS, SELECTS)))),
    "per layer in everywhere": Everywhere(not_first(chain(STORES, SELECTS), STORES)),
    "chain of per layer": chain(not_first(EVICTS, SnapKV(32, window=4)), SELECTS),
    "head groups": split(SELECTS),
    "head groups in everywhere": Everywhere(split(chain(EVICTS, SELECTS))),
    "head groups in per layer": not_first(split(Everywhere(SELECTS))),
    "per layer in head groups": split(not_first(chain(STORES, SELECTS), STORES)),
    "chain of head groups": chain(split(EVICTS), SELECTS),
    "chain of per layer of head groups": chain(not_first(split(EVICTS), EVICTS), SELECTS),
    "chain of everywhere of head groups": chain(Everywhere(split(EVICTS)), SELECTS),
    "chain of everywhere of per layer": chain(Everywhere(not_first(split(EVICTS), FULL)), SELECTS),
    "everywhere of a chain of head groups": Everywhere(chain(split(EVICTS), STORES, SELECTS)),
}  # fmt: skip
GROUPED = {name for name in COMPOSITIONS if "head groups" in name} | {
    "chain of everywhere of per layer"
}  # fmt: skip
WITH_TEXT = {name for name in COMPOSITIONS if "layer" not in name} - GROUPED
CASES = pytest.mark.parametrize("name", COMPOSITIONS)


FAST = ("everywhere of a chain", "head groups")
# Every wrapper in another one; further nestings run before a release.
NESTED = {
    "chain", "a wrapper of one's own", "per layer in everywhere", "per layer in head groups",
    "chain of everywhere of per layer", "everywhere of a chain of head groups",
}  # fmt: skip
MOST_SLOW = pytest.mark.parametrize(
    "name", some_slow(COMPOSITIONS, *FAST, exhaustive={*COMPOSITIONS} - NESTED)
)


@functools.cache
def calibrated(name: str) -> kvjax.KVTransform:
    return kvjax.calibrated(COMPOSITIONS[name], model(), RAGGED[:1])


@functools.cache
def whole() -> InfiniGenCalibration:
    return measured(InfiniGen(), model(), RAGGED[:1])


def test_a_calibration_for_all_heads_is_not_cut():
    assert whole().of_heads(None) is whole()
    assert whole_of(1).of_heads((0,)) == whole_of(1), "it is cut already"
    with pytest.raises(ValueError, match="must be for all heads of the model, got one for some"):
        whole().of_heads((whole().shape[1],))


def whole_of(head: int) -> InfiniGenCalibration:
    return whole().of_heads((head,))


def by_heads(layer: kvjax.KVTransform) -> list[tuple[tuple[int, ...], kvjax.KVTransform]]:
    return list(layer.groups) if isinstance(layer, HeadGroups) else [((0, 1), layer)]


@CASES
def test_every_infinigen_is_calibrated_for_its_heads(name):
    layers = kvjax.bind(calibrated(name), LAYERS)
    found = [
        (heads, part.calibration)
        for layer in layers
        for heads, tx in by_heads(layer)
        for part in walk(tx)
        if isinstance(part, InfiniGen)
    ]
    assert found
    for heads, calibration in found:
        np.testing.assert_array_equal(calibration.projections, whole().projections[:, heads])
    assert any(map(wants_prediction, layers))
    assert kvjax.calibrated(COMPOSITIONS[name], model(), RAGGED[:1]) == calibrated(name)
    assert kvjax.calibrated(calibrated(name), model(), []) is calibrated(name)


def test_one_calibration_serves_all(monkeypatch):
    calls, calibration = [], whole()
    monkeypatch.setattr(
        "kvjax.generation.calibration.measured",
        lambda *given: calls.append(given) or calibration,
    )
    kvjax.calibrated(not_first(SELECTS, chain(STORES, SELECTS)), model(), RAGGED[:1])
    assert len(calls) == 1


def test_what_needs_no_calibration_stays_as_it_is():
    """The model is asked only for the layers for which `PerLayer` is to choose."""
    for plain in (chain(EVICTS, STORES), Everywhere(split(STORES)), split(Around(EVICTS))):
        assert kvjax.calibrated(plain, None, []) is plain
    chosen = Everywhere(not_first(STORES, EVICTS))
    assert kvjax.calibrated(chosen, model(), []) is chosen


@CASES
def test_the_rest_of_a_composition_stays_as_it_is(name):
    """But for calibrations, a layer is what it was."""

    calibrations = [whole(), *(whole_of(head) for head in (0, 1))]

    def plain(layer: kvjax.KVTransform) -> str:
        text = repr(layer)
        for calibration in calibrations:
            text = text.replace(repr(calibration), "None")
        return text

    pairs = zip(
        kvjax.bind(calibrated(name), LAYERS), kvjax.bind(COMPOSITIONS[name], LAYERS), strict=True
    )
    for own, given in pairs:
        assert plain(own) == repr(given)


@MOST_SLOW
def test_a_plan_has_the_bytes_of_a_calibration(name):
    size = {"max_prompt": 64, "max_new": 16}
    largest = InfiniGenCalibration(np.ones((LAYERS, 2, 8, 2), np.float32))
    given = plan(model(), COMPOSITIONS[name], **size)
    expected = [
        map_methods(
            lambda tx, _: tx.with_learned(largest) if isinstance(tx, InfiniGen) else tx, layer
        )
        for layer in kvjax.bind(COMPOSITIONS[name], LAYERS)
    ]
    own = plan(model(), PerLayer(lambda layer, _: expected[layer]), **size)
    assert (given.fixed, given.request) == (own.fixed, own.request)
    assert given.transform == COMPOSITIONS[name]


SHARED = kvjax.ByHead(
    SnapKV(0.5, window=8),
    kvjax.kit.HeadProfile(np.array([[[0.8, 1.0], [0.0, 1.0]], [[0.2, 1.0], [0.4, 1.0]]])),
)
EVICTS_AND_STORES = Around(chain(EVICTS, STORES))
RING = kvjax.Ring(WINDOW)
RINGS = {
    "chain": (chain(EVICTS, STORES, SELECTS), chain(RING, STORES)),
    "wrapper": (Around(chain(EVICTS, STORES)), chain(RING, STORES)),
    "wrapper of everywhere": (Around(chain(Everywhere(EVICTS), STORES)), EVICTS_AND_STORES),
    "all of it everywhere": (Everywhere(FULL), FULL),
    "by head everywhere": (Everywhere(SHARED), kvjax.bind(SHARED, LAYERS)[1]),
    "per layer in everywhere": (Everywhere(not_first(FULL, EVICTS)), FULL),
    "every per layer": (kvjax.Every(not_first(Everywhere(EVICTS)), 4), kvjax.Every(EVICTS, 4)),
    "chain of head groups": (
        chain(split(Everywhere(EVICTS)), STORES),
        HeadGroups((((1,), chain(EVICTS, STORES)), ((0,), chain(RING, STORES)))),
    ),
    "chain of a full head group": (
        chain(HeadGroups((((1,), FULL), ((0,), EVICTS))), Everywhere(SELECTS)),
        HeadGroups((((1,), RING), ((0,), chain(EVICTS, SELECTS)))),
    ),
}


@pytest.mark.parametrize("name", RINGS)
def test_layers_with_windows_are_rings_unless_everywhere_is_in_them(name):
    transform, expected = RINGS[name]
    assert kvjax.bind(transform, LAYERS, (WINDOW,) * LAYERS, max_tokens=64)[1] == expected


@pytest.mark.parametrize(
    "name",
    some_slow(
        ["chain", "per layer in everywhere", "head groups in per layer", "chain of head groups",
         "everywhere of a chain of head groups"],
        exhaustive={"per layer in everywhere", "head groups in per layer", "chain of head groups"},
    ),
)  # fmt: skip
def test_a_prompt_that_is_read_once_serves_it(name):
    """As if it had been read for this method alone."""
    once = kvjax.evaluation.ReadOnce(model(), RAGGED[:1], [calibrated(name)], max_new=64)
    result = generate(None, context=once.context(calibrated(name)), max_new_tokens=4)
    assert result.tokens == generate(RAGGED[:1], calibrated(name), max_new_tokens=4).tokens


@pytest.mark.parametrize(
    "name",
    some_slow(
        ("chain", "everywhere of a chain", "a wrapper of one's own", "per layer in everywhere"),
        exhaustive={"chain", "everywhere of a chain"},
    ),
)
def test_watching_changes_nothing(name):
    """Head groups are not watched."""
    steps, context = plot.watch(model(), RAGGED[0], calibrated(name), steps=4)
    result = generate(RAGGED[:1], calibrated(name), max_new_tokens=4, end_tokens=())
    assert [step.token for step in steps] == result.tokens[0]
    selected = [cache.kv.lists is not None for cache in context.caches]
    for step in steps:
        assert [marks is not None for marks in step.marks] == selected


@MOST_SLOW
def test_a_context_is_saved_with_its_calibrations(name, tmp_path):
    """Whatever has a text; other compositions are refused, and nothing is written."""
    context = kvjax.read(model(), RAGGED[:1], transform=calibrated(name), max_new=64)
    save = functools.partial(kvjax.save_context, tmp_path / "own", context, model=model())
    if name not in WITH_TEXT or "own" in name:
        with pytest.raises(ValueError, match=r"needs a name \(kvjax.register\)"):
            save()
        assert not (tmp_path / "own").exists()
        return
    save()
    loaded = kvjax.load_context(tmp_path / "own", model())
    assert loaded.transform == calibrated(name)
    same_arrays(loaded, context)


OF_ALL_HEADS = {  # their head groups have a method for all heads
    "by head": SHARED,
    "chain of by head": chain(SHARED, STORES, SELECTS),
    "by head of a chain": dataclasses.replace(SHARED, base=chain(SHARED.base, STORES)),
    "by head in everywhere": Everywhere(SHARED),
    "by head in per layer": not_first(chain(SHARED, STORES)),
    "by head in a wrapper of one's own": not_first(Everywhere(dataclasses.replace(
        SHARED, base=Around(SHARED.base)))),
    "head groups with an order": HeadGroups(
        (((0,), SnapKV(8, window=4)), ((1,), SnapKV(24, window=4))), ((1, 0), (0, 1)),
        whole=kvjax.Every(SnapKV(16, window=4), steps=4),
    ),
}  # fmt: skip
EVERY_COMPOSITION = {  # with the number of layers that it is for
    **{name: (tx, LAYERS) for name, tx in (COMPOSITIONS | OF_ALL_HEADS).items()},
    **{f"case {name}": (tx, cases.CALIBRATION.shape[0]) for name, tx in cases.CASES.items()},
}
WALKS = {
    "map_methods": lambda tx: map_methods(lambda method, _: method, tx),
    "chosen": lambda tx: PerLayer(lambda layer, layers: chosen(tx, layer, layers)),
    "bind": lambda tx: PerLayer(lambda layer, layers: kvjax.bind(tx, layers)[layer]),
    "map_head_groups": lambda tx: PerLayer(
        lambda layer, layers: map_head_groups(lambda x: x, kvjax.bind(tx, layers)[layer])
    ),
    "with_named": lambda tx: with_named(tx, model()),
}


@pytest.mark.parametrize("walked", WALKS)
def test_a_walk_that_changes_nothing_loses_nothing(walked):
    """No field of any part of any composition."""
    for name, (transform, num_layers) in EVERY_COMPOSITION.items():
        layers = kvjax.bind(transform, num_layers)
        assert kvjax.bind(WALKS[walked](transform), num_layers) == layers, name
        assert (name not in OF_ALL_HEADS) or layers[1].whole is not None


def test_a_serialized_composition_loses_nothing():
    for name, (transform, num_layers) in EVERY_COMPOSITION.items():
        if "own" not in name:
            layers = kvjax.bind(transform, num_layers)
            assert from_json(to_json(layers)) == layers, name


def test_the_method_of_all_heads_changes_with_those_of_the_groups():
    """It is given its heads in the order of their numbers: those of each layer, or None for all."""
    calls = []

    def double(method: SnapKV, heads: object) -> SnapKV:
        calls.append((method.budget, heads))
        return dataclasses.replace(method, budget=2 * method.budget)

    groups = OF_ALL_HEADS["head groups with an order"]
    doubled = map_methods(double, groups)
    assert [tx.budget for _, tx in doubled.groups] == [16, 48]
    assert doubled.whole == kvjax.Every(SnapKV(32, window=4), steps=4)
    assert doubled.order == groups.order
    assert calls == [(8, ((1,), (0,))), (24, ((0,), (1,))), (16, ((1, 0), (0, 1)))]
    calls.clear()
    map_methods(double, dataclasses.replace(groups, order=None))
    assert calls == [(8, (0,)), (24, (1,)), (16, None)]


def test_kvcrush_finds_another_one_anywhere():
    inner = kvjax.KVCrush(EVICTS, representatives=4)
    for base in (inner, Around(inner), Everywhere(inner), chain(kvjax.H2O(48), Around(inner))):
        with pytest.raises(ValueError, match="cannot go around another one"):
            kvjax.KVCrush(base, representatives=4)
