"""Pictures of what is alike in a cache, as the methods' papers draw them."""

from __future__ import annotations

from functools import partial

import numpy as np
from jaxtyping import Shaped
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import MaxNLocator, PercentFormatter

from kvjax.evaluation.report.pictures import Panel, Picture

from .redundancy import EPSILON, RESERVE, SHARE, Redundancy

_HEADS = 8  # heads of the layer in the middle whose clusters are shown
_MOST_COLUMNS = 2000  # of a picture: more tokens are not told apart


def pictures_of(found: Redundancy) -> list[Picture]:
    """All of them."""
    return [similarity(found), clusters(found), runs(found), bits(found), codebooks(found)]


def similarity(found: Redundancy) -> Picture:
    """How alike keys are by their distance, a line per layer; and neighbours by layer and head."""
    panels = [
        Panel("By distance, mean over the heads of a layer", partial(_by_distance, found)),
        Panel("Neighbours, by layer and KV head", partial(_neighbours, found)),
    ]
    title = "Similarity of keys (as in Chelsea and KVMerger)"
    return Picture("similarity", title, [panels], size=(5.4, 4.0))


def _by_distance(found: Redundancy, axes: Axes) -> None:
    layers = len(found.similarity)
    for layer, colour in enumerate(colormaps["viridis"](np.linspace(0, 1, layers))):
        mean = found.similarity[layer].mean(0)
        axes.plot(found.distances, mean, color=colour, linewidth=1.2)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("distance of two tokens")
    axes.set_ylabel("mean cosine of their keys")
    axes.grid(alpha=0.25)
    shown = ScalarMappable(Normalize(0, max(layers - 1, 1)), colormaps["viridis"])
    bar = axes.figure.colorbar(shown, ax=axes, label="layer", pad=0.02)
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))


def _neighbours(found: Redundancy, axes: Axes) -> None:
    adjacent = found.similarity[:, :, 0].T
    low = min(0.0, float(adjacent.min()))
    image = axes.pcolormesh(adjacent, cmap="cividis", vmin=low, vmax=1)
    heads, layers = adjacent.shape
    shown = np.arange(0, layers, -(-layers // 16))
    axes.set_xticks(shown + 0.5, shown)
    axes.set_yticks(np.arange(heads) + 0.5, range(heads))
    axes.set_xlabel("layer")
    axes.set_ylabel("KV head")
    axes.figure.colorbar(image, ax=axes, label="mean cosine of neighbouring keys", pad=0.02)


def clusters(found: Redundancy) -> Picture:
    """Which cluster each token is in, for heads of the layer in the middle."""
    heads = min(len(found.cluster), _HEADS)
    panels = [Panel(f"KV head {head}", partial(_clusters, found, head)) for head in range(heads)]
    return Picture(
        "clusters",
        f"Clusters of keys in layer {found.layer} (as in ClusterKV), and the share of the new "
        "tokens' attention that each gets",
        [panels[start : start + 3] for start in range(0, heads, 3)],
        size=(4.6, 3.4),
    )


def _clusters(found: Redundancy, head: int, axes: Axes) -> None:
    image = axes.scatter(
        np.arange(found.cluster.shape[1]), found.cluster[head], c=found.cluster_attention[head],
        s=3, norm=LogNorm(1e-3, 1, clip=True), cmap="viridis_r", linewidths=0,
    )  # fmt: skip
    axes.set_xlabel("position of the token")
    axes.set_ylabel("cluster (-1: sinks)")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.figure.colorbar(
        image, ax=axes, label="attention to the cluster", format="{x:g}", pad=0.02, extend="min"
    )


def runs(found: Redundancy) -> Picture:
    """How long the runs of similar neighbours are, by head and token; and what merging leaves."""
    layers, heads, _ = found.run.shape
    panels = [
        Panel("Tokens in a run", partial(_runs, found)),
        Panel("Slots that merging leaves", partial(_merged, found)),
    ]
    return Picture(
        "runs",
        f"Runs of neighbours whose keys have a cosine above {EPSILON} (as in KVMerger)",
        [panels],
        size=(6.6, 1.2 + min(max(0.075 * layers * heads, 2.4), 9)),
    )


def _runs(found: Redundancy, axes: Axes) -> None:
    layers, heads, tokens = found.run.shape
    image = axes.pcolormesh(
        _columns(found.run.reshape(layers * heads, tokens)), norm=LogNorm(1, max(tokens, 2)),
        cmap="magma_r",
    )  # fmt: skip
    axes.set_xticks(*_places(tokens))
    axes.set_xlabel("position of the token")
    _layers_downwards(axes, layers, heads)
    axes.figure.colorbar(image, ax=axes, label="tokens in the run", format="{x:g}", pad=0.01)


def _merged(found: Redundancy, axes: Axes) -> None:
    left = found.merged()
    layers, heads = left.shape
    place = np.arange(layers * heads) + 0.5
    axes.barh(place, left.ravel(), height=1.0, color="#0072B2", edgecolor="white", linewidth=0.2)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("share of the tokens")
    _layers_downwards(axes, layers, heads)


def _layers_downwards(axes: Axes, layers: int, heads: int) -> None:
    """Layers from top to bottom, with a line for each of their heads."""
    shown = np.arange(0, layers, -(-layers // 32))
    axes.set_yticks((shown + 0.5) * heads, shown, fontsize=7)
    axes.set_ylim(layers * heads, 0)
    axes.set_ylabel(f"layer (of each, its {heads} KV heads)")


def _columns(values: Shaped[np.ndarray, "N T"]) -> Shaped[np.ndarray, "N C"]:
    """Every so many-th token, where there are more than can be drawn."""
    return values[:, :: -(-values.shape[1] // _MOST_COLUMNS)]


def _places(tokens: int) -> tuple[np.ndarray, list[str]]:
    """Ticks along `_columns` and the positions that they stand for."""
    every = -(-tokens // _MOST_COLUMNS)
    positions = MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]).tick_values(0, tokens)
    positions = positions[(positions >= 0) & (positions <= tokens)]
    return positions / every, [f"{int(position):,}" for position in positions]


def bits(found: Redundancy) -> Picture:
    """Which tokens each query head of the layer in the middle retains; how many heads agree."""
    lines = max(len(found.bits), len(found.agreement))
    panels = [
        Panel(f"Retained (black), layer {found.layer}", partial(_bits, found)),
        Panel("How many heads retain a token", partial(_agreement, found)),
    ]
    return Picture(
        "bits",
        f"Bits (as in KVCrush): each query head retains {SHARE:.0%} of the tokens, those with the "
        "most attention",
        [panels],
        size=(6.6, 1.2 + min(max(0.12 * lines, 2.4), 7)),
    )


def _bits(found: Redundancy, axes: Axes) -> None:
    queries, tokens = found.bits.shape
    axes.pcolormesh(_columns(found.bits.astype(float)), cmap="Greys", vmin=0, vmax=1)
    axes.set_xticks(*_places(tokens))
    axes.set_ylim(queries, 0)
    shown = np.arange(0, queries, -(-queries // 16))
    axes.set_yticks(shown + 0.5, shown)
    axes.set_xlabel("position of the token")
    axes.set_ylabel("query head")


def _agreement(found: Redundancy, axes: Axes) -> None:
    layers, counts = found.agreement.shape
    left = np.zeros(layers)
    for count, colour in enumerate(colormaps["viridis_r"](np.linspace(0, 1, counts))):
        share = found.agreement[:, count]
        axes.barh(np.arange(layers), share, left=left, color=colour, height=0.9)
        left += share
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("tokens")
    _layers(axes, layers)
    shown = ScalarMappable(Normalize(0, counts - 1), colormaps["viridis_r"])
    bar = axes.figure.colorbar(shown, ax=axes, label="query heads", pad=0.02)
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))


def codebooks(found: Redundancy) -> Picture:
    """The spindle: what eviction and books leave of each layer's keys (left) and values."""
    return Picture(
        "codebooks",
        f"Codebooks (as in SpindleKV with reserve={RESERVE})",
        [[Panel("Keys to the left, values to the right", partial(_codebooks, found))]],
        size=(7.5, 1.6 + min(max(0.2 * len(found.kept), 2), 9)),
    )


def _codebooks(found: Redundancy, axes: Axes) -> None:
    layer = np.arange(len(found.kept))
    for side, entries, name, colour in (
        (-1, found.entries[:, 0], "keys", "#0072B2"),
        (1, found.entries[:, 1], "values", "#D55E00"),
    ):
        left, own = f"{name} that eviction leaves", f"entries of {name}"
        axes.barh(layer, side * found.kept, height=0.9, color=colour, alpha=0.25, label=left)
        axes.barh(layer, side * entries, height=0.9, color=colour, label=own)
    axes.set_xlim(-1, 1)
    axes.axvline(0, color="white", linewidth=1)
    axes.xaxis.set_major_formatter(lambda x, _: f"{abs(x):.0%}")
    axes.set_xlabel("share of the layer's vectors")
    _layers(axes, len(layer))
    axes.legend(loc="lower right", frameon=False, fontsize=7)


def _layers(axes: Axes, layers: int) -> None:
    """Layers from top to bottom."""
    axes.set_ylim(layers - 0.5, -0.5)
    axes.yaxis.set_major_locator(MaxNLocator(16, integer=True))
    axes.set_ylabel("layer")
