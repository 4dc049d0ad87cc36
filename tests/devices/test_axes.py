"""Meshes as `jax.make_mesh` makes them, in every way in which JAX's users have them."""

from __future__ import annotations

import pytest

from tests.devices.test_mesh import finished, start

# One of each kind: evicting, merging, selecting in host memory, and encoding.
TRACED = (
    "snapkv(window=8)", "kvmerger", "chain(clusterkv(dense_layers=()), offload)",
    "chain(snapkv, quantize)",
)  # fmt: skip
OTHERS = "h2o", "cam(snapkv, expected=False)", "clusterkv(dense_layers=())", "codebook"


def check(*args: str) -> None:
    found = finished(start("axes", 4, *args))
    assert found and all(found.values()), [name for name, same in found.items() if not same]


@pytest.mark.parametrize(
    ("ways", "methods"),
    [
        pytest.param("traced", TRACED, id="kinds", marks=pytest.mark.exhaustive),
        pytest.param("traced", OTHERS, id="others", marks=pytest.mark.exhaustive),
        pytest.param("whole", TRACED[:1], id="all ways", marks=pytest.mark.exhaustive),
    ],
)
def test_every_kind_of_method_takes_any_mesh(ways, methods):
    check(ways, *methods)


@pytest.mark.slow
def test_any_mesh_gives_what_one_device_gives():
    check("computed", "every(snapkv(window=8), steps=2)")


@pytest.mark.slow
def test_models_and_pages_take_a_mesh_that_is_set():
    check("generated")
