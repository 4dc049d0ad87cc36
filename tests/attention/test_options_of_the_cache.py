"""Scale, window and soft cap belong to a cache from its beginning; a call cannot change them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import kvjax
from kvjax.models import DecoderConfig, RopeConfig, random_decoder
from tests.compose.test_conformance import names
from tests.support import attending
from tests.support.attending import Tokens, flush, new_cache, right, structure, the_rope
from tests.support.tolerances import close

OPTIONS = {"scale": 1.5, "window": 9, "soft_cap": 2.0}
LENGTHS = np.array([20, 7, 13])
METHODS = {
    "full": kvjax.Full(),
    "every(snapkv)": kvjax.Every(kvjax.SnapKV(8, window=4), steps=4),
    "h2o": kvjax.H2O(12),
    "clusterkv": kvjax.ClusterKV(
        10, tokens_per_cluster=2, sinks=2, interval=3, new_clusters=2, dense_layers=()
    ),
    "spindlekv": kvjax.bind(kvjax.SpindleKV(0.6, window=8, interval=4), 1)[0],
    "groups": kvjax.HeadGroups((((0,), kvjax.H2O(12)), ((1,), kvjax.Full()))),
}


LATE = {  # whose flushes look at unrotated keys, and need the rope for them
    "late": kvjax.chain(
        kvjax.Every(kvjax.SnapKV(8, window=4), steps=4),
        kvjax.Codebook(0.9, 0.9, capacity=0.5, interval=4),
    )
}
LATE["late groups"] = kvjax.HeadGroups((((0,), LATE["late"]), ((1,), kvjax.Full())))
SINKS = np.array([0.7, 3.0, -2.5, 1.0], np.float32)


PROMPT = right(np.zeros(3, int), LENGTHS, max(LENGTHS))


def prompt(transform, cache, **options):
    return attending.prompt(transform, cache, Tokens.random(), PROMPT, **options)


def steps(transform, cache, count: int, **options):
    """Outputs of decode steps, and the cache after them and its flushes."""
    outs, caches = attending.decoded(transform, cache, Tokens.random(), LENGTHS, count, **options)
    return np.concatenate(outs, axis=2), caches[-1]


@pytest.mark.parametrize("name", names(METHODS, "every(snapkv)", "groups"))
def test_a_call_need_not_repeat_them(name):
    """And one that says another value is refused, prompt or step."""
    transform = METHODS[name]
    out, cache = prompt(transform, new_cache(transform, **OPTIONS))
    again, _ = prompt(transform, new_cache(transform, **OPTIONS), **OPTIONS)
    close(out, again, "exact")
    assert structure(cache) == structure(prompt(transform, new_cache(transform, **OPTIONS))[1])
    for option, value in {"scale": 1.25, "window": 8, "soft_cap": 3.0}.items():
        for call in (prompt, lambda *given, **options: steps(*given, 1, **options)):
            with pytest.raises(ValueError, match=f"made for {option}={OPTIONS[option]}, got"):
                call(transform, cache, **{option: value})
    plain, _ = prompt(transform, new_cache(transform))
    assert not np.allclose(out, plain), "the options change nothing: this shows nothing"


@pytest.mark.parametrize("name", names(METHODS | LATE, "every(snapkv)", "late"))
def test_a_prompt_leaves_the_structure_of_a_cache(name):
    """So that a condition may stand around it, and a template restores what was saved."""
    sinks = None if name == "groups" else SINKS
    transform = (METHODS | LATE)[name]
    empty = new_cache(transform, **OPTIONS, rope=the_rope())

    @jax.jit
    def maybe(new, cache, *given):
        def read(cache):
            return kvjax.attend(cache, *given, phase="prompt", rope=the_rope(), sinks=sinks)[1]

        return jax.lax.cond(new, read, lambda cache: cache, cache)

    given = Tokens.random().at(PROMPT)
    cache = maybe(True, empty, *given)
    assert structure(cache) == structure(empty)
    _, cache = steps(transform, cache, 4, sinks=sinks)
    assert structure(cache) == structure(empty)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("name", names(["every(snapkv)", "clusterkv", "late"], "every(snapkv)"))
def test_a_restored_cache_goes_on_as_the_saved_one(name, sinks, tmp_path):
    """A flush has to know the sinks and the rope of the prompt."""
    transform = (METHODS | LATE)[name]
    _, cache = prompt(transform, new_cache(transform, **OPTIONS), sinks=sinks)

    def plain(cache):  # Orbax takes no random keys
        return [
            x for x in jax.tree.leaves(cache) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        ]

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "cache", plain(cache))
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "cache", plain(cache))
    template, arrays = new_cache(transform, **OPTIONS, rope=the_rope()), iter(found)
    restored = jax.tree.map(
        lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else next(arrays), template
    )
    pairs = zip(*(steps(transform, x, 8, sinks=sinks) for x in (cache, restored)), strict=True)
    for a, b in pairs:
        for x, y in zip(plain(a), plain(b), strict=True):
            close(x, y, "exact")


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (jnp.float32(0.25), TypeError, r"scale=16 \*\* -0.5 in place of"),
        (np.ones(1), TypeError, "a Python number"),
        ("1", TypeError, "must be a number"),
        (True, TypeError, "must be a number"),
        (0.0, ValueError, "above 0"),
        (float("nan"), ValueError, "above 0"),
    ],
)
def test_a_scale_is_a_python_number(scale, error, message):
    with pytest.raises(error, match=message):
        kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=1, head_dim=4, max_prompt=4, max_new=4,
                         scale=scale)  # fmt: skip
    cache = kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=1, head_dim=4, max_prompt=4, max_new=4)
    rows = jnp.ones((1, 1, 4, 4))
    with pytest.raises(error, match=message):
        kvjax.attend(cache, rows, rows, rows, jnp.arange(4)[None], phase="prompt",
                     scale=scale)  # fmt: skip


SMALL = {"batch": 1, "kv_heads": 1, "head_dim": 4, "max_prompt": 4, "max_new": 4}


@pytest.mark.parametrize(
    ("option", "value", "error", "message"),
    [
        ("rope", [1.0], TypeError, "rope must be a kvjax.Rope, got list"),
        ("rope", kvjax.Rope(np.ones(3, np.float32)), ValueError, "rotates 6 channels, got head_di"),
    ],
)
def test_bad_options(option, value, error, message):
    with pytest.raises(error, match=message):
        kvjax.init_cache(kvjax.Full(), **SMALL, **{option: value})


def test_a_traced_scale_is_refused_and_leaves_nothing_behind():
    """In `jit`, `1 / jnp.sqrt(16)` is a traced value; NumPy's own numbers are numbers."""
    transform = METHODS["every(snapkv)"]

    @jax.jit
    def read(cache, *given):
        scale = 1 / jnp.sqrt(16)
        return kvjax.attend(cache, *given, phase="prompt", scale=scale)

    given = Tokens.random().at(PROMPT)
    with pytest.raises(TypeError, match=r"1 / jnp\.sqrt"):
        read(new_cache(transform), *given)
    cache = new_cache(transform, scale=np.float64(0.25))
    _, cache = prompt(transform, cache, scale=0.25)
    assert flush(cache, 4).options.scale == 0.25


CONFIG = DecoderConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, query_heads=4, kv_heads=2,
    head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=256, attention_scale=0.9,
    attention_soft_cap=3.0,
)  # fmt: skip


def test_a_model_says_them():
    """`generate` makes caches for what the model's layers do; one that does not say so is told."""

    class Silent(type(random_decoder(CONFIG))):
        attention_scale = None

    model = random_decoder(CONFIG, seed=1)
    prompts = [np.random.default_rng(0).integers(64, size=30).tolist()]
    context = kvjax.read(model, prompts, transform=METHODS["every(snapkv)"])
    for cache in context.caches:
        assert (cache.options.scale, cache.options.soft_cap) == (0.9, 3.0)
    silent = random_decoder(dataclasses.replace(CONFIG), seed=1)
    silent.__class__ = Silent
    with pytest.raises(ValueError, match=r"made for scale=.*an attribute of the model"):
        kvjax.generate(silent, prompts, max_new_tokens=2)
