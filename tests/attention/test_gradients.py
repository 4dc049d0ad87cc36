"""`attend` says that it has no gradient, wherever somebody asks for one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import kvjax
from tests.generation.test_generate import model

PROMPT = 12
TRANSFORMS = {
    "full": kvjax.Full(),
    "snapkv": kvjax.SnapKV(8, window=4),
    "h2o": kvjax.H2O(8),
    "quantize": kvjax.Quantize(8),
    "quest": kvjax.Quest(8, page=2, dense_layers=()),
    "head groups": kvjax.HeadGroups((((1,), kvjax.Full()), ((0,), kvjax.H2O(8)))),
}
MODES = {
    "grad": lambda f, x: jax.grad(f)(x),
    "jit of grad": lambda f, x: jax.jit(jax.grad(f))(x),
    "grad of jit": lambda f, x: jax.grad(jax.jit(f))(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "vmap of grad": lambda f, x: jax.vmap(jax.grad(f))(x[None]),
    "grad of checkpoint": lambda f, x: jax.grad(jax.checkpoint(f))(x),
}


def tokens(count: int) -> tuple[jax.Array, ...]:
    return tuple(
        jax.random.normal(jax.random.key(n), (1, heads, count, 8))
        for n, heads in enumerate((4, 2, 2))
    )


def empty(transform: kvjax.KVTransform):
    return kvjax.init_cache(
        transform, batch=1, kv_heads=2, query_heads=4, head_dim=8, max_prompt=PROMPT, max_new=4,
        dtype=jnp.float32,
    )  # fmt: skip


def loss(phase: str, name: str, implementation: str | None = None):
    """The output's squares, as a function of a number that scales q, k and v."""
    transform, count = TRANSFORMS[name], PROMPT if phase == "prompt" else 1
    at, cache = jnp.arange(count)[None], empty(transform)

    def of(scale: jax.Array) -> jax.Array:
        scaled = (x * scale for x in tokens(count))
        out, _ = kvjax.attend(
            transform, cache, *scaled, at, phase=phase, implementation=implementation
        )
        return jnp.square(out).sum()

    return of


refused = pytest.raises(TypeError, match=r"kvjax\.attend is not differentiable")


@pytest.mark.parametrize(
    ("phase", "name", "implementation"),
    [
        *(("decode", name, "xla") for name in TRANSFORMS),
        ("prompt", "full", "xla"), ("prompt", "head groups", "xla"), ("prompt", "h2o", "interpret"),
        ("decode", "quantize", "interpret"),
    ],
)  # fmt: skip
def test_there_is_no_gradient(phase, name, implementation):
    with refused:
        jax.grad(loss(phase, name, implementation))(jnp.float32(1))


@pytest.mark.parametrize("mode", MODES)
def test_in_no_mode(mode):
    with refused:
        MODES[mode](loss("decode", "full"), jnp.float32(1))


def test_nor_of_frequencies():
    transform, cache = kvjax.Full(), empty(kvjax.Full())

    def of(frequencies: jax.Array) -> jax.Array:
        given = *tokens(PROMPT), jnp.arange(PROMPT)[None]
        rope = kvjax.Rope(frequencies)
        return kvjax.attend(transform, cache, *given, phase="prompt", rope=rope)[0].sum()

    with refused:
        jax.grad(of)(jnp.ones(4))


def test_nor_of_a_model():
    layers = kvjax.bind(kvjax.Full(), model().num_layers)
    size = {"batch": 1, "kv_heads": 2, "query_heads": 4, "head_dim": 8}
    caches = tuple(kvjax.init_cache(tx, **size, max_prompt=4, max_new=1) for tx in layers)
    ids, at = jnp.arange(4)[None], jnp.arange(4)[None]

    def of(own):
        return own(ids, at, caches, layers=layers, phase="prompt")[0].sum()

    with refused:
        nnx.grad(of)(model())


def test_what_does_not_depend_on_it_is_differentiated():
    """`stop_gradient` cuts what `attend` is given off from what comes before."""
    value = loss("decode", "full")

    def of(scale: jax.Array) -> jax.Array:
        return scale**2 * value(jax.lax.stop_gradient(scale))

    gradient = jax.grad(of)(jnp.float32(3))
    assert gradient == 6 * value(jnp.float32(3))


def test_a_program_is_as_it_would_be():
    """Nothing of it is left in what is compiled."""
    lowered = jax.jit(loss("decode", "full")).lower(jnp.float32(1)).as_text()
    assert "without_gradient" not in lowered and "custom_jvp" not in lowered
