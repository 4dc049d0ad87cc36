"""`kvjax.testing.check` finds what is broken and says it in one line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.kit import Dense, Keep, Retain, Stage, decoding_extent, newest
from kvjax.testing import ConformanceError, check
from tests.support.cases import BUDGET, OUTLIERS, chelsea, compositions, registered
from tests.support.marks import some_slow


@dataclass(frozen=True)
class Newest(kvjax.KVTransform):
    """Keeps the newest tokens."""

    budget: int = 12

    def extent(self, extent):
        return extent.keep(self.budget)

    def on_prompt(self, cache, state, step) -> tuple[Keep, tuple]:
        return Keep(jnp.full_like(cache.length, self.budget), None, newest_first=True), state


class KeepsMore(Newest):
    def on_prompt(self, cache, state, step) -> tuple[Keep, tuple]:
        return Keep(jnp.full_like(cache.length, self.budget + 3), None, newest_first=True), state


class LooksAtOtherRows(Newest):
    def on_prompt(self, cache, state, step) -> tuple[Keep, tuple]:
        sign = jnp.where(cache.length[0] > 0, 1.0, -1.0)
        score = sign * cache.position.astype(jnp.float32)
        return Keep(jnp.full_like(cache.length, self.budget), score), state


class KeepsEveryThird(Newest):
    """Of a long text it keeps more than of `max_prompt` tokens."""

    def extent(self, extent):
        return extent.keep(-(-extent.longest_prompt // 3) + self.budget)

    def on_prompt(self, cache, state, step) -> tuple[Retain, tuple]:
        return Retain((cache.position % 3 == 0) | newest(cache, self.budget)), state


class MeanOfHeads(kvjax.SnapKV):
    """Averages scores over heads, which its card does not say."""

    def on_prompt(self, cache, state, step) -> tuple[Keep, Any]:
        keep, state = super().on_prompt(cache, state, step)
        return replace(keep, reduce="layer"), state


class Loops(Newest):
    def on_step(self, cache, state, step) -> tuple[None, tuple]:
        jax.lax.while_loop(lambda x: x < cache.length[0], lambda x: x + 1, 0)
        return None, state


class CountsPromptsOfAllRows(Newest):
    """It turns its score around after two prompts of any rows."""

    def init(self, cache, layer):
        return cache, jnp.zeros(cache.shape[0], jnp.int32)

    def on_prompt(self, cache, state, step) -> tuple[Keep, jax.Array]:
        sign = jnp.where(state > 1, -1.0, 1.0)[:, None, None]
        score = sign * cache.position.astype(jnp.float32)
        return Keep(jnp.full_like(cache.length, self.budget), score), state + 1


class CountsStepsOfAllRows(CountsPromptsOfAllRows):
    def extent(self, extent):
        return decoding_extent(extent, self.budget, 1)

    def on_prompt(self, cache, state, step) -> tuple[Keep, jax.Array]:
        return Keep(jnp.full_like(cache.length, self.budget), None, newest_first=True), state

    def on_step(self, cache, state, step) -> tuple[Keep, jax.Array]:
        steps = state[:, None, None].astype(jnp.float32)
        score = jnp.sin(cache.position.astype(jnp.float32) * (1.0 + steps))
        return Keep(jnp.full_like(cache.length, self.budget), score), state + 1


class CountsInFloats(CountsPromptsOfAllRows):
    def on_prompt(self, cache, state, step) -> tuple[None, jax.Array]:
        return None, state.astype(jnp.float32)


class FreesManyInAStep(Newest):
    def on_step(self, cache, state, step) -> tuple[Retain, tuple]:
        return Retain(newest(cache, self.budget // 2)), state


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundsAgain:
    """Rows that lose a little at every prompt's end, also of rows that had no tokens in it."""

    data: jax.Array

    shape = property(lambda self: self.data.shape)
    dtype = property(lambda self: self.data.dtype)
    room = property(lambda self: None)

    def read(self, index=None):
        return Dense(self.data).read(index)

    def write(self, slots, rows):
        return type(self)(Dense(self.data).write(slots, rows).data)

    def flush(self, steps, moves=None):
        return type(self)(Dense(self.data).flush(steps, moves).data)

    def encode(self, values, k, v, slots):
        return type(self)(k * 0.9999), type(self)(v * 0.9999)

    def attention(self, values, queries, seen, mask, **options):
        return Dense(self.data).attention(Dense(values.data), queries, seen, mask, **options)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AddsOne(RoundsAgain):
    """Every answer is one too much, that of a row without a token too."""

    def attention(self, *args, **options):
        out, probabilities = super().attention(*args, **options)
        return out + 1.0, probabilities


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Overflows(RoundsAgain):
    def encode(self, values, k, v, slots):
        return type(self)(k * jnp.inf), type(self)(v)


class RoundsIdleRows(kvjax.KVTransform):
    stage = Stage.REPRESENT
    form = RoundsAgain

    def init(self, cache, layer):
        return cache.replace(k=self.form(cache.k.read()), v=self.form(cache.v.read())), ()


class AnswersPadding(RoundsIdleRows):
    form = AddsOne


class LosesKeys(RoundsIdleRows):
    form = Overflows


class HoldsTooFew(Newest):
    """Evicts nothing while it decodes, and has room for two new tokens."""

    def extent(self, extent):
        return extent.keep(self.budget).hold(self.budget + 2)


class DoublesValuesOfOtherRows(Newest):
    def on_prompt(self, cache, state, step) -> tuple[Retain, tuple]:
        factor = jnp.where(cache.length[0] > 0, 1.0, 2.0)
        return Retain(newest(cache, self.budget), values=cache.v.read() * factor), state


class ForgetsPins(kvjax.KVTransform):
    """A flush pins nothing, not even what has been pinned before."""

    def extent(self, extent):
        return extent.every(4)

    def on_flush(self, cache, state, step) -> tuple[Retain, tuple]:
        return Retain(newest(cache, 8), pinned=jnp.zeros_like(cache.pinned)), state


class EqualsNothing(Newest):
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


BROKEN = {
    "another state": (CountsInFloats, "makes float32[3] of its state int32[3]"),
    "many in a step": (FreesManyInAStep, "slots in a decode step, which may free one"),
    "rounds idle rows": (RoundsIdleRows, "stores k of a row otherwise after steps and a prompt"),
    "prompts of other rows": (CountsPromptsOfAllRows, "keeps other tokens of a row after steps"),
    "steps of other rows": (CountsStepsOfAllRows, "after steps and a prompt of other rows"),
    "keeps more": (KeepsMore, "promises 12 slots after a prompt, and keeps 15"),
    "other rows": (LooksAtOtherRows, "in a batch than of the same row alone"),
    "no value": (EqualsNothing, "is not equal to a copy of itself"),
    "padding": (AnswersPadding, "answers a row without a token with numbers that are not 0"),
    "keys that overflow": (LosesKeys, "left keys that are not finite"),
    "holds too few": (HoldsTooFew, "promises 14 slots while decoding, and needs 21"),
    "values of other rows": (
        DoublesValuesOfOtherRows,
        "answers a row in a batch otherwise than alone: outputs differ",
    ),
    "pins": (ForgetsPins, "evicts a pinned slot"),
    "other heads": (lambda: kvjax.ByHead(MeanOfHeads(0.3)), "needs couples_heads=True in its card"),
    "loop": (Loops, "has while in a decode step"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "steps of other rows"))
        for name in BROKEN
    ],
)
def test_what_is_broken_is_found(name):
    kind, said = BROKEN[name]
    with pytest.raises(ConformanceError) as raised:
        check(kind())
    message = str(raised.value)
    assert said in message and "\n" not in message


BOUND = {"pyramidinfer_paper", "spindlekv_unfold"}  # to a layer of their own
CALIBRATION = kvjax.kit.InfiniGenCalibration(np.random.default_rng(0).normal(size=(3, 2, 32, 5)))
METHODS = {
    **{name: tx for name, tx in {**registered(), **compositions(BUDGET)}.items()
       if name not in BOUND and "infinigen" not in name},
    "infinigen": kvjax.InfiniGen(BUDGET, None, CALIBRATION, dense_layers=()),
    "outlier_heads": chelsea(4 * BUDGET, recent=2, outlier_heads=OUTLIERS),
}  # fmt: skip


SOME = {"kvzip", "chelsea", "clusterkv"}  # all others run before a release


@pytest.mark.parametrize("name", some_slow(METHODS, "every", "h2o", exhaustive={*METHODS} - SOME))
def test_a_right_method_passes(name):
    check(METHODS[name], num_layers=3)


def test_what_keeps_too_much_of_a_long_text_is_found():
    check(KeepsEveryThird())
    with pytest.raises(ConformanceError, match="after 96 decode steps"):
        check(kvjax.Every(KeepsEveryThird(), steps=4))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda keep, state: keep, "got Keep"),
        (lambda keep, state: (jnp.ones((3, 2, 80), bool), state), "got .*Tracer, tuple"),
    ],
    ids=["no state", "a mask"],
)
def test_what_is_no_decision(made, said):
    class Wrong(Newest):
        def on_prompt(self, cache, state, step):
            return made(*super().on_prompt(cache, state, step))

    with pytest.raises(TypeError, match=f"Wrong.on_prompt must return a decision .* {said}"):
        check(Wrong())


class PromisesNothing(Newest):
    def extent(self, extent):
        return extent


def test_what_saves_no_bytes_is_warned_of():
    with pytest.warns(UserWarning, match=r"keeps 12 of 40 tokens.*does not promise"):
        check(PromisesNothing())


class CountsBudget(Newest):
    def on_prompt(self, cache, state, step) -> tuple[Keep, tuple]:
        return Keep(self.budget, None, newest_first=True), state


class ScoresTokens(Newest):
    def on_prompt(self, cache, state, step) -> tuple[Keep, tuple]:
        return Keep(jnp.full_like(cache.length, self.budget), cache.log_mass[0, 0]), state


class ScoresInIntegers(Newest):
    def on_prompt(self, cache, state, step) -> tuple[Keep, tuple]:
        return Keep(jnp.full_like(cache.length, self.budget), -cache.position), state


class MarksByNumber(Newest):
    def on_prompt(self, cache, state, step) -> tuple[Retain, tuple]:
        return Retain(newest(cache, self.budget).astype(jnp.float32)), state


class NewestHalf(Newest):
    def on_prompt(self, cache, state, step) -> tuple[Keep, tuple]:
        budget = jnp.full_like(cache.length, self.budget)
        return Keep(budget, None, newest=0.5, newest_first=True), state


@dataclass(frozen=True)
class Lists(kvjax.KVTransform):
    heads: list[int]


class SelectsNumbers(kvjax.KVTransform):
    stage = Stage.RECALL

    def select(self, view, state, query):
        return jnp.zeros((3, 2, 4), jnp.int32), state


class SelectsFloats(SelectsNumbers):
    def select(self, view, state, query):
        return view.take(jnp.zeros((3, 2, 4))), state


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        (CountsBudget(), TypeError, r"CountsBudget.on_prompt: budget of Keep .*\[B\].*got 12"),
        (ScoresTokens(), ValueError, r"ScoresTokens.on_prompt: score of Keep .*shape \(\d+,\)"),
        (ScoresInIntegers(), ValueError, r"score of Keep must be Float \[B.*got int32 of shape"),
        (NewestHalf(), TypeError, r"newest of Keep must be Int \[B\] or int with B = 3, got 0.5"),
        (MarksByNumber(), ValueError, r"keep of Retain must be Bool \[B, H, S\].*got float32"),
        (SelectsNumbers(), TypeError, r"SelectsNumbers.select must return a view.*got \(.*, tuple"),
        (SelectsFloats(), TypeError, r"slot numbers \[B, K, N\].*got float32 of shape \(3, 2, 4\)"),
        (Newest(0.3), TypeError, r"numbers of slots, got prompt = 0.3: kvjax.kit.most_slots"),
        (Lists([1, 2]), TypeError, r"heads of Lists must be hashable.*got \[1, 2\]"),
    ],
)
def test_what_does_not_fit_the_cache_is_named(method, error, message):
    with pytest.raises(error, match=message):
        check(method)


def test_what_is_no_transform():
    with pytest.raises(TypeError, match="give an instance"):
        check(Newest.__class__)


@pytest.mark.parametrize("name", ["needs", "on_prompt"])
def test_a_field_cannot_replace_a_member(name):
    with pytest.raises(TypeError, match=f"'{name}', which is a member"):
        type("Mine", (kvjax.KVTransform,), {"__annotations__": {name: "int"}, name: 3})


def test_a_method_without_a_minimum_says_so():
    """And an error within one is Python's own."""

    @dataclass(frozen=True)
    class Bare(kvjax.kit.PromptBudget):
        budget: int = 12

    @dataclass(frozen=True)
    class Wrong(Bare):
        minimum = property(lambda self: self.frob)

    with pytest.raises(TypeError, match="Bare has no minimum: it needs the smallest budget that"):
        check(Bare())
    with pytest.raises(AttributeError, match="frob"):
        _ = Wrong().minimum
    assert not hasattr(Bare(), "frob")
