"""`attend` says that it has no gradient, wherever somebody asks for one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import kvjax

PROMPT = 12
TRANSFORMS = {
    "full": kvjax.Full(),
    "h2o": kvjax.H2O(8),
    "quantize": kvjax.Quantize(8),
    "quest": kvjax.Quest(8, page=2, dense_layers=()),
    "head groups": kvjax.HeadGroups((((1,), kvjax.Full()), ((0,), kvjax.H2O(8)))),
}


def loss(phase: str, name: str, implementation: str = "xla", frequency: bool = False):
    """The output's squares, as a function of a factor of q, k and v, or else of frequencies."""
    transform, count = TRANSFORMS[name], PROMPT if phase == "prompt" else 1

    def of(x: jax.Array) -> jax.Array:
        cache = kvjax.init_cache(
            transform, batch=1, kv_heads=2, query_heads=4, head_dim=8, max_prompt=PROMPT,
            max_new=4, dtype=jnp.float32,
        )  # fmt: skip
        tokens = [jax.random.normal(jax.random.key(n), (1, n, count, 8)) for n in (4, 2, 2)]
        rope = kvjax.Rope(x * jnp.ones(4)) if frequency else None
        scaled = tokens if frequency else [token * x for token in tokens]
        out, _ = kvjax.attend(
            cache, *scaled, jnp.arange(count)[None], phase=phase, rope=rope,
            implementation=implementation,
        )  # fmt: skip
        return jnp.square(out).sum()

    return of


@pytest.mark.parametrize(
    "of",
    [
        *(loss("decode", name) for name in TRANSFORMS),
        loss("prompt", "head groups"),
        loss("prompt", "full", frequency=True),
        loss("prompt", "h2o", "interpret"),
        loss("decode", "quantize", "interpret"),
        jax.jit(loss("decode", "full")),
        jax.checkpoint(loss("decode", "full")),
    ],
)
def test_there_is_no_gradient(of):
    with pytest.raises(TypeError, match=r"kvjax\.attend is not differentiable"):
        jax.grad(of)(jnp.float32(1))


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
