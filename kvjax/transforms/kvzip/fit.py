"""Attention Matching's fit: the tokens that stay get the masses and values of the whole prompt."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_factor, cho_solve, solve_triangular
from jaxtyping import Array, Bool, Float

from pallas_kernels.base.logits import finite_or_zero, or_one
from pallas_kernels.base.rows import block_of, over_blocks
from pallas_kernels.base.varying import varying

QUERIES = 1024  # of a block: it has as many rows of weights, beside P × P sums
# In 24 heads of SmolLM2 that keep a twentieth, the error of masses is .2593 after 100 rounds and
# .2589 after 300. The bounds are those of the authors for keys that are chosen by their attention.
# With e^7 in place of e^3, it is .85 in place of .51 for queries that are not fitted.
ROUNDS = 100
LOG_MASSES = (-3.0, 3.0)
# Without lookups, later questions get wrong values from tokens that few of the fitted queries look
# up: of 50 needles in 1,024 tokens, the bundled model finds 33 with such a fit, 45 with these
# lookups, and 41 without a fit.
LOOKUPS = 1 / 400
# With fewer lookups, slots that are alike share their masses in ways that `ROUNDS` do not settle:
# with a hundredth of it, log-masses of 32 and 128 random slots are off by 0.1 to 3.
LEAST_LOOKUPS = 1e-4


class Fitted(NamedTuple):
    """Masses and values of a layer's kept slots after the fit."""

    log_mass: Float[Array, "B H S"]
    v: Float[Array, "B H S D"]


def fit(
    q: Float[Array, "B H G T D"],
    k: Float[Array, "B H S D"],
    v: Float[Array, "B H S D"],
    log_mass: Float[Array, "B H S"],
    out: Float[Array, "B H G T D"],
    lse: Float[Array, "B H G T"],
    *,
    scale: float,
    soft_cap: float | None = None,
    seen: Bool[Array, "B H T S"] | None = None,
    fitted: Bool[Array, "B H P"] | None = None,
    lookups: float = LOOKUPS,
) -> Fitted:
    """Fits masses and values of kept slots to the attention of some queries over all tokens.

    The N = G·T queries of a KV head are fitted together. With
    `x[n, s] = scale · q[n]·k[s]` (capped by `soft_cap`), in this order:

    1. Masses `B`, least squares of `Σ_s exp(x[n, s]) B[s] = exp(lse[n])` with `B >= 0`. Each row is
       divided by `exp(lse[n])`, so that all queries weigh the same. For each slot, `lookups · N`
       more rows say `B[s] = 1`. Then log B is brought to [-3, 3]. Slots that are not fitted keep
       their masses.
    2. Values `v + dV`, least squares of `‖X (v + dV) − out‖² + lookups · N · ‖dV‖²` with
       `X = softmax(x + log B)`. For slots that are not fitted, dV is 0.

    So each slot has `lookups · N` queries that look at nothing else and find it as it was. They
    stand for questions that come later: without them, a slot that the N queries hardly look at
    could get any value.

    Of the masses and values that there were, the new masses with the values that there were, and
    both new, each head gets the pair with the smallest

        Σ_n ‖(X v)[n] − out[n]‖² + w · tanh²((lse_B[n] − lse[n]) / 2)

    with `lse_B[n] = log Σ_s exp(x[n, s]) B[s]`, and w the mean of `‖v[s]‖²` before the fit. It is
    four times the error of the outputs beside later tokens that weigh as much as all tokens before
    them, and whose values differ from the outputs by w. So no head is worse than before for these
    queries, and masses count where outputs alone would not tell them apart.

    Memory is O(P² + 3·1024·S) for P slots that may be fitted: heads come one after the other,
    queries in blocks. Time grows with `P·S`.

    Args:
      q: queries whose attention is to stay, grouped under their KV head and rotated: those of
        KVzip's repetition.
      k, v: keys, rotated, and values of the kept slots.
      log_mass: log-masses of the slots; `-inf`: the slot is free.
      out, lse: outputs and log-sum-exps of these queries' attention over all tokens, as
        `prompt_attention` returns them. A query whose `lse` is `-inf` saw nothing (padding) and
        counts for nothing.
      scale, soft_cap: scale and bound of the logits (static).
      seen: which slots each query sees; None: all that are live.
      fitted: which of the first P slots are fitted. Those behind them are not. None: all are.
      lookups: how many more queries look up each slot by itself, as a share of N, 1e-4 at least
        (static); 1/400.

    Returns:
      Log-masses in float32, `-inf` where a slot is free, and values in the dtype of `v`, 0 there.

    Raises:
      ValueError: shapes that do not fit each other, or `lookups` is below 1e-4.

    References:
      Fast KV Compaction via Attention Matching, arXiv 2602.16284.

    Deviations from the paper:
      - Masses are found by accelerated projected gradients (`optax.nnls`) over columns of length 1.
        Columns as they are differ by orders of magnitude and need more than 1,000 rounds. The
        authors' code takes two plain gradient steps within the bounds.
      - Normal equations take the place of the matrix of N rows in both problems.
      - The authors' code has no `lookups`, and takes new masses and values in any case.

    Example:
      Two of four tokens stay, and stand for the other two, whose keys are the same:

      >>> import jax, jax.numpy as jnp
      >>> from kvjax.transforms.kvzip.fit import fit
      >>> from pallas_kernels import Mask, Queries, Seen, prompt_attention
      >>> q = jax.random.normal(jax.random.key(0), (1, 1, 1, 32, 4))
      >>> k, v = jnp.eye(4)[None, None, [0, 1, 0, 1]], jnp.arange(16.0).reshape(1, 1, 4, 4)
      >>> bias, positions = jnp.zeros((1, 1, 4)), jnp.zeros((1, 1, 4), int)
      >>> queries, seen = Queries(q, jnp.zeros((1, 32), int)), Seen(bias, positions)
      >>> out, lse = prompt_attention(queries, k, v, seen, Mask(0.5))
      >>> kept = k[:, :, :2], v[:, :, :2], bias[..., :2]
      >>> fitted = fit(q, *kept, out, lse, scale=0.5, lookups=1e-4)
      >>> jnp.exp(fitted.log_mass).round(1).tolist(), fitted.v[0, 0].round(1).tolist()
      ([[[2.0, 2.0]]], [[4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]])
    """
    _check(q, k, v, log_mass, out, lse, fitted, lookups)

    def fit_head(head: tuple[Array, ...]) -> tuple[Array, Array]:
        return _fit_head(*head, scale=scale, soft_cap=soft_cap, lookups=lookups)

    # All sums are of products in float32: in TF32, rounding could be larger than `lookups`.
    with jax.default_matmul_precision("highest"):
        fitted = jnp.ones(log_mass.shape, bool) if fitted is None else fitted
        kept = (k, v, log_mass, fitted, *(() if seen is None else (seen,)))
        by_head = [x.reshape(-1, *x.shape[2:]) for x in kept]
        by_query = [x.reshape(-1, q.shape[2] * q.shape[3], *x.shape[4:]) for x in (q, out, lse)]
        new_mass, new_v = jax.lax.map(fit_head, (*by_query, *by_head))
    return Fitted(new_mass.reshape(k.shape[:3]), new_v.reshape(v.shape))


def _fit_head(
    q: Float[Array, "N D"],
    out: Float[Array, "N D"],
    lse: Float[Array, " N"],
    k: Float[Array, "S D"],
    v: Float[Array, "S D"],
    log_mass: Float[Array, " S"],
    fitted: Bool[Array, " P"],
    seen: Bool[Array, "T S"] | None = None,
    *,
    scale: float,
    soft_cap: float | None,
    lookups: float,
) -> tuple[Float[Array, " S"], Float[Array, "S D"]]:
    """Returns log-masses and values of one KV head."""
    live, dtype, most = log_mass > -jnp.inf, v.dtype, fitted.size
    fitted &= live[:most]
    behind = (0, live.size - most)
    mass_of_others = jnp.where(jnp.pad(fitted, behind), 0, jnp.exp(log_mass))
    visible = (lse > -jnp.inf)[:, None]
    lookups_of_slot = lookups * jnp.maximum(visible.sum(dtype=jnp.float32), 1)
    if seen is not None:
        visible &= jnp.tile(seen, (lse.size // seen.shape[0], 1))
    k, v = (jnp.where(live[:, None], x, 0) for x in (k, v.astype(jnp.float32)))
    square = jnp.zeros((most, most), jnp.float32)

    def sum_over_queries(of_block, start):
        """Sums what a function returns for the logits `[n, S]` and the rest of some queries."""

        def add(first, count, sums):
            blocks = (block_of(x, first, count, 0) for x in (q, out, lse, visible))
            q_n, out_n, lse_n, visible_n = blocks
            logits = scale * jnp.einsum(
                "nd,sd->ns", q_n.astype(k.dtype), k, preferred_element_type=jnp.float32
            )
            if soft_cap is not None:
                logits = soft_cap * jnp.tanh(logits / soft_cap)
            logits = jnp.where(live[None] & visible_n, logits, -jnp.inf)
            return jax.tree.map(jnp.add, sums, of_block(logits, out_n.astype(jnp.float32), lse_n))

        arrays = q, k, v, live, fitted, out, visible
        return over_blocks(lse.size, QUERIES, add, varying(start, *arrays))

    def for_masses(logits, out_n, lse_n):
        ratio = jnp.exp(logits - finite_or_zero(lse_n)[:, None])
        rest = 1 - ratio @ mass_of_others
        ratio = jnp.where(fitted[None], ratio[:, :most], 0)
        return ratio.T @ ratio, rest @ ratio

    def for_values(logits, out_n, lse_n):
        weights, error, _ = _mixed(logits, out_n, new_mass, v)
        weights = jnp.where(fitted[None], weights[:, :most], 0)
        return weights.T @ weights, weights.T @ error

    def for_errors(logits, out_n, lse_n):
        def of(mass, values):
            _, error, total = _mixed(logits, out_n, mass, values)
            off = jnp.tanh((total - finite_or_zero(lse_n)) / 2)
            off = jnp.where(total > -jnp.inf, off, 0)
            return jnp.square(error).sum() + value_norm * jnp.square(off).sum()

        return jax.vmap(of)(*candidates)

    gram, sums = sum_over_queries(for_masses, (square, square[0]))
    new_mass = jnp.pad(_masses(gram, sums, lookups_of_slot), behind)
    new_mass = jnp.where(jnp.pad(fitted, behind), new_mass, log_mass)
    gram, moments = sum_over_queries(for_values, (square, jnp.zeros_like(v[:most])))
    new_v = v + jnp.pad(_added_values(gram, moments, lookups_of_slot), (behind, (0, 0)))
    new_v = new_v.astype(dtype).astype(jnp.float32)
    candidates = jnp.stack([log_mass, new_mass, new_mass]), jnp.stack([v, v, new_v])
    value_norm = jnp.square(v).sum() / jnp.maximum(live.sum(dtype=jnp.float32), 1)
    errors = sum_over_queries(for_errors, jnp.zeros(3, jnp.float32))
    best = jnp.argmin(jnp.where(jnp.isnan(errors), jnp.inf, errors))
    mass, values = (x[best] for x in candidates)
    return mass, values.astype(dtype)


def _mixed(
    logits: Float[Array, "N S"],
    out: Float[Array, "N D"],
    log_mass: Float[Array, " S"],
    v: Float[Array, "S D"],
) -> tuple[Float[Array, "N S"], Float[Array, "N D"], Float[Array, " N"]]:
    """Returns weights of the slots, what mixed values lack of the outputs, and log-sum-exps.

    A query that sees nothing, whose logits are all `-inf`, has 0, 0 and `-inf`.
    """
    logits = logits + log_mass[None]
    top = logits.max(1, keepdims=True, initial=-jnp.inf)
    weights = jnp.exp(logits - finite_or_zero(top))
    total = weights.sum(1, keepdims=True)
    weights = weights / or_one(total)
    error = jnp.where(top > -jnp.inf, out - weights @ v, 0)
    return weights, error, (finite_or_zero(top) + jnp.log(total))[:, 0]


def _masses(
    gram: Float[Array, "P P"], sums: Float[Array, " P"], lookups_of_slot: Float[Array, ""]
) -> Float[Array, " P"]:
    """Solves for log-masses, given `AᵀA` and `Aᵀr` of the ratios `A = exp(x - lse)`.

    Each row of `r` is what slots that are not fitted leave of 1. With `R` for which
    `RᵀR = AᵀA + c`, and c for `lookups_of_slot`, `‖R B − R⁻ᵀ(Aᵀr + c)‖` and
    `‖A B − r‖² + c ‖B − 1‖²` have the same minimum.
    """
    import optax  # here, so that importing kvjax does without it

    gram = gram + lookups_of_slot * jnp.eye(sums.size, dtype=gram.dtype)
    length = jnp.sqrt(jnp.diagonal(gram))
    gram = gram / length[:, None] / length[None]
    upper = jnp.linalg.cholesky(gram + _rounding(gram) * jnp.eye(sums.size, dtype=gram.dtype)).T
    target = solve_triangular(upper, (sums + lookups_of_slot) / length, trans=1)
    masses = optax.nnls(upper, target, ROUNDS) / length
    return jnp.clip(jnp.log(masses), *LOG_MASSES)


def _added_values(
    gram: Float[Array, "P P"], moments: Float[Array, "P D"], lookups_of_slot: Float[Array, ""]
) -> Float[Array, "P D"]:
    """Solves `(XᵀX + c) dV = Xᵀ(out − X v)`, with c for `lookups_of_slot`."""
    ridge = jnp.maximum(lookups_of_slot, _rounding(gram) * jnp.diagonal(gram).mean())
    return cho_solve(cho_factor(gram + ridge * jnp.eye(len(gram), dtype=gram.dtype)), moments)


def _rounding(gram: Float[Array, "P P"]) -> float:
    """Returns a bound on the rounding of a matrix's eigenvalues, in means of its diagonal.

    No eigenvalue is larger than P such means. With so much on the diagonal there is a Cholesky
    factor, even of slots that are all alike.
    """
    return gram.shape[0] * float(jnp.finfo(jnp.float32).eps)


def _check(q, k, v, log_mass, out, lse, fitted, lookups) -> None:
    if q.ndim != 5 or k.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[4] != k.shape[3]:
        raise ValueError(
            f"q must be [B, H, G, T, D] and k [B, H, S, D], got {q.shape} and {k.shape}"
        )
    expected = {"v": k.shape, "log_mass": k.shape[:3], "out": q.shape, "lse": q.shape[:4]}
    for (name, shape), x in zip(expected.items(), (v, log_mass, out, lse), strict=True):
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {x.shape}")
    if fitted is not None and (fitted.shape[:2] != k.shape[:2] or fitted.shape[2] > k.shape[2]):
        raise ValueError(
            f"fitted must be [B, H, P] for up to {k.shape[2]} slots of k {k.shape}, got "
            f"{fitted.shape}"
        )
    if not LEAST_LOOKUPS <= lookups < math.inf:
        raise ValueError(
            f"lookups must be a finite number, {LEAST_LOOKUPS} at least, got {lookups}"
        )
