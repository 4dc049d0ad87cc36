"""Fields over positions, a line per list of slots: held, selected and similar tokens."""

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
    """Draws lines of marks over positions: 0 is light, 1 is dark, 2 is orange.

    Args:
      axes: axes to draw on.
      marks: a line for each list of slots, a column for each position.
      group: number of lines that belong together, such as the heads of a layer. Groups are
        separated by white lines and numbered.
      label: label of the groups.

    Raises:
      TypeError, ValueError: `axes` are not axes, marks have another shape or other values, or the
        group does not divide the number of lines.

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
    # Fixed limits, so that a colour means the same in every picture.
    image = axes.imshow(
        marks, aspect="auto", interpolation="nearest", vmin=_GONE, vmax=_PINNED,
        cmap=ListedColormap([COLOURS[name] for name in ("gone", "kept", "other")]),
    )  # fmt: skip
    part_lines(axes, len(marks), group, label)
    return image


def held(axes: Axes, caches: Sequence[Cache], *, row: int = 0) -> AxesImage:
    """Draws the positions that every head of every layer holds: dark, and orange if pinned.

    Args:
      axes: axes to draw on.
      caches: caches of layers, such as `context.caches`. Each list of slots is a line: one per KV
        head, or one per query head if a method needs it. Lists of `HeadGroups` come in the order of
        its groups.
      row: row of the batch.

    Returns:
      The image; its array is `[lines, positions]`.

    Raises:
      TypeError, ValueError: `axes` are not axes, caches are not those of layers or differ in the
        number of lists, or the row is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> from kvjax import plot
      >>> from matplotlib.figure import Figure
      >>> attend = jax.jit(kvjax.attend, static_argnames="phase")
      >>> tx = kvjax.StreamingLLM(budget=3, sinks=1)
      >>> cache = kvjax.init_cache(tx, batch=1, kv_heads=2, head_dim=4, max_prompt=5, max_new=1)
      >>> rows = jnp.ones((1, 2, 5, 4))
      >>> _, cache = attend(cache, rows, rows, rows, jnp.arange(5)[None], phase="prompt")
      >>> plot.held(Figure().subplots(), [cache]).get_array().tolist()
      [[1, 0, 0, 1, 1], [1, 0, 0, 1, 1]]
    """
    check_axes(axes)
    marks = _lines(caches, row, _marks)
    return field(axes, marks, group=len(marks) // len(caches), label="layer (a line per head)")


def selected(axes: Axes, steps: Sequence[Seen], *, layer: int) -> AxesImage:
    """Draws the positions that each decode step attended to: a line per step, head by head.

    Args:
      axes: axes to draw on.
      steps: steps from `watch`.
      layer: index of the layer.

    Returns:
      The image; its array is `[heads · steps, positions]`.

    Raises:
      TypeError, ValueError: `axes` are not axes, there are no steps, the model has no such layer,
        or nothing is selected in it.

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
    step_marks = [lists for step in steps if (lists := step.marks[layer]) is not None]
    if len(step_marks) < len(steps):
        raise ValueError(f"in layer {layer} nothing is selected: its steps attend to everything")
    # Every step has one more position than the step before.
    tokens = step_marks[-1].shape[1]
    marks = np.zeros((len(step_marks[-1]), len(steps), tokens), int)
    for number, attended in enumerate(step_marks):
        marks[:, number, : attended.shape[1]] = attended
    return field(axes, marks.reshape(-1, tokens), group=len(steps), label="head (a line per step)")


def similarity(axes: Axes, caches: Sequence[Cache], *, row: int = 0) -> AxesImage:
    """Draws the similarity of neighbouring tokens' keys, and a scale: dark means similar.

    A position shows the cosine of its key and the key of the next live position, as they are
    stored. Positions that are not live are white, and so is the last live one.

    Args:
      axes: axes to draw on.
      caches, row: as in `held`.

    Returns:
      The image; its array is `[lines, positions]`, NaN where there is no cosine.

    Raises:
      TypeError, ValueError: as `held`.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> from kvjax import plot
      >>> from matplotlib.figure import Figure
      >>> attend = jax.jit(kvjax.attend, static_argnames="phase")
      >>> tx = kvjax.Full()
      >>> cache = kvjax.init_cache(tx, batch=1, kv_heads=1, head_dim=2, max_prompt=3, max_new=1)
      >>> rows = jnp.array([[[[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]]])
      >>> _, cache = attend(cache, rows, rows, rows, jnp.arange(3)[None], phase="prompt")
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
    """Draws white lines between groups, and at most 16 of their numbers."""
    for y in range(group, lines, group):
        axes.axhline(y - 0.5, color="white", linewidth=1)
    # A ceiling division: every n-th number is shown, so that there are at most 16.
    shown = np.arange(0, lines // group, -(-lines // group // 16))
    axes.set_yticks((shown + 0.5) * group - 0.5, shown)
    axes.set_ylabel(label)
    axes.set_xlabel("position of the token")


def _lines(
    caches: Sequence[Cache], row: int, make_lines: Callable[[LayerCache, int, int], np.ndarray]
) -> np.ndarray:
    """Returns a line for each list of slots; raises unless all layers have equally many lists."""
    layers = layers_of(caches, row)
    counts = [sum(part.kv.shape[1] for part in parts) for parts in layers]
    if len(set(counts)) > 1:
        raise ValueError(
            f"caches must have equally many lists of slots in all layers, got {counts}"
        )
    parts = [part for parts in layers for part in parts]
    tokens = max(int(part.kv.length[row]) for part in parts)
    return np.concatenate([make_lines(part, row, tokens) for part in parts])


def _marks(cache: LayerCache, row: int, tokens: int) -> Int[np.ndarray, "H T"]:
    """Marks live positions by 1 and pinned ones by 2."""
    kv = cache.kv
    position, live, pinned = (np.asarray(x[row]) for x in (kv.position, kv.live, kv.pinned))
    marks = np.full((len(position), tokens), _GONE)
    for head, line in enumerate(marks):
        line[position[head, live[head]]] = _HELD
        line[position[head, live[head] & pinned[head]]] = _PINNED
    return marks


def _cosines(cache: LayerCache, row: int, tokens: int) -> Float[np.ndarray, "H T"]:
    """Returns the cosine of each live position's key and the next live position's key."""
    kv = cache.kv
    position, live, keys = (np.asarray(x[row]) for x in (kv.position, kv.live, kv.k.read()))
    cosines = np.full((len(position), tokens), np.nan, np.float32)
    for head, line in enumerate(cosines):
        # Live slots by position; the others sort to the end and are cut off.
        order = np.argsort(np.where(live[head], position[head], tokens), kind="stable")
        order = order[: live[head].sum()]
        rows = keys[head, order].astype(np.float32)
        unit = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)
        line[position[head, order[:-1]]] = (unit[:-1] * unit[1:]).sum(-1)
    return cosines
