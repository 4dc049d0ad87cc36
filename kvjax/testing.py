"""Checks of a method: whether it keeps what the protocol promises, in one line if not."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.attention.attend import attend, flush, flush_interval
from kvjax.attention.layer import LayerCache, init_cache
from kvjax.compose.chain import bind
from kvjax.compose.wrappers import HeadGroups
from kvjax.protocol import Extent, KVTransform, check_transform, frees_while_decoding
from kvjax.rope import Rope

_BATCH, _KV_HEADS, _QUERY_HEADS, _HEAD_DIM = 3, 2, 4, 32
_LENGTHS = (40, 29, 6)  # of the rows' prompts
_WIDTH = 48  # of every prompt call, so that they share compiled code
_STEPS = 9
# These functions run a few times: what makes code fast is not worth its compilation.
_QUICK = {"xla_backend_optimization_level": 0}
_CONTROL = ("while", "cond", "scan")


class ConformanceError(AssertionError):
    """A method breaks a promise of the protocol."""


def check(transform: KVTransform, *, num_layers: int = 2, rtol: float = 1e-4) -> None:
    """Runs a method through small prompts and decode steps, and looks at what it promised.

    It checks that the method is a value (hashable, equal to its copy); that no token is lost beyond
    what `extent` promises; that padding, the other rows of a batch and the chunks of a prompt
    change nothing; that a row without tokens in a prompt, a step or a flush stays as it is; that
    pinned slots stay; that shapes never change while decoding; and that a decode step holds no loop
    and no conditional of its own. Take budgets of about 12 tokens: prompts have up to 40.

    Args:
      transform: the method; each of its layers is checked.
      num_layers: of the model that it is bound to.
      rtol: relative tolerance of outputs that should be equal.

    Raises:
      TypeError: not a transform.
      ConformanceError: what is broken, in one line.

    Example:
      >>> import kvjax
      >>> kvjax.testing.check(kvjax.SnapKV(budget=12, window=4))
    """
    check_transform(transform, "check")
    if transform != copy.copy(transform) or hash(transform) != hash(copy.copy(transform)):
        raise ConformanceError(f"{transform!r} is not equal to a copy of itself")
    for layer, tx in sorted(set(enumerate(bind(transform, num_layers))), key=lambda x: x[0]):
        case = _Case(tx, layer, rtol)
        for one in (_promises, _padding, _row_alone, _chunks, _idle_rows, _pinned, _step_is_plain):
            one(case)


@dataclass
class _Case:
    """One layer's transform, with the tokens that all checks read."""

    transform: KVTransform
    layer: int
    rtol: float
    max_prompt: int = 64
    max_new: int = 16
    q: np.ndarray = field(init=False)
    k: np.ndarray = field(init=False)
    v: np.ndarray = field(init=False)

    def __post_init__(self):
        rng = np.random.default_rng(0)
        length = self.max_prompt + self.max_new
        shapes = [
            (_BATCH, heads, length, _HEAD_DIM) for heads in (_QUERY_HEADS, _KV_HEADS, _KV_HEADS)
        ]
        self.q, self.k, self.v = (rng.normal(size=s).astype(np.float32) for s in shapes)
        self.rope = Rope(1.0 / 100.0 ** (jnp.arange(0, _HEAD_DIM, 2) / _HEAD_DIM))
        options = _QUICK if jax.default_backend() == "cpu" else None
        self.attend = jax.jit(
            attend, static_argnums=0, static_argnames=("phase", "last"), compiler_options=options
        )
        self.flush = jax.jit(flush, static_argnums=1, compiler_options=options)
        self.empty = jax.jit(self._empty)()

    def _empty(self):
        return init_cache(
            self.transform, batch=_BATCH, kv_heads=_KV_HEADS, query_heads=_QUERY_HEADS,
            head_dim=_HEAD_DIM, max_prompt=self.max_prompt, max_new=self.max_new,
            dtype=jnp.float32, layer=self.layer,
        )  # fmt: skip

    def call(self, cache, positions: np.ndarray, phase: str, last: bool = True):
        """One call of `attend` with the tokens at these positions, garbage where they are -1."""
        index = np.maximum(positions, 0)[:, None, :, None]
        taken = (np.take_along_axis(x, index, axis=2) for x in (self.q, self.k, self.v))
        none = (positions < 0)[:, None, :, None]
        q, k, v = (jnp.asarray(np.where(none, 1e4, x), jnp.float32) for x in taken)
        return self.attend(
            self.transform, cache, q, k, v, jnp.asarray(positions, jnp.int32),
            phase=phase, last=last, rope=self.rope,
        )  # fmt: skip

    def decode(self, cache, start: np.ndarray, steps: int, alive=None):
        """Decode steps from these positions on, flushed in between; rows not `alive` get none."""
        interval, outs = flush_interval(cache), []
        alive = np.ones(len(start), bool) if alive is None else np.asarray(alive)
        for step in range(steps):
            positions = np.where(alive, start + step, -1)[:, None]
            out, cache = self.call(cache, positions, "decode")
            outs.append(np.asarray(out))
            if interval is not None and (step + 1) % interval == 0:
                cache = self.flush(cache, interval)
        return outs, cache

    def groups(self, cache) -> list[tuple[KVTransform, LayerCache]]:
        if isinstance(self.transform, HeadGroups):
            pairs = zip(self.transform.groups, cache, strict=True)
            return [(tx, group) for (_, tx), group in pairs]
        return [(self.transform, cache)]

    def fail(self, what: str) -> None:
        raise ConformanceError(f"{self.transform!r} {what}")

    def same(self, mine, other, what: str) -> None:
        for a, b in zip(mine, other, strict=True):
            if not np.allclose(a, b, rtol=self.rtol, atol=self.rtol):
                self.fail(f"{what}: outputs differ by up to {np.abs(a - b).max():.3g}")


def _right(lengths) -> np.ndarray:
    """Positions of prompts that are padded at the right."""
    place = np.arange(_WIDTH)[None]
    return np.where(place < np.asarray(lengths)[:, None], place, -1)


def _kept(case: _Case, cache, row: int) -> list[list[int]]:
    """Live positions of a row, per head."""
    kept = []
    for _, group in case.groups(cache):
        position = np.asarray(group.kv.position[row])
        kept += [sorted(head[head >= 0].tolist()) for head in position]
    return kept


def _prompt(case: _Case):
    return case.call(case.empty, _right(_LENGTHS), "prompt")


def _promises(case: _Case) -> None:
    """No more slots live than `extent` says, none lost, shapes as they were."""
    _, cache = _prompt(case)
    _, later = case.decode(cache, np.array(_LENGTHS), _STEPS)
    for (tx, group), (_, after) in zip(case.groups(cache), case.groups(later), strict=True):
        extent = tx.extent(Extent(case.max_prompt, case.max_new))
        lost = int(group.kv.dropped.sum())
        if lost:
            case.fail(
                f"promises {extent.prompt} slots after a prompt, and keeps more: {lost} tokens "
                "found no slot"
            )
        kept = int(group.kv.live.sum(-1).max())
        if kept > extent.prompt:
            case.fail(f"promises {extent.prompt} slots after a prompt, and keeps {kept}")
        most = int(after.kv.live.sum(-1).max())
        if int(after.kv.dropped.sum()):
            case.fail(
                f"promises {extent.total} slots while decoding, and needs more: "
                f"{int(after.kv.dropped.sum())} tokens found no slot, {most} are live"
            )
        if after.kv.shape[2] != extent.total:
            case.fail(f"promises {extent.total} slots, and its cache has {after.kv.shape[2]}")
        for name, column in after.kv.columns.items():
            if column.values.shape[:3] != after.kv.shape:
                case.fail(
                    f"changed the shape of column {name!r} from {after.kv.shape} to "
                    f"{column.values.shape[:3]}"
                )
        if not np.isfinite(np.asarray(after.kv.k.read())).all():
            case.fail("left keys that are not finite")


def _padding(case: _Case) -> None:
    """Padding at the left or at the right changes nothing."""
    right = _right(_LENGTHS)
    left = np.stack([np.roll(row, _WIDTH - n) for row, n in zip(right, _LENGTHS, strict=True)])
    _, one = case.call(case.empty, right, "prompt")
    _, two = case.call(case.empty, left, "prompt")
    for row in range(_BATCH):
        if _kept(case, one, row) != _kept(case, two, row):
            case.fail(f"keeps other tokens of row {row} when its prompt is padded at the left")


def _row_alone(case: _Case) -> None:
    """A row keeps and answers in a batch what it does when the other rows are empty."""
    outs, cache = case.decode(_prompt(case)[1], np.array(_LENGTHS), _STEPS)
    only = np.array([False, True, False])
    _, alone = case.call(case.empty, _right(np.where(only, _LENGTHS, 0)), "prompt")
    own, alone = case.decode(alone, np.array(_LENGTHS), _STEPS, alive=only)
    if _kept(case, cache, 1) != _kept(case, alone, 1):
        case.fail("keeps other tokens of a row in a batch than of the same row alone")
    pairs = [out[1] for out in outs], [out[1] for out in own]
    case.same(*pairs, "answers a row in a batch otherwise than alone")


def _chunks(case: _Case) -> None:
    """A prompt in chunks is the same prompt."""
    _, whole = _prompt(case)
    positions = _right(_LENGTHS)
    half = _WIDTH // 2
    _, cache = case.call(case.empty, positions[:, :half], "prompt", last=False)
    _, cache = case.call(cache, positions[:, half:], "prompt")
    for row in range(_BATCH):
        if _kept(case, cache, row) != _kept(case, whole, row):
            case.fail(f"keeps other tokens of row {row} when its prompt comes in chunks")


def _idle_rows(case: _Case) -> None:
    """A row without tokens in steps, flushes and a further prompt stays as it is."""
    _, cache = _prompt(case)
    _, cache = case.decode(cache, np.array(_LENGTHS), 1)
    interval = flush_interval(cache)
    cache = cache if interval is None else case.flush(cache, interval)
    start = np.array(_LENGTHS) + 1
    before = _kept(case, cache, 1)
    _, later = case.decode(cache, start, 5, alive=[True, False, True])
    if _kept(case, later, 1) != before:
        case.fail("changes what a row keeps in decode steps in which only other rows get tokens")
    turn = np.full((_BATCH, _WIDTH), -1)
    turn[0, :12] = np.arange(start[0] + 5, start[0] + 17)
    _, after = case.call(later, turn, "prompt")
    if _kept(case, after, 1) != before:
        case.fail("changes what a row keeps in a prompt in which only another row gets tokens")
    one, _ = case.decode(later, start, 1, alive=[False, True, False])
    two, _ = case.decode(after, start, 1, alive=[False, True, False])
    case.same([one[0][1]], [two[0][1]], "answers a row otherwise after another row's prompt")


def _pinned(case: _Case) -> None:
    """Pinned slots stay, and stand outside the budget."""
    _, cache = _prompt(case)
    if not isinstance(cache, LayerCache) or cache.kv.stored is not None:
        return
    kv = cache.kv
    oldest = kv.live & (kv.position == jnp.where(kv.live, kv.position, 10**6).min(-1)[..., None])
    pinned = kv.replace(pinned=kv.pinned | oldest)
    extent = case.transform.extent(Extent(case.max_prompt, case.max_new))
    if extent.total < case.max_prompt and frees_while_decoding(case.transform):
        return  # the capacity has no room for pins that nobody promised
    _, later = case.decode(dataclasses.replace(cache, kv=pinned), np.array(_LENGTHS), _STEPS)
    here = np.asarray(kv.position)[np.asarray(oldest)].reshape(_BATCH, _KV_HEADS)
    for row in range(_BATCH):
        for head, kept in enumerate(_kept(case, later, row)):
            if here[row, head] not in kept:
                case.fail("evicts a pinned slot")


def _step_is_plain(case: _Case) -> None:
    """A decode step holds no loop and no condition but those of attention operations."""
    _, cache = jax.eval_shape(lambda: _prompt_shape(case))
    shape = jax.ShapeDtypeStruct
    rows = [
        shape((_BATCH, heads, 1, _HEAD_DIM), jnp.float32)
        for heads in (_QUERY_HEADS, _KV_HEADS, _KV_HEADS)
    ]
    step = jax.make_jaxpr(
        lambda cache, q, k, v, at: attend(
            case.transform, cache, q, k, v, at, phase="decode", rope=case.rope
        )
    )(cache, *rows, shape((_BATCH, 1), jnp.int32))
    found = control_flow(step.jaxpr)
    if found:
        case.fail(f"has {', '.join(sorted(set(found)))} in a decode step: leave it to on_flush")


def _prompt_shape(case: _Case) -> Any:
    rows = [
        jnp.zeros((_BATCH, heads, _WIDTH, _HEAD_DIM), jnp.float32)
        for heads in (_QUERY_HEADS, _KV_HEADS, _KV_HEADS)
    ]
    positions = jnp.zeros((_BATCH, _WIDTH), jnp.int32)
    return attend(case.transform, case.empty, *rows, positions, phase="prompt", rope=case.rope)


def control_flow(jaxpr: Any, skip: Callable[[str], bool] = lambda name: False) -> list[str]:
    """Names of the loops and conditions of a jaxpr and of those within it.

    Args:
      jaxpr: of a function.
      skip: says of the name of an inner jitted function whether to pass it over.
    """
    found = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _CONTROL:
            found.append(name)
        if skip(str(equation.params.get("name", ""))):
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += control_flow(inner, skip)
    return found
