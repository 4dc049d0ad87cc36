"""What mean, scale and Hadamard rotation change before rounding: 8, 4 and 3 bits, on any models.

    python benchmarks/rotation.py --models FOLDER FILE.gguf --text wiki.txt --out \\
        benchmarks/results/rotation.json

The bundled model and the given ones read four texts of 1,024 tokens. Keys and values of every layer
are then encoded in every form of `Quantize`, in several ways: as they are; rotated, which is values
alone where keys stand in groups of slots (`keys rotated`: these too); and with keys relative to a
mean and a scale of their channels (`Channels`), not rotated and rotated. `error` is the relative
error of the attention outputs of the last 64 tokens, each layer judged alone: the mean over layers,
texts and tokens; `first_layer` is that of the first layer, and `worst_layer` the greatest of a
layer. All tokens are encoded, the newest too. `bytes` are those of a key or value of a bfloat16
cache.

3 bits are no form of the library. They are measured as numbers of 4 bits that have 8 levels in
place of 16, and their bytes are what packed ones would take.

Then steps of one attention layer of Llama-3.1-8B's shape are timed in turns: with the full cache,
and in forms of the library, not rotated and rotated.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from common import interleaved_medians, write
from decode_step import STEPS, decode_side
from jaxtyping import Array, Float

import kvjax
from kvjax.attention.layer import LayerCache
from kvjax.generation.reading_once import Observe
from kvjax.models import demo, from_pretrained, load_tokenizer
from kvjax.protocol import Needs
from kvjax.storage.channels import Channels
from kvjax.storage.quantized import Axis, Form
from pallas_kernels import Encoded, decode_attention
from pallas_kernels.formats.bits import pack_int4

TEXTS, PROMPT, QUERIES, GROUP = 4, 1024, 64, 32
AS_THEY_ARE, ROTATED, KEYS_ROTATED = "as they are", "rotated", "keys rotated"
RELATIVE, BOTH = "relative", "relative, rotated"
SCALE_BYTES = {8: 4, 4: 2 * 2, 3: 2 * 2}  # of a group: one float32 number, or two of bfloat16


def rounded(x: Float[Array, "B H S D"], group: int, axis: Axis, levels: int) -> Encoded:
    """`pallas_kernels.quantise_groups` with fewer than 16 levels, still 4 bits a number."""
    place = {"token": x.ndim - 1, "channel": x.ndim - 2}[axis]
    shape = *x.shape[:place], x.shape[place] // group, group, *x.shape[place + 1 :]
    wide = x.astype(jnp.float32).reshape(shape)
    low, high = (f(wide, place + 1, keepdims=True) for f in (jnp.min, jnp.max))
    scale = (high - low) / (levels - 1)
    q = jnp.where(scale > 0, jnp.round((wide - low) / jnp.where(scale > 0, scale, 1.0)), 0.0)
    own = (part.squeeze(place + 1).astype(x.dtype) for part in (scale, low))
    return Encoded(pack_int4(q.astype(jnp.uint8).reshape(x.shape)), *own)


@dataclass(frozen=True)
class CoarseForm(Form):
    """Groups of values of `levels` levels."""

    levels: int = 8

    def encode(self, rows: Float[Array, "B H S D"], channels: Channels | None = None) -> Encoded:
        """Dense rows in this form."""
        own = self.basis(rows if channels is None else channels.inside(rows)).astype(rows.dtype)
        return rounded(own, self.group, self.axis, self.levels)


class Way(NamedTuple):
    """A form of keys and values, and what is done before they are encoded."""

    form: str
    bits: int
    way: str
    keys: Form
    values: Form


def all_ways() -> Iterator[Way]:
    """Every form in every way; 3 bits in the best one alone."""
    by_slot = {"8 bits": Form(8), "float8": Form("float8"), "4 bits, token": Form(4, GROUP)}
    coarse = CoarseForm(4, GROUP)
    for name, form in {**by_slot, "3 bits, token": coarse}.items():
        for way in (AS_THEY_ARE, ROTATED, RELATIVE, BOTH):
            if form is not coarse or way == BOTH:
                values = dataclasses.replace(form, hadamard=way in (ROTATED, BOTH))
                keys = dataclasses.replace(values, relative=way in (RELATIVE, BOTH))
                yield Way(
                    name, 3 if form is coarse else 4 if form.bits == 4 else 8, way, keys, values
                )
    for bits, form in {4: Form(4, GROUP), 3: coarse}.items():
        for way in (AS_THEY_ARE, ROTATED, KEYS_ROTATED):
            if form is not coarse or way == ROTATED:
                values = dataclasses.replace(form, hadamard=way != AS_THEY_ARE)
                keys = dataclasses.replace(form, axis="channel", hadamard=way == KEYS_ROTATED)
                yield Way(f"{bits} bits, channel", bits, way, keys, values)


@functools.partial(jax.jit, static_argnums=0)
def errors(ways: tuple[Way, ...], cache: LayerCache) -> Float[Array, " W"]:
    """The error of a layer's attention outputs in each way; the layer was observed."""
    kv, seen = cache.kv, cache.state
    rope, logits = seen.rope, seen.logits
    keys, values = (payload.read()[:, :, :PROMPT] for payload in (kv.k, kv.v))
    position, live = kv.position[:, :, :PROMPT], kv.live[:, :, :PROMPT]
    keys = keys if rope is None else rope.rotate(keys, position)
    q = seen.query.reshape(len(seen.query), kv.shape[1], kv.group, *seen.query.shape[2:])

    def attend(keys: Array, values: Array) -> Array:
        out, _, _ = decode_attention(
            q, keys, values, jnp.zeros(live.shape), seen.query_position, position,
            scale=logits.scale, window=logits.window, soft_cap=logits.soft_cap,
            probabilities=False,
        )  # fmt: skip
        return jnp.moveaxis(out, 3, 1).reshape(len(q), q.shape[3], -1)

    def through(form: Form, rows: Array) -> Array:
        channels = Channels.of(rows, live) if form.relative else None
        return form.decode(form.encode(rows, channels), channels)

    exact = attend(keys, values)
    found = [attend(through(way.keys, keys), through(way.values, values)) for way in ways]
    size = jnp.linalg.norm(exact, axis=-1)
    return jnp.stack([(jnp.linalg.norm(out - exact, axis=-1) / size).mean() for out in found])


def measure(model: kvjax.LanguageModel, head_dim: int, ids: list[int]) -> Iterator[dict]:
    """The rows of a model, given the tokens of a text."""
    starts = np.linspace(0, len(ids) - PROMPT, TEXTS).astype(int)
    texts = [ids[start : start + PROMPT] for start in starts]
    # In every layer all tokens, also where a window would make it a ring.
    observe = kvjax.Everywhere(Observe(Needs(query_window=QUERIES, unrotated_keys=True)))
    context = kvjax.read(model, texts, transform=observe, max_prompt=PROMPT, max_new=1)
    ways = tuple(all_ways())
    layers = np.stack([np.asarray(errors(ways, cache)) for cache in context.caches])
    for way, found in zip(ways, layers.T, strict=True):
        group = GROUP if way.keys.bits == 4 else head_dim
        yield {
            "form": way.form, "way": way.way,
            "bytes": head_dim * way.bits / 8 + head_dim / group * SCALE_BYTES[way.bits],
            "error": round(float(found.mean()), 4), "first_layer": round(float(found[0]), 3),
            "worst_layer": round(float(found.max()), 3),
        }  # fmt: skip


def step_milliseconds(prompt: int, rounds: int) -> dict[str, float]:
    """A decode step over a layer's cache, by form."""
    transforms: dict[str, kvjax.KVTransform] = {"full": kvjax.Full()}
    for rotate in (False, True):
        way = "rotated" if rotate else "not rotated"
        transforms |= {
            f"8 bits, {way}": kvjax.Quantize(8, rotate=rotate),
            f"4 bits, token, {way}": kvjax.Quantize(4, key_axis="token", rotate=rotate),
            f"4 bits, channel, {way}": kvjax.Quantize(4, rotate=rotate),
        }
    sides = {name: decode_side(transform, prompt)[0] for name, transform in transforms.items()}
    found = interleaved_medians(sides, rounds)
    return {side: round(1e3 * seconds / STEPS, 3) for side, seconds in found.items()}


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", required=True, nargs="+", help="folders, or GGUF files")
    parser.add_argument("--text", required=True, help="UTF-8 file of 10,000 tokens or more")
    parser.add_argument("--step-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    text = Path(args.text).read_text()
    given = {Path(name).stem: (name, text) for name in args.models}
    given["bundled"] = demo.directory(), demo.held_out_text()
    rows = []
    for name, (folder, text) in given.items():
        model, tokenizer = from_pretrained(folder), load_tokenizer(folder)
        found = measure(model, model.config.head_dim, tokenizer(text).input_ids)
        rows += [{"model": name, **row} for row in found]
    result = {
        "benchmark": "rotation", "texts": TEXTS, "prompt_tokens": PROMPT, "queries": QUERIES,
        "rows": rows, "step_tokens": args.step_tokens,
        "step_milliseconds": step_milliseconds(args.step_tokens, args.rounds),
    }  # fmt: skip
    write(args.out, result)


if __name__ == "__main__":
    main()
