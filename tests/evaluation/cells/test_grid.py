"""Which cells a comparison has."""

from __future__ import annotations

import itertools

import pytest

import kvjax
from kvjax.cli.arguments import parser
from kvjax.cli.options import depth_list, method_list
from kvjax.evaluation import Grid
from kvjax.evaluation.tasks import RULER_TASKS, Frame, ruler
from kvjax.models import demo, load_tokenizer
from kvjax.registry import METHODS, WRAPPERS


def test_candidates_of_a_grid():
    grid = Grid.of(
        methods=["snapkv", "full", " h2o ", "snapkv", "h2o(budget=64)", "chain(snapkv, h2o)"],
        budgets=[0.5, 64, 0.5],
    )
    assert [(one.method, one.budget) for one in grid.candidates] == [
        ("full", None), ("snapkv", 0.5), ("snapkv", 64), ("h2o", 0.5), ("h2o", 64),
        ("h2o(budget=64)", None), ("chain(snapkv, h2o)", 0.5), ("chain(snapkv, h2o)", 64),
    ]  # fmt: skip
    assert grid.candidates[2].transform == kvjax.SnapKV(64)
    kinds = [type(one.budget) for one in grid.candidates[1:3]]
    assert kinds == [float, int]


def test_a_budget_that_is_the_default_is_still_a_budget():
    found = Grid.of(methods=["infinigen", "quantize(bits=4)"], budgets=[0.1, 0.2]).candidates
    assert [one.key for one in found[1:]] == [
        ("infinigen", 0.1), ("infinigen", 0.2), ("quantize(bits=4)", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"methods": "snapkv"}, TypeError, "methods must be a sequence"),
        ({"methods": [kvjax.SnapKV(64)]}, TypeError, "must be text"),
        ({"depths": ["0"]}, TypeError, "depth must be a number"),
        ({"depths": [float("nan")]}, ValueError, "depth must lie between 0 and 1, got nan"),
        ({"lengths": []}, ValueError, "lengths must not be empty"),
        ({"questions": ["before"]}, ValueError, "question must be one of .*, got 'before'"),
        ({"chat": "no"}, TypeError, "chat must be True or False, got 'no'"),
        ({"budgets": [1, 1.0], "methods": ["streaming_llm(sinks=0)"]}, ValueError, "told apart"),
    ],
)
def test_grids_that_are_refused(change, error, said):
    with pytest.raises(error, match=said):
        Grid.of(**change)


def test_prompts_of_eval_are_long_enough_for_every_ruler_task():
    """By default; those of `kvjax compare` may be shorter."""
    lengths = parser().parse_args(["eval", *RULER_TASKS]).lengths
    tokenizer, text = load_tokenizer(demo.directory()), demo.held_out_text()
    frame = Frame.of(tokenizer, chat=False)
    for name, length in itertools.product(RULER_TASKS, lengths):
        task = ruler(name, tokenizer, text, length=length, cases=1, seed=0, frame=frame)
        assert len(task.cases[0].prompt) == length
    assert parser().parse_args(["compare"]).lengths == (512, 2048)


def test_lists_of_the_command_line():
    parts = ["h2o", "every(snapkv(window=16), steps=64)"]
    assert method_list(f" {','.join(parts)} ") == parts
    names = {text.partition("(")[0] for text in method_list("all")}
    assert names == {*METHODS, *WRAPPERS} - {"every", "when_full", "everywhere"}
    assert depth_list("5") == [0, 0.25, 0.5, 0.75, 1]
    assert depth_list("1.0") == [1.0] and depth_list("0,1") == [0, 1]
    assert len(Grid.of(methods=method_list(" all "), budgets=[0.1]).candidates) == len(names)
