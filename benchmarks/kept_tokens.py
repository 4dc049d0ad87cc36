"""Which tokens each method keeps on the bundled model, and a comparison of two such runs.

    python benchmarks/kept_tokens.py --out before
    python benchmarks/kept_tokens.py --out after --follow before
    python benchmarks/kept_tokens.py --compare before after

It shows what a change of the code did to the methods: run it before and after, and compare. The
first form writes one `METHOD.npz` per method: a batch of three rows of text of different lengths is
read, 256 decode steps are made, and at the prompt's end and after every 16 steps the live positions
of every layer, row and KV head are recorded. The settings are such that every method has something
to do within so few steps. The script uses public names alone, so that one copy of it runs with
different versions of the library.

Greedy tokens feed themselves back: after one near tie that was decided differently, two runs read
different text, and everything that they keep differs. `--follow` therefore feeds the tokens that
another run chose, and the comparison says what each run would have chosen itself.

A file has these arrays, B rows, N new tokens, C checkpoints:

- `checkpoints [C]`: decode steps before each.
- `tokens [B, N]`: the best token at each step, and `fed [B, N]`: the one that the next step read.
- `log_probability [B, N]`: of the best token; `margin [B, N]`: its logit less the second best.
- `positions_L [C, B, H, S]`: of layer L, the live positions in ascending order, -1 at the end.
- `log_mass_L [C, B, H, S]`: of the same slots, -inf at the end.

A method that indexes all slots keeps everything; its tokens and log-probabilities show what it
recalled.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.models import demo, from_pretrained, load_tokenizer
from kvjax.registry import METHODS as REGISTERED

BUDGET = 0.25  # a share of each row's prompt
EVERY = 16  # decode steps between checkpoints
NEW_TOKENS = 256
ROWS = ((0, 600), (1200, 410), (2400, 250))  # first token in the document, and how many
MAX_PROMPT = 640

CHELSEA = "chelsea(chunk=64, sinks=8, recent=32, interval=32)"
CLUSTERKV = "clusterkv(tokens_per_cluster=16, interval=32, dense_layers=(0,))"
QUEST = "quest(dense_layers=(0,))"
INFINIGEN = "infinigen(dense_layers=(0,))"
FOUR_BITS = "quantize(bits=4, residual=32)"
METHODS: dict[str, str | kvjax.KVTransform] = {
    **{name: name for name in REGISTERED},
    "streaming_llm_reposition": "streaming_llm(reposition=True)",
    "pyramidinfer_ratios": "pyramidinfer(budget=None)",
    "kvmerger_epsilon": "kvmerger(budget=None, epsilon=0.75)",
    "chelsea": CHELSEA,
    "chelsea_outlier_heads": kvjax.Chelsea(
        BUDGET, chunk=64, sinks=8, recent=32, interval=32,
        outlier_heads=kvjax.kit.OutlierHeads(((1, 2),), num_layers=4, kv_heads=4),
    ),
    "clusterkv": CLUSTERKV,
    "quest": QUEST,
    "infinigen": INFINIGEN,
    "every_snapkv": "every(snapkv, steps=32)",
    "every_kvmerger": "every(kvmerger, steps=32)",
    "when_full_snapkv": "when_full(snapkv(budget=96), room=32)",
    "cam_h2o": "cam(h2o)",
    "cam_streaming_llm": "cam(streaming_llm)",
    "kvcrush_snapkv": "kvcrush(snapkv, representatives=16)",
    "kvcrush_h2o": "kvcrush(h2o, representatives=16)",
    "kvcrush_every_snapkv": "kvcrush(every(snapkv, steps=32), representatives=16)",
    "snapkv_h2o": "chain(snapkv, h2o)",
    "quantize_8": "quantize(bits=8)",
    "quantize_4": FOUR_BITS,
    "quantize_4_token": "quantize(bits=4, key_axis='token')",
    "snapkv_quantize_4": f"chain(snapkv, {FOUR_BITS})",
    "codebook": "codebook",
    "clusterkv_offload": f"chain({CLUSTERKV}, offload)",
    "quest_offload": f"chain({QUEST}, offload)",
}  # fmt: skip


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Progress:
    """What the decode loop carries, which is that of `kvjax.generate`, with caches to look at.

    Args:
      caches: one per layer.
      position: of the newest token, which is not in the caches yet, per row.
      tokens: new tokens per row; from `step` on those that were given, or -1.
      logits: that each new token was chosen by.
      step: new tokens so far.
    """

    caches: tuple
    position: Int[Array, " B"]
    tokens: Int[Array, "B N"]
    logits: Float[Array, "B N V"]
    step: Int[Array, ""]

    def put(self, logits: Float[Array, "B V"]) -> Progress:
        """The next token of each row: the one that was given, or else the one of the best logit."""
        given = jax.lax.dynamic_index_in_dim(self.tokens, self.step, 1, keepdims=False)
        token = jnp.where(given >= 0, given, logits.argmax(-1).astype(jnp.int32))
        write = jax.lax.dynamic_update_slice_in_dim
        return dataclasses.replace(
            self,
            tokens=write(self.tokens, token[:, None], self.step, 1),
            logits=write(self.logits, logits[:, None], self.step, 1),
            step=self.step + 1,
        )


@dataclass(frozen=True)
class ModelLoop:
    """The functions of one model and one method. Equal values share compiled code.

    Args:
      graphdef: the model's, from `flax.nnx.split`.
      layers: one transform per layer, from `kvjax.bind`.
      max_prompt: padded tokens of a prompt.
      max_new: decode steps. They choose one token more, which no step reads.
    """

    graphdef: nnx.GraphDef
    layers: tuple[kvjax.KVTransform, ...]
    max_prompt: int
    max_new: int

    def apply(self, params, *args, **kwargs) -> tuple[Array, tuple]:
        """The model as a function of its parameters."""
        return nnx.merge(self.graphdef, params)(*args, layers=self.layers, **kwargs)

    @functools.partial(jax.jit, static_argnums=0)
    def read_prompt(
        self, params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], given: Array
    ) -> Progress:
        """Reads a padded prompt and chooses the first new token.

        Args:
          params: the model's.
          tokens, positions: of the prompt; positions are -1 at padding.
          given: `[B, max_new + 1]`: what the new tokens are to be, -1: the one of the best logit.
        """
        model = nnx.merge(self.graphdef, params)
        caches = tuple(
            kvjax.init_cache(
                layer, batch=len(tokens), kv_heads=model.kv_heads, query_heads=model.query_heads,
                head_dim=model.head_dim, max_prompt=self.max_prompt, max_new=self.max_new,
                layer=number,
            )
            for number, layer in enumerate(self.layers)
        )  # fmt: skip
        last = positions.max(-1)
        logits, caches = self.apply(
            params, tokens, positions, caches, phase="prompt", last=True, logits_at=last[:, None]
        )
        none = jnp.zeros((*given.shape, model.vocab_size), logits.dtype)
        start = Progress(caches, last + 1, given, none, jnp.zeros((), jnp.int32))
        return start.put(logits[:, -1])

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
    def decode(self, params, progress: Progress, until: Int[Array, ""]) -> Progress:
        """Makes decode steps until `until` new tokens have been put into the caches."""

        def step(at: Int[Array, ""], progress: Progress) -> Progress:
            token = jax.lax.dynamic_slice_in_dim(progress.tokens, at, 1, 1)
            logits, caches = self.apply(
                params, token, progress.position[:, None], progress.caches,
                phase="decode", last=True, logits_at=None,
            )  # fmt: skip
            moved = dataclasses.replace(progress, caches=caches, position=progress.position + 1)
            return moved.put(logits[:, -1])

        return jax.lax.fori_loop(progress.step - 1, until, step, progress)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def flush(self, caches: tuple) -> tuple:
        """What is done with new tokens every `flush_interval` steps."""
        return kvjax.flush(caches)


def flush_interval(caches: tuple) -> int | None:
    """Decode steps between two calls of `flush`; None: it is never called."""
    return kvjax.flush_interval(caches) if hasattr(kvjax, "flush") else None


def padded(prompts: list[list[int]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and positions `[B, size]`, padded on the right."""
    tokens = np.zeros((len(prompts), size), np.int32)
    positions = np.full_like(tokens, -1)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        positions[row, : len(prompt)] = np.arange(len(prompt))
    return tokens, positions


class Text(NamedTuple):
    """What a model reads.

    Args:
      model: the language model.
      prompts: token ids of each row.
      max_prompt: tokens that prompts are padded to.
      new_tokens: decode steps.
    """

    model: Any
    prompts: list[list[int]]
    max_prompt: int
    new_tokens: int


def bundled() -> Text:
    """The bundled model and three pieces of its document."""
    tokens = load_tokenizer(demo.directory())(demo.document().text).input_ids
    prompts = [tokens[start : start + count] for start, count in ROWS]
    return Text(from_pretrained(demo.directory()), prompts, MAX_PROMPT, NEW_TOKENS)


def method(name: str, text: Text) -> kvjax.KVTransform:
    """A method of the table; InfiniGen is calibrated on the prompts."""
    given = METHODS[name]
    transform = kvjax.parse(given, BUDGET) if isinstance(given, str) else given
    return kvjax.calibrated(transform, text.model, text.prompts)


def kept(cache) -> tuple[np.ndarray, np.ndarray]:
    """Live positions `[B, H, S]` of one layer in ascending order, -1 at the end, and their masses.

    The KV heads of head groups stand one group after the other.
    """
    groups = [_sorted_slots(part.kv) for part in (cache if isinstance(cache, tuple) else (cache,))]
    return _joined([p for p, _ in groups], -1, 1), _joined([m for _, m in groups], -np.inf, 1)


def _sorted_slots(kv: kvjax.kit.KVCache) -> tuple[np.ndarray, np.ndarray]:
    position, log_mass = np.asarray(kv.position), np.asarray(kv.log_mass)
    live = log_mass > -np.inf
    order = np.argsort(np.where(live, position, np.iinfo(np.int32).max), axis=-1, kind="stable")
    position = np.take_along_axis(np.where(live, position, -1), order, -1)
    most = int(live.sum(-1).max(initial=0))
    return position[..., :most], np.take_along_axis(log_mass, order, -1)[..., :most]


def _joined(parts: Sequence[np.ndarray], fill: float, axis: int) -> np.ndarray:
    """The arrays joined along an axis, the last axis filled up to the longest."""
    size = max(part.shape[-1] for part in parts)
    wide = [
        np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])], constant_values=fill)
        for x in parts
    ]
    return np.concatenate(wide, axis)


def record(
    transform: kvjax.KVTransform, text: Text, follow: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Reads the prompts, decodes, and returns the arrays of a file.

    Args:
      transform: the method, not bound to layers yet.
      text: what is read.
      follow: `[B, N]` tokens to feed; None: those that are chosen.
    """
    graphdef, params = nnx.split(text.model)
    layers = kvjax.bind(transform, text.model.num_layers)
    loop = ModelLoop(graphdef, layers, text.max_prompt, text.new_tokens)
    given = np.full((len(text.prompts), text.new_tokens + 1), -1, np.int32)
    if follow is not None:
        given[:, :-1] = follow
    progress = loop.read_prompt(params, *padded(text.prompts, text.max_prompt), given)
    interval = flush_interval(progress.caches)
    stops = {text.new_tokens, *range(0, text.new_tokens, EVERY)}
    flushes = set() if interval is None else set(range(interval, text.new_tokens + 1, interval))
    checkpoints, found = sorted(stops), []
    for stop in sorted(stops | flushes):
        progress = loop.decode(params, progress, jnp.int32(stop))
        if stop in flushes:
            caches = loop.flush(progress.caches)
            progress = dataclasses.replace(progress, caches=caches)
        if stop in stops:
            found.append([kept(cache) for cache in progress.caches])
    logits = np.asarray(progress.logits, np.float64)[:, :-1]
    second, best = np.moveaxis(np.sort(logits, axis=-1)[..., -2:], -1, 0)
    total = best + np.log(np.exp(logits - best[..., None]).sum(-1))
    arrays = {
        "checkpoints": np.array(checkpoints, np.int32),
        "tokens": logits.argmax(-1).astype(np.int32),
        "fed": np.asarray(progress.tokens)[:, :-1],
        "log_probability": (best - total).astype(np.float32),
        "margin": (best - second).astype(np.float32),
    }
    for layer, each in enumerate(zip(*found, strict=True)):
        position, log_mass = ([x[None] for x in part] for part in zip(*each, strict=True))
        arrays[f"positions_{layer}"] = _joined(position, -1, 0)
        arrays[f"log_mass_{layer}"] = _joined(log_mass, -np.inf, 0)
    return arrays


class Difference(NamedTuple):
    """What differs between two runs of a method.

    Args:
      tokens, of_tokens: tokens that are equal, and all of them.
      first: new tokens before the first different one of any row; None: all are equal.
      margin: of the first run there: the best logit less the second best.
      log_probability: the greatest difference while a row was fed the same tokens in both runs.
      sets, of_sets: sets of live positions that are equal, and all of them.
      fed_sets, of_fed_sets: the same among those whose row was fed the same tokens until then.
      first_set: decode steps before the first different set of a row that was fed the same tokens.
      log_mass: the greatest difference between equal sets.
    """

    tokens: int
    of_tokens: int
    first: int | None
    margin: float | None
    log_probability: float
    sets: int
    of_sets: int
    fed_sets: int
    of_fed_sets: int
    first_set: int | None
    log_mass: float


def compare(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> Difference:
    """Compares two runs of a method that read the same prompts.

    Raises:
      ValueError: the runs have different rows, steps, checkpoints, layers or heads.
    """
    layers = sum(name.startswith("positions_") for name in a)
    _check_comparable(a, b, layers)
    equal = a["tokens"] == b["tokens"]
    different = np.argwhere(~equal)
    first = None if equal.all() else int(different[:, 1].min())
    row = None if first is None else int(different[different[:, 1] == first][0, 0])
    # A row was fed the same tokens before step n if its first n tokens are equal.
    same_fed = np.logical_and.accumulate(a["fed"] == b["fed"], axis=1)
    same_before = np.pad(same_fed, ((0, 0), (1, 0)), constant_values=True)  # [B, N + 1]
    # The token of number n is chosen when n tokens have been fed.
    gap = np.abs(a["log_probability"] - b["log_probability"])
    sets, mass = zip(*(_equal_sets(a, b, layer) for layer in range(layers)), strict=True)
    steps = a["checkpoints"]
    fed = [np.broadcast_to(same_before.T[steps][:, :, None], each.shape) for each in sets]
    wrong = [steps[(~each & same).any((1, 2))] for each, same in zip(sets, fed, strict=True)]
    wrong = np.concatenate(wrong)
    return Difference(
        tokens=int(equal.sum()),
        of_tokens=equal.size,
        first=first,
        margin=None if first is None else float(a["margin"][row, first]),
        log_probability=float(gap[same_before[:, :-1]].max()),
        sets=sum(int(each.sum()) for each in sets),
        of_sets=sum(each.size for each in sets),
        fed_sets=sum(int((each & same).sum()) for each, same in zip(sets, fed, strict=True)),
        of_fed_sets=sum(int(same.sum()) for same in fed),
        first_set=int(wrong.min()) if wrong.size else None,
        log_mass=max(mass),
    )


def _check_comparable(a: dict[str, np.ndarray], b: dict[str, np.ndarray], layers: int) -> None:
    shapes = [
        {name: x.shape[:3] for name, x in run.items() if name != "checkpoints"} for run in (a, b)
    ]
    if shapes[0] != shapes[1] or not np.array_equal(a["checkpoints"], b["checkpoints"]):
        raise ValueError(
            f"runs must have the same rows, steps, checkpoints and heads, got {shapes[0]} and "
            f"{shapes[1]}"
        )
    if not layers:
        raise ValueError("runs must have positions_0, positions_1, ..., got none")


def _equal_sets(
    a: dict[str, np.ndarray], b: dict[str, np.ndarray], layer: int
) -> tuple[np.ndarray, float]:
    """Which sets of a layer are equal, `[C, B, H]`, and their masses' greatest difference."""
    count = len(a["checkpoints"])
    position = _joined([run[f"positions_{layer}"] for run in (a, b)], -1, 0)
    mass = _joined([run[f"log_mass_{layer}"] for run in (a, b)], -np.inf, 0)
    equal = (position[:count] == position[count:]).all(-1)
    there = equal[..., None] & (position[:count] >= 0)
    gap = np.abs(mass[:count][there] - mass[count:][there])
    return equal, float(gap.max(initial=0.0))


def load(directory: Path, name: str) -> dict[str, np.ndarray]:
    """The arrays of one method's file."""
    with np.load(directory / f"{name}.npz") as file:
        return dict(file)


def run_all(names: Sequence[str], out: Path, follow: Path | None) -> None:
    """Writes a file per method, and `run.json` with the versions and the settings."""
    text = bundled()
    out.mkdir(parents=True, exist_ok=True)
    settings = {name: repr(value) for name, value in METHODS.items()}
    about = {"environment": common.environment(), "budget": BUDGET, "methods": settings}
    (out / "run.json").write_text(json.dumps(about, indent=2) + "\n")
    for name in names:
        fed = None if follow is None else load(follow, name)["fed"]
        arrays = record(method(name, text), text, fed)
        np.savez_compressed(out / f"{name}.npz", **arrays)  # pyright: ignore[reportArgumentType]  # no array is named as an option
        live = (arrays["positions_3"] >= 0).sum(-1).mean((1, 2))
        print(f"{name}: live slots per head of the last layer {live[0]:.1f}, {live[-1]:.1f}")
        jax.clear_caches()


def print_comparison(first: Path, second: Path) -> None:
    """Prints one line per method that both runs have."""
    names = [name for name in METHODS if (first / f"{name}.npz").exists()]
    for name in names:
        if not (second / f"{name}.npz").exists():
            print(f"{name:26} missing in the second run")
            continue
        found = compare(load(first, name), load(second, name))
        line = f"{name:26} tokens {found.tokens}/{found.of_tokens}"
        if found.first is not None:
            line += f" (first different: {found.first}, margin {found.margin:.1e})"
        line += f"; sets {found.sets / found.of_sets:.4f}"
        line += f", after equal tokens {found.fed_sets}/{found.of_fed_sets}"
        if found.first_set is not None:
            line += f" (first different after {found.first_set} steps)"
        line += f"; log_mass within {found.log_mass:.1e}"
        print(f"{line}; log-probability within {found.log_probability:.1e}")


def main() -> None:
    """Runs it."""
    parser = common.parser_of(__doc__)
    parser.add_argument("--out", type=Path, help="folder to write to")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--follow", type=Path, help="folder of a run whose tokens are fed")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("DIR_A", "DIR_B"))
    args = parser.parse_args()
    if (args.compare is None) == (args.out is None):
        parser.error("give either --out or --compare")
    if args.compare is not None:
        print_comparison(*args.compare)
    else:
        run_all(args.methods, args.out, args.follow)


if __name__ == "__main__":
    main()
