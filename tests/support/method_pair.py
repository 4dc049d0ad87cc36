"""A transform and its reference side by side, fed the same tokens and compared at every call.

The library runs jitted on a whole ragged batch, in float32 or in 16 bits; the reference runs in
float64 on one row at a time, or on one KV head of a row.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from tests.references import clusterkv, infinigen, slots
from tests.references.rope import rope as rotate
from tests.references.slots import Slots
from tests.support.attending import OPTIONS, attend, flushed, init_cache, of_heads, slots_of
from tests.support.tolerances import close, within_roundings
from tests.support.watched import Seen, Watched, found, listed, unseen

LENGTHS = (37, 5, 52)  # the second row is shorter than every budget used with them
WIDTH = 56  # prompt calls of one width, over and over, so that tests share compiled code


class Heads:
    """The references of a row's KV heads, which decide each for itself, as one of the row."""

    def __init__(self, heads: list) -> None:
        self.heads = heads

    @property
    def kept(self) -> list[list[int]]:
        return [head.kept for head in self.heads]

    def prompt(self, q, k, v, positions, last=True) -> np.ndarray:
        heads = self._with_tokens(q, k, v)
        return np.concatenate([head.prompt(*qkv, positions, last=last) for head, *qkv in heads])

    def decode(self, q, k, v, position: int) -> np.ndarray:
        heads = self._with_tokens(q, k, v)
        return np.concatenate([head.decode(*qkv, position) for head, *qkv in heads])

    def _with_tokens(self, q, k, v):
        return zip(self.heads, np.split(q, len(self.heads)), k, v, strict=True)

    def flush(self, room: int) -> None:
        for head in self.heads:
            if hasattr(head, "flush"):
                head.flush(room)


class Pair:
    """One layer of the library, and one reference per row.

    Token p of row b is the same random q, k, v whichever call brings it.  Every call checks the
    outputs, the kept positions and, where the method has them, the accumulated scores.

    transform: of the library.  reference: makes the reference of one row and head, or with
    `whole_rows` of one row.  It has `kept`, positions, and `prompt` and `decode` as in
    `tests/references/h2o.py`; one of a whole row has them for all heads: positions of each head, q
    of all query heads, k and v with an axis of heads.  If it has `flush`, it is called too.
    heads: KV heads and query heads per KV head.  options: scale, window, soft_cap, sinks of
    attention, given to both.  rope: both get rotated keys, or with `late` unrotated ones.
    dtype: of the tokens and the cache; both get tokens that it holds exactly.  roundings: what
    outputs and slots may be off in 16 bits, relative to the largest value or key.
    width: of every prompt call.  contents: compares keys, values and masses after every `prompt`
    and `decode`.
    """

    def __init__(
        self,
        transform: kvjax.KVTransform,
        reference: Callable[..., object],
        *,
        whole_rows: bool = False,
        rows: int = 3,
        heads: tuple[int, int] = (2, 2),
        head_dim: int = 8,
        seed: int = 0,
        max_prompt: int = 128,
        max_new: int = 64,
        width: int = WIDTH,
        rope: kvjax.Rope | None = None,
        late: bool = False,
        layer: int | None = None,
        dtype: jnp.dtype = jnp.float32,
        roundings: float = 2.0,
        contents: bool = False,
        **options: Any,
    ) -> None:
        self.contents = contents
        self.dtype, self.roundings, self.width = jnp.dtype(dtype), roundings, width
        self.transform, self.options, self.rope, self.late = transform, options, rope, late
        self.rng = np.random.default_rng(seed)
        self.rows, (self.kv_heads, self.group) = rows, heads
        size = (rows, self.kv_heads * (self.group + 2), max_prompt + max_new, head_dim)
        data = self.held(self.rng.normal(size=size))
        q, self.k, self.v = np.split(data, [-2 * self.kv_heads, -self.kv_heads], axis=1)
        self.q = 2 * q  # attention peaked enough for tokens of all ages to become heavy
        self.next = np.zeros(rows, int)
        self.steps = 0  # decode steps since the last prompt
        every_head = list(itertools.product(range(rows), range(self.kv_heads)))
        if whole_rows:
            self.of_rows = [reference(**options) for _ in range(rows)]
            self.references = {(row, head): self.of_rows[row] for row, head in every_head}
        else:
            by_row = [
                [reference(**of_heads(options, self.query_heads(head))) for head in range(heads[0])]
                for _ in range(rows)
            ]
            self.references = {(row, head): by_row[row][head] for row, head in every_head}
            self.of_rows = list(map(Heads, by_row))
        self.cache = init_cache(
            transform, batch=rows, kv_heads=self.kv_heads, query_heads=self.kv_heads * self.group,
            head_dim=head_dim, max_prompt=max_prompt, max_new=max_new, dtype=dtype, layer=layer,
            **{name: options[name] for name in OPTIONS if name in options},
        )  # fmt: skip
        self.capacity = transform.extent(kvjax.kit.Extent(max_prompt, max_new)).total

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

    def prompt(self, counts=LENGTHS, side: str = "right", chunks: int = 1) -> Pair:
        """The next `counts[b]` tokens of every row, padded to `width`, in `chunks` calls."""
        positions = np.full((self.rows, self.width), -1)
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
        return self.check_contents() if self.contents else self

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
        return self.check_contents() if self.contents else self

    def _flush(self, interval: int) -> None:
        self.cache = flushed(self.cache, interval)
        self.host = jax.device_get(self.cache.kv)
        for row, reference in enumerate(self.of_rows):
            if hasattr(reference, "flush"):
                reference.flush(interval)
            self._check_slots(row, f"row {row}, flushed at {self.next[row]} tokens")

    def kept(self, row: int, head: int) -> list[int]:
        """Positions that the library holds."""
        return sorted(self.host.position[row, head][self.host.live[row, head]].tolist())

    def expected_kept(self, row: int) -> list[list[int]]:
        """Positions that each head of the row's reference holds."""
        return self.of_rows[row].kept

    def scores(self, row: int, head: int) -> np.ndarray:
        """Accumulated attention in position order, [G, S]."""
        position = self.host.position[row, head]
        live = np.flatnonzero(self.host.live[row, head])
        order = live[np.argsort(position[live])]
        return self.host.column("attention")[row, head].T[:, order]

    def check_contents(self) -> Pair:
        """Compares keys, values and masses with those of the references of single heads."""
        for (row, head), reference in self.references.items():
            held, slots = slots_of(self.cache, row, head), reference.slots
            where = f"row {row}, head {head}, {self.next[row]} tokens so far"
            np.testing.assert_array_equal(held["position"], slots.positions, where)
            if len(slots):
                self.close(held["k"], slots.keys, f"{where}, keys")
                self.close(held["v"], slots.values, f"{where}, values")
                masses = np.exp(held["log_mass"]), np.exp(slots.log_mass)
                close(*masses, "reference", f"{where}, masses")
        return self

    def _columns(self, count: int, side: str) -> np.ndarray:
        if side == "scattered":
            return np.sort(self.rng.permutation(self.width)[:count])
        return np.arange(count) + (self.width - count if side == "left" else 0)

    def _tokens(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """What `x` holds at `positions` [B, T]; padding tokens are large noise."""
        index = np.maximum(positions, 0)[:, None, :, None]
        noise = self.rng.normal(size=(*x.shape[:2], positions.shape[1], x.shape[3])) * 100
        taken = np.take_along_axis(x, index, axis=2)
        return np.where(positions[:, None, :, None] >= 0, taken, noise).astype(np.float32)

    def turned(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Queries or keys [B, H, T, D] as the reference is to get them: rotated, if not `late`."""
        if self.rope is None or self.late:
            return x
        inv_freq, factor = np.asarray(self.rope.inv_freq), self.rope.factor
        rows = zip(x.astype(np.float64), positions, strict=True)
        return np.stack([rotate(own, at, inv_freq, factor) for own, at in rows])

    def _run(self, positions: np.ndarray, **call) -> tuple[list[np.ndarray], np.ndarray]:
        """Runs the library.  Returns q, k, v as the reference is to get them, and the output."""
        q, k, v = (self._tokens(x, positions) for x in (self.q, self.k, self.v))
        where = jnp.asarray(positions, jnp.int32)
        call |= self.options
        given = [jnp.asarray(x, self.dtype) for x in (q, k, v)]
        out, self.cache = attend(self.cache, *given, where, rope=self.rope, **call)
        self.host = jax.device_get(self.cache.kv)
        out = np.asarray(out.astype(jnp.float32))
        return [self.turned(q, positions), self.turned(k, positions), v], out

    def _prompt_chunk(self, positions: np.ndarray, last: bool) -> None:
        qkv, out = self._run(positions, phase="prompt", last=last)
        for row in range(self.rows):
            expected = self._prompt_row(row, *(x[row] for x in qkv), positions[row], last)
            self._check(row, out[row], expected)
        if last:
            assert self.cache.kv.slots == self.capacity

    def _prompt_row(self, row: int, q, k, v, positions: np.ndarray, last: bool) -> np.ndarray:
        return self.of_rows[row].prompt(q, k, v, positions, last=last)

    def _decode_token(self, positions: np.ndarray) -> None:
        qkv, out = self._run(positions[:, None], phase="decode")
        for row, position in enumerate(positions.tolist()):
            expected = np.zeros(out[row, :, 0].shape)
            if position >= 0:
                expected = self._decode_row(row, *(x[row, :, 0] for x in qkv), position)
            self._check(row, out[row, :, 0], expected)

    def _decode_row(self, row: int, q, k, v, position: int) -> np.ndarray:
        return self.of_rows[row].decode(q, k, v, position)

    def _check(self, row: int, out: np.ndarray, expected: np.ndarray) -> None:
        where = f"row {row}, {self.next[row]} tokens so far"
        self.close(out, expected, where)
        self._check_slots(row, where)

    def _check_slots(self, row: int, where: str) -> None:
        kv = self.host
        kept = [self.kept(row, head) for head in range(kv.shape[1])]
        assert kept == self.expected_kept(row), where
        assert not kv.dropped[row].any(), where
        if "attention" in kv.columns and isinstance(self.of_rows[row], Heads) and any(kept):
            for head in range(self.kv_heads):
                expected = self.references[row, head].slots.scores
                close(self.scores(row, head), expected, "accumulated", f"{where}, head {head}")


class RecallingPair(Pair):
    """A method that recalls, and one reference per row; every step's lists are compared too.

    before: a method that stands before it; what that keeps the references take over.
    behind: what stands behind it.
    """

    def __init__(self, transform, reference, *, before=None, behind=(), **options) -> None:
        self.before = before
        first = () if before is None else (before,)
        chained = kvjax.chain(*first, Watched(transform), *behind)
        super().__init__(chained, reference, whole_rows=True, **options)
        self.lists: list[list[list[list[int]]]] = [[] for _ in range(self.rows)]  # of every step

    def expected_kept(self, row: int) -> list[list[int]]:
        slots = self.of_rows[row].heads or [Slots()] * self.kv_heads
        return [head.positions.tolist() for head in slots]

    def _run(self, positions, **call):
        qkv, out = super()._run(positions, **call)
        seen = found(self.cache, Seen).positions
        self.seen = None if seen is None else np.asarray(seen)
        self.cache = unseen(self.cache)
        return qkv, out

    def _prompt_row(self, row, q, k, v, positions, last):
        reference = self.of_rows[row]
        if self.before is None:
            return reference.prompt(q, k, v, positions, last=last)
        out = reference.prompt(q, k, v, positions, last=False)
        if last and reference.stale:
            reference.prompt_length = max(slots.length for slots in reference.heads)
            reference.heads = [self._held(row, head) for head in range(self.kv_heads)]
            reference.indices, reference.stale = [], False
            reference.index()
        return out

    def _held(self, row: int, head: int) -> Slots:
        """What the library holds, as the reference's slots."""
        held, slots = slots_of(self.cache, row, head), Slots(**self.options)
        slots.append(held["k"], held["v"], held["position"], 1)
        for token, log_mass in zip(slots.tokens, held["log_mass"], strict=True):
            token.log_mass = float(log_mass)
        return slots

    def _decode_row(self, row, q, k, v, position):
        out, selected = self.of_rows[row].decode(q, k, v, position, *self.more(row, position))
        assert [listed(x) for x in self.seen[row]] == selected, f"row {row}, position {position}"
        self.lists[row].append(selected)
        return out

    def more(self, row: int, position: int) -> tuple:
        """What the reference's `decode` takes beside q, k, v and position."""
        return ()


@contextmanager
def clear_choices():
    """Fails where a reference chooses between scores that float32 might order differently.

    Where it fails, another seed has to be chosen.
    """

    def best(scores: np.ndarray, count: int) -> list[int]:
        ordered = -np.sort(-scores)
        if 0 < count < len(ordered):
            clear(ordered[count - 1] - ordered[count], abs(ordered[0]))
        return original_best(scores, count)

    def similarity(keys: np.ndarray, centroids: np.ndarray, metric: str) -> np.ndarray:
        scores = original_similarity(keys, centroids, metric)
        if scores.shape[1] > 1:
            second, first = np.sort(scores, axis=1)[:, -2:].T
            clear(first - second, np.maximum(1.0, np.abs(scores).max(1)))
        return scores

    def token_count(scores: list, budget: int | float, alpha: float | None) -> int:
        for row in scores if alpha is not None else []:
            clear(np.abs(row - (row.max(initial=0) - alpha)), np.abs(row).max(initial=1))
        return original_count(scores, budget, alpha)

    original_best, original_similarity = slots.best, clusterkv.similarity
    original_count = infinigen.token_count
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith("tests.references.") and hasattr(module, "best")
    ]
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "best", best))
        stack.enter_context(mock.patch.object(clusterkv, "similarity", similarity))
        stack.enter_context(mock.patch.object(infinigen, "token_count", token_count))
        yield


def clear(gaps: np.ndarray, sizes: np.ndarray) -> None:
    """Asserts that scores are equal (ties go by position) or apart by more than their rounding."""
    sure = (gaps == 0) | (gaps > 2e-6 * sizes)
    assert np.all(sure), f"near tie ({np.min(gaps)}): change the seed"
