"""Recall and attention error: against their definitions, and layer by layer in whole models."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax.models
from kvjax.evaluation import attention_error, measure_fidelities, recall_rate
from tests.generation.test_generate import KeepsTooMuch
from tests.references import recall as reference
from tests.references.attention import softmax_attention
from tests.references.h2o import H2O
from tests.references.pyramidkv import PyramidKV
from tests.references.slots import Slots
from tests.references.snapkv import SnapKV
from tests.references.streaming_llm import StreamingLLM
from tests.support.marks import some_slow
from tests.support.tolerances import close

VOCAB, WIDTH, LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 16, 3, 4, 2, 8
INV_FREQ = 1.0 / 100.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(VOCAB, size=size).tolist() for size in (38, 9, 27)]
WINDOW = 4
SNAPKV = kvjax.SnapKV(budget=12, window=WINDOW, kernel=3)


def random_layers(query_heads, kv_heads):
    """An embedding and layers whose attention is peaked and whose output moves the next layer."""
    rng = np.random.default_rng(0)
    queries, keys = query_heads * HEAD_DIM, kv_heads * HEAD_DIM

    def weights(inputs, outputs, scale=1.0):
        return (scale * rng.normal(size=(inputs, outputs)) / inputs**0.5).astype(np.float32)

    embed = rng.normal(size=(VOCAB, WIDTH)).astype(np.float32)
    widths = (WIDTH, queries, 2.0), (WIDTH, keys), (WIDTH, keys), (queries, WIDTH)
    return embed, [tuple(weights(*width) for width in widths) for _ in range(LAYERS)]


def tiny_reference(sinks=None, query_heads=QUERY_HEADS, kv_heads=KV_HEADS) -> reference.TinyModel:
    embed, layers = random_layers(query_heads, kv_heads)
    return reference.TinyModel(embed, layers, kv_heads, HEAD_DIM, INV_FREQ, sinks)


TRACES = []


def apply_tiny(params, tokens, positions, caches, *, layers, phase, last, logits_at=None):
    """`tests.references.recall.TinyModel` through `kvjax.attend`."""
    TRACES.append(phase)
    embed, weights, sinks = params
    x, written = embed[tokens], []
    rope = kvjax.Rope(jnp.asarray(INV_FREQ, jnp.float32))

    def heads(projected):
        return projected.reshape(*x.shape[:2], -1, HEAD_DIM).transpose(0, 2, 1, 3)

    for (wq, wk, wv, wo), own, cache in zip(weights, sinks, caches, strict=True):
        out, cache = kvjax.attend(
            cache, heads(x @ wq), heads(x @ wk), heads(x @ wv), positions,
            phase=phase, last=last, rope=rope, sinks=own,
        )  # fmt: skip
        x = x + out.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1) @ wo
        written.append(cache)
    if logits_at is not None:
        x = jnp.take_along_axis(x, logits_at[:, :, None], axis=1)
    return x @ embed.T, tuple(written)


def tiny_model(
    sinks=None, query_heads=QUERY_HEADS, kv_heads=KV_HEADS
) -> kvjax.models.FunctionalModel:
    sinks = [None] * LAYERS if sinks is None else list(sinks.astype(np.float32))
    params = *random_layers(query_heads, kv_heads), sinks
    return kvjax.models.FunctionalModel(
        apply_tiny, jax.tree.map(jnp.asarray, params), num_layers=LAYERS, query_heads=query_heads,
        kv_heads=kv_heads, head_dim=HEAD_DIM, vocab_size=VOCAB, max_positions=64,
    )  # fmt: skip


# --- recall_rate and attention_error ---


def expected_recall(attention, kept, budget) -> np.ndarray:
    """The reference for every row and head, `budget` a number or `[B, H]`."""
    batch, heads = kept.shape[:2]
    grouped = attention.reshape(batch, heads, -1, attention.shape[-1])
    budget = np.broadcast_to(budget, (batch, heads))
    return np.array(
        [
            [reference.recall_rate(grouped[b, h], kept[b, h], budget[b, h]) for h in range(heads)]
            for b in range(batch)
        ]
    )


@pytest.mark.parametrize(
    ("heads", "budget", "ties"), [(1, 7, False), (3, 1, True), (3, 20, False), (6, 7, True)]
)
def test_recall_is_its_definition(heads, budget, ties):
    """With ties, probabilities are multiples of 1/64, whose sums are exact and often equal."""
    rng = np.random.default_rng(budget)
    attention = rng.dirichlet(np.full(20, 0.3), size=(12, 6)).astype(np.float32)
    if ties:
        attention = rng.integers(0, 4, size=(12, 6, 20)) / np.float32(64)
    order = rng.permuted(np.tile(np.arange(20), (12, heads, 1)), axis=-1)[..., :9]
    kept = np.where(rng.random(order.shape) < 0.3, -1, order).astype(np.int32)
    budgets = rng.integers(1, 30, size=(12, heads)).astype(np.int32)  # some above the 20 tokens
    for each in (budget, jnp.asarray(budgets)):
        found = recall_rate(jnp.asarray(attention), jnp.asarray(kept), each)
        close(found, expected_recall(attention, kept, each), "rounding")
        assert found.dtype == jnp.float32
        assert len(np.unique(found)) > 1  # nothing constant could pass


RECALL_BY_HAND = {
    "padding and free slots never count": (
        [[[0.3, 0.05, 0.05, 0.1, 0.1, 0.1, 0.1, 0.2]], [[0.4, 0.3, 0.2, 0.1, 0, 0, 0, 0]]],
        [[[0, -1, -1, 3]], [[0, -1, 7, 3]]], 8, [[2 / 8], [2 / 4]],
    ),
    "positions that stand twice count once": (
        [[[0.4, 0.3, 0.2, 0.1]]], [[[0, 0, 0, 3]]], 2, [[0.5]]
    ),
    "a row that attends to nothing misses nothing": ([[[0.0] * 4]], [[[-1, -1]]], 2, [[1]]),
}  # fmt: skip


@pytest.mark.parametrize("name", RECALL_BY_HAND)
def test_recall_by_hand(name):
    attention, kept, budget, expected = RECALL_BY_HAND[name]
    close(recall_rate(jnp.array(attention), jnp.array(kept), budget), expected, "rounding")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"budget": 5}, ValueError, "at most the 4 tokens of a row, got 5"),
        ({"budget": jnp.ones((1, 3), int)}, ValueError, r"\[B, H\] = \(1, 2\), got \(1, 3\)"),
        ({"budget": jnp.ones((1, 2))}, TypeError, "budget must hold integers, got float32"),
        ({"kept": jnp.zeros((1, 2, 3))}, TypeError, "as integers, got float32"),
        ({"kept": jnp.zeros((1, 3, 3), int)}, ValueError, "multiple of KV heads, got 4 and 3"),
        ({"kept": jnp.zeros((2, 2, 3), int)}, ValueError, "with the same B"),
    ],
)
def test_recall_refuses(change, error, message):
    given = {"attention": jnp.ones((1, 4, 4)), "kept": jnp.zeros((1, 2, 3), int), "budget": 2}
    with pytest.raises(error, match=message):
        recall_rate(**{**given, **change})


@pytest.mark.parametrize("shape", [(3, 4, 5, 8), (3,)])
def test_error_is_its_definition(shape):
    rng = np.random.default_rng(0)
    full = rng.normal(size=shape).astype(np.float32)
    output = full + np.float32(0.3) * rng.normal(size=shape).astype(np.float32)
    expected = [reference.attention_error(a, b) for a, b in zip(output, full, strict=True)]
    found = attention_error(jnp.asarray(output), jnp.asarray(full))
    close(found, expected, "reference")
    assert found.dtype == jnp.float32


def test_error_of_nothing_and_in_bfloat16():
    full = jnp.array([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    output = jnp.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    assert attention_error(output, full).tolist() == [0.0, np.inf, 0.0, 1.0]
    full = jnp.full((1, 4096), 3.0, jnp.bfloat16)  # summed in float32
    close(attention_error(full + jnp.bfloat16(0.5), full), [0.5 / 3], "reference")
    with pytest.raises(ValueError, match=r"one shape, rows first, got \(2, 3\) and \(2, 4\)"):
        attention_error(jnp.ones((2, 3)), jnp.ones((2, 4)))


# --- measure_fidelities ---


class Everything:
    """The full cache, as a reference of one row and head."""

    def __init__(self, **options):
        self.slots = Slots(**options)

    @property
    def kept(self):
        return self.slots.positions.tolist()

    def prompt(self, q, k, v, positions):
        self.slots.append(k, v, positions, len(q))
        return self.slots.attend(q, positions)[0]

    def decode(self, q, k, v, position):
        self.slots.append(k[None], v[None], [position], len(q))
        return self.slots.attend(q[:, None], [position])[0][:, 0]


def half(layer: int, num_layers: int) -> kvjax.KVTransform:
    return kvjax.Full() if layer == 1 else SNAPKV


def snapkv(budget=12, **options):
    return SnapKV(budget, observation=WINDOW, kernel=3, **options)


# Transforms, and what makes the reference of a layer and head.
METHODS = {
    "full": (kvjax.Full(), lambda layer, head: Everything()),
    "streaming_llm by rank": (
        kvjax.StreamingLLM(budget=8, reposition=True),
        lambda layer, head: StreamingLLM(8, reposition=True, inv_freq=INV_FREQ),
    ),
    "by rank in one group": (
        kvjax.HeadGroups((((1,), kvjax.StreamingLLM(8, reposition=True)), ((0,), SNAPKV))),
        lambda layer, head: (
            StreamingLLM(8, reposition=True, inv_freq=INV_FREQ) if head else snapkv()
        ),
    ),
    "h2o, a share": (kvjax.H2O(budget=0.3), lambda layer, head: H2O(0.3)),
    "snapkv": (SNAPKV, lambda layer, head: snapkv()),
    "pyramidkv": (
        kvjax.PyramidKV(budget=12, window=WINDOW, kernel=3),
        lambda layer, head: PyramidKV(12, layer, LAYERS, observation=WINDOW, kernel=3),
    ),
    "per_layer": (
        kvjax.PerLayer(half),
        lambda layer, head: Everything() if layer == 1 else snapkv(),
    ),
    "head_groups": (
        kvjax.HeadGroups((((1,), kvjax.StreamingLLM(budget=8)), ((0,), kvjax.Full()))),
        lambda layer, head: StreamingLLM(8) if head else Everything(),
    ),
}


def agrees(found, method, budget, new_tokens, questions=None, sinks=None) -> None:
    """What was found is what the reference finds, row by row."""
    assert found.recall.shape == found.head_error.shape == (LAYERS, len(PROMPTS), KV_HEADS)
    assert found.error.shape == (LAYERS, len(PROMPTS))
    for row, prompt in enumerate(PROMPTS):
        question = None if questions is None else questions[row]
        recall, error, head_error = reference.fidelity(
            tiny_reference(sinks), prompt, method, budget, new_tokens, question
        )
        close(found.recall[:, row], recall, "rounding", f"recall of row {row}")
        close(found.error[:, row], error, "accumulated", f"error of row {row}")
        close(found.head_error[:, row], head_error, "accumulated", f"heads of row {row}")


@pytest.mark.parametrize(
    ("name", "budget"),
    some_slow(
        [*((name, None) for name in METHODS), ("head_groups", 6)],
        ("head_groups", 6),
        ("streaming_llm by rank", None),
    ),
)
def test_methods_against_the_reference(name, budget):
    """Ragged rows and grouped queries, every layer on what the full cache's run gives it."""
    transform, method = METHODS[name]
    (found,) = measure_fidelities(tiny_model(), [transform], PROMPTS, budget=budget, new_tokens=2)
    agrees(found, method, budget, 2)
    if name == "full":
        assert (found.recall == 1).all()
    else:
        assert found.recall.min() < 1 and found.error.max() > 0.1


QUESTIONS = [[5, 2, 9, 1, 30], [7, 3, 3], [11]]


TURNS = {
    "by rank": ("streaming_llm by rank",),
    "two": ("streaming_llm by rank", "snapkv"),
    "unrotated": tuple(METHODS),
    "rotated": [name for name in METHODS if "by rank" not in name],
}


@pytest.mark.parametrize("which", some_slow(TURNS, "by rank", exhaustive={"unrotated", "rotated"}))
def test_a_question_after_what_was_compressed(which):
    """Many methods at once: on unrotated keys where one of them wants those, or on rotated ones."""
    transforms = [METHODS[name][0] for name in TURNS[which]]
    found = measure_fidelities(
        tiny_model(), transforms, PROMPTS, budget=6, new_tokens=2, questions=QUESTIONS
    )
    for name, one in zip(TURNS[which], found, strict=True):
        agrees(one, METHODS[name][1], 6, 2, QUESTIONS)


@pytest.mark.slow
def test_a_model_with_learned_sinks():
    """Prompts read once, their questions, new tokens and what is right: all with the sinks."""
    sinks = np.random.default_rng(4).normal(2.0, 4.0, size=(LAYERS, QUERY_HEADS))
    model = tiny_model(sinks=sinks)

    def of(layer: int, head: int) -> dict:
        return {"sinks": tiny_reference(sinks).sinks_of(layer, head)}

    methods = {
        SNAPKV: lambda *at: snapkv(**of(*at)),
        kvjax.HeadGroups((((1,), kvjax.H2O(budget=10)), ((0,), kvjax.Full()))): (
            lambda *at: H2O(10, **of(*at)) if at[1] else Everything(**of(*at))
        ),
    }
    found = measure_fidelities(
        model, list(methods), PROMPTS, budget=6, new_tokens=2, questions=QUESTIONS
    )
    for method, one in zip(methods.values(), found, strict=True):
        agrees(one, method, 6, 2, QUESTIONS, sinks)


@pytest.mark.slow
def test_every_compresses_again_between_the_steps():
    """At its second step `Every` makes room, and the third sees less of what was kept before."""
    transforms = [kvjax.Every(SNAPKV, steps=2), SNAPKV]
    again, once = measure_fidelities(tiny_model(), transforms, PROMPTS, budget=20, new_tokens=3)
    assert (again.recall[:, 1] == 1).all()  # a row that fits
    assert (again.recall <= once.recall).all()
    assert (again.recall < once.recall)[:, [0, 2]].any()


@dataclass(frozen=True)
class Least(kvjax.KVTransform):
    """Reads the `count` slots whose keys the query likes least."""

    count: int

    stage: ClassVar[kvjax.kit.Stage] = kvjax.kit.Stage.RECALL

    def select(self, view, state, query):
        kv = view.cache
        grouped = query[:, :, 0].reshape(*kv.shape[:2], kv.group, -1)
        logits = jnp.einsum("bhgd,bhsd->bhs", grouped, kv.k.read())
        value, index = jax.lax.top_k(jnp.where(kv.live, -logits, -jnp.inf), self.count)
        return view.take(jnp.where(value > -jnp.inf, index, -1)), state


@pytest.mark.slow
def test_selected_slots_count_as_kept():
    """With one query head per KV head the least logits are the least attended tokens."""
    heads = {"query_heads": 2, "kv_heads": 2}
    (found,) = measure_fidelities(tiny_model(**heads), [Least(4)], PROMPTS, budget=4)
    assert (found.recall == 0).all()
    model = tiny_reference(**heads)
    for row, prompt in enumerate(PROMPTS):
        _, layers = model.read(model.go_on(prompt, 1))
        for layer, (q, k, v) in enumerate(layers):
            at, outs, full = len(prompt), [], []
            for head in range(2):
                chosen = np.sort(np.argsort(k[head] @ q[head, at], kind="stable")[:4])
                for index, into in ((chosen, outs), (np.arange(at + 1), full)):
                    rows = k[head][index], v[head][index], np.array([at]), index
                    into.append(softmax_attention(q[head : head + 1, [at]], *rows)[0])
            close(found.error[layer, row], reference.attention_error(outs, full), "accumulated")


@pytest.mark.slow
def test_code_is_compiled_once_for_a_shape_and_the_prompt_is_read_once():
    model = dataclasses.replace(tiny_model(), apply=functools.partial(apply_tiny))
    TRACES.clear()
    (first,) = measure_fidelities(model, [SNAPKV], PROMPTS)
    assert TRACES == ["prompt", "decode"]
    other = [[(token + 1) % VOCAB for token in prompt] for prompt in PROMPTS]
    (second,) = measure_fidelities(model, [dataclasses.replace(SNAPKV)], other)
    assert len(TRACES) == 2
    assert not np.array_equal(first.error, second.error)
    measure_fidelities(model, [kvjax.H2O(budget=10)], PROMPTS)
    assert TRACES[2:] == ["prompt"]  # H2O sums what tokens receive; the new tokens are as before
    TRACES.clear()
    measure_fidelities(tiny_model(), [SNAPKV, kvjax.H2O(10), kvjax.PyramidInfer()], PROMPTS)
    # PyramidInfer changes the pass itself.
    assert TRACES.count("prompt") == 2 and TRACES.count("decode") == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"prompts": [[1], []]}, ValueError, "row 1 is empty"),
        ({"prompts": [[1] * 64]}, ValueError, "64 positions"),
        ({"budget": 4}, ValueError, "at most the 3 tokens of the longest row, got 4"),
        ({"transforms": [kvjax.SnapKV]}, TypeError, "give an instance, not the class"),
        ({"questions": [[1], [2]]}, ValueError, "for each of the 1 prompts, got 2"),
        ({"questions": [[1] * 62]}, ValueError, "64 positions, got a prompt of 64 tokens"),
    ],
)
def test_measuring_refuses(change, error, message):
    given = {"model": tiny_model(), "transforms": [kvjax.Full()], "prompts": [[1, 2]]}
    TRACES.clear()
    with pytest.raises(error, match=message):
        measure_fidelities(**{**given, **change})
    assert not TRACES  # nothing was computed


def test_lost_tokens_are_an_error():
    with pytest.raises(RuntimeError, match="keeps more than its `extent` promises"):
        measure_fidelities(tiny_model(), [KeepsTooMuch(10)], [[1] * 10], new_tokens=20)
