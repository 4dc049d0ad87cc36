"""Methods under JAX's own switches: the same types and the same numbers as without them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.support.attending import Tokens, right, shapes_of_run
from tests.support.conversations import arrays, conversation
from tests.support.marks import some_slow
from tests.support.tolerances import close

ROWS, KV_HEADS, QUERY_HEADS, HEAD_DIM, PROMPT, NEW = 2, 2, 4, 32, 40, 8
KINDS = {
    "evicts": "every(snapkv, steps=2)",
    "evicts in steps": "cam(h2o)",
    "merges": "kvmerger(pivot='random')",
    "draws": "kvcrush(h2o, pick='random', anchor='random')",
    "recalls": "clusterkv(dense_layers=())",
    "encodes": "quantize(bits=4, key_axis='channel')",
    "shares": "codebook",
    "places": "chain(clusterkv(dense_layers=()), offload)",
}
OTHERS = (
    "full", "streaming_llm(reposition=True)", "pyramidkv", "pyramidinfer",
    "quest(dense_layers=())", "kvcrush(snapkv, kmeans=True)", "when_full(snapkv, room=8)",
    "chain(quest(dense_layers=()), offload)", "quantize(bits=8, rotate=True)",
)  # fmt: skip
SHARES = ("layer_budget", "spindlekv", "spindlekv(unfold=True)")  # budgets below 1

# Each is set around calls, and JAX compiles anew under it: none needs a process of its own. Strict
# promotion and `rank_promotion="raise"` are not here, since every test runs under them.
SWITCHES = {
    "x64": lambda: jax.enable_x64(True),
    "NaNs": lambda: jax.debug_nans(True),
    "rbg": lambda: jax.default_prng_impl("rbg"),
    "no jit": lambda: jax.disable_jit(True),
    "checks": lambda: jax.enable_checks(True),
    "precision": lambda: jax.default_matmul_precision("highest"),
    "leaks": lambda: jax.check_tracer_leaks(True),
    "transfers": lambda: jax.transfer_guard("disallow"),
}


def transform(method: str, budget: float = 32) -> kvjax.KVTransform:
    return kvjax.bind(kvjax.parse(method, budget), 2)[1]


# A prompt in two chunks, two steps, and a further turn.
CALLS = (
    (20, "prompt", False), (18, "prompt", True), (1, "decode", True), (1, "decode", True),
    (3, "prompt", True),
)  # fmt: skip


@functools.cache
def tokens() -> list[jax.Array]:
    return arrays(ROWS, KV_HEADS, QUERY_HEADS, PROMPT + NEW, HEAD_DIM)


@pytest.mark.parametrize(
    "method", some_slow((*KINDS.values(), *OTHERS, *SHARES), "codebook", "spindlekv")
)
def test_nothing_becomes_64_bits_wide(method):
    """Nothing relies on an implicit promotion either: tests forbid those."""
    budget = 0.4 if method in SHARES else 48 if "quest" in method else 32
    with jax.enable_x64(True):
        call = functools.partial(conversation, transform(method, budget), CALLS, PROMPT)
        made = jax.eval_shape(call, *tokens())
    assert not [x for x in jax.tree.leaves(made) if "64" in str(x.dtype)]


@pytest.mark.parametrize("method", ["kvzip(room=4)", "own_queries(room=4)"])
def test_documents_do_not_become_64_bits_wide(method):
    """These methods decide behind tokens that look at a document, which no conversation has."""
    with jax.enable_x64(True):
        positions = right([0] * ROWS, [PROMPT, PROMPT - 9], PROMPT)
        made = shapes_of_run(transform(method), Tokens.random(ROWS), positions, max_prompt=PROMPT)
    assert not [x for x in jax.tree.leaves(made) if "64" in str(x.dtype)]


def outputs(kind: str) -> list[np.ndarray]:
    run = jax.jit(conversation, static_argnums=(0, 1, 2))
    return jax.device_get(run(transform(KINDS[kind]), CALLS, PROMPT, *tokens())[0])


without_switches = functools.cache(outputs)


# Under the first two every kind of method, under each other switch the kinds that it may concern.
UNDER = {
    "x64": KINDS,
    "NaNs": KINDS,
    "rbg": ("draws", "recalls", "merges"),
    "leaks": ("evicts", "recalls"),
    "transfers": ("recalls", "places"),
    "no jit": ("evicts", "recalls", "shares", "places"),
    "checks": ("evicts", "merges", "encodes"),
    "precision": ("evicts", "merges", "recalls", "encodes"),
}


# Cases that take long, and run before a release.
LONG = {
    *((kind, "x64") for kind in ("evicts in steps", "merges", "shares", "places")),
    *((kind, "NaNs") for kind in ("evicts in steps", "merges", "draws", "places", "encodes")),
    ("recalls", "x64"),
    ("merges", "rbg"), ("places", "transfers"), ("places", "no jit"), ("shares", "no jit"),
    ("recalls", "no jit"), ("evicts", "no jit"),
    ("encodes", "checks"), ("evicts", "precision"), ("merges", "precision"),
    ("recalls", "precision"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "switch"),
    some_slow(
        [(kind, switch) for switch in SWITCHES for kind in UNDER[switch]],
        ("draws", "rbg"),
        exhaustive=LONG,
    ),
)
def test_numbers_are_the_same_under_every_switch(kind, switch):
    """A method draws the same numbers with JAX's other generator and in 64 bits."""
    expected = without_switches(kind)
    with SWITCHES[switch]():
        found = outputs(kind)
    for own, out in zip(found, expected, strict=True):
        close(own, out, "accumulated", f"{kind}, {switch}")


def test_steps_with_offload_cannot_be_mapped():
    """Prompts can; a mapped step would gather in host memory."""
    tx = transform(KINDS["places"])
    make = functools.partial(
        kvjax.init_cache, tx, batch=1, kv_heads=KV_HEADS, query_heads=QUERY_HEADS,
        head_dim=HEAD_DIM, max_prompt=PROMPT, max_new=NEW, dtype=jnp.float32,
    )  # fmt: skip

    def prompt(*row):
        return kvjax.attend(make(), *row, phase="prompt")[1]

    def step(q, k, v, position):
        new = (x[:, :, :1] for x in (q, k, v))
        cache = prompt(q, k, v, position)
        return kvjax.attend(cache, *new, position[:, :1], phase="decode")

    *new, position = tokens()
    rows = *(x[:, None, :, :PROMPT] for x in new), position[:, None, :PROMPT]
    jax.eval_shape(jax.vmap(prompt), *rows)
    for call in (step, lambda *row: kvjax.flush(prompt(*row))):
        with pytest.raises(ValueError, match=r"jax\.vmap.*batch=2"):
            jax.eval_shape(jax.vmap(call), *rows)
