"""Contexts belong to a computation: what tells models and tokenizers apart."""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.machinery
import json
import os
import subprocess
import sys
import textwrap
import types
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import kvjax
import kvjax.evaluation
from kvjax.generation import fingerprints
from kvjax.generation.fingerprints import Fingerprint, describe, describe_tokenizer, differences
from kvjax.generation.model import FunctionalModel, as_functional
from kvjax.models import Decoder, DecoderConfig, LayerConfig, RopeConfig
from tests.generation.test_generate import CONFIG, RAGGED, model
from tests.support.attending import same_arrays

ROOT = Path(__file__).parents[2]


def with_config(config: DecoderConfig, weights=None) -> Decoder:
    """A decoder of another configuration with the very arrays of the first one."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    given = dict(nnx.to_flat_state(nnx.state(model() if weights is None else weights)))
    ours = {
        path: given[path] if path in given else x.replace(jnp.ones(x.shape, x.dtype))
        for path, x in nnx.to_flat_state(state)
    }
    return nnx.merge(graph, nnx.from_flat_state(ours))


def copied() -> Decoder:
    return nnx.merge(*jax.tree.map(lambda x: x + 0, nnx.split(model())))


def changed(**fields) -> DecoderConfig:
    return dataclasses.replace(CONFIG, **fields)


@pytest.fixture(scope="module")
def context():
    return kvjax.read(model(), RAGGED, max_prompt=128, max_new=16)


@pytest.fixture(scope="module")
def folder(context, tmp_path_factory):
    folder = tmp_path_factory.mktemp("contexts") / "own"
    kvjax.save_context(folder, context, model=model())
    return folder


# Other computations with the same weights, by what differs.
OTHERS = {
    "windows": changed(layers=(LayerConfig(CONFIG.rope, 8), LayerConfig(CONFIG.rope))),
    "type": changed(
        rope=RopeConfig(rotary_dim=8, original_max_positions=64, type="linear", factor=2.0)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_computation_with_the_same_weights(name, context, folder):
    """The very arrays of the context's model, and other answers."""
    other = with_config(OTHERS[name])
    assert jax.tree.leaves(nnx.state(other))[0] is jax.tree.leaves(nnx.state(model()))[0]
    with pytest.raises(ValueError, match=f"of another model: its .*{name}"):
        kvjax.load_context(folder, other)
    for call in (
        lambda: kvjax.generate(other, None, context=context),
        lambda: kvjax.stream(other, [[1]] * 3, context=context),
        lambda: kvjax.save_context(folder, context, model=other),
    ):
        with pytest.raises(ValueError, match=f"of this model: its .*{name}"):
            call()


def test_every_field_is_described_or_computes_nothing():
    for kind, own in (
        (DecoderConfig, CONFIG), (RopeConfig, CONFIG.rope), (LayerConfig, CONFIG.layer(0))
    ):  # fmt: skip
        for field in dataclasses.fields(kind):
            other = dataclasses.replace(own)
            object.__setattr__(other, field.name, "something else")
            silent = field.name in ("bos_token_id", "eos_token_ids", "model_type")
            assert bool(differences(describe(own), describe(other))) != silent, field.name


def test_an_equal_model_is_the_same(context, folder):
    """Made anew, with other end tokens, or with arrays in other places."""
    for other in (copied(), with_config(changed(eos_token_ids=(3,)))):
        same_arrays(kvjax.load_context(folder, other), context)
        kvjax.generate(other, None, context=context, max_new_tokens=2)


def test_weights_that_have_changed(context):
    other = copied()
    kvjax.generate(other, None, context=context, max_new_tokens=1)
    other.norm.scale[...] = other.norm.scale[...].at[5].add(1.0)
    with pytest.raises(ValueError, match=r"its weights\.norm\.scale: 'float32\[32\] "):
        kvjax.generate(other, None, context=context, max_new_tokens=1)


def test_every_way_to_a_context(context):
    """All know their model, through `jax.jit` with donation too."""
    once = kvjax.evaluation.ReadOnce(model(), RAGGED, [kvjax.Full()], max_prompt=128, max_new=16)
    passed = jax.jit(lambda x: x, donate_argnums=0)(context.copy())
    result = kvjax.generate(model(), None, context=passed, max_new_tokens=2, donate=True)
    own = Fingerprint.of(as_functional(model()))
    for each in (once.context(kvjax.Full()), result.context, context.copy()):
        assert each.fingerprint == own


def test_the_weights_are_looked_at_once(monkeypatch):
    made, content = [], fingerprints._content
    monkeypatch.setattr(fingerprints, "_content", lambda x: made.append(x) or content(x))
    other = copied()
    context = kvjax.read(other, [[1, 2, 3]], max_new=8)
    for _ in range(3):
        context = kvjax.generate(other, [[4]], context=context, max_new_tokens=1).context
    assert len(made) == 1
    kvjax.generate(model(), [[1, 2, 3]], max_new_tokens=1)
    assert len(made) == 1, "no context is kept"


def test_arrays_are_not_kept_alive():
    other = copied()
    Fingerprint.of(as_functional(other))
    seen = weakref.ref(jax.tree.leaves(nnx.state(other))[0])
    del other
    gc.collect()
    assert seen() is None


def test_arrays_can_be_donated_afterwards():
    """What NumPy has seen of an array would keep its memory."""
    x = jnp.arange(1024.0)
    before = fingerprints._checksums([x])
    moved = jax.jit(lambda x: x + 0, donate_argnums=0)(x)
    assert x.is_deleted() and fingerprints._checksums([moved]) == before


@pytest.mark.parametrize("placed", ["a device", "a mesh"])
def test_numbers_are_taken_on_their_devices(placed):
    """Bit for bit: the sign of zero and the bits of NaN tell arrays apart, too."""
    of_floats = np.array([[0.5, -0.0, 3.0], [np.nan, 1.5, -2.0]])
    of_floats[1, 0] = np.copysign(np.nan, -1)
    index, where = (np.array([0, 1, 1]), np.array([1, 0, 2])), None
    if placed == "a mesh":
        mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Explicit,))
        where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    for dtype, bits in (("float32", "uint32"), ("bfloat16", "uint16"), ("int8", "int8")):
        floats = of_floats if dtype != "int8" else np.array([[1, 2, -3], [4, -5, 6]])
        x = np.asarray(floats, jnp.dtype(dtype))
        found = fingerprints._sample_on_devices(jax.device_put(x, where), index)
        assert found.dtype == bits
        np.testing.assert_array_equal(found, x.view(bits)[index])


class Noisy(nnx.Module):
    num_layers, query_heads, kv_heads, head_dim, vocab_size = 1, 4, 2, 8, 64

    def __init__(self, rate: float, seed: int) -> None:
        self.dropout = nnx.Dropout(rate, rngs=nnx.Rngs(seed))
        self.out = nnx.Param(jnp.ones(3))

    def __call__(self, *args, **options):
        raise NotImplementedError


def test_random_numbers_are_no_weights():
    one, same, other = (
        Fingerprint.of(as_functional(Noisy(*given))) for given in ((0.1, 0), (0.1, 1), (0.2, 0))
    )
    assert one == same
    assert differences(one.content, other.content) == "model.dropout.rate: 0.1 there, 0.2 here"


# --- functions ------------------------------------------------------------------------------------


def scaled(params, *args, scale=1.0, **options):
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Scaled:
    scale: float

    def __call__(self, *args):
        raise NotImplementedError


class Scaling:
    """Looks like the function that it calls."""

    def __init__(self, function, scale):
        functools.update_wrapper(self, function)
        self.scale = scale

    def __call__(self, *args):
        raise NotImplementedError


class Plain:
    def __init__(self, scale):
        self._scale = scale

    @functools.cached_property
    def computed_when_it_is_used(self):
        return object()

    def apply(self, *args):
        raise NotImplementedError


def closure(scale):
    return lambda *args: scale


def functional(apply) -> FunctionalModel:
    return FunctionalModel(apply, {"w": jnp.ones(3)}, 1, 4, 2, 8, 64)


KINDS = {
    "partial": lambda scale: functools.partial(scaled, scale=scale),
    "dataclass": Scaled,
    "method": lambda scale: Plain(scale).apply,
    "closure": closure,
    "default": lambda scale: lambda params, scale=scale: None,
    "wrapped": lambda scale: functools.wraps(scaled)(closure(scale)),
    "callable": lambda scale: Scaling(scaled, scale),
    "jitted": lambda scale: jax.jit(closure(scale)),
    "array": lambda scale: functools.partial(scaled, scale=np.full(3, scale)),
    "nested": lambda scale: closure([{"a": Scaled(scale)}]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_functions_by_what_they_hold(kind):
    one, same, other = (Fingerprint.of(functional(KINDS[kind](scale))) for scale in (2.0, 2.0, 3.0))
    assert one == same and one != other
    assert "there" in differences(one.content, other.content)


def test_what_is_used_meanwhile_changes_nothing():
    made = Plain(1.0)
    before = describe(made)
    _ = made.computed_when_it_is_used
    assert describe(made) == before


def test_values_of_all_kinds():
    given = {
        "dtypes": [jnp.float32, np.dtype("float32"), jnp.dtype("bfloat16"), np.float32],
        "numbers": (1, True, 0.1, np.float32(0.5), float("inf"), 1j, b"a"),
        "set": {"b", "a"}, "functions": [jnp.tanh, np.tanh, max, jax.nn.silu], "none": None,
        "precision": jax.lax.Precision.HIGHEST, "empty": np.zeros((0, 3)),
        "key": jax.random.key(0), "device": jax.devices()[0],
    }  # fmt: skip
    found = describe(given)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["dtypes"] == ["float32", "float32", "bfloat16", "float32"]
    assert found["set"] == ["a", "b"] and not {"none", "device"} & found.keys()
    assert found["functions"] == ["jax.tanh", "numpy.tanh", "builtins.max", "jax.silu"]


def test_what_holds_itself_is_described():
    """In JSON, which has no cycles."""
    one: list = [1]
    one.append({"within": one})
    assert describe(one) == [1, {"within": "what it is a part of"}]


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        ({"__spec__": importlib.machinery.ModuleSpec("tools.read", None)}, "tools.read"),
        ({"__file__": "/somewhere/read.py"}, "read"),
        ({}, "__main__"),
    ],
    ids=["python -m", "a script", "typed in"],
)
def test_functions_of_a_script_have_the_name_that_others_import(attributes, name, monkeypatch):
    """Another program that imports them from it describes them alike."""
    script = types.ModuleType("__main__")
    vars(script).update(attributes)
    exec("def scale(x): return 2 * x", vars(script))
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert describe(script.scale) == f"{name}.scale"


def test_other_versions_of_flax_have_other_attributes():
    there = {"class": "flax.Linear", "use_bias": False, "promote_dtype": "flax.promote_dtype"}
    here = {"class": "flax.Linear", "use_bias": False, "out_sharding": "x"}
    assert differences(there, here) == ""
    assert differences({**there, "class": "m.Own"}, {**here, "class": "m.Own"})
    assert differences(there, {**here, "use_bias": True}) == "use_bias: False there, True here"


@pytest.mark.slow
def test_another_process_describes_alike():
    script = """
        import json
        from kvjax.generation.fingerprints import Fingerprint
        from kvjax.generation.model import as_functional
        from tests.generation.test_fingerprints import KINDS, functional
        from tests.generation.test_generate import model
        models = [as_functional(model()), *(functional(make(2.0)) for make in KINDS.values())]
        print(json.dumps([Fingerprint.of(x).digest for x in models]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True,
        check=True, env={**os.environ, "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    models = [as_functional(model()), *(functional(make(2.0)) for make in KINDS.values())]
    assert json.loads(done.stdout) == [Fingerprint.of(x).digest for x in models]


# --- tokenizers -----------------------------------------------------------------------------------

LETTERS = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "aa": 3}, "merges": ["a b", "a a"]}


def tokenizer_of(model=LETTERS, normalizer=None, pre_tokenizer=None, added_tokens=(), **options):
    parts = {
        "model": model, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
        "added_tokens": list(added_tokens), "post_processor": None, "decoder": None,
    }  # fmt: skip
    made = Tokenizer.from_str(json.dumps(parts))
    return PreTrainedTokenizerFast(tokenizer_object=made, **options)


ADDED = {"id": 4, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("model", {"model": {**LETTERS, "vocab": {"b": 0, "a": 1, "ab": 2, "aa": 3}}}),
        ("model", {"model": {**LETTERS, "merges": ["a a", "a b"]}}),
        ("normalizer", {"normalizer": {"type": "Lowercase"}}),
        ("pre_tokenizer", {"pre_tokenizer": {"type": "Digits", "individual_digits": True}}),
        ("added_tokens.4", {"added_tokens": [ADDED]}),
        ("chat_template", {"chat_template": "{{ messages }}"}),
        ("special_tokens.bos_token", {"bos_token": "<x>"}),
    ],
)
def test_another_tokenizer(name, options):
    one, other = tokenizer_of(), tokenizer_of(**options)
    assert not differences(describe_tokenizer(one), describe_tokenizer(tokenizer_of()))
    assert name in differences(describe_tokenizer(one), describe_tokenizer(other))
