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
from kvjax.serialization import NODES, VALUES

PACKAGES = (kvjax, kvjax.models, pallas_kernels)


def modules() -> list[str]:
    names = {package.__name__ for package in PACKAGES}
    for package in PACKAGES:
        found = pkgutil.walk_packages(package.__path__[:1], package.__name__ + ".")
        names.update(module.name for module in found)
    return sorted(names)


# They ask the bundled model, or compile much.
SLOW = {
    "kvjax.attention.attend",
    "kvjax.attention.layer",
    "kvjax.cache.slots",
    "kvjax.evaluation.comparison.compare",
    "kvjax.evaluation.diagnosis.diagnosis",
    "kvjax.evaluation.fidelity.fidelity",
    "kvjax.evaluation.fidelity.perplexity",
    "kvjax.evaluation.speed.speed",
    "kvjax.generation.calibration",
    "kvjax.generation.decode_loop",
    "kvjax.generation.generate",
    "kvjax.generation.model",
    "kvjax.models.decoder",
    "kvjax.plot.slots",
    "kvjax.plot.watching",
    "kvjax.storage.recent",
    "kvjax.testing",
    "kvjax.evaluation.codebook_reserve",
    "pallas_kernels.attention.codebook",
    "pallas_kernels.formats.bits",
    "pallas_kernels.grouping.greedy_cover",
    "pallas_kernels.grouping.kmeans",
    "pallas_kernels.grouping.soft_matching",
}


# They need packages that tests go without.
OTHERS = {"kvjax.lm_eval": "lm_eval"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in modules()]
)
def test_examples_run(name):
    if name in OTHERS:
        pytest.importorskip(OTHERS[name], reason=f"{OTHERS[name]} is not installed")
    module = importlib.import_module(name)
    # What an example registers is forgotten: its classes one by one, since modules that it imports
    # register others, which stay.
    with mock.patch.dict(kvjax.registry.METHODS):
        result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    for registered in (NODES, VALUES):
        for key, kind in list(registered.items()):
            if kind.__module__ == name and not hasattr(module, kind.__name__):
                del registered[key]
    assert result.failed == 0


@pytest.mark.parametrize("name", kvjax.__all__)
def test_public_names_are_documented(name):
    thing = getattr(kvjax, name)
    documented = inspect.getdoc(thing)
    assert documented and not documented.startswith(f"{name}("), f"kvjax.{name} has no docstring"
