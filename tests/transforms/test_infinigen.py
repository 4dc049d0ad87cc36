"""InfiniGen: its calibration, its lists at every step, and what a decoder predicts for it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pickle
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.evaluation import measure_fidelity
from kvjax.evaluation.fidelity.recording import record, recorded, unrecord
from kvjax.generation.calibration import calibrate_infinigen
from kvjax.models import DecoderConfig, RopeConfig, random_decoder
from kvjax.models.blocks import DecoderLayer
from kvjax.storage.offload import recall_statistics
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
from tests.references.recall import attention_error, recall_rate
from tests.references.rope import rope as rotate
from tests.support.attending import Tokens, init_cache, right, run, slots_of, the_rope
from tests.support.marks import some_slow
from tests.support.method_pair import RecallingPair, clear_choices
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
    "few near": {"alpha": 1.0, "budget": 0.5},
    "number": {"budget": 7, "alpha": 1.5},
    "number without alpha": {"budget": 7},
    "share without alpha": {"budget": 0.3},
    "one": {"budget": 1, "alpha": 2.0},
    "per query head": {"alpha": 1.5, "per_query_head": True},
    "per query head without alpha": {"per_query_head": True, "predicts": True},
    "predicted": {"alpha": 2.0, "predicts": True},
    "predicted and rotated": {"alpha": 2.0, "predicts": True, "rope": the_rope()},
    "groups of four": {"heads": (2, 4), "alpha": 1.0},
    "groups of four, per query head": {"heads": (2, 4), "alpha": 1.0, "per_query_head": True},
    "multi-head": {"heads": (3, 1), "budget": 0.5, "alpha": 3.0},
    "window": {"alpha": 1.5, "budget": 0.5, "window": 20},
    # Heads hold different tokens; a share is of those that are left, and of the new ones.
    "evicted": {"before": EVICTS, "budget": 5},
    "evicted, a share": {"before": EVICTS, "budget": 0.4, "alpha": 3.0},
    # Heads hold different numbers of tokens: the largest counts, and all get as many.
    "merged": {"before": MERGES, "budget": 0.3},
    "merged, with alpha": {"before": MERGES, "budget": 0.3, "alpha": 3.0},
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


@pytest.mark.parametrize(
    ("heads", "share"),
    [((4, 2), 0.2), ((2, 2), 0.4), ((4, 1), 1.0), pytest.param((4, 2), 0.01, marks=slow)],
)
def test_calibration_is_its_definition(heads, share):
    sizes = {"query_heads": heads[0], "kv_heads": heads[1]}
    found = calibrate_infinigen(tiny_model(**sizes), SAMPLE, share).projections
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
    found = calibrate_infinigen(tiny_model(), [[5, 6]]).projections
    assert found.shape[:3] == (3, 2, 8) and np.isfinite(found).all()
    columns = np.linalg.norm(found, axis=2)
    assert np.all((np.abs(columns - 1) < 1e-5) | (columns == 0))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"share": 0}, ValueError, r"share must lie in \(0, 1\], got 0"),
        ({"share": "all"}, TypeError, "share must be a number"),
        ({"sample": [[1], []]}, ValueError, "row 1 is empty"),
        ({"sample": [[VOCAB]]}, ValueError, "must lie in"),
        ({"model": 3}, TypeError, "model must be callable"),
    ],
)
def test_calibration_refuses(change, error, message):
    given = {"model": tiny_model(), "sample": [[1, 2]], "share": 0.2}
    with pytest.raises(error, match=message):
        calibrate_infinigen(**{**given, **change})


def test_a_calibration_is_a_value(tmp_path):
    p = np.stack([projections(2), projections(2, seed=1)])
    found, same = InfiniGenCalibration(p), InfiniGenCalibration(p.astype(np.float64))
    assert found == same and hash(found) == hash(same) and len({found, same}) == 1
    for other in (p[:1], p[::-1], -p):
        assert found != InfiniGenCalibration(other)
    assert found != "something else"
    p[:] = 7.0
    assert found == same and not found.projections.flags.writeable
    assert repr(found).startswith("InfiniGenCalibration(layers=2, kv_heads=2, head_dim=8, channel")
    assert len(repr(found)) < 100
    assert pickle.loads(pickle.dumps(found)) == found
    assert one_layer(same.projections[0]) == one_layer(found.projections[0])
    for name in ("calibration.npz", "no suffix"):
        found.save(tmp_path / name)
        assert InfiniGenCalibration.load(tmp_path / name) == found
        assert (tmp_path / name).exists()


@pytest.mark.parametrize("content", ["empty", "array", "others", "half"])
def test_a_wrong_file_is_refused(tmp_path, content):
    path = tmp_path / "some.npz"
    InfiniGenCalibration(projections(2)[None]).save(path)
    if content == "array":
        with path.open("wb") as file:
            np.save(file, np.ones(3))
    elif content == "others":
        np.savez(path, x=np.ones(3))
    else:
        path.write_bytes(path.read_bytes()[: 300 * (content == "half")])
    with pytest.raises(ValueError, match=r"some\.npz' is no file that InfiniGenCalibration\.save"):
        InfiniGenCalibration.load(path)
    with pytest.raises(FileNotFoundError):
        InfiniGenCalibration.load(tmp_path / "none.npz")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (np.ones((2, 2, 8), np.float32), ValueError, r"got \(2, 2, 8\)"),
        (np.full((1, 1, 8, 3), np.nan), ValueError, "must be finite"),
        (np.ones((1, 1, 8, 3), int), TypeError, "array of floats"),
    ],
)
def test_projections_that_are_none(given, error, message):
    with pytest.raises(error, match=message):
        InfiniGenCalibration(given)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"budget": 1.5}, ValueError, r"must lie in \(0, 1\]"),
        ({"alpha": 0}, ValueError, "alpha must be finite and above 0, got 0"),
        ({"calibration": projections(2)}, TypeError, "what kvjax.calibrate_infinigen returns"),
    ],
)
def test_bad_fields(fields, error, message):
    with pytest.raises(error, match=message):
        InfiniGen(**fields)


def test_without_a_calibration_it_says_how_to_get_one():
    size = {"batch": 1, "kv_heads": 1, "head_dim": 8, "max_prompt": 4, "max_new": 1}
    assert kvjax.bind(InfiniGen(), 2) == (kvjax.Full(), kvjax.Full())
    with pytest.raises(ValueError, match=r"kvjax\.calibrate_infinigen\(model, sample\)"):
        kvjax.init_cache(kvjax.bind(InfiniGen(), 3)[2], **size)
    with pytest.raises(ValueError, match=r"kvjax\.bind"):
        kvjax.init_cache(InfiniGen(), **size)


def test_what_is_not_calibrated_becomes_so():
    tokens = [list(range(32))]
    model, given = decoder(), InfiniGen(budget=0.5)
    found = kvjax.calibrated(kvjax.chain(given, kvjax.Offload()), model, tokens)
    calibration = kvjax.calibrate_infinigen(model, tokens)
    own = dataclasses.replace(given, calibration=calibration)
    assert found == kvjax.chain(own, kvjax.Offload())
    assert kvjax.calibrated(own, None, []) == own


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((4, 2, 8, 3), "layers=4, .*expected 3 layers"),
        ((3, 4, 8, 3), "kv_heads=4, .*expected 2 KV heads of 8 channels"),
        ((3, 2, 16, 3), "head_dim=16, .*expected 2 KV heads of 8 channels"),
    ],
)
def test_a_calibration_for_another_model(shape, message):
    calls = []
    model = dataclasses.replace(
        tiny_model(), apply=lambda *args, **kwargs: calls.append(args) or tiny_model().apply(*args)
    )
    rng = np.random.default_rng(0)
    tx = InfiniGen(calibration=InfiniGenCalibration(rng.normal(size=shape)), dense_layers=(0,))
    with pytest.raises(ValueError, match=f"a calibration for another model: .*{message}"):
        kvjax.generate(model, [[1, 2]], transform=tx, max_new_tokens=2)
    assert not calls


def test_layers_have_their_own_projections():
    """Layers are equal values; their projections are in their caches."""
    given = InfiniGenCalibration(np.stack([projections(2, seed) for seed in range(4)]))
    layers = kvjax.bind(InfiniGen(calibration=given, dense_layers=(1,)), 4)
    assert layers[1] == kvjax.Full() and layers[0] == layers[2] == layers[3]
    sizes = {"batch": 1, "kv_heads": 2, "head_dim": DIM, "max_prompt": 4, "max_new": 1}
    for layer in (0, 2, 3):
        cache = init_cache(layers[layer], layer=layer, **sizes)
        close(cache.state, given.projections[layer], "exact")
    with pytest.raises(ValueError, match=r"another model: .*layers=4, .*given layer 4"):
        kvjax.init_cache(layers[0], layer=4, **sizes)


def test_refused_behind_what_frees_while_decoding():
    with pytest.raises(ValueError, match="the index would go stale"):
        kvjax.chain(kvjax.H2O(budget=16), one_layer(projections(2)))


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
        block.attention.q_proj.kernel[...] *= 2.0
        block.attention.q_proj.bias[...] += 0.3
        block.attention_norm.scale[...] *= jnp.roll(scale, 5 * layer)
    return model


@functools.cache
def calibrated():
    return calibrate_infinigen(decoder(), SAMPLE)


class ByHand:
    """The decoder with attention in NumPy, over the whole sequence at once."""

    def __init__(self, model) -> None:
        self.model = model

    def read(self, tokens: list[int]):
        """Logits after the last token; of each layer rotated q, k, v and predicted q."""
        x, positions = self.model.embed(jnp.array([tokens])), np.arange(len(tokens))
        inv_freq, below, layers = 100.0 ** (-np.arange(0, DIM, 2) / DIM), None, []

        def turned(heads):
            return rotate(np.asarray(heads[0], np.float64), positions, inv_freq)

        for block in self.model.layers:
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
        return self.model.lm_head(self.model.norm(x))[0, -1], layers

    def go_on(self, prompt: list[int], new_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(new_tokens):
            tokens.append(int(np.argmax(self.read(tokens)[0])))
        return tokens


def decode_last(model, layers, tokens, wrap=lambda layer: layer, wrap_cache=lambda cache: cache):
    """The caches after a decode step with the last token, the others being the prompt."""
    graph, params = nnx.split(model)

    @functools.partial(jax.jit, static_argnames=("layers", "phase"))
    def call(params, tokens, positions, caches, *, layers, phase):
        run = nnx.merge(graph, params)
        return run(tokens, positions, caches, layers=layers, phase=phase)[1]

    tokens, at = jnp.array([tokens]), jnp.arange(len(tokens))[None]
    size = {"kv_heads": KV_HEADS, "query_heads": 4, "head_dim": DIM, "max_prompt": at.size}
    init = functools.partial(init_cache, batch=1, max_new=2, dtype=jnp.float32, **size)
    empty = tuple(map(init, layers))
    caches = call(params, tokens[:, :-1], at[:, :-1], empty, layers=layers, phase="prompt")
    caches, layers = tuple(map(wrap_cache, caches)), tuple(map(wrap, layers))
    return call(params, tokens[:, -1:], at[:, -1:], caches, layers=layers, phase="decode")


@pytest.mark.slow
def test_a_decoder_predicts_by_the_input_of_the_attention_below():
    """Layer l's query weights times what layer l - 1's attention was given, at its position."""
    model, tokens = decoder(), PROMPTS[2]
    caches = decode_last(model, (kvjax.Full(),) * LAYERS, tokens, recorded, record)
    _, expected = ByHand(model).read(tokens)
    for layer, (cache, (q, _, _, predicted)) in enumerate(zip(caches, expected, strict=True)):
        _, (found,) = unrecord(cache)
        close(found.query[0, :, 0], q[:, -1], "accumulated")
        if layer == 0:
            assert found.predicted is None
            continue
        close(found.predicted[0, :, 0], predicted[:, -1], "accumulated")
        assert np.abs(predicted[:, -1] - q[:, -1]).max() > 0.1


def test_a_decoder_predicts_only_where_it_is_wanted():
    model, below, phases = decoder(), [], []
    p = calibrated().projections[2]
    wanting = kvjax.HeadGroups((((1,), kvjax.Full()), ((0,), one_layer(p[:1]))))
    # Layer 0 has none below. The two layers of the full cache are alike and traced once.
    layers = (wanting, kvjax.Full(), wanting, kvjax.Full())

    def predicts(self, *args):
        below.append(args[0])
        return original(self, *args)

    def attends(*args, predicted_query=None, **options):
        phases.append((options["phase"], predicted_query is not None))
        return attend(*args, predicted_query=predicted_query, **options)

    attend, original = kvjax.attend, DecoderLayer.predict_queries
    jax.clear_caches()  # what was traced before calls neither function
    with (
        mock.patch.object(DecoderLayer, "predict_queries", predicts),
        mock.patch.object(kvjax, "attend", attends),
    ):
        jax.eval_shape(lambda: decode_last(model, layers, PROMPTS[1]))
    assert len(below) == 1
    expected = [("prompt", False)] * 2 + [("decode", layer == 2) for layer in range(3)]
    assert phases == expected


def expected_fidelity(prompt, top, new_tokens, fields):
    """Recall [layers, H] and error [layers] of a row, every layer given what the full run gave."""
    by_hand = ByHand(decoder())
    tokens = by_hand.go_on(prompt, new_tokens)
    _, layers = by_hand.read(tokens)
    length, recall, error = len(prompt), [], []
    for layer, (q, k, v, predicted) in enumerate(layers):
        method = reference.InfiniGen(calibrated().projections[layer], **fields)
        method.prompt(q[:, :length], k[:, :length], v[:, :length], np.arange(length))
        for at in range(length, len(tokens)):
            by = None if predicted is None else predicted[:, at]
            with clear_choices():
                out, selected = method.decode(q[:, at], k[:, at], v[:, at], at, by)
            full, shares = [], []
            for head, group in enumerate(q.reshape(KV_HEADS, -1, *q.shape[1:])):
                here = slice(at + 1)
                attended, p = softmax_attention(
                    group[:, at : at + 1], k[head, here], v[head, here], [at], np.arange(at + 1)
                )
                full.append(attended[:, 0])
                lists = np.reshape(selected, (KV_HEADS, -1, len(selected[0])))[head]
                seen = set(itertools.chain(*lists.tolist()))
                shares.append(recall_rate(p[:, 0], seen, top or len(seen)))
            recall.append(shares)
            error.append(attention_error(out, np.concatenate(full)))
    steps = (len(layers), new_tokens)
    return np.reshape(recall, (*steps, -1)).mean(1), np.reshape(error, steps).mean(1)


@pytest.mark.parametrize(
    ("top", "fields"),
    [
        (None, {"budget": 5, "alpha": None}),
        (6, {"budget": 0.3, "alpha": 0.4, "per_query_head": True}),
    ],
)
@pytest.mark.slow
def test_fidelity_is_measured_with_the_prediction(top, fields):
    tx = InfiniGen(calibration=calibrated(), dense_layers=(), **fields)
    found = measure_fidelity(decoder(), tx, PROMPTS, top, 2)
    for row, prompt in enumerate(PROMPTS):
        recall, error = expected_fidelity(prompt, top, 2, fields)
        close(found.recall[:, row], recall, "rounding", f"recall of row {row}")
        close(found.error[:, row], error, "accumulated", f"error of row {row}")
    assert 0 < found.recall.mean() < 1 and found.error.max() > 0.01
