"""InfiniGen: its calibration, its lists at every step, and what a decoder predicts for it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pickle
import re
from contextlib import contextmanager
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
from kvjax.storage.offload import memory_kinds, recall_statistics
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
from tests.references.slots import Slots
from tests.support.attending import INV_FREQ, init_cache, slots_of, structure, the_rope
from tests.support.decode_loops import Seen, Watched, found, unseen
from tests.support.method_pair import LENGTHS, WIDTH, attend
from tests.support.tolerances import close

DIM, CHANNELS = 8, 3
MAX_PROMPT, MAX_NEW = 128, 64

flush = jax.jit(kvjax.flush)


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


@contextmanager
def clear_choices():
    """Fails where the reference decides between scores that float32 might order differently."""

    def clear(gaps, scores) -> None:
        assert np.all((gaps == 0) | (gaps > 3e-6 * np.abs(scores).max())), "change the seed"

    def watched_best(scores, count):
        ordered = -np.sort(-scores)
        if 0 < count < len(ordered):
            clear(ordered[count - 1] - ordered[count], scores)
        return best(scores, count)

    def watched_count(scores, budget, alpha):
        for row in scores if alpha is not None else []:
            clear(np.abs(row - (row.max(initial=0) - alpha)), np.append(row, 1))
        return token_count(scores, budget, alpha)

    best, token_count = reference.best, reference.token_count
    with (
        mock.patch.object(reference, "best", watched_best),
        mock.patch.object(reference, "token_count", watched_count),
    ):
        yield


class Both:
    """The library on a ragged batch and the reference row by row, compared at every call.

    predicts: decode steps get a query that predicts, which is not the one that attends.
    first: what evicts at the prompt's end, before InfiniGen.
    last: stands behind it.
    window: of the attention.
    """

    def __init__(self, *, heads=(2, 2), seed=0, rope=False, predicts=False, first=None, last=None,
                 window=None, **fields) -> None:  # fmt: skip
        self.kv_heads, self.group = heads
        self.rng, self.rows = np.random.default_rng(seed), len(LENGTHS)
        self.rope, self.predicts, self.first = rope, predicts, first
        p = projections(self.kv_heads)
        own = Watched(one_layer(p, **fields))
        parts = [part for part in (first, own, last) if part is not None]
        self.transform = kvjax.chain(*parts)
        self.window, options = window, {**fields, "window": window}
        self.references = [reference.InfiniGen(p, **options) for _ in range(self.rows)]
        query_heads = self.kv_heads * self.group
        size = (self.rows, 2 * query_heads + 2 * self.kv_heads, MAX_PROMPT + MAX_NEW, DIM)
        cuts = np.cumsum([query_heads, query_heads, self.kv_heads])
        data = 2 * self.rng.normal(size=size).astype(np.float32)
        self.tokens = np.split(data, cuts, axis=1)  # q, what predicts it, k, v
        self.next, self.since = np.zeros(self.rows, int), 0
        self.cache = init_cache(
            self.transform, batch=self.rows, kv_heads=self.kv_heads, query_heads=query_heads,
            head_dim=DIM, max_prompt=MAX_PROMPT, max_new=MAX_NEW, dtype=jnp.float32, window=window,
        )  # fmt: skip
        self.lists: list[list[list[list[int]]]] = []  # of each step, row and head

    def at(self, positions: np.ndarray):
        """q, predicted q, k and v of the tokens [R, T]; large noise at padding."""
        index = np.maximum(positions, 0)[:, None, :, None]
        there = (positions >= 0)[:, None, :, None]
        taken = [np.take_along_axis(x, index, axis=2) for x in self.tokens]
        return [np.where(there, x, 1e4).astype(np.float32) for x in taken]

    def call(self, positions: np.ndarray, **options):
        """Runs the library; what the reference is to be given, and the output."""
        q, predicted, k, v = self.at(positions)
        if self.predicts and options["phase"] == "decode":
            options["predicted_query"] = predicted
        where = jnp.asarray(positions, jnp.int32)
        out, cache = attend(
            self.transform, self.cache, q, k, v, where, rope=the_rope() if self.rope else None,
            window=self.window, **options,
        )  # fmt: skip
        if options["phase"] == "decode":
            seen = found(cache, Seen)
            self.seen = None if seen is None else np.asarray(seen.positions)
            self.since += 1
        self.cache = unseen(cache)
        interval = kvjax.flush_interval(cache)
        if interval is not None and self.since and self.since % interval == 0:
            self.cache = flush(self.cache)
        turned = [q, predicted, k]
        if self.rope:
            turned = [
                np.stack([rotate(x[row], positions[row], INV_FREQ) for row in range(self.rows)])
                for x in turned
            ]
        return (*turned, v), np.asarray(out)

    def prompt(self, counts=LENGTHS, side="right", chunks=1) -> Both:
        """The next `counts[b]` tokens of every row."""
        positions = np.full((self.rows, WIDTH), -1)
        for row, count in enumerate(counts):
            columns = np.sort(self.rng.permutation(WIDTH)[:count])
            columns = np.arange(count) if side == "right" else columns
            positions[row, columns] = self.next[row] + np.arange(count)
        self.next += counts
        parts = np.array_split(positions, chunks, axis=1)
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            (q, _, k, v), out = self.call(part, phase="prompt", last=last)
            for row, own in enumerate(self.references):
                expected = own.prompt(q[row], k[row], v[row], part[row], last)
                close(out[row], expected, "reference", f"row {row}")
        if self.first is not None:
            for row, own in enumerate(self.references):
                own.heads = [self._kept(row, head) for head in range(self.kv_heads)]
        return self

    def _kept(self, row: int, head: int) -> Slots:
        """What the library holds, as the reference's slots."""
        own, slots = slots_of(self.cache, row, head), Slots()
        slots.append(own["k"], own["v"], own["position"], 1)
        for token, log_mass in zip(slots.tokens, own["log_mass"], strict=True):
            token.log_mass = float(log_mass)
        return slots

    def decode(self, steps: int, stopped: tuple[int, ...] = ()) -> Both:
        """`steps` tokens more; `stopped` rows get padding."""
        for _ in range(steps):
            going = ~np.isin(np.arange(self.rows), stopped)
            positions = np.where(going, self.next, -1)[:, None]
            self.next += going
            before = structure(self.cache)
            (q, predicted, k, v), out = self.call(positions, phase="decode")
            assert structure(self.cache) == before
            lists = []
            for row, own in enumerate(self.references):
                if not going[row]:
                    assert (out[row] == 0).all()
                    continue
                where = f"row {row}, {self.next[row]} tokens so far"
                with clear_choices():
                    expected, selected = own.decode(
                        q[row, :, 0], k[row, :, 0], v[row, :, 0], int(positions[row, 0]),
                        predicted[row, :, 0] if self.predicts else None,
                    )  # fmt: skip
                assert [x[x >= 0].tolist() for x in self.seen[row]] == selected, where
                close(out[row, :, 0], expected, "reference", where)
                lists.append(selected)
            self.lists.append(lists)
        return self

    def lengths(self, row: int) -> list[int]:
        """How many tokens the first list of a row had at each step."""
        return [len(lists[row][0]) for lists in self.lists]


# --- the lists ------------------------------------------------------------------------------------

CASES = {
    "default": {},
    "paper": {"alpha": 5.0},
    "all shares": {"budget": 1.0, "alpha": 5.0},
    "few near": {"alpha": 1.0, "budget": 0.5},
    "number": {"budget": 7, "alpha": 1.5},
    "number without alpha": {"budget": 7, "alpha": None},
    "share without alpha": {"budget": 0.3, "alpha": None},
    "one": {"budget": 1},
    "per query head": {"alpha": 1.5, "per_query_head": True},
    "per query head without alpha": {"alpha": None, "per_query_head": True, "predicts": True},
    "predicted": {"alpha": 2.0, "predicts": True},
    "predicted and rotated": {"alpha": 2.0, "predicts": True, "rope": True},
    "groups of four": {"heads": (2, 4), "alpha": 1.0},
    "groups of four, per query head": {"heads": (2, 4), "alpha": 1.0, "per_query_head": True},
    "multi-head": {"heads": (3, 1), "budget": 0.5, "alpha": 3.0},
    "window": {"alpha": 1.5, "budget": 0.5, "window": 20},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.fast_cases("number without alpha")
def test_every_list_of_44_steps(case):
    both = Both(**case).prompt().decode(44)
    columns = slots_of(both.cache, 2, 0)
    close(columns[PARTIAL_KEYS], columns["k"] @ projections(both.kv_heads)[0], "reference")
    if case.get("alpha") is not None and case.get("budget") != 1:
        assert len(set(both.lengths(2))) > 3  # no constant


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.fast_cases("1")
def test_padding_and_chunks(chunks):
    Both(budget=0.4, seed=1).prompt(side="scattered", chunks=chunks).decode(12)


def test_a_second_turn():
    """A row that had stopped goes on, one gets no tokens; slots move and partial keys with them."""
    both = Both(budget=0.4, alpha=3.0, seed=2).prompt().decode(9, stopped=(0,))
    both.decode(9).prompt((9, 30, 0)).decode(20)


def test_rows_that_start_with_one_token_or_none():
    both = Both(budget=0.3, seed=3).prompt((1, 0, 4)).decode(12)
    assert both.lengths(1)[:4] == [1, 2, 2, 2]


def test_ties_go_to_the_lower_position():
    both = Both(budget=6, alpha=None, seed=4)
    # One channel: a sum of several may be rounded otherwise for one key than for many at a time.
    both.tokens[2][:] = np.eye(DIM, dtype=np.float32)[0]
    both.prompt().decode(5)
    assert [lists[0][0] for lists in both.lists] == [[*range(6), 37 + t] for t in range(5)]


@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("budget", [1.0, 10_000])
@pytest.mark.slow
def test_a_budget_for_everything_is_the_full_cache(budget, per_query_head):
    both = Both(budget=budget, alpha=None, per_query_head=per_query_head, rope=True)
    full = Both(rope=True)  # of which only the tokens are used
    full.transform, full.cache = kvjax.Full(), init_cache(
        kvjax.Full(), batch=3, kv_heads=2, query_heads=4, head_dim=DIM, max_prompt=MAX_PROMPT,
        max_new=MAX_NEW, dtype=jnp.float32,
    )  # fmt: skip
    positions = np.where(np.arange(WIDTH) < np.array(LENGTHS)[:, None], np.arange(WIDTH), -1)
    for pair in (both, full):
        pair.call(positions, phase="prompt", last=True)
    for step in range(10):
        positions = np.array(LENGTHS)[:, None] + step
        outs = [pair.call(positions, phase="decode")[1] for pair in (both, full)]
        close(*outs, "reference")
        for row, length in enumerate(LENGTHS):
            for seen in both.seen[row]:
                assert seen[seen >= 0].tolist() == list(range(length + step + 1))


@pytest.mark.slow
def test_in_bfloat16():
    """Partial keys are stored as keys are, and scores are float32."""
    tx, full = one_layer(projections(2), budget=1.0, alpha=None), kvjax.Full()
    rng, outs = np.random.default_rng(0), []
    q, k, v = (jnp.asarray(rng.normal(size=(1, n, 20, DIM)), jnp.bfloat16) for n in (4, 2, 2))
    for transform in (tx, full):
        cache = init_cache(
            transform, batch=1, kv_heads=2, query_heads=4, head_dim=DIM, max_prompt=19, max_new=1,
            dtype="bfloat16",
        )  # fmt: skip
        positions = jnp.arange(20)[None]
        _, cache = attend(
            transform, cache, q[:, :, :19], k[:, :, :19], v[:, :, :19], positions[:, :19],
            phase="prompt",
        )  # fmt: skip
        out, cache = attend(
            transform, cache, q[:, :, 19:], k[:, :, 19:], v[:, :, 19:], positions[:, 19:],
            phase="decode",
        )  # fmt: skip
        outs.append(out)
        if transform is tx:
            assert cache.kv.column(PARTIAL_KEYS).dtype == jnp.bfloat16
            expected = np.asarray(k, np.float64) @ projections(2)
            close(cache.kv.column(PARTIAL_KEYS), expected, "bfloat16")
    close(*outs, "exact")


# --- in chains ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"budget": 5, "alpha": None}, {"budget": 0.4, "alpha": 3.0}])
@pytest.mark.slow
def test_over_a_cache_that_was_evicted(fields):
    """Heads hold different tokens; a share is of those that are left, and of the new ones."""
    first = kvjax.SnapKV(budget=16, window=4, kernel=3)
    both = Both(first=first, **fields).prompt().decode(40)
    kept = [set(slots_of(both.cache, 2, head)["position"].tolist()) for head in range(2)]
    assert kept[0] != kept[1] and len(kept[0]) == 56


@pytest.mark.parametrize("alpha", [None, 3.0])
@pytest.mark.slow
def test_over_a_cache_that_was_merged(alpha):
    """Heads hold different numbers of tokens: the largest counts, and all get as many."""
    first = kvjax.KVMerger(epsilon=0.3)
    both = Both(first=first, budget=0.3, alpha=alpha).prompt().decode(40)
    live = np.asarray(both.cache.kv.live).sum(-1)
    assert (np.ptp(live, axis=1) >= 4).any()


def test_partial_keys_are_those_of_merged_slots():
    p = projections(2)
    tx = kvjax.chain(kvjax.KVMerger(budget=16), one_layer(p, budget=8))
    cache = init_cache(
        tx, batch=1, kv_heads=2, head_dim=DIM, max_prompt=48, max_new=2, dtype=jnp.float32
    )
    rows = np.random.default_rng(0).normal(size=(3, 1, 2, 48, DIM)).astype(np.float32)
    _, cache = attend(tx, cache, *rows, jnp.arange(48)[None], phase="prompt")
    merged = np.asarray(cache.kv.live).sum(-1)
    assert (merged < 48).all()
    for head in range(2):
        slots = slots_of(cache, 0, head)
        close(slots[PARTIAL_KEYS], slots["k"] @ p[head], "reference")


@pytest.mark.skipif("pinned_host" not in memory_kinds(), reason="no host memory of its own")
@pytest.mark.parametrize("case", ["predicted and rotated", "groups of four, per query head"])
@pytest.mark.fast_cases("predicted and rotated")
def test_offloaded_lists_are_those_of_the_reference(case):
    both = Both(last=kvjax.Offload(interval=8), **CASES[case]).prompt().decode(40)
    assert recall_statistics(both.cache).hit_rate > 0


@pytest.mark.slow
@pytest.mark.skipif("pinned_host" not in memory_kinds(), reason="no host memory of its own")
def test_offloaded_tokens_are_those_without_offload():
    model, calibration = decoder(), calibrated()
    tx = InfiniGen(budget=8, alpha=None, calibration=calibration, dense_layers=(0,))
    found = [
        kvjax.generate(model, PROMPTS, transform=transform, max_new_tokens=24).tokens
        for transform in (tx, kvjax.chain(tx, kvjax.Offload(interval=8)))
    ]
    assert found[0] == found[1]
    assert found[0] != kvjax.generate(model, PROMPTS, max_new_tokens=24).tokens


def test_a_step_copies_no_store():
    """Partial keys are read and one is written in place; nothing is as large as the keys."""
    p = np.eye(64, 8, dtype=np.float32)[None].repeat(2, 0)
    transform = one_layer(p, budget=32)
    sizes = {"batch": 1, "kv_heads": 2, "head_dim": 64, "max_prompt": 3000, "max_new": 1000}
    cache = jax.eval_shape(lambda: kvjax.init_cache(transform, **sizes, dtype="float32"))

    def step(cache, q, kv):
        return kvjax.attend(transform, cache, q, kv, kv, jnp.array([[700]]), phase="decode")

    row = jax.ShapeDtypeStruct((1, 2, 1, 64), jnp.float32)
    compiled = jax.jit(step, donate_argnums=0).lower(cache, row, row).compile()
    for array in (cache.kv.k.data, cache.kv.column(PARTIAL_KEYS)):
        shape = ",".join(map(str, array.shape))
        assert f"f32[{shape}]" in compiled.as_text()
        assert not re.search(rf"f32\[{shape}\]\S* copy\(", compiled.as_text())
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < cache.kv.k.data.size * 4 / 2


# --- calibration ----------------------------------------------------------------------------------

SAMPLE = [row * 3 for row in PROMPTS[:1]] + PROMPTS[1:]
SAMPLE = [row[:63] for row in SAMPLE]


@pytest.mark.parametrize("share", [0.01, 0.2, 0.4, 1.0])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (4, 1)])
@pytest.mark.fast_cases(
    "heads0-0.2",
    "heads0-0.4",
    "heads0-1.0",
    "heads1-0.2",
    "heads1-0.4",
    "heads1-1.0",
    "heads2-0.2",
    "heads2-0.4",
    "heads2-1.0",
)
def test_calibration_is_its_definition(share, heads):
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
        ({"share": 1.5}, ValueError, "got 1.5"),
        ({"share": "all"}, TypeError, "share must be a number"),
        ({"sample": []}, ValueError, "at least one prompt"),
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


@pytest.mark.parametrize("content", ["text", "empty", "array", "others", "shape", "half"])
def test_a_wrong_file_is_refused(tmp_path, content):
    path = tmp_path / "some.npz"
    InfiniGenCalibration(projections(2)[None]).save(path)
    if content in ("text", "empty"):
        path.write_text("no numbers" if content == "text" else "")
    elif content == "array":
        with path.open("wb") as file:
            np.save(file, np.ones(3))
    elif content == "half":
        path.write_bytes(path.read_bytes()[:300])
    else:
        np.savez(path, **{"infinigen_projections" if content == "shape" else "x": np.ones(3)})
    with pytest.raises(ValueError, match=r"some\.npz' is no file that InfiniGenCalibration\.save"):
        InfiniGenCalibration.load(path)
    with pytest.raises(FileNotFoundError):
        InfiniGenCalibration.load(tmp_path / "none.npz")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (np.ones((2, 2, 8), np.float32), ValueError, r"got \(2, 2, 8\)"),
        (np.ones((2, 2, 8, 9), np.float32), ValueError, "at most head_dim"),
        (np.ones((2, 0, 8, 3), np.float32), ValueError, "none of them 0"),
        (np.full((1, 1, 8, 3), np.nan), ValueError, "must be finite"),
        (np.ones((1, 1, 8, 3), int), TypeError, "array of floats"),
        ("path.npz", TypeError, "array of floats"),
    ],
)
def test_projections_that_are_none(given, error, message):
    with pytest.raises(error, match=message):
        InfiniGenCalibration(given)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"budget": 0}, ValueError, "budget must be at least 1"),
        ({"budget": 1.5}, ValueError, r"must lie in \(0, 1\]"),
        ({"budget": "all"}, TypeError, "budget must be an int"),
        ({"alpha": 0}, ValueError, "alpha must be finite and above 0, got 0"),
        ({"alpha": float("nan")}, ValueError, "alpha must be finite"),
        ({"alpha": "5"}, TypeError, "alpha must be a number"),
        ({"calibration": projections(2)}, TypeError, "what kvjax.calibrate_infinigen returns"),
        ({"per_query_head": 1}, TypeError, "per_query_head must be True or False"),
        ({"dense_layers": 2}, TypeError, "tuple of layer numbers"),
        ({"dense_layers": (-1,)}, ValueError, "a layer of dense_layers must be at least 0"),
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
        ((1, 2, 8, 3), "layers=1, .*expected 3 layers"),
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
def calibrated(make=decoder):
    return calibrate_infinigen(make(), SAMPLE)


class ByHand:
    """The decoder in NumPy, in float64, token by token over the whole sequence."""

    def __init__(self, model) -> None:
        self.model = model

    def norm(self, module, x: np.ndarray) -> np.ndarray:
        scale = np.asarray(module.scale[...], np.float64)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.norm_eps) * scale

    def linear(self, module, x: np.ndarray) -> np.ndarray:
        bias = 0 if module.bias is None else np.asarray(module.bias[...], np.float64)
        return x @ np.asarray(module.kernel[...], np.float64) + bias

    def read(self, tokens: list[int]):
        """Logits after the last token; of each layer rotated q, k, v and predicted q."""
        table = np.asarray(self.model.embed.embedding[...], np.float64)
        x, positions, given, seen = table[tokens], np.arange(len(tokens)), None, []
        inv_freq = 100.0 ** (-np.arange(0, DIM, 2) / DIM)

        def heads(module, x):
            split = self.linear(module, x).reshape(len(x), -1, DIM)
            return split.transpose(1, 0, 2)

        for block in self.model.layers:
            own, below = self.norm(block.attention_norm, x), given
            attention = block.attention
            q, k = (rotate(heads(m, own), positions, inv_freq)
                    for m in (attention.q_proj, attention.k_proj))  # fmt: skip
            v = heads(attention.v_proj, own)
            predicted = None
            if below is not None:
                predicted = rotate(heads(attention.q_proj, below), positions, inv_freq)
            seen.append((q, k, v, predicted))
            outs = [
                softmax_attention(group, k[head], v[head], positions, positions)[0]
                for head, group in enumerate(q.reshape(KV_HEADS, -1, *q.shape[1:]))
            ]
            merged = np.concatenate(outs).transpose(1, 0, 2).reshape(len(x), -1)
            x, given = x + self.linear(attention.o_proj, merged), own
            inner = self.norm(block.mlp_norm, x)
            gate = self.linear(block.mlp.gate_proj, inner)
            gate = gate / (1 + np.exp(-gate))
            x = x + self.linear(block.mlp.down_proj, gate * self.linear(block.mlp.up_proj, inner))
        last = self.norm(self.model.norm, x)[-1]
        if CONFIG.tie_embeddings:
            return last @ table.T, seen
        return self.linear(self.model.lm_head, last), seen

    def go_on(self, prompt: list[int], new_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(new_tokens):
            tokens.append(int(np.argmax(self.read(tokens)[0])))
        return tokens


def caches_of(layers, size: int):
    sizes = {"kv_heads": KV_HEADS, "query_heads": 4, "head_dim": DIM, "max_prompt": size}
    return tuple(
        init_cache(layer, batch=1, max_new=2, dtype=jnp.float32, **sizes) for layer in layers
    )


def decode_last(
    model, layers, tokens: list[int], wrap=lambda layer: layer, wrap_cache=lambda c: c
):  # fmt: skip
    """The caches after a decode step with the last token, the others being the prompt."""
    graph, params = nnx.split(model)

    @functools.partial(jax.jit, static_argnames=("layers", "phase"))
    def call(params, tokens, positions, caches, *, layers, phase):
        run = nnx.merge(graph, params)
        return run(tokens, positions, caches, layers=layers, phase=phase)[1]

    tokens, at = jnp.array([tokens]), jnp.arange(len(tokens))[None]
    empty = caches_of(layers, at.size)
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


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.fast_cases("True")
def test_a_decoder_predicts_only_where_it_is_wanted(grouped):
    model, below, phases = decoder(), [], []
    p = calibrated().projections[2]
    wanting = one_layer(p)
    if grouped:
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


TOKENS = {"budget": 5, "alpha": None}
SHARES = {"budget": 0.3, "alpha": 0.4, "per_query_head": True}


def expected_fidelity(by_hand, calibration, prompt, top, new_tokens, fields):
    """Recall [layers, H] and error [layers] of a row, every layer given what the full run gave."""
    tokens = by_hand.go_on(prompt, new_tokens)
    _, layers = by_hand.read(tokens)
    length, recall, error = len(prompt), [], []
    for layer, (q, k, v, *predicted) in enumerate(layers):
        own = reference.InfiniGen(calibration.projections[layer], **fields)
        own.prompt(q[:, :length], k[:, :length], v[:, :length], np.arange(length))
        for at in range(length, len(tokens)):
            by = predicted[0][:, at] if predicted and predicted[0] is not None else None
            with clear_choices():
                out, selected = own.decode(q[:, at], k[:, at], v[:, at], at, by)
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
    recall, error = np.array(recall), np.array(error)
    steps = (len(layers), new_tokens)
    return recall.reshape(*steps, -1).mean(1), error.reshape(steps).mean(1)


@pytest.mark.parametrize("fields", [TOKENS, SHARES])
@pytest.mark.parametrize("top", [None, 6])
@pytest.mark.parametrize("predicts", [True, False])
@pytest.mark.slow
def test_fidelity_is_measured_with_the_prediction(predicts, top, fields):
    """Of the decoder, which predicts, and of a model that does not."""
    make = decoder if predicts else tiny_model
    model, calibration = make(), calibrated(make)
    by_hand = ByHand(model) if predicts else tiny_reference()
    tx = InfiniGen(calibration=calibration, dense_layers=(), **fields)
    found = measure_fidelity(model, tx, PROMPTS, top, 2)
    for row, prompt in enumerate(PROMPTS):
        recall, error = expected_fidelity(by_hand, calibration, prompt, top, 2, fields)
        close(found.recall[:, row], recall, "rounding", f"recall of row {row}")
        close(found.error[:, row], error, "accumulated", f"error of row {row}")
    assert 0 < found.recall.mean() < 1 and found.error.max() > 0.01
