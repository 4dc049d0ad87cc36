"""InfiniGen: its calibration, its lists at every step, and what a decoder predicts for it."""

from __future__ import annotations

import functools
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.evaluation import measure_fidelities
from kvjax.models import DecoderConfig, RopeConfig, random_decoder
from kvjax.storage.offload.transform import recall_statistics
from kvjax.transforms.infinigen.infinigen import PARTIAL_KEYS, InfiniGen
from kvjax.transforms.infinigen.projections import InfiniGenCalibration
from tests.evaluation.fidelity.test_fidelity import (
    KV_HEADS,
    PROMPTS,
    VOCAB,
    tiny_model,
    tiny_reference,
)
from tests.references import infinigen as reference
from tests.references.attention import softmax_attention
from tests.references.recall import attention_error
from tests.references.rope import rope as rotate
from tests.support.attending import Tokens, init_cache, right, run, slots_of, the_rope
from tests.support.marks import some_slow
from tests.support.method_pair import RecallingPair
from tests.support.tolerances import close

DIM, CHANNELS = 8, 3
slow = pytest.mark.slow


def projections(kv_heads: int, seed: int = 0) -> np.ndarray:
    """[H, D, r], the columns of an orthogonal matrix; the last head has one channel fewer."""
    rng = np.random.default_rng(seed)
    found = np.stack(
        [np.linalg.qr(rng.normal(size=(DIM, DIM)))[0][:, :CHANNELS] for _ in range(kv_heads)]
    ).astype(np.float32)
    found[-1, :, -1] = 0
    return found


def one_layer(p: np.ndarray, **fields) -> InfiniGen:
    return InfiniGen(calibration=InfiniGenCalibration(p[None]), dense_layers=(), **fields)


class InfiniPair(RecallingPair):
    """With `predicts`, decode steps get a query that predicts, and another one attends."""

    def __init__(self, transform, reference, *, predicts=False, **options):
        super().__init__(transform, reference, **options)
        self.k, self.predicts = 2 * self.k, predicts
        self.predicted = 2 * self.held(self.rng.normal(size=self.q.shape))

    def _run(self, positions, **call):
        if self.predicts and call["phase"] == "decode":
            call["predicted_query"] = self._tokens(self.predicted, positions)
            self.query = self.turned(call["predicted_query"], positions)
        return super()._run(positions, **call)

    def more(self, row, position):
        return (self.query[row, :, 0],) if self.predicts else ()

    def lengths(self, row: int) -> list[int]:
        """How many tokens the first list of a row had at each step."""
        return [len(lists[0]) for lists in self.lists[row]]


def pair(budget=0.2, *, alpha=None, per_query_head=False, heads=(2, 2), **options) -> InfiniPair:
    p, fields = projections(heads[0]), {"alpha": alpha, "per_query_head": per_query_head}
    row = functools.partial(reference.InfiniGen, p, budget, **fields)
    return InfiniPair(one_layer(p, budget=budget, **fields), row, heads=heads, **options)


# --- the lists ------------------------------------------------------------------------------------

EVICTS = kvjax.SnapKV(budget=16, window=4, kernel=3)
MERGES = kvjax.KVMerger(epsilon=0.3)
OFFLOAD = (kvjax.Offload(interval=8),)
CASES = {
    "default": {},
    "paper": {"alpha": 5.0},
    "all shares": {"budget": 1.0, "alpha": 5.0},
    "number": {"budget": 7, "alpha": 1.5},
    "number without alpha": {"budget": 7},
    "one": {"budget": 1, "alpha": 2.0},
    "per query head": {"alpha": 1.5, "per_query_head": True},
    "per query head without alpha": {"per_query_head": True, "predicts": True},
    "predicted and rotated": {"alpha": 2.0, "predicts": True, "rope": the_rope()},
    "groups of four, per query head": {"heads": (2, 4), "alpha": 1.0, "per_query_head": True},
    "window": {"alpha": 1.5, "budget": 0.5, "window": 20},
    # Heads hold different tokens; a share is of those that are left, and of the new ones.
    "evicted, a share": {"before": EVICTS, "budget": 0.4, "alpha": 3.0},
    # Heads hold different numbers of tokens: the largest counts, and all get as many.
    "merged": {"before": MERGES, "budget": 0.3},
    "offloaded": {"behind": OFFLOAD, "alpha": 2.0, "predicts": True, "rope": the_rope()},
    "offloaded, per query head": {
        "behind": OFFLOAD, "heads": (2, 4), "alpha": 1.0, "per_query_head": True
    },
}  # fmt: skip
FAST = {"number without alpha", "offloaded"}


@pytest.mark.parametrize("name", some_slow(CASES, *FAST))
def test_every_list_of_44_steps(name):
    case = CASES[name]
    both = pair(**case).prompt().decode(44)
    columns = slots_of(both.cache, 2, 0)
    close(columns[PARTIAL_KEYS], columns["k"] @ projections(both.kv_heads)[0], "reference")
    if case.get("alpha") is not None and case.get("budget") != 1:
        assert len(set(both.lengths(2))) > 3  # no constant
    live = np.asarray(both.cache.kv.live).sum(-1)
    if case.get("before") == EVICTS:
        assert both.kept(2, 0) != both.kept(2, 1) and live[2].tolist() == [60, 60]
    if case.get("before") == MERGES:
        assert (np.ptp(live, axis=1) > 1).any()
    if "behind" in case:
        assert recall_statistics(both.cache).hit_rate > 0


def test_ties_go_to_the_lower_position():
    both = pair(budget=6, seed=4)
    # One channel: a sum of several may be rounded otherwise for one key than for many at a time.
    both.k[:] = np.eye(DIM, dtype=np.float32)[0]
    both.prompt().decode(5)
    assert [lists[0] for lists in both.lists[0]] == [[*range(6), 37 + t] for t in range(5)]


def test_partial_keys_are_in_the_dtype_of_the_keys():
    tx = one_layer(projections(2), budget=5)
    cache = run(tx, Tokens.random(), right([0] * 3, (9, 30, 32), 32), 1, dtype=jnp.bfloat16)
    partial = cache.caches[-1].kv.column(PARTIAL_KEYS)
    expected = np.asarray(cache.caches[-1].kv.k.read(), np.float64) @ projections(2)
    assert partial.dtype == jnp.bfloat16
    close(partial, expected, "bfloat16")


# --- calibration ----------------------------------------------------------------------------------

SAMPLE = [row * 3 for row in PROMPTS[:1]] + PROMPTS[1:]
SAMPLE = [row[:63] for row in SAMPLE]


def learned(model, sample, share: float = 0.2) -> InfiniGenCalibration:
    return kvjax.calibrated(InfiniGen(channels=share), model, sample).calibration


@pytest.mark.parametrize(
    ("heads", "share"),
    [((4, 2), 0.2), ((2, 2), 0.4), ((4, 1), 1.0), pytest.param((4, 2), 0.01, marks=slow)],
)
def test_calibration_is_its_definition(heads, share):
    sizes = {"query_heads": heads[0], "kv_heads": heads[1]}
    found = learned(tiny_model(**sizes), SAMPLE, share).projections
    rows = [tiny_reference(**sizes).read(row)[1] for row in SAMPLE]
    q, k = (
        [np.concatenate([row[layer][i] for row in rows], axis=1) for layer in range(len(rows[0]))]
        for i in (0, 1)
    )
    expected = reference.partial_projections(q, k, share)
    assert found.shape == expected.shape and found.dtype == np.float32
    # The sign of a column is free: the column's products with itself are not.
    for i in range(found.shape[-1]):
        close(
            found[..., i, None] * found[..., None, :, i],
            expected[..., i, None] * expected[..., None, :, i],
            "accumulated",
        )


def test_calibration_of_a_sample_with_fewer_tokens_than_channels():
    found = learned(tiny_model(), [[5, 6]]).projections
    assert found.shape[:3] == (3, 2, 8) and np.isfinite(found).all()
    columns = np.linalg.norm(found, axis=2)
    assert np.all((np.abs(columns - 1) < 1e-5) | (columns == 0))


def test_a_calibration_is_a_value():
    p = np.stack([projections(2), projections(2, seed=1)])
    found, same = InfiniGenCalibration(p), InfiniGenCalibration(p.astype(np.float64))
    assert found == same and hash(found) == hash(same) and len({found, same}) == 1
    for other in (p[:1], p[::-1], -p):
        assert found != InfiniGenCalibration(other)
    assert found != "something else"
    p[:] = 7.0
    assert found == same and not found.projections.flags.writeable
    assert len(repr(found)) < 100
    assert pickle.loads(pickle.dumps(found)) == found


# --- what is refused ------------------------------------------------------------------------------


def of_another_model():
    transform = one_layer(np.ones((2, 8, 3)))
    return kvjax.generate(tiny_model(), [[1, 2]], transform=transform, max_new_tokens=2)


REFUSED = {
    "channels": (lambda: InfiniGen(channels=0), ValueError, "channels must lie"),
    "sample": (lambda: learned(tiny_model(), [[1], []]), ValueError, "row 1 is empty"),
    "model": (lambda: learned(3, [[1, 2]]), TypeError, "model must be callable"),
    "shape": (lambda: InfiniGenCalibration(np.ones((2, 2, 8))), ValueError, r"got \(2, 2, 8\)"),
    "NaN": (lambda: InfiniGenCalibration(np.full((1, 1, 8, 3), np.nan)), ValueError, "finite"),
    "dtype": (lambda: InfiniGenCalibration(np.ones((1, 1, 8, 3), int)), TypeError, "of floats"),
    "alpha": (lambda: InfiniGen(alpha=0), ValueError, "alpha must be finite and above 0, got 0"),
    "calibration": (
        lambda: InfiniGen(calibration=projections(2)), TypeError, "must be InfiniGenCal"
    ),
    "layers": (of_another_model, ValueError, "another model: it has 1 layers .*expected 3 layers"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(case):
    call, error, message = case
    with pytest.raises(error, match=message):
        call()


def test_without_a_calibration_it_says_how_to_get_one():
    size = {"batch": 1, "kv_heads": 1, "head_dim": 8, "max_prompt": 4, "max_new": 1}
    assert kvjax.bind(InfiniGen(), 2) == (kvjax.Full(), kvjax.Full())
    with pytest.raises(ValueError, match=r"kvjax\.calibrated\(transform, model, sample\)"):
        kvjax.init_cache(kvjax.bind(InfiniGen(), 3)[2], **size)
    with pytest.raises(ValueError, match=r"kvjax\.bind"):
        kvjax.init_cache(InfiniGen(), **size)


def test_layers_have_their_own_projections():
    """Layers are equal values; their projections are in their caches."""
    given = InfiniGenCalibration(np.stack([projections(2, seed) for seed in range(4)]))
    layers = kvjax.bind(InfiniGen(calibration=given, dense_layers=(1,)), 4)
    assert layers[1] == kvjax.Full() and layers[0] == layers[2] == layers[3]
    sizes = {"batch": 1, "kv_heads": 2, "head_dim": DIM, "max_prompt": 4, "max_new": 1}
    for layer in (0, 2, 3):
        cache = init_cache(layers[layer], layer=layer, **sizes)
        close(cache.state, given.projections[layer], "exact")
    with pytest.raises(ValueError, match=r"another model: expected .*, and a layer 4"):
        kvjax.init_cache(layers[0], layer=4, **sizes)


# --- the query from the layer below ---------------------------------------------------------------

LAYERS = 4
CONFIG = DecoderConfig(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_layers=LAYERS, query_heads=4,
    kv_heads=KV_HEADS, head_dim=DIM, rope=RopeConfig(rotary_dim=DIM, theta=100.0),
    max_positions=128, attention_bias=True,
)  # fmt: skip


@functools.cache
def decoder():
    """A decoder whose layers change the residual stream, so that predictions are off."""
    model = random_decoder(CONFIG, seed=3)
    scale = jnp.linspace(0.5, 2.0, CONFIG.hidden_size)
    for layer, block in enumerate(model.layers):
        joined, queries = block.attention.qkv_proj, 2 * CONFIG.head_dim  # rows of a KV head
        joined.kernel[...] = joined.kernel[...].at[:, :queries].multiply(2.0)
        joined.bias[...] = joined.bias[...].at[:, :queries].add(0.3)
        block.attention_norm.scale[...] *= jnp.roll(scale, 5 * layer)
    return model


@functools.cache
def calibrated():
    return learned(decoder(), SAMPLE)


def by_hand(tokens: list[int]):
    """The decoder with attention in NumPy, over the whole sequence at once.

    Returns logits after the last token; of each layer rotated q, k, v and predicted q.
    """
    x, positions = decoder().embed(jnp.array([tokens])), np.arange(len(tokens))
    inv_freq, below, layers = 100.0 ** (-np.arange(0, DIM, 2) / DIM), None, []

    def turned(heads):
        return rotate(np.asarray(heads[0], np.float64), positions, inv_freq)

    for block in decoder().layers:
        normed = block.attention_norm(x)
        q, k, v = block.attention.project(normed)
        q, k, v = turned(q), turned(k), np.asarray(v[0], np.float64)
        predicted = None if below is None else turned(block.attention.queries(below))
        layers.append((q, k, v, predicted))
        outs = [
            softmax_attention(group, k[head], v[head], positions, positions)[0]
            for head, group in enumerate(q.reshape(KV_HEADS, -1, *q.shape[1:]))
        ]
        outs = jnp.asarray(np.concatenate(outs)[None], jnp.float32)
        x, below = x + block.attention.merge(outs), normed
        x = x + block.mlp(block.mlp_norm(x))
    return decoder().lm_head(decoder().norm(x))[0, -1], layers


@pytest.mark.slow
def test_fidelity_is_measured_with_the_prediction():
    """Every layer is given what the full run gave."""
    fields, tokens, steps = {"budget": 0.3, "alpha": 0.4}, list(PROMPTS[0]), 2
    length = len(tokens)
    tx = InfiniGen(calibration=calibrated(), dense_layers=(), **fields)
    (found,) = measure_fidelities(decoder(), [tx], [tokens], new_tokens=steps)
    for _ in range(steps):
        tokens.append(int(np.argmax(by_hand(tokens)[0])))
    expected = []
    for layer, (q, k, v, predicted) in enumerate(by_hand(tokens)[1]):
        method = reference.InfiniGen(calibrated().projections[layer], **fields)
        method.prompt(q[:, :length], k[:, :length], v[:, :length], np.arange(length))
        for at in range(length, len(tokens)):
            by, seen = None if predicted is None else predicted[:, at], np.arange(at + 1)
            out, _ = method.decode(q[:, at], k[:, at], v[:, at], at, by)
            heads = zip(np.split(q[:, at : at + 1], KV_HEADS), k, v, strict=True)
            full = [
                softmax_attention(group, keys[seen], values[seen], [at], seen)[0][:, 0]
                for group, keys, values in heads
            ]
            expected.append(attention_error(out, np.concatenate(full)))
    close(found.error[:, 0], np.reshape(expected, (LAYERS, steps)).mean(1), "accumulated")
    assert found.error.max() > 0.01
