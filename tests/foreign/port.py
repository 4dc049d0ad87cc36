"""Gemma 3 as kvjax has it, and what the packages' own models are made and judged by."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import kvjax
from kvjax.models import Decoder, DecoderConfig, load_tokenizer, random_decoder
from models.gemma import gemma3_text_config

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16,
    "query_pre_attn_scalar": 8,
}  # fmt: skip

REAL = ("full", "snapkv(budget=0.25)", "clusterkv(budget=0.25)", "quantize",
        "every(snapkv(budget=0.25),steps=8)")  # fmt: skip
ROOT = Path(__file__).parents[2]


def prompts() -> list[list[int]]:
    """Draws two prompts of unequal lengths for tiny models."""
    rng = np.random.default_rng(1)
    return [rng.integers(3, 64, length).tolist() for length in (30, 23)]


def texts_beyond_the_window(path: Path) -> list[list[int]]:
    """Returns two texts for Gemma 3 270M that are longer than its windows of 512."""
    tokens = load_tokenizer(path)((ROOT / "ARCHITECTURE.md").read_text())["input_ids"]
    return [tokens[:600], tokens[1000:1550]]


def tiny_port() -> Decoder:
    """Makes five layers with windows of 16 and one without, whose texts do not repeat a token."""
    graph, state = nnx.split(random_decoder(gemma3_text_config(TINY)))
    rng = np.random.default_rng(7)

    def drawn(x: Any) -> Any:
        return jnp.asarray(rng.normal(size=x.shape) * (3.0 if x.ndim == 1 else 0.3), x.dtype)

    return nnx.merge(graph, jax.tree.map(drawn, state))


def weights_of(port: Decoder) -> tuple[DecoderConfig, dict[str, Any], list[dict[str, Any]]]:
    """Returns the sizes, the weights besides the layers, and those of each layer.

    q, k, v are `[heads, width, head_dim]`, o is `[heads, head_dim, width]`, gate and up are
    `[width, hidden]`, down is `[hidden, width]`.
    """
    c, state = port.config, nnx.to_pure_dict(nnx.state(port))
    group, layers = c.query_heads // c.kv_heads, []
    for number in range(c.num_layers):
        layer = state["layers"][number]
        attention, mlp = layer["attention"], layer["mlp"]
        joined = attention["qkv_proj"]["kernel"].reshape(c.kv_heads, -1, c.head_dim, c.hidden_size)
        q, k, v = jnp.split(joined, (group, group + 1), axis=1)
        q, k, v = (x.reshape(-1, *x.shape[2:]).swapaxes(1, 2) for x in (q, k, v))
        o = attention["o_proj"]["kernel"].T.reshape(c.query_heads, c.head_dim, c.hidden_size)
        gate, up = mlp["gate_up_proj"]["kernel"].transpose(1, 2, 0)
        norms = {name: x["scale"] for name, x in {**layer, **attention}.items() if "norm" in name}
        down = mlp["down_proj"]["kernel"].T
        layers.append(
            {"q": q, "k": k, "v": v, "o": o, "gate": gate, "up": up, "down": down, **norms}
        )
    return c, {"embed": state["embed"]["embedding"], "norm": state["norm"]["scale"]}, layers


@contextlib.contextmanager
def repeating() -> Iterator[None]:
    """Lets kvjax's port feed tokens that its caches hold already."""
    attend = kvjax.attend
    kvjax.attend = functools.partial(attend, repeats=True)
    try:
        yield
    finally:
        kvjax.attend = attend


def by_hand(
    port: Decoder, method: Any, prompts: Sequence[list[int]], count: int, fed_again: str | None
) -> tuple[list[list[int]], list[list[float]]]:
    """Writes with kvjax's port as a loop of others goes, with `kvjax.flush` between the steps.

    Args:
      fed_again: "last": each row's last token of the prompt is fed once more; "shortest": all rows
        go on from the end of the shortest prompt; None: the first new token comes of the prompt.

    Returns:
      The tokens of each row, and how far their logits are above those of the second-best tokens.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    width = lengths.max()
    text = np.zeros((len(prompts), width + count), np.int32)
    margins = np.zeros(text.shape, np.float32)
    for row, prompt in enumerate(prompts):
        text[row, : len(prompt)] = prompt
    steps = count + (width - lengths.min() if fed_again == "shortest" else 0)
    sizes = {"batch": len(prompts), "max_prompt": int(width), "max_new": int(steps)}
    shape = {"num_layers": port.num_layers, "query_heads": port.query_heads,
             "kv_heads": port.kv_heads, "head_dim": port.head_dim}  # fmt: skip
    caches = kvjax.init_caches(
        method, **sizes, **shape, windows=port.windows, scale=port.attention_scale, repeats=True
    )
    seen = [window and window + 1 for window in port.windows]
    layers = kvjax.bind(kvjax.parse(method), port.num_layers, seen, int(width + steps))
    graph, state = nnx.split(port)

    @functools.partial(jax.jit, static_argnames="phase", donate_argnums=3)
    def call(state: Any, tokens: Any, positions: Any, caches: Any, phase: str, at: Any) -> Any:
        logits, caches = nnx.merge(graph, state)(
            tokens, positions, caches, layers=layers, phase=phase, logits_at=at
        )
        best, tokens = jax.lax.top_k(logits[:, 0], 2)
        return tokens[:, 0], best[:, 0] - best[:, 1], caches

    mask = np.arange(width) < lengths[:, None]
    with repeating():
        new, margin, caches = call(
            state, text[:, :width], kvjax.positions_of(mask), caches, "prompt", lengths[:, None] - 1
        )
        at = {None: lengths, "last": lengths - 1, "shortest": lengths * 0 + lengths.min() - 1}
        at, rows = at[fed_again], np.arange(len(prompts))
        if fed_again is None:
            text[rows, at], margins[rows, at] = new, margin
        interval = kvjax.flush_interval(caches)
        for step in range(steps - (fed_again is None)):
            done = step - (fed_again is not None)  # steps that had new tokens
            if interval and done > 0 and done % interval == 0:
                caches = kvjax.flush(caches)
            zeros = np.zeros((len(prompts), 1), np.int32)
            new, margin, caches = call(
                state, text[rows, at][:, None], at[:, None], caches, "decode", zeros
            )
            at = at + 1
            writes = (at >= lengths) & (at < text.shape[1])
            text[rows[writes], at[writes]] = np.asarray(new)[writes]
            margins[rows[writes], at[writes]] = np.asarray(margin)[writes]
    kvjax.check_dropped(caches)
    return tuple(  # pyright: ignore[reportReturnType]  # of two
        [x[row, length : length + count].tolist() for row, length in enumerate(lengths)]
        for x in (text, margins)
    )


def read_and_asked(
    model: Any, texts: list[list[int]], budget: float, layers: int
) -> list[list[int]]:
    """Reads documents with budgets by head, of which the last layer gets most, and asks."""
    table = np.linspace([0.2, 1.0], [1.0, 1.0], layers)[:, None]
    heads = kvjax.kit.HeadProfile(np.repeat(table, model.kv_heads, axis=1))
    method = kvjax.ByHead(kvjax.KVzip(budget), heads)
    document = kvjax.read(model, texts, transform=method, max_prompt=max(map(len, texts)) + 16)
    question = [texts[0][3:9], texts[1][5:9]]
    return kvjax.generate(
        model, question, context=document, max_new_tokens=16, end_tokens=()
    ).tokens
