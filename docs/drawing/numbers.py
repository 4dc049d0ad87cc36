"""Pictures of what slots hold: masses, values, books, bits; and of the idea of it all."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import kvjax
from kvjax import plot
from kvjax.models import demo, load_tokenizer
from kvjax.plot.looks import COLOURS

from .material import BUDGET, TOKENS, Material, new_figure

KEPT, OTHER = COLOURS["kept"], COLOURS["other"]
LINES = (("#0072B2", "-"), ("#D55E00", (0, (5, 2))), ("#009E73", (0, (1, 1))),
         ("#CC79A7", (0, (5, 1, 1, 1))))  # fmt: skip


def masses(material: Material, transform: kvjax.KVTransform, layer: int = 2) -> Figure:
    """How many tokens each slot of a layer stands for."""
    cache = material.caches(transform)[layer]
    figure, panels = new_figure(3.4, rows=cache.kv.shape[1])
    for head, axes in enumerate(panels):
        plot.masses(axes, cache, head=head).set_rasterized(True)
        axes.set(xlabel="", ylabel=f"head {head}")
    top = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(top=top)
    panels[0].set_title(f"Layer {layer}: tokens in the slot")
    panels[-1].set_xlabel("position of the token")
    return figure


def moved(material: Material, layer: int = 1) -> Figure:
    """By how much the values of kept tokens differ from those of the base alone."""
    base = kvjax.SnapKV(budget=BUDGET)
    merged = kvjax.CaM(base, merge_tokens=16, prompt=True, expected=True)
    plain, changed = (material.caches(tx)[layer].kv for tx in (base, merged))
    heads = []  # both caches hold the same tokens in the same slots
    for head, live in enumerate(np.asarray(plain.live[0])):
        before, after = (np.asarray(cache.v.read()[0, head])[live] for cache in (plain, changed))
        change = np.linalg.norm(after - before, axis=-1) / np.linalg.norm(before, axis=-1)
        heads.append((np.asarray(plain.position[0, head])[live], change))
    figure, panels = new_figure(3.4, rows=len(heads))
    top = max(float(height.max()) for _, height in heads)
    for head, (axes, (at, height)) in enumerate(zip(panels, heads, strict=True)):
        axes.vlines(at, 0, height, color=KEPT, linewidth=0.8, rasterized=True)
        axes.set(ylim=(0, top * 1.1), ylabel=f"head {head}")
    panels[0].set_title(f"Values of layer {layer}: relative change")
    panels[-1].set_xlabel("position of the token")
    return figure


def books(material: Material) -> Figure:
    """How many vectors each entry of a layer's books stands for, the busiest entries first."""
    figure, panels = new_figure(2.8, columns=2)
    caches = material.caches(kvjax.Codebook())
    for axes, name in zip(panels, "kv", strict=True):
        for layer, cache in enumerate(caches):
            payload = getattr(cache.kv, name)
            index = np.asarray(payload.index[0])[np.asarray(cache.kv.live[0])]
            uses = np.sort(np.bincount(index))[::-1]
            uses = uses[uses > 0]
            colour, dashes = LINES[layer % len(LINES)]
            label = f"layer {layer}: {len(uses):,} entries"
            axes.loglog(1 + np.arange(len(uses)), uses, color=colour, ls=dashes, label=label,
                        marker=".", markevery=[0])  # fmt: skip
        axes.set_title({"k": "keys", "v": "values"}[name])
        axes.set_xlabel("entry, the busiest first")
        axes.legend(fontsize=7)
    panels[0].set_ylabel(f"of {TOKENS * caches[0].kv.shape[1]:,} vectors")
    return figure


def spindle(material: Material, reserve: float = 0.5) -> Figure:
    """By layer: tokens that are kept, and entries of the books, as shares of all vectors."""
    figure, axes = new_figure(2.6)
    caches = material.caches(kvjax.SpindleKV(reserve=reserve))
    every = TOKENS * caches[0].kv.shape[1]
    shares = np.array([
        [int(kv.live[0].sum()), int(kv.k.count[0]), int(kv.v.count[0])]
        for kv in (cache.kv for cache in caches)
    ]) / every  # fmt: skip
    looks = (("vectors kept", "#d0d0d0", ""), ("key entries", KEPT, ""),
             ("value entries", OTHER, "///"))  # fmt: skip
    for part, (label, colour, hatch) in enumerate(looks):
        place = np.arange(len(caches)) + (part - 1) * 0.27
        axes.bar(place, shares[:, part], 0.25, color=colour, hatch=hatch, edgecolor="black",
                 linewidth=0.4, label=label)  # fmt: skip
    axes.set_xticks(range(len(caches)), [f"layer {i}" for i in range(len(caches))])
    axes.set_ylabel("share of the full cache's vectors")
    axes.legend()
    return figure


def errors(material: Material, layer: int = 2, head: int = 0) -> Figure:
    """The size of each channel of a head's keys, and the error of stored forms."""
    forms = {
        "8 bits": kvjax.Quantize(8),
        "4 bits, groups of slots": kvjax.Quantize(4),
        "4 bits, groups of channels": kvjax.Quantize(4, key_axis="token"),
        "the same, not rotated": kvjax.Quantize(4, key_axis="token", rotate=False),
    }
    read = {
        name: np.asarray(material.caches(tx)[layer].kv.k.read()[0, head, :TOKENS])
        for name, tx in {"exact": kvjax.Full(), **forms}.items()
    }
    exact = read.pop("exact")
    size = np.sqrt((exact**2).mean(0))
    order = np.argsort(size)[::-1]
    figure, panels = new_figure(2.6, columns=2)
    panels[0].bar(np.arange(len(size)), size[order], color=KEPT)
    panels[0].set_title("size of the keys (root mean square)")
    for (name, keys), (colour, dashes) in zip(read.items(), LINES, strict=False):
        error = np.sqrt(((keys - exact) ** 2).mean(0))[order]
        panels[1].semilogy(error, color=colour, ls=dashes, label=name)
    panels[1].set_title("error of the stored keys")
    panels[1].legend(fontsize=7)
    for axes in panels:
        axes.set_xlabel("channel, the largest first")
    return figure


def idea(material: Material) -> Figure:
    """What families of methods do with twelve tokens: squares are slots, numbers tokens in them."""
    figure, axes = new_figure(3.2)
    number = 12
    lines = {
        "full": [(i, 1, 1) for i in range(number)],
        "evict": [(i, 1, int(i in (0, 4, 5, 9, 10, 11))) for i in range(number)],
        "merge": [(0, 1, 1), (1, 3, 1), (4, 2, 1), (6, 3, 1), (9, 1, 1), (10, 1, 1), (11, 1, 1)],
        "select": [(i, 1, 1 if i in (0, 4, 5, 10, 11) else 2) for i in range(number)],
        "fewer bits": [(i, 1, 3) for i in range(number)],
    }
    faces = {0: "white", 1: KEPT, 2: "#c9d3e8", 3: KEPT}
    for y, (name, slots) in enumerate(lines.items()):
        axes.text(-0.4, y + 0.4, name, ha="right", va="center")
        for x, size, kind in slots:
            height = 0.3 if kind == 3 else 0.8
            axes.add_patch(Rectangle((x + 0.05, y + 0.4 - height / 2), size - 0.1, height,
                                     facecolor=faces[kind], edgecolor="#666666",
                                     linestyle="-" if kind else ":"))  # fmt: skip
            if size > 1:
                axes.text(x + size / 2, y + 0.4, str(size), color="white", ha="center", va="center")
    notes = ("every token has a slot", "some tokens are dropped", "like tokens share a slot",
             "all stay, a step looks at some", "all stay, in a smaller form")  # fmt: skip
    for y, note in enumerate(notes):
        axes.text(number + 0.3, y + 0.4, note, va="center")
    axes.set(xlim=(-2.2, number + 6), ylim=(len(lines), -0.2))
    axes.axis("off")
    return figure


def shares_of_heads(material: Material, budget: float = 0.1, tokens: int = 1024) -> Figure:
    """Which share of its tokens each head keeps at a budget, from two texts."""
    tokenizer = load_tokenizer(demo.directory())
    texts = {"docstrings": demo.held_out_text(), "the document": demo.document().text}
    profiles = {}
    for name, text in texts.items():
        sample = tokenizer(text, add_special_tokens=False).input_ids[:tokens]
        by_head = kvjax.ByHead(kvjax.KVzip(budget))
        profiles[name] = kvjax.calibrated(by_head, material.model, [sample]).profile
    figure, axes = new_figure(2.8)
    plot.head_shares(axes, profiles, budget)
    return figure
