"""Pictures of a diagnosis: what methods lose, and where."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import NullFormatter, PercentFormatter

from kvjax.evaluation.report.pictures import Panel, Picture, save, style

from .diagnosis import ERROR, Diagnosis
from .redundancy_plots import pictures_of

_LEAST = 1e-4  # error that is drawn: logarithms have no zero
_TICKS = [factor * 10.0**power for power in range(-4, 2) for factor in (1, 2, 5)]


def draw(diagnosis: Diagnosis, folder: Path, error: float = ERROR) -> list[str]:
    """Writes all pictures to a folder that there is, and returns the names of their files.

    `error_vs_bytes`, `error_by_head` and `recall_by_head`; and of what is alike, where that was
    looked for, `similarity`, `clusters`, `runs`, `bits` and `codebooks`.
    """
    pictures = [
        error_vs_bytes(diagnosis, error),
        by_head(diagnosis, "error"),
        by_head(diagnosis, "recall"),
    ]
    if diagnosis.redundancy is not None:
        pictures += pictures_of(diagnosis.redundancy)
    for picture in pictures:
        save(picture, folder)
    return [f"{picture.name}.png" for picture in pictures]


def error_vs_bytes(diagnosis: Diagnosis, error: float = ERROR) -> Picture:
    """A line per method through its budgets: error against bytes; the smallest cache is marked."""
    panel = Panel(_about(diagnosis), partial(_error_vs_bytes, diagnosis, error))
    return Picture("error_vs_bytes", "Error by bytes", [[panel]], size=(8.6, 4.8))


def _error_vs_bytes(diagnosis: Diagnosis, error: float, axes: Axes) -> None:
    findings = diagnosis.findings[1:]
    for number, method in enumerate(dict.fromkeys(one.candidate.method for one in findings)):
        own = [one for one in findings if one.candidate.method == method]
        own = sorted(own, key=lambda one: one.share)
        errors = [np.maximum(one.error, _LEAST) for one in own]
        axes.plot([one.share for one in own], errors, label=method, **style(number))
    axes.axhline(error, color="black", linewidth=1, linestyle=":", label=f"error {error:g}")
    best = diagnosis.smallest(error)
    if best is not None:
        axes.plot(
            best.share, max(best.error, _LEAST), marker="o", markersize=18, linestyle="",
            markerfacecolor="none", markeredgecolor="black", label=f"smallest: {best.name}",
        )  # fmt: skip
    axes.set_xlabel("bytes of the cache, share of the full cache's")
    axes.set_ylabel("relative error of attention outputs (log scale)")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlim(left=0)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in _TICKS if low <= tick <= high])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8)


def by_head(diagnosis: Diagnosis, what: str) -> Picture:
    """A line per method and budget, a field per layer and KV head: `"error"` or `"recall"`."""
    findings = diagnosis.findings[1:]
    layers, _, heads = findings[0].fidelity.recall.shape
    longest = max(len(one.name) for one in findings)
    width = 2.2 + 0.07 * longest + min(max(0.09 * layers * heads, 4.5), 14)
    title = "Relative error" if what == "error" else "Recall of the most attended tokens"
    return Picture(
        f"{what}_by_head",
        f"{title} by layer and head",
        [[Panel(_about(diagnosis), partial(_by_head, diagnosis, what))]],
        size=(width, 1.2 + 0.19 * len(findings)),
    )


def _by_head(diagnosis: Diagnosis, what: str, axes: Axes) -> None:
    findings, is_error = diagnosis.findings[1:], what == "error"
    given = [one.fidelity.head_error if is_error else one.fidelity.recall for one in findings]
    values = np.stack(given).astype(np.float64).mean(2)
    candidates, layers, heads = values.shape
    shown = np.maximum(values, _LEAST).reshape(candidates, -1)
    scale, colours = LogNorm(0.01, 1, clip=True), "magma_r"
    if not is_error:
        scale, colours = Normalize(0, 1), "cividis"
    image = axes.pcolormesh(shown, norm=scale, cmap=colours)
    every = -(-layers // 32)
    ticks = np.arange(0, layers, every)
    axes.set_xticks((ticks + 0.5) * heads, ticks, fontsize=7)
    for layer in range(1, layers):
        axes.axvline(layer * heads, color="white", linewidth=0.4)
    names = [one.name for one in findings]
    axes.set_yticks(np.arange(candidates) + 0.5, names, fontsize=7)
    axes.set_ylim(candidates, 0)
    for row in range(1, candidates):
        if findings[row].candidate.method != findings[row - 1].candidate.method:
            axes.axhline(row, color="white", linewidth=1)
    axes.set_xlabel(f"layer (of each, its {heads} KV heads from left to right)")
    extend = "both" if is_error else None
    axes.figure.colorbar(image, ax=axes, label=what, format="{x:g}", pad=0.01, extend=extend)


def _about(diagnosis: Diagnosis) -> str:
    """Of which text a picture is."""
    return (
        f"{diagnosis.prompt_tokens:,} tokens, a question of {diagnosis.question_tokens:,} "
        f"{diagnosis.where} what was compressed, mean over {diagnosis.new_tokens} new tokens"
    )
