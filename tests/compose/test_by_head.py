"""A budget that is shared among heads: what each of them keeps, where, and in how many bytes."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax.evaluation
from kvjax import ByHead, ClusterKV, KVzip, Quantize, SnapKV, chain
from kvjax.budgets.heads import HeadShares
from kvjax.budgets.profile import shares
from kvjax.compose.wrappers import by_head_groups
from kvjax.kit import HeadProfile
from tests.generation.test_generate import RAGGED, generate, model
from tests.references import head_shares
from tests.references.rope import rope
from tests.references.snapkv import SnapKV as ReferenceSnapKV
from tests.support.attending import INV_FREQ, Tokens, parts, right, run
from tests.support.tolerances import close

LAYERS, HEADS, GROUP = 3, 4, 2
SNAPKV = SnapKV(0.3, window=4, kernel=3)


def table_of(seed: int = 0, layers: int = LAYERS, heads: int = HEADS) -> np.ndarray:
    """Profile of heads that need very different numbers of tokens."""
    rng = np.random.default_rng(seed)
    size = np.exp(rng.normal(scale=2, size=(layers, heads, 1)))
    levels = np.append(np.geomspace(0.001, 1, 20), np.inf)
    return 1 - np.exp(-size * levels)


PROFILE = HeadProfile(table_of())
SMALL = HeadProfile(table_of(layers=2, heads=2))  # of the random model


def sizes(layer: int) -> dict:
    return {"kv_heads": HEADS, "query_heads": HEADS * GROUP, "layer": layer}


# --- shares ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("safeguard", [0, 0.2, 1])
@pytest.mark.parametrize("budget", [0.02, 0.1, 0.31, 1.0])
def test_shares_are_the_references(budget, safeguard):
    rng = np.random.default_rng(2)
    scores = [rng.gamma(0.4, size=(2, 3, n)) * np.exp(rng.normal(size=(2, 3, 1))) for n in (40, 57)]
    thresholds = kvjax.budgets.profile.ladder(scores)
    found = shares(kvjax.budgets.profile.profile(scores, thresholds), budget, safeguard)
    expected = head_shares.shares(scores, budget, safeguard=safeguard)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    np.testing.assert_allclose(found.mean(), budget, rtol=1e-9)


@pytest.mark.parametrize("safeguard", [0.0, 0.5])
def test_every_head_of_every_layer_has_its_share(safeguard):
    tx = ByHead(SNAPKV, PROFILE, safeguard)
    each = shares(PROFILE.table, 0.3, safeguard)
    for number, layer in enumerate(kvjax.bind(tx, LAYERS)):
        cache = kvjax.init_cache(layer, batch=1, head_dim=8, max_prompt=64, max_new=4,
                                 **sizes(number))  # fmt: skip
        heads = [part.heads.tolist() for part in cache]
        assert sorted(itertools.chain(*heads)) == list(range(HEADS))
        for own, part in zip(heads, cache, strict=True):
            np.testing.assert_allclose(part.state, each[number, own], rtol=1e-6)
            assert part.kv.slots - 4 >= max(int(each[number, head] * 64) for head in own)


def test_layers_share_layouts():
    """Equal transforms are compiled once; `init_cache` must be told which layer it is for."""
    layers = kvjax.bind(ByHead(SNAPKV, HeadProfile(table_of(layers=40))), 40)
    assert 1 < len(set(layers)) <= 9
    layout = max(layers, key=layers.count)
    several = tuple(n for n, layer in enumerate(layers) if layer == layout)
    assert [part.budget.layers for part in by_head_groups(layout)] == [several] * len(layout.groups)
    with pytest.raises(ValueError, match="give init_cache layer="):
        kvjax.init_cache(layout, batch=1, kv_heads=HEADS, head_dim=8, max_prompt=9, max_new=1)


@pytest.mark.parametrize("seed", range(3))
def test_bytes_are_close_to_the_budget(seed):
    """30 layers of 3 heads as different as SmolLM2's, at 4,096 tokens: mean slots, and bytes."""
    rng = np.random.default_rng(seed)
    size = np.exp(rng.normal(scale=2.5, size=(30, 1, 1)) + rng.normal(scale=2, size=(30, 3, 1)))
    levels = np.append(np.geomspace(1e-5, 10, 64), np.inf)
    profile = HeadProfile(1 - np.exp(-size * levels))
    model = {"batch": 1, "kv_heads": 3, "query_heads": 9, "head_dim": 64, "max_prompt": 4096,
             "max_new": 0}  # fmt: skip

    def nbytes(tx):
        layers = enumerate(kvjax.bind(tx, 30))
        made = (functools.partial(kvjax.init_cache, one, layer=n, **model) for n, one in layers)
        return sum(kvjax.nbytes(jax.eval_shape(make)) for make in made)

    share = nbytes(ByHead(KVzip(0.05, room=0), profile)) / nbytes(kvjax.Full())
    assert 0.05 <= share <= 0.065


SHARES = HeadShares(((0.5, 0.25, 0.0), (0.1, 0.4, 1 / 3)), (2, 5), minimum=3)


def test_head_shares_are_whole_slots_of_each_row():
    lengths = np.array([0, 2, 3, 10, 30, 100])
    assert SHARES(lengths).tolist() == [0, 2, 3, 5, 15, 50]
    found = SHARES.slots(SHARES.of_layer(5), jnp.asarray(lengths), 100)
    expected = [
        [min(n, max(int(share * n + 1e-6), 3)) for share in (0.1, 0.4, 1 / 3)] for n in lengths
    ]
    assert found.tolist() == expected
    assert SHARES.slots(SHARES.of_layer(2), jnp.array([400]), 100).tolist() == [[50, 25, 3]]


# --- what heads keep ------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", range(LAYERS))
def test_each_head_keeps_what_it_would_alone(layer):
    """Ragged rows, groups of query heads, and outputs of the prompt and of steps after it."""
    lengths, width, steps = (64, 37, 6), 64, 3
    tokens = Tokens.random(length=80, kv_heads=HEADS, query_heads=HEADS * GROUP, seed=layer)
    tx, each = kvjax.bind(ByHead(SNAPKV, PROFILE), LAYERS)[layer], shares(PROFILE.table, 0.3)[layer]
    own = run(tx, tokens, right([0] * 3, lengths, width), steps, max_prompt=width, max_new=8,
              **sizes(layer))  # fmt: skip
    where = {h: (part, i) for part in parts(tx, own.prompt_cache) for i, h in enumerate(part.heads)}
    rotated = [rope(x, np.arange(80), INV_FREQ) for x in tokens[:2]] + [tokens.v]
    for row, length in enumerate(lengths):
        for head in range(HEADS):
            reference = ReferenceSnapKV(float(each[head]), 4, 3)
            q, k, v = (x[row] for x in rotated)
            group = slice(head * GROUP, (head + 1) * GROUP)
            out = reference.prompt(
                q[group, :length], k[head, :length], v[head, :length], np.arange(length)
            )
            close(own.prompt_out[row, group, :length], out)
            part, place = where[head]
            position = np.asarray(part.cache.kv.position[row, place])
            live = np.asarray(part.cache.kv.live[row, place])
            assert sorted(position[live]) == reference.kept, (row, head)
            slots = min(length, max(int(each[head] * length), 5))
            assert len(reference.kept) == slots
            for step in range(steps):
                at = length + step
                out = reference.decode(q[group, at], k[head, at], v[head, at], at)
                close(own.outs[step][row, group, 0], out)


@pytest.mark.parametrize("base", [SnapKV(1.0, window=4), KVzip(1.0, room=64)], ids=str)
def test_a_budget_of_one_is_the_full_cache(base):
    tx, question = ByHead(base, SMALL), [[5, 6, 7], [8], [9, 10]]
    answers = []
    for transform in (tx, kvjax.Full()):
        context = kvjax.read(model(), RAGGED, transform=transform, max_prompt=72, max_new=16)
        result = kvjax.generate(model(), question, context=context, max_new_tokens=8)
        answers.append((result.tokens, np.asarray(result.context.logits)))
    assert answers[0][0] == answers[1][0]
    close(answers[0][1], answers[1][1])


def positions_of(context) -> list[np.ndarray]:
    """Positions of the live slots of each layer, row and head, of which the heads are in order."""
    found = []
    for layer, cache in zip(context.layers, context.caches, strict=True):
        by_number = {}
        for part in parts(layer, cache):
            kv = part.cache.kv
            for place, head in enumerate(part.heads):
                at = np.where(np.asarray(kv.live[:, place]), np.asarray(kv.position[:, place]), -1)
                by_number[head] = [sorted(set(row.tolist()) - {-1}) for row in at]
        found.append([by_number[head] for head in sorted(by_number)])
    return found


def read(tx, prompts=RAGGED, **options):
    return kvjax.read(model(), prompts, transform=tx, **{"max_prompt": 72, "max_new": 16} | options)


KVZIP = KVzip(0.25, room=32)


@pytest.mark.slow
def test_kvzip_keeps_the_best_of_each_head():
    """A head keeps as many of the highest scores as its share of the row says, and the sinks."""
    context, each = read(ByHead(KVZIP, SMALL)), shares(SMALL.table, 0.25)
    whole = kept_of_larger_budgets(RAGGED)
    for (n, layer), (b, prompt) in itertools.product(
        enumerate(positions_of(context)), enumerate(RAGGED)
    ):
        for h, rows in enumerate(layer):
            slots = min(len(prompt), max(int(each[n, h] * len(prompt)), 5))
            assert rows[b] == whole[slots][n][h][b], (n, h, b)


def kept_of_larger_budgets(prompts) -> dict[int, list]:
    """Returns what KVzip with equal heads keeps, by the number of slots of a head."""
    each = shares(SMALL.table, 0.25).ravel()
    counts = {min(len(p), max(int(share * len(p)), 5)) for p in prompts for share in each}
    return {
        count: positions_of(read(KVzip(count, room=32, values=KVZIP.values), prompts))
        for count in counts
    }


# --- compositions ---------------------------------------------------------------------------------


def test_a_chain_may_stand_inside_or_outside():
    """Both are the same layers: head groups stand outside, with a chain in each."""
    for stored in (Quantize(8), ClusterKV(64, tokens_per_cluster=8, dense_layers=())):
        inside, outside = ByHead(chain(KVZIP, stored), SMALL), chain(ByHead(KVZIP, SMALL), stored)
        assert kvjax.bind(inside, 2) == kvjax.bind(outside, 2)


def test_stored_in_eight_bits_it_keeps_the_same_tokens():
    plain, eight = read(ByHead(KVZIP, SMALL)), read(ByHead(chain(KVZIP, Quantize(8)), SMALL))
    assert positions_of(plain) == positions_of(eight)
    assert eight.nbytes < 0.7 * plain.nbytes


@pytest.mark.slow
def test_clusters_of_what_is_kept_answer_as_all_of_it_does():
    """A selection with room for all clusters attends to every slot that KVzip has left."""
    clusters = ClusterKV(72, tokens_per_cluster=4, sinks=2, dense_layers=())
    question, tokens = [[5, 6, 7], [8], [9, 10]], []
    for tx in (ByHead(KVZIP, SMALL), chain(ByHead(KVZIP, SMALL), clusters)):
        tokens.append(kvjax.generate(model(), question, context=read(tx), max_new_tokens=6).tokens)
    assert tokens[0] == tokens[1]


def test_every_may_stand_inside():
    """Generated tokens are compressed too, each head to its share of all tokens so far."""
    every = kvjax.Every(SnapKV(0.25, window=4), steps=4)
    context = generate(None, context=read(ByHead(every, SMALL)), end_tokens=()).context
    each = shares(SMALL.table, 0.25)
    for n, layer in enumerate(positions_of(context)):
        for h, rows in enumerate(layer):
            for b, prompt in enumerate(RAGGED):
                tokens = min(len(prompt) + 12, context.max_prompt)
                assert len(rows[b]) <= max(int(each[n, h] * tokens), 5) + 4
    with pytest.raises(ValueError, match="goes around the transforms of HeadGroups"):
        kvjax.bind(kvjax.Every(ByHead(SNAPKV, SMALL), 4), 2)


def test_infinigen_gets_the_calibration_of_each_layers_heads():
    tx = chain(ByHead(SNAPKV, SMALL), kvjax.InfiniGen(16, alpha=None, dense_layers=()))
    calibrated = kvjax.calibrated(tx, model(), RAGGED[:1])
    whole = calibrated.parts[1].calibration.projections
    layers = kvjax.bind(calibrated, 2)
    for number, layer in enumerate(layers):
        for heads, part in zip(layer.heads, by_head_groups(layer), strict=True):
            (infinigen,) = part.parts[1:]
            own = infinigen.calibration.projections[number]
            np.testing.assert_array_equal(own, whole[number, list(heads[number])])


def test_in_per_layer_it_is_for_the_layers_that_choose_it():
    profile, sixth = ByHead(SNAPKV, PROFILE), kvjax.Full()
    layers = kvjax.bind(kvjax.PerLayer(lambda i, n: sixth if i == 1 else profile), LAYERS)
    assert layers[1] == kvjax.Full()
    assert (layers[0], layers[2]) == kvjax.bind(profile, LAYERS)[::2]


# --- contexts -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_of_a_context_are_repeated_and_taken():
    tx, question = ByHead(KVZIP, SMALL), [5, 6, 7]
    one = read(tx, RAGGED[:1])
    alone = kvjax.generate(model(), [question], context=one, max_new_tokens=6).tokens
    several = kvjax.generate(model(), [question] * 2, context=one.repeat(2), max_new_tokens=6)
    assert several.tokens == alone * 2
    heads = [part.heads for cache in kvjax.take_rows(one.caches, [0, 0, 0]) for part in cache]
    for own, given in zip(heads, [p.heads for cache in one.caches for p in cache], strict=True):
        np.testing.assert_array_equal(own, given)


def test_a_context_is_saved_and_loaded(tmp_path):
    """A saved context has its profile, and answers the question as before."""
    tx, question = ByHead(chain(KVZIP, Quantize(8)), SMALL), [[5, 6, 7], [8], [9, 10]]
    context = read(tx)
    kvjax.save_context(tmp_path / "own", context, model=model())
    again = kvjax.load_context(tmp_path / "own", model())
    assert again.transform == tx and again.layers == context.layers
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(context), strict=True):
        np.testing.assert_array_equal(a, b)
    answers = [
        kvjax.generate(model(), question, context=x, max_new_tokens=6).tokens
        for x in (context, again)
    ]
    assert answers[0] == answers[1]


def test_one_reading_serves_it():
    once = kvjax.evaluation.ReadOnce(model(), RAGGED, [SNAPKV], max_new=16, max_prompt=72)
    tx = ByHead(SNAPKV, SMALL)
    assert positions_of(once.context(tx)) == positions_of(read(tx))


def test_a_serialized_step_has_the_heads_of_its_layer():
    """Two layers of one layout, in one program."""
    profile = HeadProfile(np.array([[[0.9, 1], [0.1, 1]], [[0.1, 1], [0.9, 1]]]))
    layers = kvjax.bind(ByHead(SNAPKV, profile), 2)
    assert layers[0] == layers[1]
    tokens = Tokens.random(rows=1, length=40, kv_heads=2, query_heads=4)
    q, k, v, at = tokens.at(right([0], [32], 32))
    outs, exported = [], None
    for number, layer in enumerate(layers):
        cache = kvjax.init_cache(layer, batch=1, kv_heads=2, query_heads=4, head_dim=8,
                                 max_prompt=32, max_new=4, layer=number)  # fmt: skip
        step = jax.jit(functools.partial(kvjax.attend, phase="prompt"))
        if exported is None:
            exported = jax.export.deserialize(
                jax.export.export(step)(cache, q, k, v, at).serialize()
            )
        out, after = exported.call(cache, q, k, v, at)
        outs.append((np.asarray(out), [part.heads.tolist() for part in after]))
        close(out, step(cache, q, k, v, at)[0])
    assert outs[0][1] == [[0], [1]] and outs[1][1] == [[1], [0]]


def test_recording_is_in_the_order_of_heads():
    """A record has heads in their own order, though groups have another one."""
    from kvjax.evaluation.fidelity.recording import looked_at, record, unrecord

    tx = kvjax.bind(ByHead(SNAPKV, PROFILE), LAYERS)[1]
    tokens = Tokens.random(rows=1, length=72, kv_heads=HEADS, query_heads=HEADS * GROUP)
    own = run(tx, tokens, right([0], [64], 64), 0, max_prompt=64, max_new=4, **sizes(1))
    q, k, v, at = tokens.at(np.array([[64]]))
    _, cache = kvjax.attend(record(own.prompt_cache), q, k, v, at, phase="decode")
    cache, records = unrecord(cache)
    held = np.asarray(looked_at(tx, cache, records, 65))
    counts = [min(64, max(int(share * 64), 5)) + 1 for share in shares(PROFILE.table, 0.3)[1]]
    assert held.sum(-1).tolist() == [counts] and len(set(counts)) > 2


# --- what is refused ------------------------------------------------------------------------------


BAD = {
    "slots": (lambda: ByHead(KVzip(64), SMALL), ValueError, "a share of the tokens", "64"),
    "two shares": (lambda: ByHead(chain(KVZIP, SNAPKV), SMALL), ValueError, "one method"),
    "no share": (lambda: ByHead(kvjax.Full(), SMALL), ValueError, "Full"),
    "while decoding": (lambda: ByHead(kvjax.H2O(0.2), SMALL), ValueError, "compresses prompts"),
    "a window": (
        lambda: ByHead(kvjax.CaM(kvjax.StreamingLLM(0.2)), SMALL), ValueError, "compresses prompts"
    ),
    "no profile": (lambda: ByHead(KVZIP, 0.3), TypeError, "HeadProfile", "0.3"),
    "safeguard": (lambda: ByHead(KVZIP, SMALL, 1.5), ValueError, "safeguard must lie in", "1.5"),
    "safeguard's type": (lambda: ByHead(KVZIP, SMALL, "a"), TypeError, "safeguard", "'a'"),
    "not a transform": (lambda: ByHead("kvzip", SMALL), TypeError, "kvjax.parse"),
    "missing profile": (lambda: read(ByHead(KVZIP)), ValueError, "kvjax.calibrated"),
    "layers": (lambda: kvjax.bind(ByHead(KVZIP, SMALL), 3), ValueError, "2 layers", "expected 3"),
    "heads": (
        lambda: kvjax.init_cache(
            kvjax.bind(ByHead(KVZIP, SMALL), 2)[0], batch=1, kv_heads=3, head_dim=4,
            max_prompt=9, max_new=1, layer=0,
        ),
        ValueError, "2 KV heads, got 3",
    ),
    "table": (lambda: HeadProfile(np.ones((2, 3))), ValueError, "(2, 3)"),
    "order": (
        lambda: kvjax.HeadGroups((((0, 1), kvjax.Full()),), order=((0, 0),)), ValueError, "(0, 0)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    build, error, *words = BAD[name]
    with pytest.raises(error) as caught:
        build()
    assert all(word in str(caught.value) for word in words), str(caught.value)
