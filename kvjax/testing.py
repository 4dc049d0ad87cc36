"""Checks that a method keeps what the protocol promises; says in one line if it does not."""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.attention.attend import attend, begin_document
from kvjax.attention.flush import flush, flush_interval
from kvjax.attention.init_cache import init_cache
from kvjax.attention.joined_heads import method_for_all
from kvjax.attention.layer import Cache, LayerCache, Reading, layer_caches
from kvjax.cache.rope import Rope
from kvjax.compose.bind import bind
from kvjax.compose.chain import parts_of
from kvjax.compose.foreseen import frees_while_decoding
from kvjax.compose.wrappers import by_head_groups
from kvjax.generation.calibration import measured, with_missing
from kvjax.generation.model import FunctionalModel
from kvjax.protocol import Extent, KVTransform, Phase, check_transform
from kvjax.transforms.clusterkv.recalled import RANK_AGAIN
from pallas_kernels.base.mixing import SUM_AGAIN

__all__ = ["ConformanceError", "check", "control_flow"]

# Names of kvjax's functions that hold a condition or a loop and may be part of a decode step.
OWN_CONDITIONS = (SUM_AGAIN, RANK_AGAIN, "_fetch")

_BATCH, _KV_HEADS, _QUERY_HEADS, _HEAD_DIM = 3, 2, 4, 32
_MAX_PROMPT, _MAX_NEW = 64, 96
_LENGTHS = np.array((40, 29, 6))  # tokens of the rows' prompts
_WIDTH = 48  # tokens of every prompt call, so that all of them share compiled code
_LOOKING = 16  # tokens that look at a prompt
_LONG_PROMPT = 2**20  # tokens of a prompt that is never read
_STEPS = 9  # decode steps of most checks
_LONG = _MAX_NEW  # decode steps that bring a row far beyond its prompt and `max_prompt`
# Compiled code runs only a few times here, so that optimising it would take longer than it saves.
_QUICK = {"xla_backend_optimization_level": 0}
_CONTROL = ("while", "cond", "scan")


class ConformanceError(AssertionError):
    """Raised when a method breaks a promise of the protocol.

    Example:
      >>> from dataclasses import dataclass
      >>> import kvjax
      >>> @dataclass(frozen=True)
      ... class Boastful(kvjax.KVTransform):  # it promises four slots, and evicts nothing
      ...     def extent(self, extent):
      ...         return extent.keep(4)
      >>> kvjax.testing.check(Boastful())
      Traceback (most recent call last):
        ...
      kvjax.testing.ConformanceError: Boastful() promises 4 slots after a prompt, and keeps 40
    """


def check(transform: KVTransform, *, num_layers: int = 2, rtol: float = 1e-4) -> None:
    """Runs a method through small prompts and decode steps, and checks what it promises.

    It checks that

    - the method is a value: hashable, and equal to its copy;
    - it reads only what its `needs` ask for (TypeError, as wherever it is used);
    - no more tokens are live than `extent` promises, and none is lost;
    - padding, other rows of a batch and chunks of a prompt change neither outputs nor kept tokens;
    - a row without tokens in a prompt, a step or a flush stays as it is;
    - padding is answered with zeros;
    - pinned slots stay;
    - under `ByHead`, a prompt's tokens are kept head by head, unless `couples_heads` is declared;
    - shapes and dtypes of a cache and of the method's state never change;
    - a decode step holds no loop and no conditional of the method.

    Prompts have up to 40 tokens, so that a budget of about 12 tokens, or 0.3, suits. A method
    that learns from a model (`kvjax.kit.Learner`, `ByHead`) learns from a small random one, unless
    it has learned already. The check warns of a method that evicts and does not promise so in
    `extent`, because that saves no bytes.

    Args:
      transform: the method. Each of its layers is checked; of equal layers, only the first.
      num_layers: layers of the model that the method is bound to.
      rtol: relative tolerance of outputs that should be equal.

    Raises:
      TypeError: `transform` is not a transform, or reads what it has not asked for.
      ConformanceError: a promise is broken; says which, in one line.

    Example:
      >>> import kvjax
      >>> kvjax.testing.check(kvjax.StreamingLLM(budget=12))
    """
    check_transform(transform, "check")
    if transform != copy.copy(transform) or hash(transform) != hash(copy.copy(transform)):
        raise ConformanceError(f"{transform!r} is not equal to a copy of itself")
    model, sample = _model(num_layers), [list(range(int(_LENGTHS.max())))]
    transform = with_missing(transform, model, lambda method: measured(method, model, sample))
    layers = bind(transform, num_layers)
    for tx in dict.fromkeys(layers):
        case = _Case(tx, layers.index(tx), rtol)
        for check_promise in _CHECKS:
            check_promise(case)


def _model(num_layers: int) -> FunctionalModel:
    """Returns a model of attention layers alone, with random weights."""
    rng, width = np.random.default_rng(1), _QUERY_HEADS * _HEAD_DIM
    heads = num_layers, width, _QUERY_HEADS + 2 * _KV_HEADS, _HEAD_DIM
    params = {
        "embedding": rng.normal(size=(_WIDTH, width)).astype(np.float32),
        "projections": rng.normal(0.0, width**-0.5, heads).astype(np.float32),
    }
    return FunctionalModel(
        _apply, params, num_layers, _QUERY_HEADS, _KV_HEADS, _HEAD_DIM, vocab_size=_WIDTH
    )


def _apply(
    params: Any, tokens: Array, positions: Array, caches: Sequence[Cache], *,
    layers: Sequence[KVTransform], phase: Phase, last: bool = True, logits_at: Array | None = None,
) -> tuple[Array, tuple[Cache, ...]]:  # fmt: skip
    """Calls the model of `_model`, as `kvjax.models.LanguageModel` says."""
    x, after = params["embedding"][tokens], []
    for projection, cache in zip(params["projections"], caches, strict=True):
        qkv = jnp.einsum("btw,whd->bhtd", x, projection)
        q, k, v = jnp.split(qkv, (_QUERY_HEADS, _QUERY_HEADS + _KV_HEADS), axis=1)
        out, cache = attend(cache, q, k, v, positions, phase=phase, last=last, rope=_rope())
        x = x + out.swapaxes(1, 2).reshape(x.shape)
        after.append(cache)
    return x @ params["embedding"].T, tuple(after)


def _rope() -> Rope:
    return Rope(1.0 / 100.0 ** (jnp.arange(0, _HEAD_DIM, 2) / _HEAD_DIM))


class _Case:
    """One layer's transform with the tokens that all checks read.

    Attributes:
      empty: the empty cache.
      out, prompted: outputs and cache of a prompt that is padded on the right.
      outs, decoded: outputs and cache of `_STEPS` decode steps after it.
    """

    def __init__(self, transform: KVTransform, layer: int, rtol: float):
        self.transform, self.layer, self.rtol = transform, layer, rtol
        rng, length = np.random.default_rng(0), _MAX_PROMPT + _MAX_NEW
        self.qkv = [
            rng.normal(size=(_BATCH, heads, length, _HEAD_DIM)).astype(np.float32)
            for heads in (_QUERY_HEADS, _KV_HEADS, _KV_HEADS)
        ]
        self.rope = _rope()
        options = _QUICK if jax.default_backend() == "cpu" else None
        self.attend = jax.jit(attend, static_argnames=("phase", "last"), compiler_options=options)
        self.flush = jax.jit(flush, static_argnums=1, compiler_options=options)
        self.empty = self.new_cache(transform)
        self.out, self.prompted = self.prompt(self.empty, _right(_LENGTHS))
        self.outs, self.decoded = self.decode(self.prompted, _LENGTHS, _STEPS)

    def new_cache(self, transform: KVTransform) -> Cache:
        """Returns an empty cache of a transform."""
        make = functools.partial(
            init_cache, transform, batch=_BATCH, kv_heads=_KV_HEADS, query_heads=_QUERY_HEADS,
            head_dim=_HEAD_DIM, max_prompt=_MAX_PROMPT, max_new=_MAX_NEW, dtype=jnp.float32,
            layer=self.layer,
        )  # fmt: skip
        return jax.jit(make)()

    def tokens(self, positions: np.ndarray) -> list[jax.Array]:
        """Returns q, k, v and positions of tokens; large numbers where the position is -1."""
        index = np.maximum(positions, 0)[:, None, :, None]
        padding = (positions < 0)[:, None, :, None]
        qkv = (np.where(padding, 1e4, np.take_along_axis(x, index, axis=2)) for x in self.qkv)
        return [*(jnp.asarray(x, jnp.float32) for x in qkv), jnp.asarray(positions, jnp.int32)]

    def prompt(
        self, cache: Cache, positions: np.ndarray, last: bool = True
    ) -> tuple[np.ndarray, Cache]:
        """Returns the outputs of a prompt, and the cache after it.

        For methods with a probe it is a document, and some tokens look at it.
        """
        attend = functools.partial(self.attend, rope=self.rope)
        is_document = any(tx.needs.probe for tx in by_head_groups(self.transform))
        begun = any(isinstance(part, Reading) for part in layer_caches(cache))
        if is_document and not begun:
            cache = begin_document(cache)
        looks = last and is_document
        ends = last and not looks
        out, cache = attend(cache, *self.tokens(positions), phase="prompt", last=ends)
        if looks:
            reading: Any = layer_caches(cache)[0]
            more = np.asarray(reading.kv.length)[:, None] + np.arange(_LOOKING)
            more = np.where(np.asarray(reading.rows)[:, None], more, -1)
            _, cache = attend(cache, *self.tokens(more), phase="probe")
        out = np.asarray(out)
        if out[np.broadcast_to((positions < 0)[:, None, :, None], out.shape)].any():
            self.fail("answers padding of a prompt with numbers that are not 0")
        return out, cache

    def decode(
        self, cache: Cache, start: np.ndarray, steps: int, alive: tuple = (True,) * _BATCH
    ) -> tuple[list[np.ndarray], Cache]:
        """Runs decode steps from these positions on, with flushes between them.

        Rows that are not `alive` get no tokens.
        """
        interval, outs = flush_interval(cache), []
        for step in range(steps):
            tokens = self.tokens(np.where(alive, start + step, -1)[:, None])
            before = cache
            out, cache = self.attend(cache, *tokens, phase="decode", rope=self.rope)
            self.frees_one_slot(before, cache)
            outs.append(np.asarray(out))
            if outs[-1][np.logical_not(alive)].any():
                self.fail("answers a row without a token with numbers that are not 0")
            if interval is not None and (step + 1) % interval == 0:
                cache = self.flush(cache, interval)
        return outs, cache

    def frees_one_slot(self, before: Cache, after: Cache) -> None:
        """Fails where a decode step frees more slots than the one that its token may take."""
        for part, new in zip(layer_caches(before), layer_caches(after), strict=True):
            freed = int((part.kv.live.sum(-1) - new.kv.live.sum(-1)).max()) + 1
            if freed > 1:
                self.fail(f"frees {freed} slots in a decode step, which may free one: use on_flush")

    def same_rows(self, first: Cache, second: Cache, row: int, what: str) -> None:
        """Fails where the keys or values of a row are not equal bit for bit."""
        for part, other in zip(layer_caches(first), layer_caches(second), strict=True):
            live = np.asarray(part.kv.live[row])
            for name in ("k", "v"):
                rows = [np.asarray(getattr(x.kv, name).read()[row])[live] for x in (part, other)]
                if not np.array_equal(rows[0], rows[1]):
                    self.fail(what.format(name=name))

    def kept(self, cache: Cache, row: int) -> list[list[int]]:
        """Returns the live positions of a row, per head."""
        groups = (np.asarray(group.kv.position[row]) for group in layer_caches(cache))
        return [sorted(head[head >= 0].tolist()) for heads in groups for head in heads]

    def same_tokens(self, a: Cache, b: Cache, rows: range | tuple, message: str) -> None:
        """Fails with the message if any of these rows keeps different tokens in two caches."""
        for row in rows:
            if self.kept(a, row) != self.kept(b, row):
                self.fail(message.format(row=row))

    def same_answers(self, a: list, b: list, row: int, message: str) -> None:
        """Fails with the message if a row's outputs differ; both are lists of [B, Q, T, D]."""
        for x, y in zip(a, b, strict=True):
            if not np.allclose(x[row], y[row], rtol=self.rtol, atol=self.rtol):
                most = np.abs(x[row] - y[row]).max()
                self.fail(f"{message}: outputs differ by up to {most:.3g}".format(row=row))

    def same_prompt(self, outs: np.ndarray, cache: Cache, circumstance: str) -> None:
        """Fails if the prompt, read in another way, has other outputs or leaves other tokens."""
        message = f"keeps other tokens of row {{row}} {circumstance}"
        self.same_tokens(cache, self.prompted, range(_BATCH), message)
        steps, _ = self.decode(cache, _LENGTHS, 1)
        for row in range(_BATCH):
            message = f"answers row {{row}} otherwise {circumstance}"
            self.same_answers([outs, *steps], [self.out, self.outs[0]], row, message)

    def fail(self, message: str) -> None:
        """Raises ConformanceError for the transform."""
        raise ConformanceError(f"{self.transform!r} {message}")


def _right(lengths: np.ndarray) -> np.ndarray:
    """Returns the positions of prompts that are padded on the right."""
    place = np.arange(_WIDTH)[None]
    return np.where(place < lengths[:, None], place, -1)


def _state(case: _Case) -> None:
    """Checks that a method gives back a state of the form that it is given."""
    for before, after in ((case.empty, case.prompted), (case.prompted, case.decoded)):
        for old, new in zip(layer_caches(before), layer_caches(after), strict=True):
            given, made = (
                jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", cache.state)
                for cache in (old, new)
            )
            if given != made:
                case.fail(f"makes {made} of its state {given}: shapes and dtypes must stay")


def _promises(case: _Case) -> None:
    """Checks that no more slots are live than `extent` says, none is lost, and shapes stay."""
    pairs = zip(layer_caches(case.prompted), layer_caches(case.decoded), strict=True)
    for before, after in pairs:
        extent, kv = before.transform.extent(Extent(_MAX_PROMPT, _MAX_NEW)), after.kv
        kept = int((before.kv.live.sum(-1) + before.kv.dropped).max())
        if (
            kept < _LENGTHS.max()
            and extent.prompt >= _MAX_PROMPT
            # A room may be larger than the short prompt, and is not as large as the long one.
            and before.transform.extent(Extent(_LONG_PROMPT, _MAX_NEW)).prompt >= _LONG_PROMPT
        ):
            warnings.warn(
                f"{before.transform!r} keeps {kept} of {_LENGTHS.max()} tokens, and `extent` does "
                "not promise so: its cache takes the bytes of the full one",
                stacklevel=4,
            )
        if kept > extent.prompt:
            case.fail(f"promises {extent.prompt} slots after a prompt, and keeps {kept}")
        if kv.dropped.any():
            needed = int((kv.live.sum(-1) + kv.dropped).max())
            case.fail(f"promises {extent.total} slots while decoding, and needs {needed}")
        if kv.slots != extent.total:
            case.fail(f"promises {extent.total} slots, and its cache has {kv.slots}")
        for name, column in kv.columns.items():
            shape = column.values.shape[:3]
            if shape != kv.shape:
                case.fail(f"changed the shape of column {name!r} from {kv.shape} to {shape}")
        if not jnp.isfinite(kv.k.read()).all():
            case.fail("left keys that are not finite")


def _heads_apart(case: _Case) -> None:
    """Checks that a method for all heads keeps the same of a head whatever other heads read."""
    whole = method_for_all(case.transform)
    if whole is None:
        return
    cache, other = case.new_cache(whole), copy.copy(case)
    other.qkv = [np.concatenate((x[:, : x.shape[1] // 2],) * 2, 1) for x in case.qkv]
    (_, first), (_, second) = (each.prompt(cache, _right(_LENGTHS)) for each in (case, other))
    if any(case.kept(first, row)[0] != case.kept(second, row)[0] for row in range(_BATCH)):
        case.fail(
            "keeps other tokens of a head when another head reads other keys: the method in "
            "`ByHead` needs couples_heads=True in its card"
        )


def _long_text(case: _Case) -> None:
    """Checks that a method keeps no more of a long text than of `max_prompt` tokens.

    This is asked only of methods that compress while decoding.
    """
    if flush_interval(case.prompted) is None:
        return
    _, later = case.decode(case.prompted, _LENGTHS, _LONG)
    for layer in layer_caches(later):
        if layer.kv.dropped.any():
            needed = int((layer.kv.live.sum(-1) + layer.kv.dropped).max())
            case.fail(
                f"promises {layer.kv.slots} slots, and needs {needed} after {_LONG} decode steps: "
                "when a row has more than max_prompt tokens, keep no more than of max_prompt"
            )


def _padding(case: _Case) -> None:
    """Checks that padding on the left has the same result as padding on the right."""
    pairs = zip(_right(_LENGTHS), _LENGTHS, strict=True)
    left = np.stack([np.roll(row, _WIDTH - length) for row, length in pairs])
    out, cache = case.prompt(case.empty, left)
    rows = zip(out, _LENGTHS, strict=True)
    out = np.stack([np.roll(row, length - _WIDTH, axis=1) for row, length in rows])
    case.same_prompt(out, cache, "when its prompt is padded at the left")


def _row_alone(case: _Case) -> None:
    """Checks that a row has the same result in a batch as when the other rows are empty."""
    only = (False, True, False)
    out, alone = case.prompt(case.empty, _right(np.where(only, _LENGTHS, 0)))
    outs, alone = case.decode(alone, _LENGTHS, _STEPS, only)
    message = "keeps other tokens of a row in a batch than of the same row alone"
    case.same_tokens(case.decoded, alone, (1,), message)
    message = "answers a row in a batch otherwise than alone"
    case.same_answers([case.out, *case.outs], [out, *outs], 1, message)


def _chunks(case: _Case) -> None:
    """Checks that a prompt has the same result in chunks as in one call."""
    first, second = np.split(_right(_LENGTHS), 2, axis=1)
    out, cache = case.prompt(case.empty, first, last=False)
    more, cache = case.prompt(cache, second)
    case.same_prompt(np.concatenate((out, more), axis=2), cache, "when its prompt comes in chunks")


def _idle_rows(case: _Case) -> None:
    """Checks that a row without tokens in steps, flushes and a further prompt stays as it is."""
    _, cache = case.decode(case.prompted, _LENGTHS, 1)
    interval = flush_interval(cache)
    cache = cache if interval is None else case.flush(cache, interval)
    start, only = _LENGTHS + 1, (False, True, False)
    _, later = case.decode(cache, start, 5, (True, False, True))
    message = "changes what a row keeps in decode steps in which only other rows get tokens"
    case.same_tokens(later, cache, (1,), message)
    turn = np.full((_BATCH, _WIDTH), -1)
    turn[0, :12] = np.arange(start[0] + 5, start[0] + 17)
    _, idle = case.prompt(later, turn)
    message = "changes what a row keeps in a prompt in which only another row gets tokens"
    case.same_tokens(idle, cache, (1,), message)
    message = "stores {name} of a row otherwise after steps and a prompt of other rows"
    case.same_rows(cache, idle, 1, message)
    # The state that a method has of the row shows in its next decisions: the row goes on, once
    # from `cache` as it was, and once from `idle`, after steps and a prompt of other rows.
    turn = np.full((_BATCH, _WIDTH), -1)
    turn[1, :12] = np.arange(start[1] + 5, start[1] + 17)
    outs, decoded = case.decode(cache, start, 5, only)
    idle_outs, idle_decoded = case.decode(idle, start, 5, only)
    out, prompted = case.prompt(decoded, turn)
    idle_out, idle_prompted = case.prompt(idle_decoded, turn)
    message = "answers a row otherwise after steps and a prompt of other rows"
    case.same_answers([*outs, out], [*idle_outs, idle_out], 1, message)
    message = "keeps other tokens of a row after steps and a prompt of other rows: see Step.of_rows"
    case.same_tokens(decoded, idle_decoded, (1,), message)
    case.same_tokens(prompted, idle_prompted, (1,), message)


def _pinned(case: _Case) -> None:
    """Checks that pinned slots stay, outside the budget."""
    cache, extent = case.prompted, case.transform.extent(Extent(_MAX_PROMPT, _MAX_NEW))
    frees = any(map(frees_while_decoding, parts_of(case.transform)))
    if not isinstance(cache, LayerCache) or (frees and extent.total < _MAX_PROMPT):
        return  # the capacity has no room for pins that nobody promised
    kv = cache.kv
    oldest = jnp.where(kv.live, kv.position, 10**6).min(-1, keepdims=True)
    pinned = kv.replace(pinned=kv.pinned | (kv.position == oldest))
    later: Any = case.decode(dataclasses.replace(cache, kv=pinned), _LENGTHS, _STEPS)[1]
    if not (later.kv.position == oldest).any(-1).all():
        case.fail("evicts a pinned slot")


def _step_is_plain(case: _Case) -> None:
    """Checks that a decode step holds no loop and no condition but those of kvjax's operations.

    It looks at the step with kernels, as a GPU runs it: on a CPU, selections count their rounds in
    a loop.
    """
    step = functools.partial(attend, phase="decode", rope=case.rope, implementation="pallas")
    jaxpr = jax.make_jaxpr(step)(case.prompted, *case.tokens(_LENGTHS[:, None])).jaxpr
    names = control_flow(jaxpr, lambda name: name in OWN_CONDITIONS)
    if names:
        case.fail(f"has {', '.join(sorted(set(names)))} in a decode step: leave it to on_flush")


_CHECKS = (
    _state, _promises, _heads_apart, _long_text, _padding, _row_alone, _chunks, _idle_rows, _pinned,
    _step_is_plain,
)  # fmt: skip


def control_flow(jaxpr: Any, skip: Callable[[str], bool] = lambda name: False) -> list[str]:
    """Returns the names of the loops and conditions of a jaxpr, inner ones included.

    Kernels are not looked into.

    Args:
      jaxpr: the jaxpr of a function.
      skip: takes the name of an inner jitted function, and returns whether to skip that function;
        by default none is skipped.

    Returns:
      `"while"`, `"cond"` and `"scan"`, as often as they occur, in their order.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> @jax.jit
      ... def smoothed(score):  # three times, in a loop
      ...     return jax.lax.fori_loop(0, 3, lambda n, x: (x + jnp.roll(x, 1)) / 2, score)
      >>> jaxpr = jax.make_jaxpr(smoothed)(jnp.ones(8)).jaxpr
      >>> kvjax.testing.control_flow(jaxpr)
      ['scan']
      >>> kvjax.testing.control_flow(jaxpr, skip=lambda name: name == "smoothed")
      []
    """
    names = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _CONTROL:
            names.append(name)
        if name == "pallas_call" or skip(str(equation.params.get("name", ""))):
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    names += control_flow(inner, skip)
    return names
