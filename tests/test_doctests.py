"""Every example in a docstring runs, and everything public has a docstring."""

import doctest
import importlib
import inspect
import pkgutil
from unittest import mock

import pytest

import kvjax
import kvjax.models
import pallas_kernels

PACKAGES = (kvjax, kvjax.models, pallas_kernels)


def modules() -> list[str]:
    names = {package.__name__ for package in PACKAGES}
    for package in PACKAGES:
        found = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
        names.update(module.name for module in found)
    return sorted(names)


# They ask the bundled model, or compile much.
SLOW = {
    "kvjax.evaluation.compare",
    "kvjax.evaluation.fidelity",
    "kvjax.transforms.spindlekv.reserve",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in modules()]
)
@pytest.mark.fast_cases(
    "kvjax",
    "kvjax.attention",
    "kvjax.budgets",
    "kvjax.budgets.budgets",
    "kvjax.budgets.layers",
    "kvjax.cache",
    "kvjax.cache.payload",
    "kvjax.cache.selection",
    "kvjax.cache.units",
    "kvjax.cli",
    "kvjax.cli.arguments",
    "kvjax.cli.compare_command",
    "kvjax.cli.compare_table",
    "kvjax.cli.generate_command",
    "kvjax.cli.inputs",
    "kvjax.cli.main",
    "kvjax.cli.methods_command",
    "kvjax.cli.terminal",
    "kvjax.compose",
    "kvjax.compose.chain",
    "kvjax.compose.foreseen",
    "kvjax.compose.wrappers",
    "kvjax.decisions",
    "kvjax.evaluation",
    "kvjax.evaluation.files",
    "kvjax.evaluation.grid",
    "kvjax.evaluation.material",
    "kvjax.evaluation.plots",
    "kvjax.evaluation.recording",
    "kvjax.evaluation.results",
    "kvjax.evaluation.retrieval",
    "kvjax.evaluation.wording",
    "kvjax.generation",
    "kvjax.generation.continuation",
    "kvjax.generation.model",
    "kvjax.generation.progress",
    "kvjax.generation.sampling",
    "kvjax.generation.steps",
    "kvjax.kit",
    "kvjax.models",
    "kvjax.models.blocks",
    "kvjax.models.config",
    "kvjax.models.demo",
    "kvjax.models.demo.corpus",
    "kvjax.models.demo.export",
    "kvjax.models.demo.held_out",
    "kvjax.models.demo.initial",
    "kvjax.models.demo.measure",
    "kvjax.models.demo.ngrams",
    "kvjax.models.demo.recipe",
    "kvjax.models.demo.tasks",
    "kvjax.models.demo.train",
    "kvjax.models.demo.training",
    "kvjax.models.demo.words",
    "kvjax.models.families",
    "kvjax.models.llama",
    "kvjax.models.loading",
    "kvjax.models.pruning",
    "kvjax.models.reading",
    "kvjax.models.rope_scaling",
    "kvjax.models.safetensors_files",
    "kvjax.protocol",
    "kvjax.registry",
    "kvjax.rope",
    "kvjax.storage",
    "kvjax.storage.codebook",
    "kvjax.storage.encoded_attention",
    "kvjax.storage.offload",
    "kvjax.storage.quantize",
    "kvjax.storage.quantized",
    "kvjax.storage.references",
    "kvjax.transforms",
    "kvjax.transforms.cam",
    "kvjax.transforms.chelsea",
    "kvjax.transforms.chelsea.chelsea",
    "kvjax.transforms.chelsea.outlier_heads",
    "kvjax.transforms.clusterkv",
    "kvjax.transforms.clusterkv.clusterkv",
    "kvjax.transforms.clusterkv.clusters",
    "kvjax.transforms.h2o",
    "kvjax.transforms.held_budget",
    "kvjax.transforms.infinigen",
    "kvjax.transforms.infinigen.infinigen",
    "kvjax.transforms.infinigen.projections",
    "kvjax.transforms.kvcrush",
    "kvjax.transforms.kvcrush.base",
    "kvjax.transforms.kvcrush.kvcrush",
    "kvjax.transforms.kvcrush.representatives",
    "kvjax.transforms.kvcrush.units",
    "kvjax.transforms.kvmerger",
    "kvjax.transforms.kvmerger.kvmerger",
    "kvjax.transforms.kvmerger.unmerged",
    "kvjax.transforms.pyramidinfer",
    "kvjax.transforms.pyramidkv",
    "kvjax.transforms.quest",
    "kvjax.transforms.random",
    "kvjax.transforms.recall",
    "kvjax.transforms.snapkv",
    "kvjax.transforms.spindlekv",
    "kvjax.transforms.spindlekv.layer_budget_eviction",
    "kvjax.transforms.spindlekv.spindlekv",
    "kvjax.transforms.streaming_llm",
    "pallas_kernels",
    "pallas_kernels.attention",
    "pallas_kernels.attention.call",
    "pallas_kernels.attention.decode",
    "pallas_kernels.attention.forms",
    "pallas_kernels.attention.gather",
    "pallas_kernels.attention.kernel",
    "pallas_kernels.attention.prompt",
    "pallas_kernels.attention.quantized",
    "pallas_kernels.attention.rotation",
    "pallas_kernels.base",
    "pallas_kernels.base.dispatch",
    "pallas_kernels.base.kernel_parts",
    "pallas_kernels.base.logits",
    "pallas_kernels.base.rows",
    "pallas_kernels.base.tiles",
    "pallas_kernels.formats",
    "pallas_kernels.formats.codebook",
    "pallas_kernels.formats.packed_bits",
    "pallas_kernels.grouping",
    "pallas_kernels.grouping.cosine",
    "pallas_kernels.grouping.nearest_entries",
    "pallas_kernels.grouping.segment_merge",
    "pallas_kernels.grouping.slot_pairs",
    "pallas_kernels.recall",
    "pallas_kernels.recall.cluster_selection",
    "pallas_kernels.recall.host_rows",
    "pallas_kernels.recall.page_bounds",
    "pallas_kernels.recall.page_scores",
    "pallas_kernels.tune",
)
def test_examples_run(name):
    with mock.patch.dict(kvjax.METHODS):  # what an example registers is forgotten
        result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


@pytest.mark.parametrize("name", kvjax.__all__)
def test_public_names_are_documented(name):
    thing = getattr(kvjax, name)
    documented = inspect.getdoc(thing)
    assert documented and not documented.startswith(f"{name}("), f"kvjax.{name} has no docstring"


def test_examples_exist():
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = [
        test
        for name in modules()
        for test in finder.find(importlib.import_module(name))
        if test.examples
    ]
    assert len(examples) >= 20
