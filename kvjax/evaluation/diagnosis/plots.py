"""Pictures of a diagnosis: errors by cache bytes, and by layer and head."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter

from kvjax.evaluation.report.plots import LOOK, png, style
from kvjax.files import write_whole

from .diagnosis import ERROR, Diagnosis

_LEAST = 1e-4  # smaller errors are drawn as this: a logarithmic axis has no zero
_TICKS = [factor * 10.0**power for power in range(-4, 2) for factor in (1, 2, 5)]


def draw(diagnosis: Diagnosis, folder: Path, error: float = ERROR) -> list[str]:
    """Writes `error_vs_bytes`, `error_by_head` and `recall_by_head` to an existing folder.

    Returns:
      The names of the files.
    """
    figures = {
        "error_vs_bytes.png": error_vs_bytes(diagnosis, error),
        "error_by_head.png": by_head(diagnosis, "error"),
        "recall_by_head.png": by_head(diagnosis, "recall"),
    }
    for name, figure in figures.items():
        write_whole(folder / name, png(figure))
    return list(figures)


@matplotlib.rc_context(LOOK)
def error_vs_bytes(diagnosis: Diagnosis, error: float = ERROR) -> Figure:
    """Draws error by bytes, a line per method over its budgets, and marks the smallest cache."""
    figure = Figure((9.0, 5.0))
    axes = figure.subplots()
    findings = diagnosis.findings[1:]
    for number, method in enumerate(dict.fromkeys(x.candidate.method for x in findings)):
        points = sorted((x.share, x.error) for x in findings if x.candidate.method == method)
        shares, errors = np.transpose(points)
        axes.plot(shares, np.maximum(errors, _LEAST), label=method, **style(number))
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
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
    axes.set_title(f"Error by bytes\n{_text_of(diagnosis)}")
    return figure


@matplotlib.rc_context(LOOK)
def by_head(diagnosis: Diagnosis, measure: Literal["error", "recall"]) -> Figure:
    """Draws a measure: a line per method and budget, a field per layer and KV head."""
    findings, is_error = diagnosis.findings[1:], measure == "error"
    arrays = [x.fidelity.head_error if is_error else x.fidelity.recall for x in findings]
    values = np.stack(arrays).astype(np.float64).mean(2)
    candidates, layers, heads = values.shape
    longest = max(len(finding.name) for finding in findings)
    width = 2.2 + 0.07 * longest + min(max(0.09 * layers * heads, 4.5), 14)
    figure = Figure((width, 1.6 + 0.19 * candidates))
    axes = figure.subplots()
    image = axes.pcolormesh(
        np.maximum(values, _LEAST).reshape(candidates, -1),
        norm=LogNorm(0.01, 1, clip=True) if is_error else Normalize(0, 1),
        cmap="magma_r" if is_error else "cividis",
    )
    # At most 32 layers have a label.
    shown = np.arange(0, layers, -(-layers // 32))
    axes.set_xticks((shown + 0.5) * heads, shown)
    for layer in range(1, layers):
        axes.axvline(layer * heads, color="white", linewidth=0.4)
    axes.set_yticks(np.arange(candidates) + 0.5, [finding.name for finding in findings])
    axes.set_ylim(candidates, 0)
    axes.set_xlabel(f"layer (of each, its {heads} KV heads from left to right)")
    extend = "both" if is_error else None
    figure.colorbar(image, ax=axes, label=measure, format="{x:g}", pad=0.01, extend=extend)
    title = "Relative error" if is_error else "Recall of the most attended tokens"
    axes.set_title(f"{title} by layer and head\n{_text_of(diagnosis)}")
    return figure


def _text_of(diagnosis: Diagnosis) -> str:
    """Returns a line that describes the text."""
    return (
        f"{diagnosis.prompt_tokens:,} tokens, a question of {diagnosis.question_tokens:,} "
        f"{diagnosis.where} what was compressed, mean over {diagnosis.new_tokens} new tokens"
    )
