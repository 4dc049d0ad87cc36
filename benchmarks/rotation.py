"""What mean, scale and Hadamard rotation change before rounding: 8, 4 and 3 bits, on any models.

    python benchmarks/rotation.py --models FOLDER FILE.gguf --text wiki.txt --out \\
        benchmarks/results/rotation.json

The bundled model and the given ones read four texts of 1,024 tokens with the full cache. Every form
of `Quantize` then stores them in several ways: as they are; rotated, which is values alone where
keys stand in groups of slots (`keys rotated`: these too); and with keys relative to a mean and a
scale of their channels (`Channels`), not rotated and rotated. `error` is the relative error of
attention outputs at the next tokens, each layer judged alone (`measure_fidelities`): the mean over
layers, texts and tokens; `first_layer` is that of the first layer alone, and `worst_layer` the
greatest of a layer. `nats` is how much more the negative log-likelihood of the 128 tokens that
follow is than the full cache's. `bytes` are those of a key or value of a bfloat16 cache.

3 bits are no form of the library. They are measured as numbers of 4 bits that have 8 levels in
place of 16, and their bytes are what packed ones would take.

Then steps of one attention layer of Llama-3.1-8B's shape are timed in turns, with rows as they are
and in the default way. A row that the file holds already is not measured again, so that a run which
was stopped goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from common import Rows, interleaved_medians
from decode_step import STEPS, decode_side
from jaxtyping import Array, Float

import kvjax
from kvjax.evaluation import context_nll
from kvjax.evaluation.fidelity.fidelity import judge
from kvjax.evaluation.fidelity.full_run import FullRun
from kvjax.generation.model import as_functional
from kvjax.models import demo, from_pretrained, load_tokenizer
from kvjax.storage.channels import Channels
from kvjax.storage.quantized import Axis, Form
from pallas_kernels import Encoded
from pallas_kernels.formats.bits import pack_int4

TEXTS, PROMPT, CONTINUATION, NEXT, GROUP = 4, 1024, 128, 8, 32
STEP = "a layer of Llama-3.1-8B"  # the rows of times
AS_THEY_ARE, ROTATED, KEYS_ROTATED = "as they are", "rotated", "keys rotated"
RELATIVE, DEFAULT = "relative", "relative, rotated"
EIGHT = {"8 bits": 8, "float8": "float8"}
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


@dataclass(frozen=True)
class Stored(kvjax.Quantize):
    """`Quantize` in another way.

    Args:
      way: one of the above.
      levels: of 4 bits.
    """

    way: str = DEFAULT
    levels: int = 16

    def init(self, cache, layer):
        """Payloads in that way."""
        cache, state = super().init(cache, layer)
        relative = self.way in (RELATIVE, DEFAULT) and not self.groups_slots
        rotated = self.way in (ROTATED, KEYS_ROTATED, DEFAULT)
        keys = rotated and (self.way == KEYS_ROTATED or not self.groups_slots)

        def payload(own, hadamard: bool, relative: bool):
            form = dataclasses.replace(own.form, hadamard=hadamard, relative=relative)
            if self.levels < 16:
                form = CoarseForm(**vars(form), levels=self.levels)
            channels = own.channels if relative else None
            return dataclasses.replace(own, form=form, channels=channels)

        return cache.replace(
            k=payload(cache.k, keys, relative), v=payload(cache.v, rotated, False)
        ), state


def variants(head_dim: int) -> Iterator[tuple[dict[str, object], kvjax.KVTransform]]:
    """Every form in every way: what a row says of it, and the transform."""
    by_slot = AS_THEY_ARE, ROTATED, RELATIVE, DEFAULT
    in_groups = AS_THEY_ARE, ROTATED, KEYS_ROTATED
    forms = [(name, 8, head_dim, Stored(bits), by_slot) for name, bits in EIGHT.items()]
    for bits, levels in ((4, 16), (3, 8)):
        for axis, ways in (("channel", in_groups), ("token", by_slot)):
            ways = ways if bits == 4 else ((ROTATED,) if axis == "channel" else (DEFAULT,))
            stored = Stored(4, key_axis=axis, levels=levels)
            forms.append((f"{bits} bits, {axis}", bits, GROUP, stored, ways))
    for form, bits, group, transform, ways in forms:
        about = {"form": form, "bits": bits}
        about["bytes"] = head_dim * bits / 8 + head_dim / group * SCALE_BYTES[bits]
        for way in ways:
            # In every layer the form itself, also where a window would make it a ring.
            own = kvjax.Everywhere(dataclasses.replace(transform, way=way))
            yield {**about, "way": way}, own


def measure(model, ids: list[int], transforms: list[kvjax.KVTransform]) -> Iterator[dict]:
    """A row's figures for each transform, given the tokens of a text."""
    starts = np.linspace(0, len(ids) - PROMPT - CONTINUATION, TEXTS).astype(int)
    texts = [ids[start : start + PROMPT] for start in starts]
    follow = np.array([ids[at + PROMPT : at + PROMPT + CONTINUATION] for at in starts], np.int32)
    run = FullRun(as_functional(model), texts, transforms, new_tokens=NEXT)
    caches = [kvjax.Full(), *transforms]
    read = kvjax.ReadOnce(model, texts, caches, buckets=(PROMPT,), max_new=CONTINUATION)

    def nats(transform: kvjax.KVTransform) -> float:
        return float(context_nll(model, read.context(transform), follow).mean())

    exact = nats(kvjax.Full())
    for transform in transforms:
        error = judge(run, run.context(transform)).error
        yield {
            "error": round(float(error.mean()), 4),
            "first_layer": round(float(error[0].mean()), 3),
            "worst_layer": round(float(error.mean(1).max()), 3),
            "nats": round(nats(transform) - exact, 4),
        }
        jax.clear_caches()


BY_TOKEN = Stored(4, key_axis="token")


def step_milliseconds(prompt: int, rounds: int) -> dict[tuple[str, str], float]:
    """A decode step over a layer's cache, by form and way."""
    sides = {("full", AS_THEY_ARE): decode_side(kvjax.Full(), prompt)[0]}
    forms = {"8 bits": Stored(8), "4 bits, channel": Stored(4), "4 bits, token": BY_TOKEN}
    for form, transform in forms.items():
        for way in (AS_THEY_ARE, DEFAULT):
            sides[form, way] = decode_side(dataclasses.replace(transform, way=way), prompt)[0]
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
    about = {
        "benchmark": "rotation", "texts": TEXTS, "prompt_tokens": PROMPT, "next_tokens": NEXT,
        "continuation_tokens": CONTINUATION, "step_tokens": args.step_tokens,
    }  # fmt: skip
    rows = Rows(args.out, about)
    given = {
        **{Path(name).stem: (name, Path(args.text).read_text()) for name in args.models},
        "bundled": (demo.directory(), demo.held_out_text()),
    }
    for name, (folder, text) in given.items():
        model, tokenizer = from_pretrained(folder), load_tokenizer(folder)
        all_variants = [({"model": name, **x}, tx) for x, tx in variants(model.config.head_dim)]
        missing = [(x, tx) for x, tx in all_variants if not rows.has(**x)]
        if missing:
            found = measure(model, tokenizer(text).input_ids, [tx for _, tx in missing])
            for (said, _), figures in zip(missing, found, strict=True):
                rows.add(**said, **figures)
    if not rows.has(model=STEP):
        for side, milliseconds in step_milliseconds(args.step_tokens, args.rounds).items():
            rows.add(model=STEP, form=side[0], way=side[1], milliseconds=milliseconds)


if __name__ == "__main__":
    main()
