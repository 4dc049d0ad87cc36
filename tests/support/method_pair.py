"""A transform and its reference side by side, fed the same tokens and compared at every call.

The library runs jitted on a whole ragged batch, in float32 or in 16 bits; the reference runs in
float64 on one row and one KV head at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from tests.references import h2o, kvcrush, kvmerger, pyramidinfer, snapkv
from tests.references.rope import rope as rotate
from tests.support.attending import OPTIONS, flushed, init_cache, of_heads
from tests.support.tolerances import close, within_roundings

STATIC = ("transform", "phase", "last", "scale", "window", "soft_cap")
attend = jax.jit(  # equal transforms share compiled code
    kvjax.attend,
    static_argnames=STATIC,
)

LENGTHS = (37, 5, 52)  # the second row is shorter than every budget used with them
WIDTH = 56  # prompt calls of one width, over and over, so that tests share compiled code
SIDES = ("right", "left", "scattered")


class Pair:
    """One layer of the library, and one reference per (row, KV head).

    Token p of row b is the same random q, k, v whichever call brings it.  Every call checks the
    outputs, the kept positions and, where the method has them, the accumulated scores.

    transform: of the library.  reference: makes the reference of one row and head.
    heads: KV heads and query heads per KV head.  options: scale, window, soft_cap, sinks of
    attention, given to both.  rope: both get rotated keys, or with `late` unrotated ones.
    dtype: of the tokens and the cache; both get tokens that it holds exactly.  roundings: what
    outputs and slots may be off in 16 bits, relative to the largest value or key.
    """

    def __init__(
        self,
        transform: kvjax.KVTransform,
        reference: Callable[..., object],
        *,
        rows: int = 3,
        heads: tuple[int, int] = (2, 2),
        head_dim: int = 8,
        seed: int = 0,
        max_prompt: int = 128,
        max_new: int = 64,
        rope: kvjax.Rope | None = None,
        late: bool = False,
        layer: int | None = None,
        dtype: jnp.dtype = jnp.float32,
        roundings: float = 2.0,
        **options: float | None,
    ) -> None:
        self.dtype, self.roundings = jnp.dtype(dtype), roundings
        self.transform, self.options, self.rope, self.late = transform, options, rope, late
        self.rng = np.random.default_rng(seed)
        self.rows, (self.kv_heads, self.group) = rows, heads
        size = (rows, self.kv_heads * (self.group + 2), max_prompt + max_new, head_dim)
        data = self.held(self.rng.normal(size=size))
        q, self.k, self.v = np.split(data, [-2 * self.kv_heads, -self.kv_heads], axis=1)
        self.q = 2 * q  # attention peaked enough for tokens of all ages to become heavy
        self.next = np.zeros(rows, int)
        self.steps = 0  # decode steps since the last prompt
        self.references = {
            (row, head): reference(**of_heads(options, self.query_heads(head)))
            for row, head in itertools.product(range(rows), range(self.kv_heads))
        }
        limits = {"max_prompt": max_prompt, "max_new": max_new}
        shape = {"batch": rows, "kv_heads": self.kv_heads, "head_dim": head_dim}
        query_heads = self.kv_heads * self.group
        of_logits = {name: options[name] for name in OPTIONS if name in options}
        self.cache = init_cache(
            transform, query_heads=query_heads, dtype=dtype, layer=layer, **shape, **limits,
            **of_logits,
        )  # fmt: skip
        self.capacity = transform.extent(kvjax.Extent(max_prompt, max_new)).total

    def held(self, x: np.ndarray) -> np.ndarray:
        """The numbers as the dtype of the tokens holds them, in float32."""
        return np.array(jnp.asarray(x, self.dtype).astype(jnp.float32))

    def close(self, actual: np.ndarray, expected: np.ndarray, where: str) -> None:
        """Asserts that the library's numbers are the reference's."""
        if self.dtype == jnp.float32:
            close(actual, expected, "reference", where)
        else:
            within_roundings(actual, expected, self.dtype, self.roundings, where)

    def query_heads(self, head: int) -> slice:
        """Those of a KV head."""
        return slice(head * self.group, (head + 1) * self.group)

    def prompt(self, counts, side: str = "right", chunks: int = 1) -> Pair:
        """The next `counts[b]` tokens of every row, padded to WIDTH, in `chunks` calls."""
        positions = np.full((self.rows, WIDTH), -1)
        for row, count in enumerate(counts):
            columns = self._columns(count, side)
            positions[row, columns] = self.next[row] + np.arange(count)
        self.next += counts
        parts = np.array_split(positions, chunks, axis=1)
        with clear_choices():
            for i, part in enumerate(parts):
                self._prompt_chunk(part, last=i == len(parts) - 1)
            interval = kvjax.flush_interval(self.cache)
            if interval is not None and self.steps % interval:
                self._flush(interval)  # rows without a token of this prompt may lack room
        self.steps = 0
        return self

    def decode(self, steps: int, stopped: tuple[int, ...] = ()) -> Pair:
        """`steps` tokens more, one at a time; `stopped` rows get padding.

        The cache is flushed when it has to be, and the references that have a `flush` too.
        """
        interval = kvjax.flush_interval(self.cache)
        with clear_choices():
            for _ in range(steps):
                going = ~np.isin(np.arange(self.rows), stopped)
                positions = np.where(going, self.next, -1)
                self.next += going
                self._decode_token(positions)
                self.steps += 1
                if interval is not None and self.steps % interval == 0:
                    self._flush(interval)
        return self

    def _flush(self, interval: int) -> None:
        self.cache = flushed(self.cache, interval)
        self.host = jax.device_get(self.cache.kv)
        for (row, head), reference in self.references.items():
            if hasattr(reference, "flush"):
                reference.flush(interval)
            where = f"row {row}, head {head}, flushed at {self.next[row]} tokens"
            self._check_slots(row, head, where)

    def kept(self, row: int, head: int) -> list[int]:
        """Positions that the library holds."""
        return sorted(self.host.position[row, head][self.host.live[row, head]].tolist())

    def scores(self, row: int, head: int) -> np.ndarray:
        """Accumulated attention in position order, [G, S]."""
        position = self.host.position[row, head]
        live = np.flatnonzero(self.host.live[row, head])
        order = live[np.argsort(position[live])]
        return self.host.column("attention")[row, head].T[:, order]

    def _columns(self, count: int, side: str) -> np.ndarray:
        if side == "scattered":
            return np.sort(self.rng.permutation(WIDTH)[:count])
        return np.arange(count) + (WIDTH - count if side == "left" else 0)

    def _tokens(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """What `x` holds at `positions` [B, T]; padding tokens are large noise."""
        index = np.maximum(positions, 0)[:, None, :, None]
        noise = self.rng.normal(size=(*x.shape[:2], positions.shape[1], x.shape[3])) * 100
        taken = np.take_along_axis(x, index, axis=2)
        return np.where(positions[:, None, :, None] >= 0, taken, noise).astype(np.float32)

    def _run(self, positions: np.ndarray, **call) -> tuple[list[np.ndarray], np.ndarray]:
        """Runs the library.  Returns q, k, v as the reference is to get them, and the output."""
        qkv = [self._tokens(x, positions) for x in (self.q, self.k, self.v)]
        where = jnp.asarray(positions, jnp.int32)
        call |= self.options
        given = [jnp.asarray(x, self.dtype) for x in qkv]
        out, self.cache = attend(self.transform, self.cache, *given, where, rope=self.rope, **call)
        self.host = jax.device_get(self.cache.kv)
        if self.rope is not None and not self.late:
            inv_freq = np.asarray(self.rope.inv_freq)
            for i, row in itertools.product((0, 1), range(self.rows)):
                qkv[i] = qkv[i].astype(np.float64)
                qkv[i][row] = rotate(qkv[i][row], positions[row], inv_freq, self.rope.factor)
        out = np.asarray(out.astype(jnp.float32))
        return qkv, out.reshape(self.rows, self.kv_heads, self.group, -1, out.shape[-1])

    def _prompt_chunk(self, positions: np.ndarray, last: bool) -> None:
        (q, k, v), out = self._run(positions, phase="prompt", last=last)
        for (row, head), reference in self.references.items():
            own = self.query_heads(head)
            expected = reference.prompt(
                q[row, own], k[row, head], v[row, head], positions[row], last=last
            )
            self._check(row, head, out[row, head], expected)
        if last:
            assert self.cache.kv.slots == self.capacity

    def _decode_token(self, positions: np.ndarray) -> None:
        (q, k, v), out = self._run(positions[:, None], phase="decode")
        for (row, head), reference in self.references.items():
            own = self.query_heads(head)
            expected = np.zeros((self.group, out.shape[-1]))
            if positions[row] >= 0:
                expected = reference.decode(
                    q[row, own, 0], k[row, head, 0], v[row, head, 0], int(positions[row])
                )
            self._check(row, head, out[row, head, :, 0], expected)

    def _check(self, row: int, head: int, out: np.ndarray, expected: np.ndarray) -> None:
        where = f"row {row}, head {head}, {self.next[row]} tokens so far"
        self.close(out, expected, where)
        self._check_slots(row, head, where)

    def _check_slots(self, row: int, head: int, where: str) -> None:
        reference, kv = self.references[row, head], self.host
        assert self.kept(row, head) == reference.kept, where
        assert int(kv.dropped[row, head]) == 0, where
        if "attention" in kv.columns and len(reference.slots):
            close(self.scores(row, head), reference.slots.scores, "accumulated", where)


@contextmanager
def clear_choices():
    """Fails where a reference chooses between scores that float32 might order differently.

    Best kept and best dropped score must be equal (ties are decided by position) or apart by more
    than 1e-5 of the largest score.  Where it fails, another seed has to be chosen.
    """

    def watched(scores: np.ndarray, count: int) -> list[int]:
        ordered = -np.sort(-scores)
        if 0 < count < len(ordered):
            gap = ordered[count - 1] - ordered[count]
            assert gap == 0 or gap > 1e-5 * abs(ordered[0]), f"near tie ({gap}): change the seed"
        return original(scores, count)

    original = h2o.best
    with ExitStack() as stack:
        for module in (h2o, kvcrush, kvmerger, pyramidinfer, snapkv):
            stack.enter_context(mock.patch.object(module, "best", watched))
        yield
