"""One list of methods and compositions, each with settings that bite in small caches.

A method that is registered is a case, with the arguments of its card, and goes through every test
over all cases. Tests choose among the cases by traits, which are computed from the transforms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import pytest

import kvjax
from kvjax import CaM, Every, HeadGroups, KVCrush, PerLayer, Quantize, WhenFull, chain
from kvjax.budgets.budgets import slots_for
from kvjax.compose.walks import walk
from kvjax.compose.wrappers import by_head_groups
from kvjax.kit import Extent, Stage
from kvjax.registry import METHODS
from tests.support.attending import HEAD_DIM, KV_HEADS, MAX_NEW, MAX_PROMPT, one_layer
from tests.support.marks import some_slow

BUDGET, WINDOW = 12, 4
GROUP = 4  # of numbers of 4 bits

CALIBRATION = kvjax.kit.InfiniGenCalibration(
    np.random.default_rng(0).normal(size=(3, KV_HEADS, HEAD_DIM, 3))
)


def arguments_of(method: type[kvjax.KVTransform]) -> dict:
    """Arguments of a method, at a budget that bites in the caches here."""
    fields = {field.name for field in dataclasses.fields(method)}
    here = {"budget": BUDGET, "calibration": CALIBRATION, "dense_layers": ()}
    return {name: value for name, value in here.items() if name in fields} | method.card.small


ARGUMENTS = {name: arguments_of(method) for name, method in METHODS.items()}
OF_A_TEXT = {  # methods that have something to do with 36 slots for a text
    "chelsea": "chelsea(sinks=4, recent=8, interval=8)",
    "clusterkv": "clusterkv(tokens_per_cluster=8, sinks=4, interval=5, dense_layers=())",
    "quest": "quest(page=4, dense_layers=())",
    "infinigen": "infinigen(alpha=None, dense_layers=(0,))",
    "layer_budget": "layer_budget(reserve=0.6, window=8)",
    "spindlekv": "spindlekv(reserve=0.6, window=8, interval=4)",
}
ENOUGH = MAX_PROMPT + MAX_NEW
OUTLIERS = kvjax.kit.OutlierHeads(((1, 1),), num_layers=3, kv_heads=KV_HEADS)


def snapkv(budget=BUDGET):
    return kvjax.SnapKV(budget=budget, window=WINDOW, kernel=3)


def chelsea(budget=BUDGET, **changes):
    return kvjax.Chelsea(**{**ARGUMENTS["chelsea"], "budget": budget, **changes})


def clusterkv(budget=BUDGET, **changes):
    return kvjax.ClusterKV(**{**ARGUMENTS["clusterkv"], "budget": budget, **changes})


def quest(budget=BUDGET, **changes):
    return kvjax.Quest(**{**ARGUMENTS["quest"], "budget": budget, **changes})


def spindlekv(reserve, **changes):
    return kvjax.SpindleKV(**{**ARGUMENTS["spindlekv"], "reserve": reserve, **changes})


def infinigen(budget=BUDGET):
    return kvjax.InfiniGen(**{**ARGUMENTS["infinigen"], "budget": budget})


def pyramidinfer_paper(context):
    return kvjax.PyramidInfer(ratio=0.5, context=context, interval=None)


def half_of_the_first_layer(layer: int, num_layers: int):
    return kvjax.Full() if layer == 0 else snapkv(0.5)


def enough_but_in_the_first_layer(layer: int, num_layers: int):
    return kvjax.Full() if layer == 0 else snapkv(ENOUGH)


def compositions(budget: int) -> dict:
    snap, enough = snapkv(budget), budget >= ENOUGH
    choose = enough_but_in_the_first_layer if enough else half_of_the_first_layer
    share = 1.0 if enough else 0.5
    return {
        "every": Every(snap, steps=3),
        "every_kvmerger": Every(kvjax.KVMerger(budget), steps=3),
        "when_full": WhenFull(snap, room=3),
        "chain": chain(snapkv(budget + 4), kvjax.H2O(budget=budget)),
        "per_layer": PerLayer(choose),
        "head_groups": HeadGroups((((1,), snap), ((0,), kvjax.Full()))),
        "pyramidinfer_paper": one_layer(pyramidinfer_paper(ENOUGH if enough else 5), layer=2),
        "cam": CaM(kvjax.H2O(budget=budget), merge_tokens=3),
        "cam_prompt": CaM(snap, prompt=True),
        "kvcrush": KVCrush(snap),
        "kvcrush_h2o": KVCrush(
            kvjax.H2O(budget=budget), 4, anchor="mean", pick="random", granularity=2
        ),
        "every_kvcrush": Every(KVCrush(snap, anchor="alternate"), steps=3),
        "outlier_heads": chelsea(budget, recent=2, outlier_heads=OUTLIERS),
        "reposition": kvjax.StreamingLLM(budget=budget, reposition=True),
        "ring": kvjax.Ring(budget + 1),
        "ring_quantize": chain(kvjax.Ring(budget + 1), Quantize(8)),
        "float_h2o": kvjax.H2O(budget=share),
        "clusterkv_offload": chain(clusterkv(budget), kvjax.Offload()),
        "clusterkv_per_query_head": chain(
            clusterkv(budget, per_query_head=True), kvjax.Offload(recent_steps=2)
        ),
        "quest_by_bounds": quest(budget, spread=None),
        "quest_offload": chain(quest(budget), kvjax.Offload(recent_steps=0, interval=3)),
        "snapkv_clusterkv": chain(snapkv(budget + 4), clusterkv(budget)),
        **quantised(budget),
        "h2o_codebook": chain(kvjax.H2O(budget=budget), kvjax.Codebook()),
        "spindlekv_unfold": one_layer(spindlekv(1.0 if enough else 0.5, unfold=True)),
    }


def quantised(budget: int) -> dict:
    snap, h2o, eight = snapkv(budget), kvjax.H2O(budget=budget), Quantize(8)
    token, channel = Quantize(4, GROUP, "token"), Quantize(4, GROUP, residual=GROUP)
    return {
        "quantize": eight,
        "snapkv_quantize": chain(snap, eight),
        "h2o_quantize": chain(h2o, eight),
        "chelsea_quantize": chain(chelsea(budget), eight),
        "kvmerger_quantize": chain(kvjax.KVMerger(budget), eight),
        "quantize_clusterkv": chain(eight, clusterkv(budget)),
        "quantize_quest": chain(eight, quest(budget)),
        "h2o_quantize_token": chain(h2o, token),
        "snapkv_quantize_channel": chain(snap, channel),
        "snapkv_quantize_keys_in_8": chain(snap, Quantize(4, GROUP, key_bits=8)),
        "snapkv_quantize_keys_in_3": chain(snap, Quantize(2, GROUP, key_bits=3)),
        "quantize_channel_infinigen": chain(channel, infinigen(budget)),
        "quantize_clusterkv_offload": chain(
            Quantize(4, GROUP, key_bits=8), clusterkv(budget), kvjax.Offload()
        ),
    }


def registered(**changes) -> dict:
    def change(arguments: dict) -> dict:
        if changes and "reserve" in arguments:
            return {**arguments, "reserve": 1.0}
        return {**arguments, **changes} if "budget" in arguments else arguments

    return {name: method(**change(ARGUMENTS[name])) for name, method in METHODS.items()}


CASES = {name: one_layer(tx) for name, tx in {**registered(), **compositions(BUDGET)}.items()}
COVERING = {
    name: one_layer(tx)
    for name, tx in {**registered(budget=ENOUGH), **compositions(ENOUGH)}.items()
    if name != "float_h2o"  # a share of the prompt never covers what is generated
}


def methods_in(name: str) -> list[kvjax.KVTransform]:
    """All transforms in a case, of all its heads."""
    return [part for group in by_head_groups(CASES[name]) for part in walk(group)]


def selects(name: str) -> bool:
    """Whether a step attends to a selection: of what was live in `test_<method>.py`."""
    return any(part.stage == Stage.RECALL for part in methods_in(name))


def evicts_alone(name: str) -> bool:
    """Whether a case evicts or merges, for all heads of a layer alike, and does nothing else."""
    whole = CASES[name]
    return not isinstance(whole, HeadGroups | kvjax.Ring) and all(
        part.stage == Stage.EVICT for part in methods_in(name)
    )


def holds_its_budget(name: str) -> bool:
    """Whether no more than `BUDGET` slots are live after any step."""
    totals = {tx.extent(Extent(MAX_PROMPT, MAX_NEW)).total for tx in by_head_groups(CASES[name])}
    return totals == {BUDGET + 1}  # with the token that is being added


def has_books(name: str) -> bool:
    """Whether it stores keys and values in books, which have room for every vector here."""
    return any(isinstance(part, kvjax.Codebook) for part in methods_in(name))


def names_heads(name: str) -> bool:
    """Whether it names the KV heads of the model, of which there are `KV_HEADS`."""
    about_heads = ("calibration", "outlier_heads")
    return isinstance(CASES[name], HeadGroups) or any(
        getattr(part, field, None) is not None for part in methods_in(name) for field in about_heads
    )


def evicts_from_short_rows(name: str) -> bool:
    """Whether a row of no more than `BUDGET` tokens may lose some: budgets are shares of tokens."""
    lengths = np.arange(MAX_PROMPT + 1)
    budgets = [
        slots_for(part.budget, lengths, part.minimum)
        for part in methods_in(name)
        if getattr(part, "budget", None) is not None
    ]
    return any((slots < lengths)[: BUDGET + 1].any() for slots in budgets)


# What others in the table show nearly as well; they run with the slow tests.
SLOW = {
    "cam", "cam_prompt", "chain", "clusterkv_offload", "clusterkv_per_query_head", "every",
    "every_kvcrush", "every_kvmerger", "float_h2o", "head_groups", "infinigen", "kvcrush",
    "kvcrush_h2o", "h2o_codebook", "layer_budget", "outlier_heads", "per_layer",
    "pyramidinfer_paper", "pyramidkv", "quest", "quest_by_bounds", "quest_offload", "reposition",
    "ring", "ring_quantize", "snapkv_clusterkv", "spindlekv", "spindlekv_unfold", "when_full",
    *set(quantised(BUDGET)) - {"quantize"},
}  # fmt: skip


# Compositions whose parts and ways to be joined are in other cases.
EXHAUSTIVE = {
    "cam_prompt", "chelsea_quantize", "clusterkv_per_query_head", "every", "every_kvcrush",
    "every_kvmerger", "float_h2o", "h2o_quantize", "h2o_quantize_token", "kvcrush_h2o",
    "kvmerger_quantize", "layer_budget", "outlier_heads", "per_layer", "pyramidinfer_paper",
    "quantize_clusterkv", "quantize_clusterkv_offload", "quantize_quest", "quest_by_bounds",
    "quest_offload", "ring", "ring_quantize", "snapkv_clusterkv", "snapkv_quantize",
    "snapkv_quantize_keys_in_3", "snapkv_quantize_keys_in_8", "spindlekv_unfold", "when_full",
}  # fmt: skip

# One case of each kind: keeping everything, evicting at the prompt's end, after a repetition and in
# steps, merging in steps, head groups, selecting, 8 and 4 bits, books, and host memory.
KINDS = {
    "full", "snapkv", "kvzip", "h2o", "chelsea", "head_groups", "clusterkv", "quantize",
    "snapkv_quantize_channel", "h2o_codebook", "clusterkv_offload",
}  # fmt: skip


def names(chosen: Iterable[str], *fast: str) -> list:
    """Cases of which those named in `fast` are not slow, or else those that are not in SLOW.

    Those in EXHAUSTIVE run before a release only, unless they are named in `fast`.
    """
    chosen = list(chosen)
    return some_slow(chosen, *(fast or set(chosen) - SLOW), exhaustive=EXHAUSTIVE)


def kinds(chosen: Iterable[str], *fast: str) -> list:
    """Cases of which one of each kind is slow, unless it is named in `fast`.

    Those that are neither in KINDS nor in `fast` run before a release only.
    """
    chosen = list(chosen)
    return some_slow(chosen, *fast, exhaustive=set(chosen) - KINDS)


every_case = pytest.mark.parametrize("name", names(CASES))
