"""What is drawn, as matplotlib has it, against NumPy; and errors before anything is drawn."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

import kvjax
from kvjax import plot
from kvjax.models import DecoderConfig, RopeConfig, random_decoder
from tests.evaluation.fidelity.test_fidelity import tiny_model

HEADS, TOKENS, DIM = 2, 24, 8
TABLE = np.array([[[0.9, 1.0], [0.1, 1.0]], [[0.3, 1.0], [0.7, 1.0]]])
PROFILE = kvjax.kit.HeadProfile(TABLE)
OTHER_MODEL = kvjax.kit.HeadProfile(TABLE[:1])


@pytest.fixture
def axes():
    return Figure(layout="constrained").subplots()


def read(transform, *, batch=1, seed=0):
    """A layer's cache after a prompt, and its keys; the last row has fewer tokens."""
    keys = jax.random.normal(jax.random.key(seed), (batch, HEADS, TOKENS, DIM))
    cache = kvjax.init_cache(
        transform, batch=batch, kv_heads=HEADS, head_dim=DIM, max_prompt=TOKENS, max_new=4
    )
    place = jnp.arange(TOKENS)[None]
    lengths = jnp.array([TOKENS] * (batch - 1) + [TOKENS - 5])[:, None]
    attend = jax.jit(kvjax.attend, static_argnames="phase")
    positions = jnp.where(place < lengths, place, -1)
    _, cache = attend(cache, keys, keys, keys, positions, phase="prompt")
    return cache, np.asarray(keys, np.float64)


def slots_of(cache, row=0):
    """Of each head: position, mass and whether it is pinned, slot by slot, live ones alone."""
    kv = cache.kv
    arrays = (np.asarray(x[row]) for x in (kv.position, np.exp(kv.log_mass), kv.pinned, kv.live))
    for position, mass, pinned, live in zip(*arrays, strict=True):
        yield list(zip(position[live], mass[live], pinned[live], strict=True))


def test_held_marks_live_and_pinned_positions(axes):
    first, _ = read(kvjax.KVCrush(kvjax.H2O(budget=8), representatives=3), batch=2)
    second, _ = read(kvjax.KVCrush(kvjax.H2O(budget=8), representatives=3), batch=2, seed=1)
    image = plot.held(axes, (first, second), row=1)
    expected = np.zeros((2 * HEADS, TOKENS - 5), int)
    for line, slots in enumerate([*slots_of(first, 1), *slots_of(second, 1)]):
        for position, _, pinned in slots:
            expected[line, position] = 2 if pinned else 1
    assert np.array_equal(image.get_array(), expected)
    assert {0, 1, 2} == set(expected.ravel())
    assert [text.get_text() for text in axes.get_yticklabels()] == ["0", "1"]
    groups = kvjax.HeadGroups((((0,), kvjax.Full()), ((1,), kvjax.StreamingLLM(6, sinks=2))))
    image = plot.held(Figure().subplots(), [read(groups)[0]])
    assert image.get_array().sum(1).tolist() == [TOKENS - 5, 6]


@pytest.mark.parametrize("budget", [TOKENS, 6])
def test_similarity_is_the_cosine_with_the_next_live_key(axes, budget):
    cache, keys = read(kvjax.StreamingLLM(budget=budget, sinks=2))
    found = np.ma.filled(plot.similarity(axes, [cache]).get_array(), np.nan)
    kept = [0, 1, *range(max(TOKENS - 5 - budget + 2, 2), TOKENS - 5)]
    unit = keys[0] / np.linalg.norm(keys[0], axis=-1, keepdims=True)
    expected = np.full((HEADS, TOKENS - 5), np.nan)
    for at, following in itertools.pairwise(kept):
        expected[:, at] = (unit[:, at] * unit[:, following]).sum(-1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_masses_stand_at_the_positions_of_their_slots(axes):
    cache, _ = read(kvjax.Chelsea(budget=12, sinks=2, recent=4))
    lines = plot.masses(axes, cache, head=1)
    expected = sorted(list(slots_of(cache))[1])
    assert max(mass for _, mass, _ in expected) > 1
    drawn = [(segment[1, 0], segment[1, 1]) for segment in lines.get_segments()]
    np.testing.assert_allclose(drawn, [(at, mass) for at, mass, _ in expected], rtol=1e-6)
    assert axes.get_ylim()[1] > max(mass for _, mass, _ in expected)


@pytest.fixture(scope="module")
def model():
    return random_decoder(
        DecoderConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
            kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def watched(model):
    transform = kvjax.ClusterKV(
        budget=16, sinks=4, tokens_per_cluster=6, dense_layers=(0,), interval=8
    )
    prompt = np.random.default_rng(0).integers(0, 64, 60).tolist()
    return plot.watch(model, prompt, transform, steps=3), prompt, transform


@pytest.mark.slow
def test_watched_steps_are_those_of_the_method(model, watched):
    (steps, context), prompt, transform = watched
    plain = kvjax.generate(
        model, [prompt], transform=transform, max_new_tokens=3, end_tokens=()
    ).tokens[0]
    assert [step.token for step in steps] == plain
    assert context.length.tolist() == [63]
    assert [step.marks[0] for step in steps] == [None] * 3  # a dense layer
    for number, step in enumerate(steps, start=1):
        assert step.marks[1].shape == (2, 60 + number)
        assert step.marks[1][:, :4].all()  # sinks
        assert step.marks[1][:, 60:].all()  # new tokens, not clustered yet
        assert (step.marks[1].sum(1) <= 16 + number).all()
    with pytest.raises(ValueError, match="must select"):
        plot.watch(model, [1, 2, 3], kvjax.SnapKV(budget=40), steps=1)


@pytest.mark.slow
def test_layers_of_head_groups_do_what_they_do_and_are_not_watched(model, watched):
    _, prompt, selecting = watched
    split = kvjax.HeadGroups((((1,), kvjax.StreamingLLM(12)), ((0,), kvjax.StreamingLLM(20))))
    mixed = kvjax.PerLayer(lambda layer, _: split if layer == 0 else selecting)
    steps, context = plot.watch(model, prompt, mixed, steps=3)
    plain = kvjax.generate(model, [prompt], transform=mixed, max_new_tokens=3, end_tokens=())
    assert [step.token for step in steps] == plain.tokens[0]
    assert [part.kv.live.sum(-1).tolist() for part in context.caches[0]] == [[[12]], [[20]]]
    assert steps[0].marks[0] is None and steps[0].marks[1] is not None
    with pytest.raises(ValueError, match="by one method for all heads of a layer, got HeadGroups"):
        plot.watch(model, prompt, split, steps=1)


@dataclasses.dataclass(frozen=True)
class Attention(kvjax.KVTransform):
    """Leaves the attention of a step in its state."""

    needs = property(lambda self: kvjax.kit.Needs(decode_mass=True))

    def init(self, cache, layer):
        return cache, jnp.zeros((cache.shape[0], 4, cache.slots))

    def on_step(self, cache, state, step):
        return None, step.mass


def check_recall(model, prompt, step, layer: int) -> None:
    """Compares the first step in a layer above dense ones with the attention of the step."""
    context = kvjax.read(model, [prompt], transform=Attention(), max_new=4)
    context = kvjax.generate(model, None, context=context, max_new_tokens=1, end_tokens=()).context
    count = len(prompt) + 1  # a token's slot is its place
    mass = np.asarray(context.caches[layer].state, np.float64)[0, :, :count]
    of_head = mass.reshape(2, 2, count).sum(1)
    for head, marks in enumerate(step.marks[layer]):
        best = set(np.argsort(-of_head[head], kind="stable")[: marks.sum()])
        expected = len(best & set(np.flatnonzero(marks))) / marks.sum()
        assert step.recall[layer][head] == pytest.approx(expected, abs=1e-6)
    assert 0 < step.mean_recall < 1


def test_recall_of_a_step_is_the_share_of_the_most_attended_tokens(model, watched):
    (steps, _), prompt, transform = watched
    everything = dataclasses.replace(transform, budget=60)
    all_steps, _ = plot.watch(model, prompt, everything, steps=1)
    assert all_steps[0].recall[1].tolist() == [1.0, 1.0]
    assert all_steps[0].mean_recall == 1.0
    check_recall(model, prompt, steps[0], layer=1)


@pytest.mark.slow
def test_recall_beside_learned_sinks():
    sinks = np.array([[0.0] * 4] * 2 + [[8.0, -8.0, -8.0, 8.0]])
    model, prompt = tiny_model(sinks=sinks), np.random.default_rng(4).integers(0, 32, 50).tolist()
    transform = kvjax.Quest(budget=16, page=4, dense_layers=(0, 1))
    steps, _ = plot.watch(model, prompt, transform, steps=1)
    check_recall(model, prompt, steps[0], layer=2)


def test_selected_has_a_line_for_each_head_and_step(axes, watched):
    (steps, _), _, _ = watched
    image = plot.selected(axes, steps, layer=1).get_array().reshape(2, 3, 63)
    for number, step in enumerate(steps):
        np.testing.assert_array_equal(image[:, number, : 61 + number], step.marks[1])
        assert not image[:, number, 61 + number :].any()


def test_clusters_are_numbered_by_their_first_tokens(axes, watched):
    (steps, context), _, _ = watched
    marks = steps[-1].marks[1][1]
    others, seen = plot.clusters(axes, context.caches[1], head=1, seen=marks)
    cache = context.caches[1]
    index = cache.state[0]
    position = np.asarray(cache.kv.position)[0, 1]
    members = []
    for start, size in zip(index.starts[0, 1].tolist(), index.sizes[0, 1].tolist(), strict=True):
        if size:
            members.append(sorted(position[start : start + size].tolist()))
    members.sort(key=lambda own: own[0])
    expected = {at: number for number, own in enumerate(members) for at in own}
    others, seen = (dict(dots.get_offsets().astype(int).tolist()) for dots in (others, seen))
    assert others | seen == expected and len(expected) == 56
    assert sorted(seen) == [at for at in sorted(expected) if marks[at]]


def test_lines_have_a_point_for_each_step_and_layer(axes):
    drawn = plot.recall(axes, {"a": [0.5, 1.0], "b": np.array([0.25])})
    assert [line.get_xydata().tolist() for line in drawn] == [[[1, 0.5], [2, 1.0]], [[1, 0.25]]]
    assert len({(line.get_marker(), line.get_color()) for line in drawn}) == 2
    cache, _ = read(kvjax.Full())
    small, _ = read(kvjax.StreamingLLM(budget=6, sinks=2))
    other = Figure().subplots()
    lines = plot.layer_bytes(other, {"full": [cache, small], "small": [small, small]})
    sizes = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(y)) for y in (cache, small)]
    np.testing.assert_allclose(lines[0].get_ydata(), np.array(sizes) / 1e3)
    np.testing.assert_allclose(lines[1].get_ydata(), [sizes[1] / 1e3] * 2)


def test_shares_have_a_point_for_each_head(axes):
    drawn = plot.head_shares(axes, {"a": PROFILE, "b": PROFILE}, 0.5)
    expected = [0.2 * 0.5 + 0.8 * TABLE[..., 0].ravel()] * 2
    np.testing.assert_allclose([line.get_ydata() for line in drawn], expected, rtol=1e-6)
    assert len({(line.get_markersize(), line.get_color()) for line in drawn}) == 2
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "1"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]


def test_field_colours_are_lighter_for_less(axes):
    image = plot.field(axes, np.array([[0, 1, 2]]))
    grey = [0.299 * r + 0.587 * g + 0.114 * b for r, g, b, _ in image.to_rgba(np.arange(3))]
    assert grey[0] > grey[2] > grey[1]  # gone, pinned, kept: apart in grey too
    assert min(np.abs(np.diff(sorted(grey)))) > 0.15


WRONG = {
    "no axes": (lambda axes, cache: plot.similarity(None, [cache]), TypeError, "axes"),
    "no layers": (lambda axes, cache: plot.held(axes, cache), TypeError, "caches"),
    "row": (lambda axes, cache: plot.held(axes, [cache], row=1), ValueError, "row .* at most 0"),
    "head": (lambda axes, cache: plot.masses(axes, cache, head=2), ValueError, "head .* at most 1"),
    "clusters": (lambda axes, cache: plot.clusters(axes, cache), ValueError, "ClusterKV"),
    "marks": (lambda axes, cache: plot.field(axes, [[0, 3]]), ValueError, "0, 1 and 2"),
    "group": (
        lambda axes, cache: plot.field(axes, [[0, 1]] * 3, group=2), ValueError,
        "group must divide the 3 lines, got 2",
    ),
    "no steps": (
        lambda axes, cache: plot.selected(axes, [], layer=0), TypeError, "that watch returns",
    ),
    "uneven layers": (
        lambda axes, cache: plot.held(axes, [cache, cache_of(HEADS + 1)]), ValueError,
        r"equally many lists of slots in all layers, got \[2, 3\]",
    ),
    "dense": (
        lambda axes, cache: plot.selected(axes, [plot.Seen(1, (None,), (None,))], layer=0),
        ValueError, "nothing is selected",
    ),
    "recall": (lambda axes, cache: plot.recall(axes, {"a": [1.5]}), ValueError, r"\[0, 1\]"),
    "list": (lambda axes, cache: plot.layer_bytes(axes, [cache]), TypeError, "dict"),
    "no profile": (lambda axes, cache: plot.head_shares(axes, {"a": 1}, 0.1), TypeError, "1 for a"),
    "profiles": (
        lambda axes, cache: plot.head_shares(axes, {"a": PROFILE, "b": OTHER_MODEL}, 0.1),
        ValueError, r"one model, got .*\[\(1, 2\), \(2, 2\)\]",
    ),
    "no share": (
        lambda axes, cache: plot.head_shares(axes, {"a": PROFILE}, 2.0), ValueError, "budget",
    ),
    "span": (lambda axes, cache: plot.span(axes, 5, 4), ValueError, "last"),
    "legend": (lambda axes, cache: plot.legend(axes.figure, live="a"), ValueError, "legend"),
}  # fmt: skip


def cache_of(heads):
    return kvjax.init_cache(
        kvjax.Full(), batch=1, kv_heads=heads, head_dim=DIM, max_prompt=TOKENS, max_new=4
    )


@pytest.mark.parametrize("name", WRONG)
def test_errors_come_before_anything_is_drawn(axes, name):
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        call(axes, cache_of(HEADS))
    assert not axes.has_data() and not axes.texts
