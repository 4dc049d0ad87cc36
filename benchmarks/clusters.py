"""ClusterKV on a real model: what size of clusters, choice and chunk do to attention.

    python benchmarks/clusters.py --model FOLDER --text wikitext2.valid.txt --out \\
        benchmarks/results/clusters_smollm2.json

The model reads `--tokens` tokens of the text once. A prompt of each of `--lengths` is the beginning
of them, and the `--steps` tokens after it are decode steps: their queries, keys and values go to
the full cache and to the method's cache of the same layer, as in `kvjax.evaluation`'s
`measure_fidelity`, but with the text's own next tokens. A row has the mean over layers, KV heads
and steps of `recall_rate`, for as many tokens as were looked at, and of `attention_error`. A cache
may be given any budget after its tokens were clustered.

`choice` is `"mean"` or `"max"` over the query heads of a KV head, or `"each"`: a choice per query
head. Rows without `chunk` and `rounds` have the default ones; a chunk of 0 is the whole prompt.

A run that was stopped goes on where it was, given the same arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from common import Rows

import kvjax
from kvjax.attention.attend import compress_prompt
from kvjax.attention.layer import LayerCache, init_cache
from kvjax.cache.slots import evict
from kvjax.evaluation import attention_error, recall_rate
from kvjax.evaluation.fidelity.recording import looked_at, record, recorded, unrecord
from kvjax.generation.reading_once import Observe
from kvjax.models import from_pretrained, load_tokenizer
from kvjax.protocol import Needs

SIZES, BUDGETS = (8, 16, 32, 80), (0.05, 0.1, 0.2, 0.5)
CHOICES = {
    "mean": {"group_reduce": "mean"}, "max": {"group_reduce": "max"},
    "each": {"per_query_head": True},
}  # fmt: skip
CHUNKS = ((0, 20), (0, 5), (256, 5), (512, 5), (1024, 3), (1024, 20), (2048, 5))
DENSE = 2  # layers that are dense by default


class Steps(NamedTuple):
    """Decode steps of one layer; the first axis counts them."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    position: jax.Array
    output: jax.Array
    attention: jax.Array


@functools.partial(jax.jit, static_argnums=2)
def steps_after(seen: LayerCache, length, count: int) -> Steps:
    """The tokens after the first `length`, and what the full cache does with them."""
    place = length + jnp.arange(count)
    k, v = seen.kv.k.read(), seen.kv.v.read()
    tokens = k.shape[2]
    q = seen.state.query[:, :, -tokens:][:, :, place]
    grouped = q.reshape(1, k.shape[1], -1, *q.shape[2:])
    logits = jnp.einsum("bhgtd,bhsd->bhgts", grouped, k, precision="highest") / k.shape[3] ** 0.5
    logits = jnp.where(jnp.arange(tokens) <= place[:, None], logits, -jnp.inf)
    attention = jax.nn.softmax(logits, axis=-1)
    out = jnp.einsum("bhgts,bhsd->bhgtd", attention, v, precision="highest").reshape(q.shape)
    first = (jnp.moveaxis(x, 2, 0)[:, :, :, None] for x in (q, k[:, :, place], v[:, :, place]))
    attention = attention.reshape(*q.shape[:3], tokens)
    return Steps(
        *first, place, jnp.moveaxis(out, 2, 0)[:, :, :, None], jnp.moveaxis(attention, 2, 0)
    )


@functools.partial(jax.jit, static_argnums=0)
def clustered(transform: kvjax.ClusterKV, seen: LayerCache, length) -> LayerCache:
    """The method's cache of the first `length` tokens."""
    batch, kv_heads, slots = seen.kv.shape
    empty = init_cache(
        transform, batch=batch, kv_heads=kv_heads, query_heads=kv_heads * seen.kv.group,
        head_dim=seen.kv.k.shape[3], max_prompt=slots, max_new=64, dtype=jnp.float32,
    )  # fmt: skip
    kept = jnp.broadcast_to(jnp.arange(slots) < length, seen.kv.shape)
    return compress_prompt(transform, empty, dataclasses.replace(seen, kv=evict(seen.kv, kept)))


@functools.partial(jax.jit, static_argnums=0)
def judged(transform: kvjax.ClusterKV, cache: LayerCache, budget, steps: Steps):
    """Recall and error with this many slots."""
    clusters, key = cache.state
    clusters = dataclasses.replace(clusters, budget=jnp.full_like(clusters.budget, budget))

    def step(cache, own: Steps):
        out, cache = kvjax.attend(
            recorded(transform), record(cache), own.query, own.key, own.value,
            own.position[None, None], phase="decode",
        )  # fmt: skip
        cache, records = unrecord(cache)
        held = looked_at(transform, records, own.attention.shape[-1])
        kept = records[0].seen.reshape(*held.shape[:2], -1)
        recall = recall_rate(own.attention, kept, held.sum(-1, dtype=jnp.int32))
        return cache, (recall.mean(), attention_error(out, own.output).mean())

    _, found = jax.lax.scan(step, dataclasses.replace(cache, state=(clusters, key)), steps)
    return jax.tree.map(jnp.mean, found)


def cells(lengths: list[int]) -> Iterator[tuple[dict[str, object], dict[str, object]]]:
    """What is varied: the entries of a row, and the arguments of a method."""
    for size, choice, length in itertools.product(SIZES, CHOICES, lengths):
        own = {"tokens_per_cluster": size}
        yield {"length": length, **own, "choice": choice}, {**own, **CHOICES[choice]}
    for (chunk, rounds), length in itertools.product(CHUNKS, lengths):
        own = {"length": length, "tokens_per_cluster": 16, "choice": "max"}
        options = {"tokens_per_cluster": 16, "chunk": chunk or None, "iterations": rounds}
        yield {**own, "chunk": chunk, "rounds": rounds}, options


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--text", required=True, help="UTF-8 file of at least as many tokens")
    parser.add_argument("--out", required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8176])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--every", type=int, default=3, help="which of the layers are measured")
    args = parser.parse_args()
    model, tokenizer = from_pretrained(args.model), load_tokenizer(args.model)
    prompt = tokenizer(Path(args.text).read_text()[: 8 * args.tokens]).input_ids[: args.tokens]
    observe = Observe(Needs(query_share=1.0))
    seen = kvjax.read(model, [prompt], transform=observe, max_new=1).caches[DENSE :: args.every]
    about = {"model": Path(args.model).name, "text": Path(args.text).name, "tokens": args.tokens}
    about |= {"steps": args.steps, "layers": len(seen)}
    rows = Rows(args.out, {"benchmark": "clusters", **about})
    for row, options in cells(args.lengths):
        if rows.has(**{"chunk": None, **row, "budget": BUDGETS[-1]}):
            continue
        transform = kvjax.ClusterKV(max(BUDGETS), dense_layers=(), **options)
        found = []
        for layer in seen:
            cache = clustered(transform, layer, row["length"])
            steps = steps_after(layer, row["length"], args.steps)
            slots = [int(share * row["length"]) for share in BUDGETS]
            found.append([judged(transform, cache, budget, steps) for budget in slots])
        for i, budget in enumerate(BUDGETS):
            recall, error = (float(sum(each[i][j] for each in found)) / len(found) for j in (0, 1))
            rows.add(**row, budget=budget, recall=round(recall, 4), error=round(error, 4))


if __name__ == "__main__":
    main()
