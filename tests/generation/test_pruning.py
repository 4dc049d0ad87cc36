"""The decoder with PyramidInfer at the paper's ratios, against a loop, row by row."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import PyramidInfer
from kvjax.generation.pruning import pass_on, states_at
from kvjax.models import DecoderConfig, RopeConfig, random_decoder
from tests.references.pyramidinfer import PyramidInfer as Reference
from tests.references.pyramidinfer import entering
from tests.references.rope import rope
from tests.support.attending import init_cache, middle, right
from tests.support.tolerances import close

CONFIG = DecoderConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=4, query_heads=4, kv_heads=2,
    head_dim=8, rope=RopeConfig(rotary_dim=8, theta=100.0), max_positions=256,
)  # fmt: skip
PAPER = PyramidInfer(context=6, ratio=0.6, interval=4)
LENGTHS, WIDTH, NEW = (40, 23, 6), 40, 12
TOKENS = np.random.default_rng(0).integers(0, 64, (3, WIDTH + NEW))


@functools.cache
def model():
    return random_decoder(CONFIG, 0)


def call(*args, **how):
    """The model's call, compiled once per kind."""
    return _call(nnx.state(model()), *args, **how)


@functools.partial(jax.jit, static_argnames=("layers", "phase", "last"))
def _call(state, *args, **how):
    return nnx.merge(nnx.graphdef(model()), state)(*args, **how)


LAYOUTS = {"right": right([0] * 3, LENGTHS, WIDTH), "scattered": middle(LENGTHS, WIDTH)}


class Run(NamedTuple):
    """Prompt logits, the caches, logits of decode steps, and the caches after them."""

    logits: np.ndarray
    caches: tuple
    steps: list
    after: tuple


def run(layout="right", new=NEW, chunks=1) -> Run:
    positions = LAYOUTS[layout]
    layers = kvjax.bind(PAPER, CONFIG.num_layers)
    size = {"batch": 3, "kv_heads": 2, "query_heads": 4, "head_dim": 8}
    caches = tuple(
        init_cache(layer, **size, max_prompt=WIDTH, max_new=NEW, dtype=jnp.float32)
        for layer in layers
    )
    tokens = np.take_along_axis(TOKENS, np.maximum(positions, 0), axis=1)
    logits, parts = [], np.split(np.arange(WIDTH), chunks)
    for part in parts:
        out, caches = call(
            tokens[:, part], positions[:, part], caches,
            layers=layers, phase="prompt", last=part is parts[-1],
        )  # fmt: skip
        logits.append(out)
    prompt, steps = caches, []
    for step in range(new):
        now = positions.max(1, keepdims=True) + 1 + step
        token = np.take_along_axis(TOKENS, now, axis=1)
        out, caches = call(token, now, caches, layers=layers, phase="decode")
        steps.append(np.asarray(out)[:, 0])
    return Run(np.concatenate(logits, 1), prompt, steps, caches)


class Loop:
    """One row through all layers; each has a reference in float64 for its attention."""

    def __init__(self) -> None:
        options = {"context": PAPER.context, "ratio": PAPER.ratio, "interval": PAPER.interval}
        self.layers = [
            Reference(None, layer, CONFIG.num_layers, CONFIG.kv_heads, **options)
            for layer in range(CONFIG.num_layers)
        ]

    def __call__(self, tokens, positions, decode=False) -> tuple[np.ndarray, list[int]]:
        """Logits of the tokens that come out of the last layer, and their positions."""
        x, positions = model().embed(jnp.array([tokens])), list(positions)
        inv_freq = 100.0 ** (-np.arange(0, 8, 2) / 8)
        for number, (block, layer) in enumerate(zip(model().layers, self.layers, strict=True)):
            projected = block.attention.project(block.attention_norm(x))
            q, k, v = (np.asarray(heads[0], np.float64) for heads in projected)
            q, k = (rope(heads, positions, inv_freq) for heads in (q, k))
            if decode:
                out = layer.decode(q[:, 0], k[:, 0], v[:, 0], positions[0])[:, None]
            else:
                out = layer.prompt(q, k, v, positions)
            x = x + block.attention.merge(jnp.asarray(out[None], jnp.float32))
            x = x + block.mlp(block.mlp_norm(x))
            if not decode and number + 1 < len(self.layers):
                going = [i for i, position in enumerate(positions) if position in layer.passed]
                x, positions = x[:, np.array(going)], [positions[i] for i in going]
        return np.asarray(model().lm_head(model().norm(x))[0]), positions


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.slow
def test_decoder_equals_the_loop(layout):
    mine, positions = run(layout), LAYOUTS[layout]
    for row, length in enumerate(LENGTHS):
        loop = Loop()
        logits, came_out = loop(TOKENS[row, :length], range(length))
        assert came_out[-1] == length - 1
        assert row == 2 or len(came_out) < length
        columns = {int(p): column for column, p in enumerate(positions[row]) if p >= 0}
        close(mine.logits[row, [columns[p] for p in came_out]], logits, "accumulated", f"{row}")
        dropped = [column for p, column in columns.items() if p not in came_out]
        np.testing.assert_array_equal(mine.logits[row, dropped], 0)
        self_check(mine.caches, row, loop)
        for step in range(NEW):
            at = length + step
            expected, _ = loop(TOKENS[row, at : at + 1], [at], decode=True)
            close(mine.steps[step][row], expected[0], "accumulated", f"row {row}, step {step}")
        self_check(mine.after, row, loop)


def self_check(caches, row, loop):
    """Every layer caches the tokens that entered it."""
    for cache, layer in zip(caches, loop.layers, strict=True):
        for head in range(CONFIG.kv_heads):
            position = np.asarray(cache.kv.position)[row, head]
            assert sorted(position[position >= 0].tolist()) == layer.kept


def test_layers_compute_what_they_promise():
    """The arrays themselves shrink, and layer l holds what `entering` says."""
    mine = run(new=0)
    counts = entering(WIDTH, CONFIG.num_layers, context=PAPER.context, ratio=PAPER.ratio)
    assert counts[:4] == [40, 40, 38, 32]
    for cache, count in zip(mine.caches, counts, strict=False):
        assert np.asarray(cache.kv.live[0]).sum(-1).tolist() == [count] * 2
    assert [c.kv.slots for c in mine.caches] == sorted(
        (c.kv.slots for c in mine.caches), reverse=True
    )


@pytest.mark.slow
def test_chunks_are_not_pruned():
    """Every layer then sees every token, and evicts down to as many by its own scores."""
    mine = run(chunks=2, new=2)
    whole = run(new=0)
    assert (np.abs(mine.logits[0]).max(-1) > 0).all()
    for cache, other in zip(mine.caches, whole.caches, strict=True):
        np.testing.assert_array_equal(cache.kv.live.sum(-1), other.kv.live.sum(-1))
        assert (np.asarray(cache.kv.dropped) == 0).all()


def test_pass_on():
    positions = jnp.array([[7, -1, 8, 9, -1], [0, 1, 2, 3, 4], [-1] * 5])
    kept = jnp.array([[0, 3, 7, 9], [1, 4, -1, -1], [2, -1, -1, -1]])
    x = 1.0 + jnp.arange(15.0).reshape(3, 5, 1)
    going, left = pass_on(x, positions, kept)
    assert left.tolist() == [[-1, -1, 7, 9], [-1, -1, 1, 4], [-1] * 4]
    assert going[..., 0].tolist() == [[0, 0, 1, 4], [0, 0, 7, 10], [0] * 4]
    back = states_at(going, left, positions)[..., 0]
    assert back.tolist() == [[1, 0, 0, 4, 0], [0, 7, 0, 0, 10], [0] * 5]
    more_room = pass_on(jnp.ones((1, 2, 1)), jnp.array([[3, 4]]), jnp.array([[0, 1, 3, 4, -1]]))
    assert more_room[1].tolist() == [[3, 4]]
