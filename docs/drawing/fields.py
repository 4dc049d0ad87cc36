"""Pictures of who holds or looks at which position."""

from __future__ import annotations

import dataclasses

import numpy as np
from flax import nnx
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

import kvjax
from kvjax import plot
from kvjax.models import LayerConfig, random_decoder
from kvjax.plot.fields import part_lines

from .material import BUDGET, STEPS, TOKENS, Material, new_figure


def kept(material: Material, transform: kvjax.KVTransform, **other: str) -> Figure:
    """Which positions each head of each layer holds after the prompt; `other`: pinned ones."""
    figure, axes = new_figure(2.6)
    plot.held(axes, material.caches(transform))
    plot.span(axes, *material.answer, "answer")
    plot.legend(figure, kept="kept", **other)
    return figure


def received(material: Material) -> Figure:
    """The attention that each position has received from the whole prompt."""
    figure, axes = new_figure(2.8)
    caches = material.caches(kvjax.H2O(budget=1.0))
    sums = np.concatenate([cache.kv.column("attention")[0, :, :TOKENS] for cache in caches])
    image = axes.imshow(
        sums.mean(-1), aspect="auto", interpolation="nearest", cmap="Greys", norm=LogNorm(0.03, 10)
    )
    part_lines(axes, len(sums), material.model.kv_heads, "layer (a line per head)")
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
        plot.held(axes, material.caches(transform))
        axes.set(title=title, ylabel="layer")
    plot.legend(figure, kept="kept")
    return figure


def selected(material: Material, transform: kvjax.KVTransform, layer: int = 2) -> Figure:
    """What each of a few decode steps attends to, by KV head."""
    steps, _ = plot.watch(material.model, material.prompt, transform, STEPS)
    figure, axes = new_figure(2.8)
    plot.selected(axes, steps, layer=layer)
    plot.span(axes, *material.answer, "answer")
    plot.legend(figure, kept="attended to")
    return figure


def fetched(material: Material, layer: int = 2) -> Figure:
    """Of what steps attend to: what the step before had, and what must cross from the host."""
    steps, _ = plot.watch(material.model, material.prompt, kvjax.ClusterKV(budget=BUDGET), STEPS)
    figure, axes = new_figure(2.8)
    image = plot.selected(axes, steps, layer=layer)
    marks = np.asarray(image.get_array()).reshape(-1, STEPS, image.get_array().shape[1])
    crosses = marks == 1
    crosses[:, 1:] &= marks[:, :-1] == 0
    crosses[:, :, TOKENS:] = False  # new tokens are on the device
    image.set_data(np.where(crosses, 2, marks).reshape(image.get_array().shape))
    plot.legend(figure, kept="on the device since the step before", other="fetched from the host")
    return figure


def clusters(material: Material, layer: int = 2) -> Figure:
    """The cluster of each position, and what the next step attends to."""
    method = kvjax.ClusterKV(budget=BUDGET, tokens_per_cluster=16)
    (step,), context = plot.watch(material.model, material.prompt, method, 1)
    figure, panels = new_figure(4.4, rows=material.model.kv_heads)
    for head, axes in enumerate(panels):
        seen = step.marks[layer][head]
        for dots in plot.clusters(axes, context.caches[layer], head=head, seen=seen):
            dots.set_rasterized(True)
        plot.span(axes, *material.answer, "" if head else "answer")
        axes.set(xlabel="", ylabel=f"head {head}\ncluster")
    panels[-1].set_xlabel("position of the token")
    plot.legend(figure, kept="attended to by the next step", pale="kept for later steps")
    return figure
