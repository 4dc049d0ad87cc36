"""Divides a batch into groups of similarly long rows, so that little of a prompt is padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from kvjax.attention.layer import Cache, Part, layer_caches, map_parts
from kvjax.attention.rows import map_rows
from kvjax.compiled_code import compiled
from kvjax.compose.walks import walk
from kvjax.devices import put_by_rows
from kvjax.generation.steps import pad
from kvjax.protocol import KVTransform
from kvjax.storage.offload.transform import Offload

_TOKENS_PER_SHAPE = 512  # reading so many takes about as long as compiling for one more shape


class Pieces(NamedTuple):
    """Tokens that look at the documents of a group, in pieces, padded.

    Args:
      tokens: token ids, `[G, P, R]`; in a layer, states `[G, P, R, C]`.
      positions: their positions, which go on behind the document; -1 marks padding.
    """

    tokens: Array
    positions: Int[Array, "G P R"]


class Looking(NamedTuple):
    """Says how a probe looks at the documents of a group.

    Args:
      pieces: the tokens that look; None: none do.
      length: tokens of each document, of which the prompt may be a piece.
    """

    pieces: Pieces | None
    length: Int[Array, " G"]


class Group(NamedTuple):
    """Rows of a batch that are read together.

    Args:
      rows: numbers of the rows; None: all of them, in order.
      tokens, positions: padded; -1 marks padding.
      looking: None: the prompts are not documents, or no method has a probe.
    """

    rows: Int[np.ndarray, " G"] | None
    tokens: Int[Array, "G T"]
    positions: Int[Array, "G T"]
    looking: Looking | None = None


def grouped(
    prompts: Sequence[Sequence[int] | np.ndarray],
    widths: Sequence[int],
    layers: Sequence[KVTransform],
    mesh: Mesh | None,
    first: Int[np.ndarray, " B"] | None = None,
) -> list[Group]:
    """Makes the groups of a batch's prompts, as `row_groups` divides them.

    All rows stay together on a mesh, which divides the rows, and where keys and values are in host
    memory.

    Args:
      prompts: one per row; an empty one takes no part.
      widths: the length that each prompt would be padded to alone.
      layers: one transform per layer.
      mesh: the mesh that divides the rows, if any.
      first: the position of each row's first token; None: 0.
    """
    offloaded = any(isinstance(part, Offload) for layer in {*layers} for part in walk(layer))
    divided = [None] if offloaded or mesh is not None else row_groups(widths)
    first = np.zeros(len(prompts), np.int32) if first is None else first
    groups = []
    for rows in divided:
        numbers = range(len(prompts)) if rows is None else rows
        width = max(widths[row] for row in numbers)
        tokens, places = pad([prompts[row] for row in numbers], width)
        positions = np.where(places >= 0, places + first[list(numbers), None], -1)
        index = None if rows is None else np.array(rows, np.int32)
        groups.append(Group(index, put_by_rows(tokens, mesh), put_by_rows(positions, mesh)))
    return groups


def row_groups(widths: Sequence[int]) -> list[list[int]] | list[None]:
    """Returns the rows of each group; `[None]`: all rows together, padded to the longest.

    A row joins others if padding it to the longest of them less than doubles it. A group has a
    power of two of rows, so that a batch of B rows has at most `log2 B` shapes for each width. All
    rows stay together if the groups would not halve the number of padded tokens, or
    would save less than it takes to compile for their shapes.

    Args:
      widths: the padded length of each row; 0: the row takes no part.

    Example:
      >>> from kvjax.generation.groups import row_groups
      >>> row_groups([64, 2048, 64, 1280, 64])
      [[1, 3], [0, 2], [4]]
      >>> row_groups([64, 80, 112])
      [None]
    """
    by_width: list[list[int]] = []
    for row in sorted(range(len(widths)), key=lambda row: -widths[row]):
        if widths[row] and by_width and 2 * widths[row] > widths[by_width[-1][0]]:
            by_width[-1].append(row)
        elif widths[row]:
            by_width.append([row])
    groups: list[list[int]] = []
    for rows in by_width:
        while rows:
            count = 2 ** (len(rows).bit_length() - 1)
            groups.append(rows[:count])
            rows = rows[count:]
    together = len(widths) * max(widths)
    apart = sum(len(rows) * widths[rows[0]] for rows in groups)
    saved = together - apart
    worth_it = together >= 2 * apart and saved >= _TOKENS_PER_SHAPE * len(groups)
    return groups if worth_it else [None]


@compiled()
def join_groups(order: Int[Array, " B"], caches: tuple[Cache, ...]) -> Cache:
    """Joins the caches of groups of rows into one.

    Args:
      order: for each row of the result, its place among the rows of all groups, one group after
        the other.
      caches: one per group.
    """
    parts = zip(*map(layer_caches, caches), strict=True)  # a head group's caches, of all groups

    def join(_: Part) -> Part:
        return map_rows(lambda *xs: jnp.concatenate(xs)[order], *next(parts))

    return map_parts(join, caches[0])
