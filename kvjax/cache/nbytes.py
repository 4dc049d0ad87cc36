"""Bytes of caches, by the kind of memory."""

from __future__ import annotations

import jax


def nbytes(tree) -> int:
    """Returns the bytes of all arrays in a pytree.

    A cache has keys, values, positions, masses, columns and state. The function takes arrays
    and shapes (`jax.eval_shape`), so that it can tell the size of a cache before it is made.

    Example:
      >>> import jax, kvjax
      >>> size = {"batch": 1, "kv_heads": 8, "head_dim": 128, "max_prompt": 32_768, "max_new": 256}
      >>> full, snapkv = (
      ...     kvjax.nbytes(jax.eval_shape(lambda: kvjax.init_cache(tx, **size, dtype="bfloat16")))
      ...     for tx in (kvjax.Full(), kvjax.SnapKV(budget=1024))
      ... )
      >>> round(full / snapkv, 1)
      25.8
    """
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def memory_bytes(tree) -> dict[str, int]:
    """Returns the bytes of all arrays in a pytree, by the kind of memory that they are in.

    Args:
      tree: arrays as a call returns them, not shapes.

    Example:
      >>> import kvjax, kvjax.evaluation
      >>> size = {"batch": 1, "kv_heads": 2, "head_dim": 16, "max_prompt": 64, "max_new": 8}
      >>> kvjax.evaluation.memory_bytes(kvjax.init_cache(kvjax.Full(), **size))
      {'device': 19748}
    """
    total: dict[str, int] = {}
    for leaf in jax.tree.leaves(tree):
        memory = leaf.sharding.memory_kind
        total[memory] = total.get(memory, 0) + leaf.size * leaf.dtype.itemsize
    return total
