"""KVzip's fit from end to end: what is stored, against SciPy's solvers in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.budgets.heads import HeadShares
from kvjax.transforms.kvzip import fit as fit_module
from kvjax.transforms.kvzip.kvzip import MOST_FITTED
from kvjax.transforms.kvzip.repetition import SAMPLE, QuerySample
from tests.references import attention_matching as reference
from tests.references.attention import softmax_attention
from tests.support.attending import attend, new_cache, slots_of
from tests.support.tolerances import close
from tests.transforms.test_kvzip import PIECE, Documents

LOWEST, HIGHEST = np.exp(fit_module.LOG_MASSES)
LOOKUPS = fit_module.LOOKUPS


class Fitted(Documents):
    """Documents of a method that fits, with what each head's queries and tokens were."""

    def __init__(self, budget=12, **options):
        super().__init__(budget, fit=True, **options)
        self.looked, self.asked = [], []

    def tokens(self, counts, width, side="right"):
        made = super().tokens(counts, width, side)
        if width == PIECE:
            self.looked.append(made)
        else:
            self.asked.append(made)
        return made

    def systems(self):
        """For each head its kept slots, and logits, log-sum-exps and outputs of its queries."""
        for row, head in self.heads:
            new, at = self.asked[-1]
            if not (at[row] >= 0).any():
                continue
            _, k, v, at = self.of_head(new, at, row, head)
            k, v, at = k[at >= 0], v[at >= 0], at[at >= 0]
            q, where = [], []
            for piece in self.looked:
                queries, _, _, places = self.of_head(*piece, row, head)
                q.append(queries[:, places >= 0])
                where.append(places[places >= 0])
            q, where = np.concatenate(q, axis=1), np.concatenate(where)
            window = self.options.get("window")
            options = {"scale": self.options.get("scale", 8**-0.5)}
            options["soft_cap"] = self.options.get("soft_cap")
            out, _ = softmax_attention(q, k, v, where, at, window=window, **options)
            slots = slots_of(self.cache, row, head)
            new = slots["position"] >= at[0]
            kept = np.searchsorted(at, slots["position"][new])
            hidden = at[None] <= where[:, None] - (window or 10**6)

            def logits(k, hidden, q=q, options=options):
                x = np.array([reference.logits(group, k, **options) for group in q])
                return np.where(hidden[None], -np.inf, x).reshape(-1, k.shape[0])

            with np.errstate(divide="ignore"):
                lse = np.log(np.exp(logits(k, hidden)).sum(1))
            x = logits(k[kept], hidden[:, kept])
            sees = (x > -np.inf).any(1)
            found = {name: slots[name][new] for name in ("v", "log_mass")}
            yield (row, head), v[kept], found, x[sees], lse[sees], out.reshape(-1, 8)[sees]


CASES = {
    "plain": {"heads": (2, 3)}, "one query head": {"heads": (3, 1), "budget": 8},
    "soft cap": {"attention": {"scale": 0.9, "soft_cap": 2.5}},
    "share": {"budget": 0.3}, "sliding window": {"attention": {"window": 40}},
    "sinks of attention": {"attention": {"sinks": np.array([0.5, 6.0, -2.0, 3.0], np.float32)}},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_masses_and_values_are_those_of_scipy(name):
    both = Fitted(room=8, **CASES[name]).document((37, 16, 52))
    better = 0
    for (row, head), before, found, x, lse, out in both.systems():
        mass = np.exp(found["log_mass"].astype(float))
        expected = reference.masses(x, lse, LOWEST, HIGHEST, LOOKUPS)
        off, least = (reference.mass_error(x, lse, masses, LOOKUPS) for masses in (mass, expected))
        assert off < 1.01 * least + 1e-3, (row, head)
        values = reference.values(x, mass, before, out, LOOKUPS)
        close(found["v"], values, "accumulated", f"row {row}, head {head}")
        errors = [
            np.linalg.norm(reference.weights(x, masses) @ v - out)
            for masses, v in ((np.ones(len(before)), before), (mass, found["v"]))
        ]
        assert errors[1] < errors[0]
        better += errors[1] < 0.7 * errors[0]
    assert better > 1


def test_a_further_document_leaves_the_first_as_it_is():
    both = Fitted(budget=20, room=8).document((12, 8, 9), pieces=1)
    before = [slots_of(both.cache, row, head) for row, head in both.heads]
    new, at = both.tokens((30, 0, 24), 56)
    both.call(new, at, "prompt", last=False)
    both.length += (30, 0, 24)
    piece = both.tokens((20, 0, 20), PIECE)
    both.call(*piece, "probe")
    for (row, head), old in zip(both.heads, before, strict=True):
        kept = slots_of(both.cache, row, head)
        first = np.isin(kept["position"], old["position"])
        stays = np.isin(old["position"], kept["position"])  # a part of its slots goes
        assert first.sum() == stays.sum() >= 8
        for name in ("position", "log_mass", "k", "v"):
            np.testing.assert_array_equal(kept[name][first], old[name][stays], name)
        fitted = kept["log_mass"][~first]
        assert row == 1 or (fitted != 0).any()


def documents(seed: int = 0):
    """Keys near few centres, so that tokens can stand for others, and queries of a repetition."""
    rng = np.random.default_rng(seed)
    near = rng.integers(0, 12, 32)
    k = rng.normal(size=(3, 2, 12, 8))[:, :, near] + 0.2 * rng.normal(size=(3, 2, 32, 8))
    v, q = rng.normal(size=(3, 2, 32, 8)), 2 * rng.normal(size=(3, 4, 32, 8))
    at = np.where(np.arange(32)[None] < np.array([32, 24, 30])[:, None], np.arange(32)[None], -1)
    return [x.astype(np.float32) for x in (q, k, v)], at.astype(np.int32)


def read(tx, count: int = 300, pieces: int = 1, seed: int = 0):
    """The cache after a document whose repetition has so many tokens, and the document."""
    (q, k, v), at = documents(seed)
    cache = new_cache(tx)
    _, cache = attend(cache, q, k, v, at, phase="prompt", last=False)
    rng = np.random.default_rng(seed + 1)
    asked = [2 * rng.normal(size=(3, h, count, 8)).astype(np.float32) for h in (4, 2, 2)]
    where = at.max(1)[:, None] + 1 + np.arange(count, dtype=np.int32)[None]
    for number, part in enumerate(np.array_split(np.arange(count), pieces)):
        new = [x[:, :, part] for x in asked]
        last = number == pieces - 1
        _, cache = attend(cache, *new, where[:, part], phase="probe", last=last)
    return cache, (k, v, at)


def error_of(parts, k, v, at) -> np.ndarray:
    """The relative error of the outputs of queries that were not fitted, `[B, H]`."""
    q, errors = np.random.default_rng(7).normal(size=(2, 100, 8)) * 2, np.zeros((3, 2))
    for heads, cache in parts:
        for row in range(3):
            for number, head in enumerate(heads):
                there = at[row] >= 0
                where = np.full(100, 1000)
                keys, values = k[row, head, there], v[row, head, there]
                full, _ = softmax_attention(q, keys, values, where, at[row, there], scale=8**-0.5)
                x = slots_of(cache, row, number)
                out, _ = softmax_attention(
                    q, x["k"], x["v"], where, x["position"], x["log_mass"], scale=8**-0.5
                )
                errors[row, head] = np.linalg.norm(out - full) / np.linalg.norm(full)
    return errors


def method(fit: bool, budget=8):
    # Neighbours say nothing about random keys.
    return kvjax.KVzip(budget, kernel=1, sinks=0, room=4, fit=fit)


@pytest.mark.parametrize("pieces", [1, 3])
def test_attention_of_other_queries_comes_closer(pieces):
    errors = []
    for fit in (False, True):
        cache, document = read(method(fit), pieces=pieces)
        errors.append(error_of([((0, 1), cache)], *document))
    assert (errors[1] < 0.7 * errors[0]).all()


@pytest.mark.slow
def test_groups_of_heads_are_fitted_each_in_its_own_rectangle():
    groups = kvjax.HeadGroups((((1,), method(True)), ((0,), method(True, 16))))
    caches, document = read(groups)
    for number, tx in enumerate((method(True), method(True, 16))):
        whole, _ = read(tx)
        head = (1, 0)[number]
        for row in range(3):
            mine, expected = slots_of(caches[number], row, 0), slots_of(whole, row, head)
            for name in ("position", "log_mass", "v"):
                close(mine[name], expected[name], "float32", name)
    fitted = error_of([((1,), caches[0]), ((0,), caches[1])], *document)
    plain = kvjax.HeadGroups((((1,), method(False)), ((0,), method(False, 16))))
    caches, _ = read(plain)
    assert (fitted < 0.7 * error_of([((1,), caches[0]), ((0,), caches[1])], *document)).all()


def test_what_is_fitted_is_stored_in_8_bits():
    plain, document = read(method(True))
    stored, _ = read(kvjax.chain(method(True), kvjax.Quantize(8)))
    for row, head in np.ndindex(3, 2):
        mine, expected = slots_of(stored, row, head), slots_of(plain, row, head)
        np.testing.assert_array_equal(mine["log_mass"], expected["log_mass"])
        assert np.abs(mine["v"] - expected["v"]).max() < 0.01 * np.abs(expected["v"]).max()
    fitted = error_of([((0, 1), stored)], *document)
    kept = read(kvjax.chain(method(False), kvjax.Quantize(8)))[0]
    assert (fitted < 0.7 * error_of([((0, 1), kept)], *document)).all()


def test_a_fit_of_16_bits_stays_finite():
    tx = method(True)
    (q, k, v), at = documents()
    cache = new_cache(tx, dtype=jnp.bfloat16)
    low = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    _, cache = attend(cache, *low, at, phase="prompt", last=False)
    where = at.max(1)[:, None] + 1 + np.arange(32, dtype=np.int32)[None]
    _, cache = attend(cache, *low, where, phase="probe")
    assert np.isfinite(np.asarray(cache.kv.v.read(), np.float32)).all()
    assert (np.asarray(cache.kv.log_mass)[np.asarray(cache.kv.live)] != 0).any()


@pytest.mark.parametrize("most_tokens", [10_000, 700])
def test_queries_are_those_of_every_nth_token(most_tokens):
    """Whatever calls the tokens come in, padded anywhere, and in rows of any length."""
    rng = np.random.default_rng(0)
    add = jax.jit(QuerySample.add)
    cache = kvjax.init_cache(
        kvjax.Full(), batch=3, kv_heads=2, head_dim=4, max_prompt=most_tokens, max_new=0,
        dtype=jnp.float32,
    )  # fmt: skip
    sample, size = QuerySample.empty(cache.kv), min(SAMPLE, most_tokens)
    seen = [([], []) for _ in range(3)]
    for width in (90, 1, 2800, 3600, 900):
        q = rng.normal(size=(3, 2, width, 4)).astype(np.float32)
        there = rng.random((3, width)) < np.array([0.9, 0.3, 0.0])[:, None]
        at = np.where(there, rng.integers(0, 10_000, (3, width)), -1).astype(np.int32)
        sample = add(sample, q, at)
        for row, (queries, places) in enumerate(seen):
            queries.extend(np.moveaxis(q[row][:, there[row]], 1, 0))
            places.extend(at[row][there[row]])
            step = 1
            while size * step < len(places):
                step *= 2
            expected = np.array(places[::step], int)
            np.testing.assert_array_equal(sample.position[row, : len(expected)], expected)
            assert (sample.position[row, len(expected) :] == -1).all()
            if len(expected):
                chosen = np.moveaxis(np.array(queries[::step]), 0, 1)
                np.testing.assert_array_equal(sample.query[row][:, : len(expected)], chosen)
    assert sample.count.tolist() == [len(places) for _, places in seen]
    assert len(seen[0][1]) > 3 * size


def test_of_each_head_no_more_than_four_times_the_budget_are_fitted():
    """Rows have 32, 24 and 30 tokens. Four times the budget is half of them."""
    shares = HeadShares(((0.5, 0.8),), layers=(0,), minimum=1, budget=0.5 / MOST_FITTED)
    caches = [read(method(fit, shares), seed=3)[0] for fit in (True, False)]
    all_of_it, _ = read(method(True, 0.5), seed=3)
    for row, most in enumerate((16, 12, 15)):
        for head in range(2):
            fitted, plain = (slots_of(cache, row, head) for cache in caches)
            np.testing.assert_array_equal(fitted["position"], plain["position"])
            changed = (fitted["log_mass"] != plain["log_mass"]) | (fitted["v"] != plain["v"]).any(1)
            assert changed.sum() == most
            best = slots_of(all_of_it, row, head)
            assert set(fitted["position"][changed]) == set(best["position"])
            if head == 0:
                close(fitted["v"][changed], best["v"], "fitted")
