"""Programs that `jax.export` has written: what they name, and that they run in other processes."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.attention.layer import QueryWindow
from kvjax.attention.prompt import begin
from kvjax.devices import Placement, check_mesh
from kvjax.serialization import NODES, TRANSFORMS, VALUES, from_json, to_json
from tests.attention.exported import programs, results
from tests.compose.test_conformance import CASES, every_case, standard
from tests.support.attending import SIZE, new_cache, parts
from tests.support.cases import BUDGET, quantised
from tests.support.marks import some_slow
from tests.support.tolerances import close

ROOT = Path(__file__).parents[2]
QUANTIZED = "chain(snapkv(budget=24), quantize)"
FOUR = ("snapkv", "h2o", "clusterkv", "quantize")
# What they name, the others name too.
COMBINED = {
    *quantised(BUDGET), "cam_prompt", "every_kvcrush", "every_kvmerger", "float_h2o",
    "kvcrush_h2o", "quest_offload", "ring_quantize", "snapkv_clusterkv",
}  # fmt: skip
OTHERS = tuple(sorted({*CASES} - {*FOUR} - COMBINED | {"snapkv_quantize_channel"}))


def written(x) -> jax.export.Exported:
    """A program that gives back what it takes, after it has been bytes."""
    exported = jax.export.export(jax.jit(lambda x: x))(x)
    return jax.export.deserialize(exported.serialize())


@every_case
def test_caches_of_every_method_are_read_as_they_were(name):
    cache = jax.eval_shape(functools.partial(kvjax.init_cache, CASES[name], **SIZE))
    assert written([cache]).in_tree == jax.tree.structure((([cache],), {}))


def test_what_caches_hold_at_other_times():
    """In the middle of a prompt, and for flushes; and frequencies that are given to a step."""
    rope = kvjax.Rope(jnp.ones(4), interleaved=True, factor=0.5)
    cache = jax.eval_shape(functools.partial(kvjax.init_cache, CASES["quantize"], **SIZE))
    reading = jax.eval_shape(begin, cache)
    reading = dataclasses.replace(
        reading, rope=rope, queries=QueryWindow.empty(3, 4, 2, 8, jnp.float32),
    )  # fmt: skip
    assert written((reading, rope)).in_tree == jax.tree.structure((((reading, rope),), {}))


def test_names_are_those_of_the_page():
    """What has been written with them is to be read by later versions."""
    page = (ROOT / "docs" / "guides" / "exporting.md").read_text()
    packages = ("kvjax.", "pallas_kernels.")
    ours = {x: node for x, node in NODES.items() if node.__module__.startswith(packages)}
    assert len(ours) > 20 and all(f"`{name}`" in page for name in ours)
    assert all(name == f"kvjax.{node.__name__}" for name, node in ours.items())
    values = {x: value for x, value in VALUES.items() if value.__module__.startswith(packages)}
    assert len(values) > 5 and all(name == value.__name__ for name, value in values.items())


@kvjax.kit.static_value
@dataclasses.dataclass(frozen=True)
class Half:
    """A budget of one's own."""

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        return lengths // 2


@kvjax.kit.pytree_node
@dataclasses.dataclass(frozen=True)
class Seen:
    """A state of one's own, with a static part."""

    length: jax.Array
    budget: Half = dataclasses.field(default=Half(), metadata={"static": True})


class Turns(NamedTuple):
    """Another one, which a notebook may decorate whenever its cell runs."""

    count: jax.Array


def test_classes_of_ones_own():
    seen = Seen(jnp.zeros(3, jnp.int32))
    assert written(seen).in_tree == jax.tree.structure(((seen,), {}))
    assert from_json(to_json(seen.budget)) == Half()
    assert kvjax.kit.pytree_node(Turns) is Turns is kvjax.kit.pytree_node(Turns)
    turns = Turns(seen.length)
    assert written(turns).in_tree == jax.tree.structure(((turns,), {}))


def test_a_class_may_be_called_as_one_of_kvjax():
    """A method of one's own may have pages, too, and a module of kvjax is imported at first use."""
    pages = kvjax.kit.pytree_node(NamedTuple("Pages", [("first", jax.Array)]))
    assert NODES["kvjax.Pages"] is not pages is NODES[f"kvjax.{__name__}.Pages"]
    state = pages(jnp.zeros(3))
    assert written(state).in_tree == jax.tree.structure(((state,), {}))
    share = dataclasses.make_dataclass("Share", [], namespace={"__module__": __name__}, frozen=True)
    kvjax.kit.static_value(share)
    assert from_json(to_json((share(), kvjax.SnapKV(0.5)))) == (share(), kvjax.SnapKV(0.5))


def test_a_cell_of_a_notebook_may_run_again():
    again = dataclasses.make_dataclass("Half", [], namespace={"__module__": __name__}, frozen=True)
    kvjax.kit.static_value(again)
    assert from_json(to_json(again())) == again()
    kvjax.kit.static_value(Half)


@dataclasses.dataclass(frozen=True)
class Mine(kvjax.StreamingLLM):
    """A method of one's own."""

    strength: float = 1.0


def test_static_values_are_json():
    mesh = check_mesh(jax.make_mesh((1, 1), ("data", "tensor")))
    calibration = kvjax.kit.InfiniGenCalibration(np.random.default_rng(0).normal(size=(1, 2, 8, 3)))
    for value in (
        *CASES.values(),
        kvjax.bind(kvjax.PyramidKV(budget=64), 30)[7],
        kvjax.InfiniGen(64, calibration=calibration),
        Placement(mesh, True),
        Placement(check_mesh(jax.sharding.AbstractMesh((2,), ("data",))), False),
        (None, (), 1, 1.0, 1e-300, float("inf"), "ä", range(2, 9), jnp.dtype("bfloat16")),
    ):
        read = from_json(json.loads(json.dumps(to_json(value))))
        assert read == value and hash(read) == hash(value)


def test_what_no_program_can_name(monkeypatch):
    with pytest.raises(ValueError, match=r"needs a name \(kvjax.register\)"):
        to_json(Mine(8))
    with pytest.raises(TypeError, match="cannot hold <function"):
        to_json(kvjax.SnapKV(lambda lengths: lengths))
    with pytest.raises(ValueError, match="names the method 'mine', which is unknown"):
        from_json({"method": "mine", "fields": {}})
    with pytest.raises(ValueError, match=r"names the value 'os\.system', which is unknown"):
        from_json({"value": "os.system", "fields": {}})
    with pytest.raises(ValueError, match=r"a mesh of the devices \[997\]"):
        from_json({"mesh": [{"data": 1}, [997]]})
    monkeypatch.setitem(TRANSFORMS, "mine", Mine)
    assert from_json(to_json(Mine(8))) == Mine(8)


@pytest.mark.slow
def test_names_are_known_once_a_cache_is_made():
    code = (
        "import jax, kvjax\n"
        "size = dict(batch=1, kv_heads=1, head_dim=4, max_prompt=32, max_new=1)\n"
        f"kvjax.init_cache(kvjax.parse({QUANTIZED!r}), **size)\n"
        "assert jax.export.deserialize(bytearray(open(0, 'rb').read())).nr_devices == 1"
    )
    cache = jax.eval_shape(functools.partial(kvjax.init_cache, kvjax.parse(QUANTIZED), **SIZE))
    exported = jax.export.export(jax.jit(lambda x: x))(cache).serialize()
    done = subprocess.run([sys.executable, "-c", code], input=bytes(exported), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def expected(name: str) -> list[np.ndarray]:
    """What `results` gives where nothing is exported."""
    whole = standard(name)
    held = [part.cache.kv.position for part in parts(CASES[name], whole.caches[-1])]
    return [np.asarray(x) for x in (whole.prompt_out, *whole.outs, *held)]


def same(name: str, found) -> None:
    for number, (x, y) in enumerate(zip(found, expected(name), strict=True)):
        close(x, y, what=f"{name}, array {number}")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FOUR, id="four", marks=pytest.mark.slow),
        pytest.param(OTHERS, id="others", marks=pytest.mark.exhaustive),
    ],
)
def test_programs_run_in_another_process(names, tmp_path):
    """Which traces no attention and no decision again."""
    for name in names:
        (tmp_path / name).mkdir()
        for what, exported in programs(CASES[name], new_cache(CASES[name])).items():
            (tmp_path / name / what).write_bytes(exported.serialize())
    command = [sys.executable, "-m", "tests.attention.exported", str(tmp_path), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in names:
        with np.load(tmp_path / f"{name}.npz") as found:
            same(name, found.values())


# Host memory has no symbolic shapes.
WITHOUT_HOST = [name for name in CASES if "Offload" not in repr(CASES[name])]


@pytest.mark.parametrize(
    "name",
    some_slow(WITHOUT_HOST, "h2o", exhaustive={*WITHOUT_HOST} - {"clusterkv", "h2o_codebook"}),
)
def test_a_program_for_any_number_of_rows(name):
    """Of three rows, and of one of them."""
    (batch,) = jax.export.symbolic_shape("b")
    transform, sizes = CASES[name], {**SIZE, "batch": batch}
    cache = jax.eval_shape(functools.partial(kvjax.init_cache, transform, **sizes))
    made = programs(transform, cache, batch)
    same(name, results(made, new_cache(transform)))
    alone = results(made, new_cache(transform, 1), rows=(1,))
    for x, y in zip(alone, expected(name), strict=True):
        close(x[0], y[1], what=name)
