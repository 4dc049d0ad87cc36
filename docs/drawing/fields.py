"""Pictures of who holds or looks at which position."""

from __future__ import annotations

import dataclasses

import numpy as np
from flax import nnx
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

import kvjax
from kvjax.models import LayerConfig, random_decoder

from .material import BUDGET, STEPS, TOKENS, Material, Observed, marks_of, steps_of
from .panels import KEPT, PALE, draw_field, legend, new_figure, part_rows, shade_answer


def kept(material: Material, transform: kvjax.KVTransform, other: str = "") -> Figure:
    """Which positions each head of each layer holds after the prompt; `other`: pinned ones."""
    figure, axes = new_figure(2.6)
    marks = _held(material, transform)
    draw_field(axes, marks, "layer (a row per KV head)", material.model.kv_heads)
    shade_answer(axes, material)
    legend(figure, kept="kept", **({"other": other} if other else {}))
    return figure


def received(material: Material) -> Figure:
    """The attention that each position has received from the whole prompt."""
    figure, axes = new_figure(2.8)
    caches = material.caches(kvjax.H2O(budget=1.0))
    sums = np.concatenate([cache.kv.column("attention")[0, :, :TOKENS] for cache in caches])
    image = axes.imshow(
        sums.mean(-1), aspect="auto", interpolation="nearest", cmap="Greys", norm=LogNorm(0.03, 10)
    )
    part_rows(axes, "layer (a row per KV head)", material.model.kv_heads)
    axes.set_xlabel("position of the token")
    figure.colorbar(image, ax=axes, pad=0.01, label="attention received", format="{x:g}")
    return figure


def windows(material: Material, window: int = 128) -> Figure:
    """Layers with and without a window: rings in the first, or the method everywhere."""
    config = material.model.config
    layers = tuple(LayerConfig(config.rope, None if i % 2 else window)
                   for i in range(config.num_layers))  # fmt: skip
    model = random_decoder(dataclasses.replace(config, layers=layers))
    nnx.update(model, nnx.state(material.model))
    material = material._replace(model=model)
    figure, panels = new_figure(4.6, rows=2)
    method = kvjax.SnapKV(budget=64)
    titles = {f"snapkv: layers with a window of {window} are rings": method,
              "everywhere(snapkv)": kvjax.Everywhere(method)}  # fmt: skip
    for axes, (title, transform) in zip(panels, titles.items(), strict=True):
        draw_field(axes, _held(material, transform), "layer", material.model.kv_heads)
        axes.set_title(title)
    legend(figure, kept="kept")
    return figure


def selected(material: Material, transform: kvjax.KVTransform, layer: int = 2) -> Figure:
    """What each of a few decode steps attends to, by KV head."""
    seen, _ = steps_of(material, Observed(transform), STEPS)
    marks = np.stack([marks_of(step[layer]) for step in seen], axis=1)  # heads, steps, positions
    figure, axes = new_figure(2.8)
    draw_field(axes, marks.reshape(-1, marks.shape[-1]), "KV head (a row per step)", STEPS)
    shade_answer(axes, material)
    legend(figure, kept="attended to")
    return figure


def fetched(material: Material, layer: int = 2) -> Figure:
    """Of what steps attend to: what the step before had, and what must cross from the host."""
    seen, _ = steps_of(material, Observed(kvjax.ClusterKV(budget=BUDGET)), STEPS)
    marks = np.stack([marks_of(step[layer]) for step in seen], axis=1)
    before = np.concatenate([np.zeros_like(marks[:, :1]), marks[:, :-1]], axis=1)
    crosses = (marks == 1) & (before == 0)
    crosses[:, :, TOKENS:] = False  # new tokens are on the device
    marks = np.where(crosses, 2, marks)
    figure, axes = new_figure(2.8)
    draw_field(axes, marks.reshape(-1, marks.shape[-1]), "KV head (a row per step)", STEPS)
    legend(figure, kept="on the device since the step before", other="fetched from the host")
    return figure


def clusters(material: Material, layer: int = 2) -> Figure:
    """The cluster of each position, and what the next step attends to."""
    observed = Observed(kvjax.ClusterKV(budget=BUDGET, tokens_per_cluster=16))
    seen, context = steps_of(material, observed, 1)
    cache = context.caches[layer]
    index = cache.state.base[0]
    figure, panels = new_figure(4.4, rows=len(index.sizes[0]))
    for head, axes in enumerate(panels):
        position = np.asarray(cache.kv.position[0, head])
        spans = zip(index.starts[0, head], index.sizes[0, head], strict=True)
        members_of = [position[start : start + size] for start, size in spans if size]
        for number, members in enumerate(sorted(members_of, key=min)):
            chosen = np.isin(members, seen[0][layer][head])
            for part, colour, size in ((~chosen, PALE, 2), (chosen, KEPT, 4)):
                axes.plot(members[part], np.full(part.sum(), number), ".", color=colour,
                          markersize=size, rasterized=True)  # fmt: skip
        shade_answer(axes, material, axes.get_ylim()[1] if head == 0 else None)
        axes.set_ylabel(f"head {head}\ncluster")
    panels[-1].set_xlabel("position of the token")
    legend(figure, kept="attended to by the next step", gone="kept for later steps")
    return figure


def _held(material: Material, transform: kvjax.KVTransform) -> np.ndarray:
    """Of every list of slots, layer by layer: 1 at positions that are live, 2 where pinned."""
    rows = []
    for cache in material.caches(transform):
        kv = cache.kv
        live, pinned = (
            marks_of(np.where(where[0], kv.position[0], -1))
            for where in (kv.live, kv.live & kv.pinned)
        )
        rows.append(live + pinned)
    return np.concatenate(rows)
