"""Contexts at rest: they hold what they keep, and answer as if they had never rested."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import kvjax
from kvjax.attention.layer import layer_caches
from kvjax.attention.resting import positions_at_rest, rest, rounded, wake
from kvjax.generation import context as contexts
from kvjax.generation.context_files import _content, _newest
from tests.generation.test_context import OFFLOADED, QUESTIONS, STORED, generate, read
from tests.generation.test_generate import RAGGED, compiled, model
from tests.support.attending import same_arrays, structure
from tests.support.marks import some_slow

SHARES = kvjax.kit.HeadProfile(np.array([[[0.8, 1.0], [0.1, 1.0]], [[0.1, 1.0], [0.4, 1.0]]]))
METHODS = {
    "full": "full",
    "head groups": kvjax.ByHead(kvjax.KVzip(0.5, room=8), SHARES),
    **{
        name: name
        for name in ("4 bits", "3 and 2 bits", "codebook", "chelsea", "clusterkv", "every")
    },
    **{name: name for name in STORED if STORED[name] == OFFLOADED},
}


def document(name: str, prompts=RAGGED, **options) -> kvjax.Context:
    method = METHODS[name]
    if isinstance(method, str):
        return read(method, prompts, **options)
    return kvjax.read(model(), prompts, transform=method, max_prompt=128, max_new=64, **options)


@pytest.fixture
def never_rests(monkeypatch):
    """Makes contexts as they come out of the prompt pass."""

    def make(*args) -> kvjax.Context:
        with monkeypatch.context() as patch:
            patch.setattr(kvjax.Context, "at_rest", lambda context, **_: context)
            return document(*args)

    return make


FAST = "4 bits", "head groups"
# What a layer holds beside its slots; all others run before a release.
BESIDE = {"clusterkv", "3 and 2 bits", "offload"}


@pytest.mark.parametrize(
    "name", some_slow(METHODS, *FAST, "3 and 2 bits", exhaustive={*METHODS} - {*FAST, *BESIDE})
)
def test_turns_after_a_rest_are_those_without(name, never_rests):
    """In tokens and logits, bit for bit; and nothing of the shapes of the caches is lost."""
    whole, context = never_rests(name), document(name)
    assert context.resting and not whole.resting
    assert context.awake_nbytes == whole.awake_nbytes == whole.nbytes > context.nbytes
    assert structure(context.caches) == structure(whole.caches)
    same_arrays(whole.at_rest(), context)
    first, again = (generate(QUESTIONS, each) for each in (whole, context))
    second, later = (generate(QUESTIONS, each.context.at_rest()) for each in (first, again))
    went_on = generate(QUESTIONS, first.context)
    assert first.tokens == again.tokens and second.tokens == later.tokens == went_on.tokens
    np.testing.assert_array_equal(first.context.logits, again.context.logits)
    np.testing.assert_array_equal(later.context.logits, went_on.context.logits)


@pytest.mark.parametrize(
    "name", some_slow(METHODS, *FAST, exhaustive={*METHODS} - {*FAST, *BESIDE})
)
def test_bytes_at_rest_are_those_of_live_slots(name):
    context = document(name, RAGGED[:1])
    live = 0
    for held, awake in zip(context.held, context.caches, strict=True):
        for part, twin in zip(layer_caches(held), layer_caches(awake), strict=True):
            used, position = twin.kv.used, np.asarray(twin.kv.position)
            assert part.kv.position.size == rounded(int(used.sum()))
            taken = np.arange(position.shape[2]) < np.asarray(used)[..., None]
            np.testing.assert_array_equal(
                positions_at_rest(part.kv)[: int(used.sum())], position[taken]
            )
            live += int(twin.kv.live.sum())
    assert context.occupancy.live == live


def test_what_rests_is_for_nothing_but_contexts():
    """It is refused where caches are wanted, and what is full takes no more at rest."""
    context = document("full", [[n % 64 for n in range(100)]])
    with pytest.raises(ValueError, match=r"take_rows: .* take its \.caches"):
        kvjax.take_rows(context.held, [0])
    full = kvjax.read(
        model(), [[n % 64 for n in range(128)]], max_prompt=128, max_new=1, dtype="float32"
    )
    assert full.nbytes <= full.awake_nbytes


def test_further_questions_compile_nothing():
    """About another document of about the same length, too."""
    generate(QUESTIONS[:1], document("full", RAGGED[:1]))
    before = compiled(), rest._cache_size(), wake._cache_size()
    for prompt in (RAGGED[0], RAGGED[0][::-1], [*RAGGED[0], 5]):
        generate(QUESTIONS[1:2], document("full", [prompt]))
    assert (compiled(), rest._cache_size(), wake._cache_size()) == before


def test_a_conversation_never_rests(monkeypatch):
    """Whoever donates a context gets its memory on, without a copy."""
    context = document("full")
    answer = generate(QUESTIONS, context, donate=True)
    with pytest.raises(ValueError, match="given away"):
        generate(QUESTIONS, context)

    def refuse(*_):
        raise AssertionError("a cache was copied")

    monkeypatch.setattr(contexts, "rest", refuse)
    monkeypatch.setattr(contexts, "wake", refuse)
    for _ in range(2):
        assert not answer.context.resting
        answer = generate(QUESTIONS, answer.context, donate=True)


def test_a_folder_holds_what_rests(tmp_path):
    context = generate(QUESTIONS, document("full")).context
    kvjax.save_context(tmp_path / "own", context, model=model())
    kinds = _content(_newest(tmp_path / "own"))["arrays"].values()
    saved = sum(np.dtype(dtype).itemsize * np.prod(shape, dtype=int) for dtype, shape in kinds)
    assert saved == kvjax.nbytes(context.at_rest()) < kvjax.nbytes(context)
    assert kvjax.load_context(tmp_path / "own", model()).resting


def test_contexts_rest_in_64_bits_too():
    """Nothing relies on an implicit promotion: tests forbid those."""
    expected = generate(QUESTIONS, read("full").at_rest())
    with jax.enable_x64(True):
        context = read("full")
        answer = generate(QUESTIONS, context.take([0, 1, 2]))
        leaves = jax.tree.leaves((context, answer.context.at_rest()))
    assert answer.tokens == expected.tokens
    assert not [x for x in leaves if "64" in str(x.dtype)]
