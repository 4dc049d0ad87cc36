"""The fit of masses and values against SciPy's solvers in float64, and that it is never worse."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.transforms.kvzip import fit as fit_module
from kvjax.transforms.kvzip.fit import fit
from tests.references import attention_matching as reference
from tests.references.attention import softmax_attention
from tests.support.tolerances import close

LOWEST, HIGHEST = np.exp(fit_module.LOG_MASSES)
LOOKUPS = 1e-4


class Case:
    """Two rows of two KV heads: documents, queries with padding, and slots with free ones between.

    Some keys are near others, so that slots stand for several tokens.
    """

    def __init__(
        self, group=3, tokens=40, slots=12, free=3, dim=8, document=60, scale=0.6, soft_cap=None,
        seed=0, dtype="float32", not_fitted=None,
    ):  # fmt: skip
        rng = np.random.default_rng(seed)
        shape = (2, 2)
        self.options = {"scale": scale, "soft_cap": soft_cap}
        near = rng.integers(0, slots, size=document)
        near[:slots] = np.arange(slots)
        centres = rng.normal(size=(*shape, slots, dim))
        k = centres[:, :, near] + 0.3 * rng.normal(size=(*shape, document, dim))
        v = rng.normal(size=(*shape, document, dim))
        self.q = rng.normal(size=(*shape, group, tokens, dim)).astype(np.float32)
        self.k, self.v = (x[:, :, :slots].astype(dtype) for x in (k, v))
        self.live = np.ones((*shape, slots), bool)
        for head in np.ndindex(shape):
            self.live[head][rng.choice(slots, free, replace=False)] = False
        self.is_fitted = np.ones((*shape, slots), bool)
        if not_fitted is not None:  # the last slots, and one that stands among those before
            self.is_fitted[..., -not_fitted:] = False
            self.is_fitted[..., 1] = False
        self.first = slots - (not_fitted or 0)
        self.padding = np.zeros((2, tokens), bool)
        self.padding[1, tokens // 2 :] = True
        self.log_mass = np.where(self.live, 0.0, -np.inf).astype(np.float32)
        self.out = np.zeros(self.q.shape, np.float32)
        self.lse = np.full(self.q.shape[:4], -np.inf, np.float32)
        at, there = np.zeros(tokens, int), np.zeros(document, int)
        for b, h in np.ndindex(shape):
            x = [reference.logits(q, k[b, h], **self.options) for q in self.q[b, h]]
            lse = np.log(np.exp(np.array(x)).sum(-1))
            out, _ = softmax_attention(self.q[b, h], k[b, h], v[b, h], at, there, **self.options)
            self.out[b, h] = np.where(self.padding[b, :, None], 0, out)
            self.lse[b, h] = np.where(self.padding[b], -np.inf, lse)
        # What stands in free slots and in padding means nothing.
        self.k[~self.live], self.v[~self.live] = np.nan, np.nan
        for b in range(2):
            self.q[b][:, :, self.padding[b]] = np.nan

    @property
    def args(self):
        return [jnp.asarray(x) for x in (self.q, self.k, self.v, self.log_mass, self.out, self.lse)]

    def fitted(self, lookups=LOOKUPS):
        options = {**self.options, "lookups": lookups}
        if not self.is_fitted.all():
            options["fitted"] = jnp.asarray(self.is_fitted[..., : self.first])
        return [np.asarray(x) for x in jax.jit(lambda *x: fit(*x, **options))(*self.args)]

    def heads(self):
        """Of each head the live slots, logits of its queries, their lse, and their outputs."""
        for b, h in np.ndindex(2, 2):
            live, there = self.live[b, h], ~self.padding[b]
            q = self.q[b, h][:, there].reshape(-1, self.q.shape[-1]).astype(self.k.dtype)
            x = reference.logits(q, self.k[b, h][live], **self.options)
            lse, out = self.lse[b, h][:, there].ravel(), self.out[b, h][:, there]
            yield (b, h), live, x, lse.astype(float), out.reshape(len(q), -1).astype(float)


def error(x, mass, v, out):
    return np.linalg.norm(reference.weights(x, mass) @ v - out)


def choice_error(x, lse, mass, v, out, before):
    """The error by which a head's masses and values are chosen, with the values before the fit."""
    return reference.choice_error(x, lse, mass, v, out, np.square(before).sum(1).mean())


CASES = {
    "plain": {}, "soft cap": {"soft_cap": 2.0}, "one query head": {"group": 1, "tokens": 90},
    "every slot live": {"free": 0}, "16 bits": {"dtype": jnp.bfloat16},
    "some are fitted": {"not_fitted": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("block", "lookups"), [(7, LOOKUPS), (1024, LOOKUPS), (1024, 0.03)])
def test_masses_and_values_are_those_of_scipy(name, block, lookups, monkeypatch):
    monkeypatch.setattr(fit_module, "QUERIES", block)
    case = Case(**CASES[name])
    log_mass, v = case.fitted(lookups)
    assert log_mass.dtype == np.float32 and v.dtype == case.v.dtype
    for head, live, x, lse, out in case.heads():
        assert (log_mass[head][~live] == -np.inf).all() and (v[head][~live] == 0).all()
        mass, is_fitted = np.exp(log_mass[head][live].astype(float)), case.is_fitted[head][live]
        assert (mass[~is_fitted] == 1).all()
        expected = reference.masses(x, lse, LOWEST, HIGHEST, lookups, is_fitted)
        off, least = (
            reference.mass_error(x, lse, found, lookups, is_fitted) for found in (mass, expected)
        )
        assert off < 1.001 * least + 1e-4
        totals = (np.exp(x - lse[:, None]) @ found for found in (mass, expected))
        np.testing.assert_allclose(*totals, rtol=5e-3)
        before = case.v[head][live].astype(float)
        values = reference.values(x, mass, before, out, lookups, is_fitted)
        close(v[head][live], values, "bfloat16" if "16" in name else "accumulated")
        np.testing.assert_array_equal(v[head][live][~is_fitted], case.v[head][live][~is_fitted])
        most = 0.7 if lookups == LOOKUPS else 0.9
        assert error(x, mass, v[head][live].astype(float), out) < most * error(
            x, np.ones(len(before)), before, out
        )


def test_free_slots_before_and_behind_change_nothing():
    """Heads are fitted as they are without the free slots."""
    case, starts = Case(), {(0, 0): 0, (0, 1): 60, (1, 0): 63, (1, 1): 280}
    log_mass, v = case.fitted()
    k, values = (np.full((2, 2, 300, 8), np.nan, np.float32) for _ in range(2))
    masses = np.full((2, 2, 300), -np.inf, np.float32)
    for head, start in starts.items():
        place = slice(start, start + 12)
        k[head][place], values[head][place] = case.k[head], case.v[head]
        masses[head][place] = case.log_mass[head]
    case.k, case.v, case.log_mass = k, values, masses
    wide_mass, wide_v = case.fitted()
    for head, start in starts.items():
        place = slice(start, start + 12)
        close(np.exp(wide_mass[head][place]), np.exp(log_mass[head]), "fitted")
        close(wide_v[head][place], v[head], "fitted")
        assert np.isinf(np.delete(wide_mass[head], np.r_[place])).all()
        assert (np.delete(wide_v[head], np.r_[place], axis=0) == 0).all()


def test_what_stands_for_equal_keys_gives_full_attention():
    """Keys occur once, twice, ... six times: masses are these numbers, values are the means.

    They are as far off as one hundredth of a query that finds each slot as it was makes them.
    """
    rng = np.random.default_rng(1)
    times = np.arange(1, 7)
    kept, owner = rng.normal(size=(6, 16)), np.repeat(np.arange(6), times)
    k, v = kept[owner], rng.normal(size=(21, 16))
    q = rng.normal(size=(2, 50, 16))
    out, _ = softmax_attention(q, k, v, np.zeros(50), np.zeros(21), scale=0.5)
    lse = np.log(np.exp(0.5 * q @ k.T).sum(-1))
    first = np.array([np.argmax(owner == i) for i in range(6)])
    args = [jnp.asarray(x, jnp.float32)[None, None] for x in (q, kept, v[first])]
    rest = [jnp.asarray(x, jnp.float32)[None, None] for x in (np.zeros(6), out, lse)]
    fitted = fit(*args, *rest, scale=0.5, lookups=1e-4)
    np.testing.assert_allclose(np.exp(fitted.log_mass)[0, 0], times, rtol=0.03)
    means = [v[owner == i].mean(0) for i in range(6)]
    np.testing.assert_allclose(fitted.v[0, 0], means, atol=0.1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("noise", [0.0, 0.3, 3.0, 30.0])
def test_each_head_gets_the_pair_with_the_least_error(seed, noise):
    """Outputs with noise that no values can give: the values that there were may be the best."""
    case = Case(seed=seed, tokens=12, slots=10, free=2)
    rng = np.random.default_rng(seed)
    case.lse += (noise / 3 * rng.normal(size=case.lse.shape)).astype(np.float32)
    log_mass, v = case.fitted(0.03)
    for head, live, x, lse, out in case.heads():
        before, new = case.v[head][live].astype(float), v[head][live].astype(float)
        ones, mass = np.ones(len(before)), reference.masses(x, lse, LOWEST, HIGHEST, 0.03)
        pairs = [(ones, before), (mass, before)]
        pairs.append((mass, reference.values(x, mass, before, out, 0.03)))
        errors = [choice_error(x, lse, *pair, out, before) for pair in pairs]
        found = np.exp(log_mass[head][live].astype(float))
        got = choice_error(x, lse, found, new, out, before)
        assert got <= min(errors) * 1.01 + 1e-5
        best = int(np.argmin(errors))
        if sorted(errors)[1] > 1.05 * sorted(errors)[0]:
            close(new, pairs[best][1], "accumulated")
            assert np.abs(found - pairs[best][0]).max() < 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masses_count_where_outputs_are_alike(dtype):
    """One token 300 times, of which 64 stay: every choice has the same outputs."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(1, 1, 2, 300, 16)), dtype)
    key = jnp.asarray(rng.normal(size=16), dtype)
    k = jnp.broadcast_to(key, (1, 1, 64, 16))
    x = 0.25 * (np.asarray(q, np.float64) @ np.asarray(key, np.float64))
    out, lse = jnp.ones(q.shape), jnp.asarray(x + np.log(300), jnp.float32)
    args = q, k, jnp.ones(k.shape, dtype), jnp.zeros((1, 1, 64)), out, lse
    log_mass = np.asarray(fit(*args, scale=0.25, lookups=LOOKUPS).log_mass, np.float64)
    mass = reference.masses(
        np.repeat(x.reshape(-1, 1), 64, 1), np.asarray(lse, float).ravel(), LOWEST, HIGHEST, LOOKUPS
    )
    np.testing.assert_allclose(np.exp(log_mass)[0, 0], mass, rtol=0.01)
    assert abs(np.log(np.exp(log_mass).sum()) - np.log(300)) < 0.12 < np.log(300 / 64)


HARD = {
    "equal keys": {"equal": True}, "more slots than queries": {"tokens": 3, "slots": 50, "free": 0},
    "equal keys and few queries": {"equal": True, "tokens": 2, "slots": 60, "free": 5},
    "one live slot": {"slots": 5, "free": 4}, "no slot": {"slots": 5, "free": 5},
    "no query": {"nothing": True}, "large logits": {"scale": 40.0},
}  # fmt: skip


def hard(name, seed=0):
    options = dict(HARD[name])
    equal, nothing = options.pop("equal", False), options.pop("nothing", False)
    case = Case(seed=seed, **options)
    if equal:  # the outputs are still those of different keys
        case.k = np.where(case.live[..., None], np.nan_to_num(case.k)[:, :, :1] + 0.1, np.nan)
        case.k = case.k.astype(np.float32)
    if nothing:
        case.lse[:], case.out[:] = -np.inf, 0
    return case


@pytest.mark.parametrize("name", HARD)
def test_hard_systems_stay_finite_and_are_not_worse(name):
    case = hard(name)
    log_mass, v = case.fitted()
    live = case.live
    assert np.isfinite(v).all() and np.isfinite(log_mass[live]).all()
    assert (log_mass[~live] == -np.inf).all() and (v[~live] == 0).all()
    if name == "no query":
        assert (log_mass == case.log_mass).all() and (v[live] == case.v[live]).all()
    elif name != "no slot":
        for head, there, x, lse, out in case.heads():
            before = case.v[head][there].astype(float)
            mass = np.exp(log_mass[head][there].astype(float))
            after = choice_error(x, lse, mass, v[head][there].astype(float), out, before)
            least = choice_error(x, lse, np.ones(len(before)), before, out, before)
            assert after <= least * (1 + 1e-5)


@pytest.mark.parametrize("far", [-20, -36, -38, -39, -40, -41, -42, -44, -60, -200])
def test_slots_that_no_query_looks_at_change_nothing(far):
    """Their logits lie so far below all others that their squares leave the range of float32."""
    case = Case(free=0)
    for each in (case.q, case.k):  # one more channel, 1 in all queries
        each[..., 0] = 1
    case.k[..., 0] = 0
    case.k[:, :, ::2, 0] = far / case.options["scale"]
    log_mass, v = case.fitted()
    assert np.isfinite(v).all() and np.isfinite(log_mass).all()
    for head, _, x, lse, _ in case.heads():
        mass = np.exp(log_mass[head].astype(float))
        expected = reference.masses(x, lse, LOWEST, HIGHEST, LOOKUPS)
        off, least = (reference.mass_error(x, lse, found, LOOKUPS) for found in (mass, expected))
        assert off < 1.001 * least + 1e-4


@pytest.mark.parametrize("seed", range(8))
def test_no_head_is_worse_where_there_is_nothing_to_gain(seed):
    """Everything is kept: errors are those of rounding, and masses must not add to them."""
    case = Case(seed=seed, slots=20, document=20, free=0)
    log_mass, v = case.fitted()
    for head, _, x, _, out in case.heads():
        mass = np.exp(log_mass[head].astype(float))
        before = error(x, np.ones(20), case.v[head], out)
        assert error(x, mass, v[head], out) <= before + 1e-5 * np.linalg.norm(out)


def test_masses_that_were_there_count_for_what_was_there():
    """The masses and values that there were are the best: they stay, bit for bit."""
    case = Case(free=0)
    rng = np.random.default_rng(3)
    case.log_mass = rng.uniform(3.5, 5, case.log_mass.shape).astype(np.float32)  # out of bounds
    case.log_mass[..., ::2] = -4
    for b, h in np.ndindex(2, 2):
        there = ~case.padding[b]
        x = reference.logits(case.q[b, h][:, there], case.k[b, h], **case.options)
        mass = np.exp(case.log_mass[b, h].astype(float))
        for g in range(3):
            case.out[b, h, g, there] = reference.weights(x[g], mass) @ case.v[b, h]
            case.lse[b, h, g, there] = np.log(np.exp(x[g]) @ mass)
    log_mass, v = case.fitted()
    assert (log_mass == case.log_mass).all() and (v == case.v).all()


def test_on_each_device_of_a_mesh():
    case = Case()
    options = {**case.options, "lookups": LOOKUPS}
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, "tensor")
    by_head = jax.shard_map(lambda *x: fit(*x, **options), mesh=mesh, in_specs=spec, out_specs=spec)
    for found, expected in zip(jax.jit(by_head)(*case.args), case.fitted(), strict=True):
        close(found, expected, "rounding")


def test_memory_does_not_grow_with_queries_times_slots():
    slots, tokens = 1024, 16_384
    shapes = [
        (1, 2, 4, tokens, 64), (1, 2, slots, 64), (1, 2, slots, 64), (1, 2, slots),
        (1, 2, 4, tokens, 64), (1, 2, 4, tokens),
    ]  # fmt: skip
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = jax.jit(lambda *x: fit(*x, scale=0.1)).lower(*args).compile()
    taken = compiled.memory_analysis().temp_size_in_bytes
    assert taken < math.prod(shapes[0]) * 4 + 64 * 2**20 < 4 * tokens * slots * 4


SMALL = [
    np.zeros(shape, np.float32)
    for shape in (
        (1, 2, 3, 4, 8), (1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5), (1, 2, 3, 4, 8), (1, 2, 3, 4),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("place", "shape", "message"),
    [
        (0, (1, 2, 4, 8), r"\[B, H, G, T, D\].* got \(1, 2, 4, 8\)"),
        (1, (1, 1, 5, 8), r"and \(1, 1, 5, 8\)"),
        (2, (1, 2, 6, 8), r"v must have shape \(1, 2, 5, 8\), got \(1, 2, 6, 8\)"),
        (3, (1, 2, 6), "log_mass must have shape"),
        (4, (1, 2, 3, 5, 8), "out must have shape"),
        (5, (1, 6, 4), r"lse must have shape \(1, 2, 3, 4\), got \(1, 6, 4\)"),
    ],
)
def test_refused(place, shape, message):
    args = [*SMALL]
    args[place] = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=message):
        fit(*args, scale=1.0)


@pytest.mark.parametrize("lookups", [0, -1.0, 1e-6, np.inf, np.nan])
def test_refused_lookups(lookups):
    with pytest.raises(
        ValueError, match=f"lookups must be a finite number, 0.0001 at least, got {lookups}"
    ):
        fit(*SMALL, scale=1.0, lookups=lookups)
