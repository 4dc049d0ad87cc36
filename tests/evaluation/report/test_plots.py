"""Pictures of a comparison: what is drawn where, and that all words are inside."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from kvjax.evaluation import Results
from kvjax.evaluation.cells.estimates import Proportion
from kvjax.evaluation.report import pictures, plots
from kvjax.evaluation.report.heat_maps import depth_bins
from tests.support.comparisons import CANDIDATES, FULL_LOSS, LONG, comparison


@pytest.fixture(scope="module")
def drawn() -> dict[str, pictures.Picture]:
    return {picture.name: picture for picture in plots.all_pictures(comparison())}


def axes_of(picture: pictures.Picture, title: str):
    """The axes of the panel with this title."""
    (panel,) = [one for line in picture.panels for one in line if one.title == title]
    axes = Figure().subplots()
    panel.draw(axes)
    return axes


def lines(axes, method: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """The x and y of each line with the colour of a method."""
    colour = pictures.style(["h2o", LONG, "infinigen"].index(method))["color"]
    bars = [bar[0] for bar in axes.containers] or axes.lines
    return [
        (np.array(line.get_xdata(), float), np.array(line.get_ydata(), float))
        for line in bars
        if line.get_color() == colour
    ]


def test_there_is_a_picture_of_everything(drawn):
    by_length = (
        "scores_by_bytes", "scores_by_budget", "perplexity", "perplexity_quarters", "attention",
        "attention_layers",
    )  # fmt: skip
    maps = {"heatmap_full", "heatmap_h2o", "heatmap_infinigen"}
    long = next(name for name in drawn if name.startswith("heatmap_chain"))
    assert set(drawn) == {f"{name}_{length}" for name in by_length for length in (128, 256)} | {
        *maps, long
    }  # fmt: skip
    assert long.replace("=", "").replace("-", "").replace("_", "").isalnum()
    titles = [[panel.title for panel in line] for line in drawn["scores_by_bytes_128"].panels]
    assert titles == [
        [f"{task}, question inside", f"{task}, question after"]
        for task in ("needle", "niah multivalue", "vt")
    ]
    assert {drawn[name].length for name in maps} == {None}


def test_shares_and_slots_are_apart(drawn):
    picture = drawn["scores_by_budget_256"]
    titles = [panel.title for panel in picture.panels[0]]
    assert titles == [
        f"needle, question {question}, budget as {kind}"
        for kind in ("share", "slots")
        for question in ("inside", "after")
    ]
    axes = axes_of(picture, "needle, question inside, budget as share")
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0.25", "0.5"]
    ((x, y),) = lines(axes, "h2o")
    assert np.abs(x - [0, 1]).max() < 0.5 and y.tolist() == [0.25, 0.5]
    axes = axes_of(picture, "needle, question inside, budget as slots")
    assert [text.get_text() for text in axes.get_xticklabels()] == ["32"]
    ((x, y),) = lines(axes, "h2o")
    assert y.tolist() == [round(20 * 32 / 256) / 20]


def test_by_bytes_no_line_joins_shares_and_slots(drawn):
    axes = axes_of(drawn["scores_by_bytes_256"], "needle, question inside")
    shares, slots = lines(axes, "h2o")
    assert shares[0].tolist() == [0.25, 0.5] and slots[0].tolist() == [0.125]
    face = {bar[0].get_markerfacecolor() for bar in axes.containers if bar[0].get_xdata()[0] < 0.2}
    assert face == {"white"} and "hollow" in axes.get_xlabel()
    ((x, y),) = lines(axes, "infinigen")
    assert (x.tolist(), y.tolist()) == ([1.0], [1.0])
    low, high = axes.get_xlim()
    assert low < 0.125 and high > 1


def test_a_budget_of_its_own_goes_across(drawn):
    axes = axes_of(drawn["scores_by_budget_128"], "needle, question inside, budget as share")
    ((x, y),) = lines(axes, "infinigen")
    assert len(x) == 2 and y.tolist() == [1.0, 1.0]


def test_the_full_cache_is_a_line_with_a_band(drawn):
    axes = axes_of(drawn["scores_by_bytes_128"], "needle, question inside")
    (band,) = [patch for patch in axes.patches if patch.get_facecolor()[0] == 0.88]
    low, high = Proportion(20, 20).interval
    assert [band.get_y(), band.get_y() + band.get_height()] == pytest.approx([low, high])
    (full,) = [line for line in axes.lines if line.get_color() == "black"]
    assert set(full.get_ydata()) == {1.0}


def test_intervals_are_drawn(drawn):
    axes = axes_of(drawn["scores_by_budget_128"], "needle, question inside, budget as share")
    bar = next(bar for bar in axes.containers if bar[0].get_color() == pictures.style(0)["color"])
    (segments,) = bar[2]
    low, high = Proportion(5, 20).interval
    assert segments.get_segments()[0][:, 1] == pytest.approx([low, high])


def test_a_failed_cell_is_a_gap(drawn):
    axes = axes_of(drawn["scores_by_budget_256"], "needle, question after, budget as share")
    ((_, y),) = lines(axes, "h2o")
    assert not math.isnan(y[0]) and math.isnan(y[1])
    ((_, other),) = lines(axes, LONG)
    assert not np.isnan(other).any()


def test_a_task_at_the_floor_is_told(drawn):
    for name in ("scores_by_bytes_128", "scores_by_budget_128"):
        for line in drawn[name].panels:
            for panel in line:
                texts = [text.get_text() for text in axes_of(drawn[name], panel.title).texts]
                at_floor = panel.title.startswith("vt")
                assert texts == ["full cache at the floor: not ranked"] * at_floor


def test_perplexity_is_a_difference(drawn):
    axes = axes_of(drawn["perplexity_128"], "perplexity, budget as share")
    ((_, y),) = lines(axes, "h2o")
    assert y == pytest.approx([0.4, 0.2])
    assert "more than full" in axes.get_ylabel()
    quarters = axes_of(drawn["perplexity_quarters_128"], "budget 0.25")
    ((x, y),) = lines(quarters, "h2o")
    full = [FULL_LOSS + 0.1 * n for n in range(4)]
    own = [FULL_LOSS + 0.4 + 0.025 * n for n in range(4)]
    assert x.tolist() == [1, 2, 3, 4]
    assert y == pytest.approx(np.subtract(own, full))


def test_attention(drawn):
    picture = drawn["attention_128"]
    error = axes_of(picture, "error of attention, budget as share")
    assert lines(error, "h2o")[0][1] == pytest.approx([0.5625, 0.375])  # means over two layers
    recall = axes_of(picture, "recall of attention, budget as share")
    assert lines(recall, "h2o")[0][1] == pytest.approx([0.25, 0.5])
    layers = axes_of(drawn["attention_layers_128"], "budget 0.5")
    assert lines(layers, "h2o")[0][1] == pytest.approx([0.5, 0.25])


# Heat maps


def test_depths_are_binned():
    rows = comparison().rows()
    needle = [row for row in rows if row.task == "needle"]
    names = [name for name, _, _ in depth_bins(needle)]
    assert names == ["0-0.2", "0.2-0.4", "0.4-0.6", "0.6-0.8", "0.8-1"]
    few = [row._replace(depths={0.0: None, 0.5: None, 1.0: None}) for row in needle[:2]]
    assert depth_bins(few) == [("0", 0, 0), ("0.5", 0.5, 0.5), ("1", 1, 1)]
    assert depth_bins([row for row in rows if row.task == "vt"]) == []
    # Every depth is in one bin, also those on the ends.
    bins = depth_bins([needle[0]._replace(depths=dict.fromkeys(np.linspace(0, 1, 11)))])
    for depth in np.linspace(0, 1, 11):
        assert sum(first <= depth <= last for _, first, last in bins) == 1


def test_fields_of_a_heat_map(drawn):
    picture = drawn["heatmap_h2o"]
    titles = [[panel.title for panel in line] for line in picture.panels]
    assert titles == [
        [f"{task}, question inside", f"{task}, question after"]
        for task in ("needle", "niah multivalue")
    ], "vt has no depths"
    axes = axes_of(picture, "needle, question inside")
    ticks = [text.get_text() for text in axes.get_xticklabels()]
    assert ticks == [f"{n}\n{budget}" for budget in (0.25, 0.5, 32) for n in (128, 256)]
    texts = [text.get_text() for text in axes.texts]
    # Budget 0.25: cases 0 to 4 of 20 are right, of which 0 and 1 have the depths 0 and 0.111.
    assert texts[:5] == ["50\nof 4", "50\nof 4", "25\nof 4", "0\nof 4", "0\nof 4"]
    failed = [text.get_text() for text in axes_of(picture, "needle, question after").texts]
    assert failed.count("failed") == 5 and failed[15:20] == ["failed"] * 5
    image = axes.collections[0].get_array()
    assert image.shape == (5, 6) and image[0, 0] == 0.5


def test_heat_maps_of_methods_with_alike_names():
    found = comparison(candidates=[("full", None), ("a(b)", 0.5), ("a,b", 0.5)], tasks=["needle"])
    names = [picture.name for picture in plots.all_pictures(found)]
    assert len(set(names)) == len(names) == 2 + 2 + 3


# Looks


def test_styles_can_be_told_apart():
    styles = [pictures.style(number) for number in range(60)]
    assert len({(one["color"], one["marker"], str(one["linestyle"])) for one in styles}) == 60
    assert len({one["marker"] for one in styles[:10]}) == 10
    assert all(matplotlib.colors.is_color_like(one["color"]) for one in styles)


@pytest.mark.parametrize("longer", ["", "x" * 150])
def test_nothing_is_cut(longer, monkeypatch, tmp_path):
    candidates = [(method + longer * (method == LONG), budget) for method, budget in CANDIDATES]
    results = comparison(lengths=[128], tasks=["needle", "perplexity"], candidates=candidates)
    figures = []
    savefig = Figure.savefig

    def keep(figure, *args, **options):
        figures.append(figure)
        savefig(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    for picture in plots.all_pictures(results):
        pictures.save(picture, tmp_path)
    assert len(figures) == 4 + 4
    for figure in figures:
        width, height = figure.get_size_inches() * figure.dpi
        texts = [figure._suptitle, *(axes.title for axes in figure.axes)]
        texts += [text for legend in figure.legends for text in legend.texts]
        boxes = [text.get_window_extent() for text in texts]
        for text, box in zip(texts, boxes, strict=True):
            inside = box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height
            assert inside, (text.get_text(), box)
        titles = [axes.title.get_window_extent() for axes in figure.axes]
        for one, other in itertools.pairwise(titles):
            assert not one.overlaps(other)
        assert all(not boxes[0].overlaps(box) for box in boxes[1:]), "the title hides another"


def test_png_files(tmp_path):
    results = comparison(tasks=["needle"], lengths=[128])
    for picture in plots.all_pictures(results):
        pictures.save(picture, tmp_path)
        pixels = matplotlib.image.imread(tmp_path / f"{picture.name}.png")[..., :3]
        assert min(pixels.shape[:2]) > 200
        assert 0.005 < (pixels < 0.9).any(-1).mean() < 0.95, f"{picture.name} is blank"


def test_svg_is_the_same_again_and_takes_any_name():
    name = "h2o(<&>'$x$')"
    results = comparison(["needle"], [128], [("full", None), (name, 0.25)])
    for picture in plots.all_pictures(results):
        first, second = pictures.picture_svg(picture), pictures.picture_svg(picture)
        assert first == second
        xml.etree.ElementTree.fromstring(first)
    panel = picture.panels[0][0]._replace(title=name)
    xml.etree.ElementTree.fromstring(pictures.panel_svg(panel, (3, 2)))


@pytest.mark.parametrize("task", ["needle", "vt", "perplexity", "attention"])
def test_one_task_alone(task):
    results = comparison([task], [128], questions=["inside"])
    names = {picture.name.rpartition("_")[0] for picture in plots.all_pictures(results)}
    expected = {
        "perplexity": {"perplexity", "perplexity_quarters"},
        "attention": {"attention", "attention_layers"},
    }
    asked = {"scores_by_bytes", "scores_by_budget"}
    assert {name for name in names if not name.startswith("heatmap")} == expected.get(task, asked)


def test_the_full_cache_alone():
    results = comparison(["needle", "perplexity", "attention"], [128], [("full", None)])
    names = {picture.name for picture in plots.all_pictures(results)}
    assert names == {
        "scores_by_bytes_128", "scores_by_budget_128", "perplexity_128", "attention_128",
        "heatmap_full",
    }  # fmt: skip
    for picture in plots.all_pictures(results):
        pictures.picture_svg(picture)


def test_without_the_full_cache_and_with_nothing_but_failures():
    whole = comparison(["needle", "perplexity"], [128])
    for keep in (lambda cell: cell.method != "full", lambda cell: False):
        records = {
            cell: found if keep(cell) else {"failed": "no", "seconds": 0.0}
            for cell, found in whole.records.items()
        }
        for picture in plots.all_pictures(Results(whole.settings, records)):
            pictures.picture_svg(picture)
