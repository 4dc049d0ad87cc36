"""Pictures of a comparison: what is drawn where, and that all words are inside."""

from __future__ import annotations

import io

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvjax.evaluation import Results
from kvjax.evaluation.report import plots
from tests.support.comparisons import CANDIDATES, LONG, comparison, share_interval


@pytest.fixture(scope="module")
def drawn() -> dict[str, Figure]:
    return plots.figures(comparison())


def axes_of(figure: Figure, title: str) -> Axes:
    """The panel with this title."""
    (axes,) = [axes for axes in figure.axes if axes.get_title() == title]
    return axes


def line(axes: Axes, method: str) -> np.ndarray:
    """The points of a method's line, `[2, N]`."""
    (bars,) = [bars for bars in axes.containers if bars.get_label() == method]
    return np.array(bars[0].get_data(), float)


def test_there_is_a_picture_of_everything(drawn):
    long = next(name for name in drawn if name.startswith("heatmap_chain"))
    lengths = (128, 256)
    assert set(drawn) == {
        *(f"{name}_{length}" for name in ("scores_by_bytes", "perplexity") for length in lengths),
        "heatmap_full", "heatmap_h2o", "heatmap_infinigen", long,
    }  # fmt: skip
    assert long.replace("=", "").replace("-", "").replace("_", "").isalnum()
    assert [axes.get_title() for axes in drawn["scores_by_bytes_128"].axes] == [
        f"{task}, question {question}"
        for task in ("needle", "niah multivalue", "vt")
        for question in ("inside", "after")
    ]


def test_scores_by_bytes(drawn):
    axes = axes_of(drawn["scores_by_bytes_256"], "needle, question inside")
    shares = np.array([0.125, 0.25, 0.5])  # 32 slots are an eighth of the prompt
    np.testing.assert_array_equal(line(axes, "h2o"), (shares, np.round(20 * shares) / 20))
    np.testing.assert_array_equal(line(axes, "infinigen"), [[1.0], [1.0]])
    low, high = axes.get_xlim()
    assert low < 0.125 and high > 1
    (interval,) = axes.containers[0][2]
    ends = interval.get_segments()[1][:, 1]
    np.testing.assert_allclose(ends, share_interval(5, 20))
    (band,) = [patch for patch in axes.patches if patch.get_facecolor()[0] == 0.88]
    ends = [band.get_y(), band.get_y() + band.get_height()]
    np.testing.assert_allclose(ends, share_interval(20, 20))
    after = axes_of(drawn["scores_by_bytes_256"], "needle, question after")
    assert line(after, "h2o")[0].tolist() == [0.125, 0.25], "what failed is left out"
    perplexity = axes_of(drawn["perplexity_128"], "perplexity")
    np.testing.assert_allclose(line(perplexity, "h2o")[1], [0.4, 0.4, 0.2])
    assert "more than full" in perplexity.get_ylabel()
    for axes in drawn["scores_by_bytes_256"].axes:
        texts = [text.get_text() for text in axes.texts]
        at_floor = axes.get_title().startswith("vt")
        assert texts == ["full cache at the floor: not ranked"] * at_floor


def test_depths_are_binned():
    rows = comparison().rows()
    needle = [row for row in rows if row.task == "needle"]
    names = [name for name, _, _ in plots.depth_bins(needle)]
    assert names == ["0-0.2", "0.2-0.4", "0.4-0.6", "0.6-0.8", "0.8-1"]
    few = [row._replace(depths={0.0: None, 0.5: None, 1.0: None}) for row in needle[:2]]
    assert plots.depth_bins(few) == [("0", 0, 0), ("0.5", 0.5, 0.5), ("1", 1, 1)]
    # Every depth is in one bin, also those on the ends.
    bins = plots.depth_bins([needle[0]._replace(depths=dict.fromkeys(np.linspace(0, 1, 11)))])
    for depth in np.linspace(0, 1, 11):
        assert sum(first <= depth <= last for _, first, last in bins) == 1


def test_fields_of_a_heat_map(drawn):
    figure = drawn["heatmap_h2o"]
    assert [axes.get_title() for axes in figure.axes] == [
        f"{task}, question {question}"
        for task in ("needle", "niah multivalue")
        for question in ("inside", "after")
    ], "vt has no depths"
    axes = axes_of(figure, "needle, question inside")
    ticks = [text.get_text() for text in axes.get_xticklabels()]
    assert ticks == [f"{n}\n{budget}" for budget in (0.25, 0.5, 32) for n in (128, 256)]
    texts = [text.get_text() for text in axes.texts]
    # Budget 0.25: cases 0 to 4 of 20 are right, of which 0 and 1 have the depths 0 and 0.111.
    assert texts[:5] == ["50\nof 4", "50\nof 4", "25\nof 4", "0\nof 4", "0\nof 4"]
    failed = [text.get_text() for text in axes_of(figure, "needle, question after").texts]
    assert failed.count("failed") == 5 and failed[15:20] == ["failed"] * 5
    image = axes.collections[0].get_array()
    assert image.shape == (5, 6) and image[0, 0] == 0.5


def test_heat_maps_of_methods_with_alike_names():
    found = comparison(candidates=[("full", None), ("a(b)", 0.5), ("a,b", 0.5)], tasks=["needle"])
    assert len([name for name in plots.figures(found) if name.startswith("heatmap_a")]) == 2


def test_styles_can_be_told_apart():
    styles = [plots.style(number) for number in range(60)]
    assert len({(one["color"], one["marker"], str(one["linestyle"])) for one in styles}) == 60
    assert len({one["marker"] for one in styles[:10]}) == 10


def test_nothing_is_cut_or_blank():
    longer = "$x$" * 50
    candidates = [(method + longer * (method == LONG), budget) for method, budget in CANDIDATES]
    results = comparison(lengths=[128], tasks=["needle", "perplexity"], candidates=candidates)
    for name, figure in plots.figures(results).items():
        pixels = matplotlib.image.imread(io.BytesIO(plots.png(figure)))[..., :3]
        assert 0.005 < (pixels < 0.9).any(-1).mean() < 0.95, f"{name} is blank"
        figure.draw_without_rendering()
        width, height = figure.get_size_inches() * figure.dpi
        texts = [figure._suptitle, *(axes.title for axes in figure.axes)]
        texts += [text for legend in figure.legends for text in legend.texts]
        boxes = [text.get_window_extent() for text in texts]
        for text, box in zip(texts, boxes, strict=True):
            inside = box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height
            assert inside, (name, text.get_text(), box)
        assert all(not boxes[0].overlaps(box) for box in boxes[1:]), "the title hides another"


@pytest.mark.parametrize(
    ("candidates", "failed"),
    [([("full", None)], ()), (CANDIDATES, ("full",)), (CANDIDATES, dict(CANDIDATES))],
    ids=["the full cache alone", "without the full cache", "nothing but failures"],
)
def test_what_there_is_is_drawn(candidates, failed):
    whole = comparison(["needle", "perplexity", "attention"], [128], candidates)
    records = {
        cell: {"failed": "no", "seconds": 0.0} if cell.method in failed else found
        for cell, found in whole.records.items()
    }
    drawn = plots.figures(Results(whole.settings, records))
    assert {"scores_by_bytes_128", "perplexity_128"} <= set(drawn)
    for figure in drawn.values():
        plots.png(figure)
