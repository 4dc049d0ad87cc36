"""Models with sliding windows: rings give the full cache's text from the bytes of the windows."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax.cache.nbytes import nbytes
from kvjax.generation.model import as_functional
from kvjax.models import DecoderConfig, LayerConfig, RopeConfig, random_decoder
from tests.generation.test_context import STORED
from tests.generation.test_generate import RAGGED, method
from tests.support.decoders import louder
from tests.support.marks import some_slow
from tests.support.tolerances import close

WINDOW, NEW = 8, 48
LOCAL, GLOBAL = RopeConfig(rotary_dim=8, theta=100.0), RopeConfig(rotary_dim=8)
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "query_heads": 4, "kv_heads": 2,
    "head_dim": 8, "rope": GLOBAL, "max_positions": 256,
}  # fmt: skip
GEMMA = DecoderConfig(
    **SIZES, num_layers=4, layers=(LayerConfig(LOCAL, WINDOW), LayerConfig(GLOBAL)) * 2,
    qk_norm="head", norms="both", norm_plus_one=True, embedding_scale=2.0,
)  # fmt: skip
MISTRAL = DecoderConfig(**SIZES, num_layers=2, sliding_window=WINDOW)
CONFIGS = {"gemma": GEMMA, "mistral": MISTRAL}
QUESTIONS = [[7, 3], [11], list(range(20))]


@functools.cache
def model(name: str):
    return louder(random_decoder(CONFIGS[name], seed=3))


@functools.cache
def without_rings(name: str) -> kvjax.models.FunctionalModel:
    """The same model, of which nothing but its attention knows the windows."""
    functional = dataclasses.replace(as_functional(model(name)), windows=())
    options = {x.name: getattr(functional, x.name) for x in dataclasses.fields(functional)}
    return WithoutRings(**options, hidden=model(name).windows)


@dataclasses.dataclass(frozen=True)
class WithoutRings(kvjax.models.FunctionalModel):
    """A model that says the windows of its attention, but asks for no rings."""

    hidden: tuple[int | None, ...] = ()

    def attention(self, layer):
        return dataclasses.replace(super().attention(layer), window=self.hidden[layer])


jax.tree_util.register_dataclass(
    WithoutRings,
    data_fields=["params"],
    meta_fields=[x.name for x in dataclasses.fields(WithoutRings) if x.name != "params"],
)


def read(name: str, prompts=RAGGED, transform=None, **options):
    options = {"max_prompt": 160, "max_new": 128, **options}
    return kvjax.read(model(name), prompts, transform=transform, **options)


def rings(context) -> list:
    return [cache for cache, window in zip(context.caches, context.windows, strict=True) if window]


# --- the full cache's text ------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_text_is_that_of_the_full_cache(name):
    """Ragged prompts, some shorter than a window, and 48 new tokens; then two further turns."""
    turns = {}
    for of_rings, mine in ((True, model(name)), (False, without_rings(name))):
        context, found = kvjax.read(mine, RAGGED, max_prompt=160, max_new=128), []
        for asked, most in ((None, NEW), (QUESTIONS, 10), ([[5], None, [9, 9]], 10)):
            result = kvjax.generate(mine, asked, context=context, max_new_tokens=most)
            context = result.context
            found.append((result.tokens, np.asarray(context.logits)))
        turns[of_rings] = found
        slots = [cache.kv.slots for cache in context.caches]
        whole = 160 + 128
        assert slots == [WINDOW if window and of_rings else whole for window in model(name).windows]
    for (tokens, logits), (expected, full_logits) in zip(*turns.values(), strict=True):
        assert tokens == expected
        close(logits, full_logits)
    assert len(set(turns[True][0][0][0])) > 3, "a model that repeats itself shows nothing"


# --- with every method ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    some_slow(
        ["h2o", "quest", "infinigen", "pyramidinfer", "8 bits", "4 bits", "every"],
        exhaustive={"quest", "infinigen", "pyramidinfer", "4 bits", "every"},
    ),
)
def test_every_method_in_the_other_layers(name):
    """Rings hold the same bytes under all of them, unless rows are stored in fewer bits."""
    tx = kvjax.calibrated(uncalibrated(STORED.get(name, name)), model("gemma"), [RAGGED[0]])
    context = read("gemma", transform=tx)
    answer = kvjax.generate(model("gemma"), QUESTIONS, context=context, max_new_tokens=12)
    assert [len(row) for row in answer.tokens] == [12] * 3
    whole = nbytes(rings(read("gemma"))[0])
    for cache in rings(answer.context):
        assert cache.kv.slots == WINDOW
        if "quantize" in STORED.get(name, ""):
            assert nbytes(cache) < whole
        else:
            assert nbytes(cache) == whole
            assert cache.transform == kvjax.Ring(WINDOW)
    alone = [
        kvjax.generate(
            model("gemma"), [q], context=read("gemma", [p], tx, buckets=[64]), max_new_tokens=12
        )
        for p, q in zip(RAGGED, QUESTIONS, strict=True)
    ]
    if name != "pyramidinfer":  # a row alone has another longest prompt, so another schedule
        assert answer.tokens == [one.tokens[0] for one in alone]


def uncalibrated(name: str) -> kvjax.KVTransform:
    """As `method` makes it, for a model of four layers."""
    tx = method(name)
    return dataclasses.replace(tx, calibration=None) if isinstance(tx, kvjax.InfiniGen) else tx


def test_everywhere_and_short_texts():
    tx = kvjax.H2O(4)
    everywhere = read("mistral", transform=kvjax.Everywhere(tx))
    assert everywhere.layers == (tx, tx)
    assert everywhere.nbytes < everywhere.full_nbytes == read("mistral").nbytes
    wide = dataclasses.replace(MISTRAL, sliding_window=100)
    short = kvjax.read(random_decoder(wide), [[1, 2, 3]], transform=tx, max_new=36, buckets=[64])
    assert short.layers == (tx, tx), "a text of 100 tokens never leaves the window"
    longer = kvjax.read(random_decoder(wide), [[1, 2, 3]], transform=tx, max_new=37, buckets=[64])
    assert longer.layers == (kvjax.Ring(100),) * 2


# --- what is said and kept ------------------------------------------------------------------------


def test_windows_of_another_number_of_layers_are_refused():
    wrong = dataclasses.replace(without_rings("gemma"), windows=(8, None))
    with pytest.raises(ValueError, match="one entry per layer, 4, got 2"):
        kvjax.generate(wrong, RAGGED)


def test_repositioned_texts_end_where_rings_positions_do():
    """Rings keep tokens' own positions, so that a text may not go beyond the model's."""
    tx, prompt = kvjax.StreamingLLM(16, reposition=True), [list(range(60)) * 4]
    with pytest.raises(ValueError, match="the model has 256 positions"):
        kvjax.generate(model("gemma"), prompt, transform=tx, max_new_tokens=40)
