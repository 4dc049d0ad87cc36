"""Fields of positions: who holds, looks at or resembles what, a line for each list of slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int, Shaped
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.image import AxesImage

from kvjax.attention.layer import Cache, LayerCache
from kvjax.checks import check_count
from kvjax.messages import brief

from .looks import COLOURS, check_axes, layers_of
from .watching import Seen

_GONE, _HELD, _PINNED = range(3)


def field(
    axes: Axes, marks: Shaped[np.ndarray, "N T"], *, group: int = 1, label: str = ""
) -> AxesImage:
    """Draws lines of marks over positions: 0 is light, 1 dark, 2 the other colour.

    Args:
      axes: to draw on.
      marks: a line for each list of slots, a column for each position.
      group: lines that belong together, such as the heads of a layer; groups are parted by a white
        line and numbered.
      label: of the groups.

    Raises:
      TypeError, ValueError: no axes, marks of another shape or other values, a group that does not
        divide the lines.

    Example:
      >>> import numpy as np
      >>> from matplotlib.figure import Figure
      >>> from kvjax import plot
      >>> axes = Figure().subplots()
      >>> image = plot.field(axes, np.eye(4, dtype=int), group=2, label="layer")
      >>> [text.get_text() for text in axes.get_yticklabels()]
      ['0', '1']
    """
    check_axes(axes)
    check_count("group", group, 1)
    marks = np.asarray(marks)
    if marks.ndim != 2 or not marks.size or not np.isin(marks, (_GONE, _HELD, _PINNED)).all():
        raise ValueError(f"marks must be [lines, positions] of 0, 1 and 2, got {brief(marks)}")
    if len(marks) % group:
        raise ValueError(f"group must divide the {len(marks)} lines, got {group}")
    image = axes.imshow(
        marks, aspect="auto", interpolation="nearest", vmin=_GONE, vmax=_PINNED,
        cmap=ListedColormap([COLOURS[name] for name in ("gone", "kept", "other")]),
    )  # fmt: skip
    part_lines(axes, len(marks), group, label)
    return image


def held(axes: Axes, caches: Sequence[Cache], *, row: int = 0) -> AxesImage:
    """Draws which positions every head of every layer holds: dark, and pinned ones in orange.

    Args:
      axes: to draw on.
      caches: of layers, such as `context.caches`; a line for each of their lists of slots, which
        are one for each KV head, or where a method needs it one for each query head; those of
        `HeadGroups` come in the order of its groups.
      row: of the batch.

    Returns:
      The image; its array is `[lines, positions]`.

    Raises:
      TypeError, ValueError: no axes, no caches of layers with as many lists, a row out of range.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> from kvjax import plot
      >>> from matplotlib.figure import Figure
      >>> attend = jax.jit(kvjax.attend, static_argnums=0, static_argnames="phase")
      >>> tx = kvjax.StreamingLLM(budget=3, sinks=1)
      >>> cache = kvjax.init_cache(tx, batch=1, kv_heads=2, head_dim=4, max_prompt=5, max_new=1)
      >>> rows = jnp.ones((1, 2, 5, 4))
      >>> _, cache = attend(tx, cache, rows, rows, rows, jnp.arange(5)[None], phase="prompt")
      >>> plot.held(Figure().subplots(), [cache]).get_array().tolist()
      [[1, 0, 0, 1, 1], [1, 0, 0, 1, 1]]
    """
    check_axes(axes)
    marks = _lines(caches, row, _marks)
    return field(axes, marks, group=len(marks) // len(caches), label="layer (a line per head)")


def selected(axes: Axes, steps: Sequence[Seen], *, layer: int) -> AxesImage:
    """Draws which positions each decode step attended to: a line per step, head by head.

    Args:
      axes: to draw on.
      steps: from `watch`.
      layer: which one.

    Returns:
      The image; its array is `[heads · steps, positions]`.

    Raises:
      TypeError, ValueError: no axes, no steps, a layer that the model does not have or in which
        nothing is selected.

    Example:
      >>> import numpy as np
      >>> from matplotlib.figure import Figure
      >>> from kvjax import plot
      >>> marks = np.array([[True, False, True]]), np.array([[False, True, False, False]])
      >>> steps = [plot.Seen(token=5, marks=(seen,), recall=(None,)) for seen in marks]
      >>> plot.selected(Figure().subplots(), steps, layer=0).get_array().tolist()
      [[1, 0, 1, 0], [0, 1, 0, 0]]
    """
    check_axes(axes)
    if not len(steps) or not all(isinstance(step, Seen) for step in steps):
        raise TypeError(f"steps must be those that watch returns, got {brief(steps)}")
    check_count("layer", layer, 0, most=len(steps[0].marks) - 1)
    seen_marks = [step.marks[layer] for step in steps]
    if seen_marks[0] is None:
        raise ValueError(f"in layer {layer} nothing is selected: its steps attend to everything")
    tokens = seen_marks[-1].shape[1]
    marks = np.zeros((len(seen_marks[-1]), len(steps), tokens), int)
    for step, seen in enumerate(seen_marks):
        marks[:, step, : seen.shape[1]] = seen
    return field(axes, marks.reshape(-1, tokens), group=len(steps), label="head (a line per step)")


def similarity(axes: Axes, caches: Sequence[Cache], *, row: int = 0) -> AxesImage:
    """Draws how alike the keys of neighbouring tokens are, and a scale: dark where they are alike.

    A position has the cosine of its key and the next one's, as they are stored; where the next
    position is not live, that of the next one that is. A position that is not live is white, and so
    is the last one.

    Args:
      axes: to draw on.
      caches, row: as in `held`.

    Returns:
      The image; its array is `[lines, positions]`, NaN where there is no cosine.

    Raises:
      TypeError, ValueError: as `held`.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> from kvjax import plot
      >>> from matplotlib.figure import Figure
      >>> attend = jax.jit(kvjax.attend, static_argnums=0, static_argnames="phase")
      >>> tx = kvjax.Full()
      >>> cache = kvjax.init_cache(tx, batch=1, kv_heads=1, head_dim=2, max_prompt=3, max_new=1)
      >>> rows = jnp.array([[[[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]]])
      >>> _, cache = attend(tx, cache, rows, rows, rows, jnp.arange(3)[None], phase="prompt")
      >>> plot.similarity(Figure().subplots(), [cache]).get_array()[0, :2].tolist()
      [1.0, 0.0]
    """
    check_axes(axes)
    cosines = _lines(caches, row, _cosines)
    look = {"vmin": 0, "vmax": 1, "cmap": "Greys"}
    image = axes.imshow(cosines, aspect="auto", interpolation="nearest", **look)
    part_lines(axes, len(cosines), len(cosines) // len(caches), "layer (a line per head)")
    axes.figure.colorbar(image, ax=axes, pad=0.01, label="cosine with the next key", extend="min")
    return image


def part_lines(axes: Axes, lines: int, group: int, label: str) -> None:
    """White lines between groups, and their numbers, not more than fit."""
    for y in range(group, lines, group):
        axes.axhline(y - 0.5, color="white", linewidth=1)
    shown = np.arange(0, lines // group, -(-lines // group // 16))
    axes.set_yticks((shown + 0.5) * group - 0.5, shown)
    axes.set_ylabel(label)
    axes.set_xlabel("position of the token")


def _lines(
    caches: Sequence[Cache], row: int, of_part: Callable[[LayerCache, int, int], np.ndarray]
) -> np.ndarray:
    """A line for each list of slots; raises unless all layers have as many of them."""
    layers = layers_of(caches, row)
    counts = [sum(part.kv.shape[1] for part in parts) for parts in layers]
    if len(set(counts)) > 1:
        raise ValueError(f"caches must have as many lists of slots in all layers, got {counts}")
    parts = [part for parts in layers for part in parts]
    tokens = max(int(part.kv.length[row]) for part in parts)
    return np.concatenate([of_part(part, row, tokens) for part in parts])


def _marks(cache: LayerCache, row: int, tokens: int) -> Int[np.ndarray, "H T"]:
    """1 at positions that are live, 2 where they are pinned."""
    kv = cache.kv
    position, live, pinned = (np.asarray(x[row]) for x in (kv.position, kv.live, kv.pinned))
    marks = np.full((len(position), tokens), _GONE)
    for head, line in enumerate(marks):
        line[position[head, live[head]]] = _HELD
        line[position[head, live[head] & pinned[head]]] = _PINNED
    return marks


def _cosines(cache: LayerCache, row: int, tokens: int) -> Float[np.ndarray, "H T"]:
    """The cosine of the key of each live position and that of the next live one."""
    kv = cache.kv
    position, live, keys = (np.asarray(x[row]) for x in (kv.position, kv.live, kv.k.read()))
    cosines = np.full((len(position), tokens), np.nan, np.float32)
    for head, line in enumerate(cosines):
        order = np.argsort(np.where(live[head], position[head], tokens), kind="stable")
        order = order[: live[head].sum()]
        rows = keys[head, order].astype(np.float32)
        unit = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)
        line[position[head, order[:-1]]] = (unit[:-1] * unit[1:]).sum(-1)
    return cosines
