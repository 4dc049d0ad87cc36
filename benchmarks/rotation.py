"""What a Hadamard rotation before rounding changes: 8, 4 and 3 bits, on two models.

    python benchmarks/rotation.py --model FOLDER --text wiki.txt --out \\
        benchmarks/results/rotation.json

The bundled model and that of the folder read four texts of 1,024 tokens with the full cache. Every
form of `Quantize` then stores them without a rotation and with keys and values rotated, and where
keys are grouped along tokens also with values alone rotated. `error` is the relative error of
attention outputs at the next tokens, each layer judged alone (`measure_fidelities`): the mean over
layers, texts and tokens; `worst_layer` is the greatest mean of a layer. `nats` is how much more the
negative log-likelihood of the 128 tokens that follow is than the full cache's. `bytes` are those of
a key or value of a bfloat16 cache.

3 bits are no form of the library. They are measured as numbers of 4 bits that have 8 levels in
place of 16, and their bytes are what packed ones would take.

Then steps of one attention layer of Llama-3.1-8B's shape are timed, rotated and not, in turns. A
row that the file holds already is not measured again, so that a run which was stopped goes on.
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
from kvjax.storage.quantized import Axis, Form
from pallas_kernels import Encoded
from pallas_kernels.formats.bits import pack_int4

TEXTS, PROMPT, CONTINUATION, NEXT, GROUP = 4, 1024, 128, 8, 32
STEP = "a layer of Llama-3.1-8B"  # the rows of times
ROTATED = {"not": False, "values": "values", "keys and values": True}
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

    def encode(self, rows: Float[Array, "B H S D"]) -> Encoded:
        """Dense rows in this form."""
        own = self.basis(rows).astype(rows.dtype)
        return rounded(own, self.group, self.axis, self.levels)


@dataclass(frozen=True)
class ThreeBits(kvjax.Quantize):
    """`Quantize(bits=4)` with 8 levels in place of 16."""

    def init(self, cache, layer):
        """Payloads of 8 levels."""
        cache, state = super().init(cache, layer)
        k, v = (
            dataclasses.replace(own, form=CoarseForm(**vars(own.form)))  # pyright: ignore[reportAttributeAccessIssue]
            for own in (cache.k, cache.v)
        )
        return cache.replace(k=k, v=v), state


def variants(head_dim: int) -> Iterator[tuple[dict[str, object], kvjax.KVTransform]]:
    """Every form, rotated or not: what a row says of it, and the transform."""
    forms = [("8 bits", 8, head_dim, kvjax.Quantize(8))]
    for bits, kind in ((4, kvjax.Quantize), (3, ThreeBits)):
        forms.append((f"{bits} bits, channel", bits, GROUP, kind(4)))
        for group in dict.fromkeys((GROUP, head_dim)):
            by_token = kind(4, group=group, key_axis="token")
            forms.append((f"{bits} bits, token, groups of {group}", bits, group, by_token))
    for form, bits, group, transform in forms:
        about = {"form": form, "bits": bits}
        about["bytes"] = head_dim * bits / 8 + head_dim / group * SCALE_BYTES[bits]
        for rotated, rotate in ROTATED.items():
            if rotate != "values" or "channel" in form:
                yield {**about, "rotated": rotated}, dataclasses.replace(transform, rotate=rotate)


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
            "worst_layer": round(float(error.mean(1).max()), 3),
            "nats": round(nats(transform) - exact, 4),
        }
        jax.clear_caches()


def step_milliseconds(prompt: int, rounds: int) -> dict[tuple[str, str], float]:
    """A decode step over a layer's cache, by form and what is rotated."""
    sides = {("full", "not"): decode_side(kvjax.Full(), prompt)[0]}
    for form, bits in {"8 bits": 8, "4 bits, channel": 4}.items():
        for rotated in ("not", "keys and values"):
            transform = kvjax.Quantize(bits, rotate=ROTATED[rotated])
            sides[form, rotated] = decode_side(transform, prompt)[0]
    found = interleaved_medians(sides, rounds)
    return {side: round(1e3 * seconds / STEPS, 3) for side, seconds in found.items()}


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
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
        Path(args.model).name: (args.model, Path(args.text).read_text()),
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
            rows.add(model=STEP, form=side[0], rotated=side[1], milliseconds=milliseconds)


if __name__ == "__main__":
    main()
