"""Rows of caches: taken, repeated, in another order, and put into other caches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.attention.layer import Part, Reading, check_caches, layer_caches, map_parts
from kvjax.attention.parts import has_rows, placed
from kvjax.cache.rope import Rope
from kvjax.compiled_code import compiled
from kvjax.messages import brief
from kvjax.storage.offload.payload import to_host

Caches = TypeVar("Caches")  # a LayerCache, or a pytree of them
Rows = Int[Array, " N"] | Int[np.ndarray, " N"] | Sequence[int]


def take_rows(caches: Caches, index: Rows) -> Caches:
    """Rows of caches as caches: some of them, repeated, or in another order.

    All that a row has comes along: its slots and columns in whatever form they are stored, its
    part of the method's state, its length, and what has been read of a prompt that is not complete.
    The batch that results is as large as the index is long. Arrays that a method has for all rows
    alike, such as tables of budgets and the key of its random draws, stay as they are. Draws depend
    on the key, the KV head and the position of a token alone, so a row draws the same numbers
    wherever it stands, and copies of a row that see the same tokens stay equal.

    Beam search takes the rows of its best beams after each step. Rows go out of a batch by being
    left out. Inside `jit`, donate the caches.

    Args:
      caches: of one layer, or a pytree of them, such as a list by layer.
      index: the row that each new row is copied from, `[N]`, all of them below the batch. Numbers
        that are an array of JAX are not checked.

    Returns:
      Caches of N rows in memory of their own: keys and values in host memory are there again, and
      what was made for a mesh is divided as its new number of rows allows.

    Raises:
      TypeError: `caches` holds something else, or the index is not a list of whole numbers.
      ValueError: a row does not exist, the index is empty, the caches have different batches or
        are stacked by layer.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> attend = jax.jit(kvjax.attend, static_argnames="phase")
      >>> tx = kvjax.SnapKV(budget=24, window=8)
      >>> cache = kvjax.init_cache(tx, batch=2, kv_heads=2, head_dim=4, max_prompt=32, max_new=4)
      >>> tokens = jnp.ones((2, 2, 32, 4))
      >>> at = jnp.stack([jnp.arange(32), jnp.where(jnp.arange(32) < 7, jnp.arange(32), -1)])
      >>> _, cache = attend(cache, tokens, tokens, tokens, at, phase="prompt")
      >>> kvjax.take_rows(cache, [1, 1, 0]).kv.length.tolist()
      [7, 7, 32]
    """
    rows = _checked(index, _batch(caches, "take_rows"))
    return map_parts(lambda cache: placed(_taken(cache, rows)), caches)


def put_rows(caches: Caches, index: Rows, other: Caches) -> Caches:
    """Caches in which some rows are those of other caches: a batch whose members come and go.

    A row of the batch is replaced with all that it has, as `take_rows` takes it; the others stay as
    they are, bit for bit. So does what a method has for all rows alike, which is the same in both
    caches of a layer. What a cache keeps of the attention of the last prompt for its flushes (the
    frequencies of RoPE, the logits of sinks) comes from `other` if that has had a prompt.

    A method with a `flush_interval` finds in new rows the room that they had where they come from.
    Call `kvjax.flush` once after rows have come that took decode steps since their last flush.

    Args:
      caches: of one layer, or a pytree of them. Donate them.
      index: the rows that are replaced, `[N]`, different ones and all of them below the batch.
        Numbers that are an array of JAX are not checked.
      other: caches of N rows, of the same layers, method, sizes and options, and at the same
        chunk of a prompt if that is not complete. An empty cache frees rows.

    Returns:
      The caches, of the same batch.

    Raises:
      TypeError: as `take_rows`.
      ValueError: as `take_rows`; a row stands twice, or the caches are not alike.

    Example:
      >>> import kvjax
      >>> sizes = {"kv_heads": 2, "head_dim": 4, "max_prompt": 32, "max_new": 4}
      >>> batch = kvjax.init_cache(kvjax.Full(), batch=4, **sizes)
      >>> one = kvjax.init_cache(kvjax.Full(), batch=1, **sizes)
      >>> batch = kvjax.put_rows(batch, [2], one)
      >>> batch.kv.shape
      (4, 2, 36)
    """
    batch, new_rows = (_batch(x, "put_rows") for x in (caches, other))
    rows = _checked(index, batch)
    if rows.shape[0] != new_rows:
        raise ValueError(
            f"index must name a row for each one of the other caches, {new_rows}, got "
            f"{rows.shape[0]}"
        )
    if isinstance(rows, np.ndarray) and np.unique(rows).size < rows.size:
        raise ValueError(f"index must name different rows, got {rows.tolist()}")
    if _tree(caches) != _tree(other):
        raise ValueError(
            "put_rows takes two pytrees of the same structure, by layer and group of heads, got "
            f"{len(layer_caches(caches))} and {len(layer_caches(other))} caches"
        )
    left = iter(layer_caches(other))

    def put(cache: Part) -> Part:
        new = next(left)
        _check_alike(cache, new)
        return placed(_put(cache, rows, new))

    return map_parts(put, caches)


def map_rows(function: Callable[..., Array], cache: Part, *others: Part) -> Part:
    """`function` of the arrays that have rows, and the others of the first cache, copied."""
    return jax.tree.map(
        lambda has, *arrays: function(*arrays) if has else copied(arrays[0]),
        has_rows(cache), cache, *others,
    )  # fmt: skip


def copied(x: Array) -> Array:
    """`x` in memory of its own. Where no sharding is named, the copy is not bound to a device."""
    if isinstance(x, jax.core.Tracer):
        return jnp.copy(x)  # an output of `jit` that is an input would be that very array
    where = x.sharding if _in_host_memory(x) or len(x.sharding.device_set) > 1 else None
    return jax.device_put(x, where, may_alias=False)


@compiled()
def _taken(cache: Part, rows: Int[Array, " N"]) -> Part:
    return map_rows(lambda x: _rows_of(x, rows), cache)


@compiled()
def _put(cache: Part, rows: Int[Array, " N"], new: Part) -> Part:
    put = functools.partial(_with_rows, rows=rows)
    done = map_rows(put, _without_rope(cache), _without_rope(new))
    done = dataclasses.replace(done, rope=_rope_of(cache, rows, new))
    if isinstance(cache, Reading) and isinstance(new, Reading):
        rope = _rope_of(cache.cache, rows, new.cache)
        return dataclasses.replace(done, cache=dataclasses.replace(done.cache, rope=rope))  # pyright: ignore[reportAttributeAccessIssue]
    sinks = cache.options.sinks
    if sinks is None:
        return done
    sinks = jnp.where(jnp.isneginf(new.options.sinks), sinks, new.options.sinks)
    return dataclasses.replace(done, options=dataclasses.replace(cache.options, sinks=sinks))


def _without_rope(cache: Part) -> Part:
    """The cache without frequencies, which a used one may have and an empty one not."""
    if isinstance(cache, Reading):
        cache = dataclasses.replace(cache, cache=_without_rope(cache.cache))
    return dataclasses.replace(cache, rope=None)


def _rope_of(cache: Part, rows: Int[Array, " N"], new: Part) -> Rope | None:
    """Returns the frequencies of the last prompt, which an empty cache does not have."""
    if new.rope is None:
        return jax.tree.map(copied, cache.rope)
    if new.rope.inv_freq.ndim == 1:
        return jax.tree.map(copied, new.rope)
    old = cache.rope
    if old is None:
        shape = cache.kv.shape[0], *new.rope.inv_freq.shape[1:]
        old = dataclasses.replace(new.rope, inv_freq=jnp.zeros(shape, new.rope.inv_freq.dtype))
    return jax.tree.map(lambda x, new: _with_rows(x, new, rows), old, new.rope)


def _rows_of(x: Array, rows: Int[Array, " N"]) -> Array:
    """Rows of an array, in the same kind of memory."""
    if not _in_host_memory(x):
        return x[rows]
    empty = to_host(jnp.zeros((rows.shape[0], *x.shape[1:]), x.dtype))
    return _moved(empty, jnp.arange(rows.shape[0]), x, rows)


def _with_rows(x: Array, new: Array, rows: Int[Array, " N"]) -> Array:
    """An array with other rows in the place of some, in the same kind of memory."""
    if not _in_host_memory(x):
        return x.at[rows].set(new)
    return _moved(x, rows, new, jnp.arange(rows.shape[0]))


def _moved(x: Array, to: Int[Array, " N"], new: Array, source: Int[Array, " N"]) -> Array:
    """Rows of one array of host memory in another one; the device holds one row at a time."""

    def move(i: Int[Array, ""], x: Array) -> Array:
        row = jax.lax.dynamic_slice_in_dim(new, source[i], 1)
        row = to_host(jax.device_put(row, jax.memory.Space.Device))
        return jax.lax.dynamic_update_slice_in_dim(x, row, to[i], 0)

    return jax.lax.fori_loop(0, to.shape[0], move, x)


def _in_host_memory(x: Array) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def _batch(caches: Any, where: str) -> int:
    """The rows of all of these caches."""
    check_caches(caches, where, reading=True)
    batches = {part.kv.shape[0] for part in layer_caches(caches)}
    if len(batches) != 1:
        raise ValueError(f"{where} takes caches of one batch, got {sorted(batches) or 'none'}")
    return batches.pop()


def _checked(index: Any, batch: int) -> Int[Array, " N"] | Int[np.ndarray, " N"]:
    """Returns row numbers as an array, checked against the batch unless JAX holds them."""
    rows = index if isinstance(index, jax.Array) else np.asarray(index)
    if rows.shape == (0,):
        raise ValueError("index must name at least one row, got none")
    if rows.ndim != 1 or not jnp.issubdtype(rows.dtype, jnp.integer):
        raise TypeError(f"index must be whole numbers of rows, [N], got {brief(index)}")
    if isinstance(rows, jax.Array):
        return rows
    if rows.min() < 0 or rows.max() >= batch:
        raise ValueError(f"index must be rows below {batch}, the batch, got {brief(rows.tolist())}")
    return rows.astype(np.int32)


def _tree(caches: Any) -> Any:
    return jax.tree.structure(caches, is_leaf=lambda x: isinstance(x, Part))


def _check_alike(cache: Part, new: Part) -> None:
    """Raises ValueError unless rows of one cache can be those of the other."""
    for name, expected, actual in _settings(cache, new):
        if expected != actual:
            raise ValueError(
                f"the other caches must be made like those that get their rows, for {name}="
                f"{expected!r:.200}, got {actual!r:.200}"
            )
    (first, tree), (second, new_tree) = (jax.tree.flatten(_without_rope(x)) for x in (cache, new))
    kinds = [[(x.shape[1:], x.dtype) for x in arrays] for arrays in (first, second)]
    if tree != new_tree or kinds[0] != kinds[1]:
        raise ValueError(
            "the other caches must have arrays like those that get their rows: both with complete "
            "prompts or after the same chunk of one, of one dtype, and of methods for the same "
            "layers"
        )


def _settings(cache: Part, new: Part) -> list[tuple[str, Any, Any]]:
    """Lists what both were made for, by name."""
    layers = tuple(x.cache if isinstance(x, Reading) else x for x in (cache, new))
    pairs = layers, (cache.kv, new.kv), (cache.options, new.options)
    return [
        (field.name, getattr(part, field.name), getattr(new_part, field.name))
        for part, new_part in pairs
        for field in dataclasses.fields(part)
        if field.metadata.get("static")
    ]
