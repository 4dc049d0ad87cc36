"""A method reads what its own `needs` ask for, and nothing that another one asks for."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.kit import Keep, Mark, Needs, Stage, accumulated_attention
from kvjax.protocol import Moment
from kvjax.transforms.kvzip.repetition import Repetition

ASK = {  # what asks for each field
    "mass": Needs(decode_mass=True),
    "query": Needs(query_window=3),
    "query_position": Needs(query_share=0.25),
    "record": Needs(probe=Repetition()),
    "attention": Needs(accumulated_attention=True),
    "predicted": Needs(predicted_query=True),
}
THERE = {  # the moments that have it
    "mass": {"step"}, "query": {"prompt"}, "query_position": {"prompt"}, "record": {"prompt"},
    "attention": {"prompt", "flush", "step", "select"}, "predicted": {"select"},
}  # fmt: skip
MOMENTS = "prompt", "flush", "step"
CASES = [(name, moment) for name in ASK for moment in MOMENTS if name != "predicted"]
CASES += [("predicted", "select"), ("attention", "select")]
NOTHING = Needs()
READ = []  # what a method has read while it was traced


@dataclasses.dataclass(frozen=True)
class Reads(kvjax.KVTransform):
    """Reads a field at a moment, and decides nothing."""

    name: str
    at: Moment | str
    asks: Needs = NOTHING

    stage = property(lambda self: Stage.RECALL if self.at == "select" else Stage.EVICT)
    needs = property(lambda self: self.asks)

    def extent(self, extent):
        return extent.every(2) if self.at == "flush" else extent

    def read(self, moment, source, cache):
        if moment == self.at:
            of_cache = self.name == "attention"
            READ.append(accumulated_attention(cache) if of_cache else getattr(source, self.name))

    def select(self, view, state, query):
        self.read("select", view, view.cache)
        return view, state

    def on_prompt(self, cache, state, step):
        self.read(step.moment, step, cache)
        return None, state

    on_flush = on_step = on_prompt


@dataclasses.dataclass(frozen=True)
class Asks(kvjax.KVTransform):
    """Asks for everything, and decides nothing."""

    needs = property(lambda self: Needs(True, 4, 0.5, decode_mass=True)._replace(
        predicted_query=True, probe=Repetition()))  # fmt: skip


def trace(transform: kvjax.KVTransform) -> list:
    """What a method has read in a prompt that a probe looks at, a step and a flush."""
    READ.clear()

    def run():
        cache = kvjax.init_cache(
            transform, batch=1, kv_heads=2, query_heads=4, head_dim=8, max_prompt=16, max_new=8,
        )  # fmt: skip
        q, kv = jnp.ones((1, 4, 6, 8)), jnp.ones((1, 2, 6, 8))
        at, probe = jnp.arange(6)[None], transform.needs.probe
        call = (cache, q, kv, kv, at)
        cache = kvjax.attend(*call, phase="prompt", last=probe is None)[1]
        if probe is not None:
            call = (cache, q, kv, kv, at + 6)
            cache = kvjax.attend(*call, phase="probe")[1]
        new = q[:, :, :1], kv[:, :, :1], kv[:, :, :1], jnp.array([[6]])
        options = {"phase": "decode", "predicted_query": new[0]}
        return kvjax.flush(kvjax.attend(cache, *new, **options)[1])

    jax.eval_shape(run)
    return list(READ)


def refused(name: str, moment: str):
    member = "select" if moment == "select" else f"on_{moment}"
    return pytest.raises(
        TypeError, match=re.escape(f"Reads.{member} reads {name!r}") + ".*Needs\\("
    )


@pytest.mark.parametrize("name, moment", CASES)
def test_what_was_not_asked_for_cannot_be_read(name, moment):
    with refused(name, moment):
        trace(Reads(name, moment))


@pytest.mark.parametrize("name, moment", CASES)
def test_what_another_part_asked_for_cannot_be_read(name, moment):
    with refused(name, moment):
        trace(kvjax.chain(Asks(), Reads(name, moment)))


@pytest.mark.parametrize("name, moment", CASES)
def test_what_a_wrapper_asked_for_its_base_cannot_read(name, moment):
    @dataclasses.dataclass(frozen=True)
    class Around(kvjax.kit.Wrapper):
        stage = property(lambda self: self.base.stage)
        needs = property(lambda self: Asks().needs)

    with refused(name, moment):
        trace(Around(Reads(name, moment)))


@pytest.mark.parametrize("name, moment", CASES)
def test_what_was_asked_for_is_there_or_none_by_its_moment(name, moment):
    for transform in (Reads(name, moment, ASK[name]), kvjax.chain(
        Reads("mass", "prompt", ASK["mass"]), Reads(name, moment, ASK[name])
    )):  # fmt: skip
        value = trace(transform)[-1]
        assert (value is not None) == (moment in THERE[name])


def test_every_gives_its_base_the_queries_of_decoding():
    for name in ("query", "query_position"):
        keeps = KeepsNewest(name, "prompt", ASK[name])
        assert all(value is not None for value in trace(kvjax.Every(keeps, steps=2)))
        with refused_by(KeepsNewest, name):
            trace(kvjax.Every(dataclasses.replace(keeps, asks=NOTHING), steps=2))


class KeepsNewest(Reads):
    """Keeps the newest tokens, whatever it reads."""

    def extent(self, extent):
        return extent.keep(4)

    def on_prompt(self, cache, state, step):
        self.read(step.moment, step, cache)
        return Keep(jnp.full_like(cache.length, 4), None, newest_first=True), state

    def on_step(self, cache, state, step):
        return None, state

    on_flush = on_step


def refused_by(method: type, name: str):
    return pytest.raises(TypeError, match=f"{method.__name__}.on_prompt reads {name!r}")


def test_each_head_group_and_layer_reads_what_it_asked_for():
    reads = KeepsNewest("query", "prompt")
    asks = kvjax.SnapKV(8, window=2)
    groups = kvjax.HeadGroups((((0,), asks), ((1,), reads)))
    with refused_by(KeepsNewest, "query"):
        trace_prompt(groups)
    layers = kvjax.PerLayer(lambda layer, num_layers: (asks, reads)[layer])
    trace_prompt(kvjax.bind(layers, 2)[0])
    with refused_by(KeepsNewest, "query"):
        trace_prompt(kvjax.bind(layers, 2)[1])


def trace_prompt(transform: kvjax.KVTransform) -> None:
    def run():
        cache = kvjax.init_cache(
            transform, batch=1, kv_heads=2, head_dim=8, max_prompt=16, max_new=8
        )
        rows = jnp.ones((1, 2, 6, 8))
        return kvjax.attend(cache, rows, rows, rows, jnp.arange(6)[None], phase="prompt")[1]

    jax.eval_shape(run)


def test_an_inner_chain_that_rewrites_keeps_the_sums_of_an_outer_part():
    """The column is withheld from the inner chain, and moves with the slots all the same."""

    class Marks(Reads):
        def on_prompt(self, cache, state, step):
            return Mark({}), state

    inner = kvjax.Every(kvjax.chain(KeepsNewest("", ""), Marks("", "")), steps=2)
    assert trace(kvjax.chain(inner, Reads("attention", "step", ASK["attention"])))


class KeepsByMass(kvjax.kit.PromptBudget):
    """Reads the mass of a step at a prompt's end, and does not ask for it."""

    budget: int = 12
    minimum = 2

    def on_prompt(self, cache, state, step):
        return Keep(self.rows_budget(cache, state), step.mass), state


def test_check_refuses_a_forgotten_request():
    with refused_by(KeepsByMass, "mass"):
        kvjax.testing.check(KeepsByMass())


class ScoresByMass(KeepsNewest):
    """Keeps by attention probabilities, which only a step has."""

    def on_prompt(self, cache, state, step):
        return Keep(jnp.full_like(cache.length, 4), step.mass), state


def test_a_score_that_a_moment_does_not_have_is_no_window():
    with pytest.raises(
        TypeError, match=r"ScoresByMass\.on_prompt: Keep takes a score or newest_first"
    ):
        trace_prompt(ScoresByMass("mass", "prompt", ASK["mass"]))
