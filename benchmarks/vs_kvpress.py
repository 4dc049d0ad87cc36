"""kvpress (PyTorch) and kvjax on a CPU: kept positions, seconds, memory and answers, in one run.

    python benchmarks/vs_kvpress.py methods --model FOLDER --text wiki.txt --out \\
        benchmarks/results/vs_kvpress_smollm2.json
    python benchmarks/vs_kvpress.py kvzip --model FOLDER --text essays.txt \\
        --sample wikitext2.valid.txt --out benchmarks/results/vs_kvpress_kvzip_smollm2.json

It makes an environment for kvpress (`--environment`, otherwise a temporary folder) and installs
pinned versions there. pip downloads PyTorch for GPUs, unless `PIP_EXTRA_INDEX_URL` is
https://download.pytorch.org/whl/cpu. Both frameworks get the same weights in float32, the same
tokens, as many slots and as many threads on the same cores, each in a process of its own (this file
with `side`) that has run the request once. Nothing else should run meanwhile: PyTorch's threads
wait for each other in a loop, and suffer more than XLA's. Files are written row by row, and a run
that was stopped goes on.

`methods`: a row is a method and a prompt length.

- `first_s`, `per_token_s`: the least of `--rounds` calls, one framework after the other.
  `times_as_fast` divides kvpress's seconds by kvjax's.
- `peak_bytes`: the greatest resident memory of a new process during its first call; kvjax has the
  programs from a compilation cache.
- `positions`: the sets of kept positions per layer and KV head at the prompt's end. `equal` of
  `lists` sets are equal, in `contained` one holds the other, `common` is the share of positions
  that both keep, of the smaller set. `gap`: by how much, relatively, kvpress's score of a token
  that it alone keeps exceeds that of a token that kvjax alone keeps, at most. It says how near a
  tie was that fell differently.
- `answers`, at the shortest length: of `--cases` needles with the question inside, how many each
  framework answers, and in how many cases both write the same.

Where positions are not equal:

- snapkv: both sum the same products in another order. Scores differ in the last bits of a float32,
  and two tokens at the edge of the budget change places where `gap` is that small.
- pyramidkv: kvpress counts the window in the least layer, `B / beta`, kvjax adds it to `base /
  beta`; `pyramid_beta` turns one into the other. kvpress rounds each layer's slots, kvjax rounds
  them so that they add up: some layers have a slot more or less (`contained`).
- h2o: another method. kvpress's `ObservedAttentionPress` keeps what received the most attention per
  query that could see it, kvjax's `H2O` half by the sum, as in the paper, and half the newest
  tokens. `positions_by_sum` compares kvjax's with what H2O chooses from kvpress's attention. This
  press needs the whole attention matrix of a layer in memory ("eager").

While decoding, kvpress's presses evict nothing; `StreamingLLM` and `H2O` of kvjax hold their
budget. With `reposition`, kvpress rotates what it keeps once, at the prompt's end, and kvjax all
of it at every step, because a token that is evicted moves all later ones. `CaM` has no row:
kvpress's begins to count attention when the prompt has been read.

`kvzip`: documents are the contexts of needles, and the question is asked when the document has been
compressed. Both sides repeat the document after the same tokens. Profiles for `ByHead` are made
from `--sample`.

- `scores`: `median` and `most` are of the relative differences of all scores, of all layers, KV
  heads and tokens. Where `piece` is short, one document is repeated in several pieces; `held` is
  then the share of the best tokens of all heads by kvpress's scores that are so by kvjax's too.
- `positions`: pairs of sets, compared as above, of all documents together. `of_model`:
  what KVzipPress keeps, and the best tokens of all layers and heads by kvjax's scores. `of_layer`:
  the same with `layerwise=True`, and the best of each layer. `of_head`: the best of each head by
  kvpress's scores, and what kvjax's KVzip keeps. `by_head`: what KVzipPress keeps, and what kvjax's
  ByHead keeps. `held`: the share of the first sets' positions that the second ones have too.
- `answers`: right answers, and bytes of the caches when the document has been compressed. Those of
  kvjax have room for question and answer.
- `losses`: of the right answers to ten questions about each of some passages of SQuAD, in nats per
  token. `recovery`, in per cent of 1: (nothing kept − method) / (nothing kept − full), with an
  interval over passages. With nothing kept, sinks stay.
- `times`: the least of `--rounds` calls, one side after the other, and the greatest resident memory
  of a new process during its first call. `read_s` is the document, with its compression.

Where the sides differ:

- KVzipPress shares its budget among all heads of all layers, or with `layerwise` of a layer, by the
  document's own scores. kvjax's KVzip gives every head the same number of tokens; ByHead shares
  the budget by a profile of the model, so that shapes are known when a document comes.
- KVzipPress evicts nothing: the cache keeps all its rows, and in every step the keys of those that
  are left out are overwritten by one that no query of that step attends to.
- kvjax's default multiplies scores by the size of values (`values=True`) and averages them over
  neighbouring tokens (`kernel=3`).
- The probabilities of a piece's queries are over the whole document and the piece in kvjax, in
  KVzipPress over the first four tokens, the document's part that is repeated, and the piece.
- KVzipPress ends its instruction by the end of a chat message. What begins a chat, such as a system
  prompt, gets no scores, and all but four tokens of it go. Here both sides have the instruction of
  `KVzip`, and nothing is a chat.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import importlib.metadata
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # a side runs where neither kvjax nor JAX is installed
    from common import Rows

PACKAGES = ("kvpress==0.5.5", "torch==2.13.0", "transformers==5.2.0")
NEW_TOKENS, ANSWER_TOKENS = 32, 16  # of a timed call, and of an answer

# `methods`
SHARE = 0.2  # of the prompt that stays
PYRAMID_WINDOW, PYRAMID_BETA = 8, 20

# Of kvpress and of kvjax; {ratio} is the share that goes, {slots} what stays.
METHODS = {
    "full": ("None", "Full()"),
    "snapkv": (
        "SnapKVPress({ratio}, window_size=64, kernel_size=5)",
        "SnapKV({slots}, window=64, kernel=5, pooling='avg')",
    ),
    "streaming_llm": ("StreamingLLMPress({ratio}, n_sink=4)", "StreamingLLM({slots}, sinks=4)"),
    "streaming_llm, reposition": (
        "KeyRerotationPress(StreamingLLMPress({ratio}, n_sink=4))",
        "StreamingLLM({slots}, sinks=4, reposition=True)",
    ),
    "pyramidkv": (
        f"PyramidKVPress({{ratio}}, window_size={PYRAMID_WINDOW}, kernel_size=5, "
        f"beta={PYRAMID_BETA})",
        f"PyramidKV({{slots}}, window={PYRAMID_WINDOW}, kernel=5, pooling='avg', beta={{beta}})",
    ),
    "h2o": ("ObservedAttentionPress({ratio})", "H2O({slots})"),
}

# `kvzip`
SHARES = (0.5, 0.2, 0.1, 0.05)  # of the document that stays
DOCUMENTS = 2  # of which scores and positions are compared
PIECE, SHORT_PIECE = 2048, 256
SINKS = 4
PARTS = ("positions", "answers", "losses", "times")
PASSAGE = 1408  # tokens of a passage, at most
NOTHING = "Sinks()"  # of what is read, only sinks stay
PROFILES = {
    "heads.safetensors": "kvzip",
    "heads_without_values.safetensors": "kvzip(values=False, kernel=1)",
}
FULL = {"kvpress": "None", "kvjax": "Full()"}

# {ratio} is the share that goes, {share} what stays.
KVZIP = {
    "kvpress": {"KVzipPress": "KVzipPress({ratio})"},
    "kvjax": {
        "kvzip(values=False, kernel=1)": "KVzip({share}, values=False, kernel=1, room=64)",
        "kvzip": "KVzip({share}, room=64)",
        "by_head(kvzip(values=False, kernel=1))": (
            "ByHead(KVzip({share}, values=False, kernel=1, room=64), "
            "'heads_without_values.safetensors')"
        ),
        "by_head(kvzip)": "ByHead(KVzip({share}, room=64), 'heads.safetensors')",
    },
}
COMPARED = {  # of which positions are compared
    "kvpress": ("KVzipPress({ratio})", "KVzipPress({ratio}, layerwise=True)"),
    "kvjax": tuple(
        KVZIP["kvjax"][name]
        for name in ("kvzip(values=False, kernel=1)", "by_head(kvzip(values=False, kernel=1))")
    ),
}
LOSSES = {
    "kvpress": KVZIP["kvpress"],
    "kvjax": {
        "by_head(kvzip)": KVZIP["kvjax"]["by_head(kvzip)"],
        "by_head(own_queries)": "ByHead(OwnQueries({share}, room=64), 'heads.safetensors')",
    },
}
TIMED = (("full", None), ("kvzip", 0.2), ("by_head(kvzip)", 0.2), ("by_head(kvzip)", 0.05))


Positions = Sequence[Sequence[Sequence[int]]]  # of each layer and KV head


def compression_ratio(slots: int, tokens: int) -> float:
    """The ratio at which kvpress keeps `slots`: it takes `int(tokens · (1 - ratio))`."""
    return 1 - (slots + 1e-6) / tokens


def pyramid_beta(slots: int) -> float:
    """kvjax's `beta` for the pyramid of `PYRAMID_BETA` in kvpress.

    The last layer has `slots / PYRAMID_BETA` in kvpress and `W + (slots - W) / beta` in kvjax; the
    mean is the same, and so is every layer between.
    """
    return (slots - PYRAMID_WINDOW) / (slots / PYRAMID_BETA - PYRAMID_WINDOW)


def expressions(method: str, tokens: int) -> dict[str, str]:
    """The method of each side, keeping the same number of slots."""
    slots = int(SHARE * tokens)
    names = {"slots": slots, "ratio": compression_ratio(slots, tokens), "beta": pyramid_beta(slots)}
    return {side: METHODS[method][n].format(**names) for n, side in enumerate(SIDES)}


def compare_positions(
    kvpress: Positions, kvjax: Positions, scores: Sequence[Sequence[Sequence[float]]]
) -> dict[str, float]:
    """The figures of `positions`, from what each side keeps and kvpress's scores of all tokens."""
    layers = zip(kvpress, kvjax, scores, strict=True)
    heads = [head for layer in layers for head in zip(*layer, strict=True)]
    equal, contained, common, smaller, gaps = 0, 0, 0, 0, [0.0]
    for kept_by_kvpress, kept_by_kvjax, score in heads:
        theirs, ours = set(kept_by_kvpress), set(kept_by_kvjax)
        both, least = len(theirs & ours), min(len(theirs), len(ours))
        equal, contained = equal + (theirs == ours), contained + (both == least)
        common, smaller = common + both, smaller + least
        if theirs - ours and ours - theirs:
            best = max(score[at] for at in theirs - ours)
            gaps.append((best - min(score[at] for at in ours - theirs)) / abs(best))
    return {
        "lists": len(heads), "equal": equal, "contained": contained, "common": common / smaller,
        "gap": max(gaps),
    }  # fmt: skip


def heavy_hitters(score: Sequence[float], slots: int) -> list[int]:
    """What H2O keeps, from attention per query that could see a token."""
    count, oldest_recent = len(score), len(score) - (slots - slots // 2)
    total = [each * (count - at) for at, each in enumerate(score)]
    best = sorted(range(oldest_recent), key=lambda at: total[at], reverse=True)[: slots // 2]
    return sorted(best) + list(range(oldest_recent, count))


def written(text: str, share: float | None) -> str:
    """An expression of `KVZIP` at a share."""
    return text if share is None else text.format(share=share, ratio=round(1 - share, 6))


def best_scores(scores: Sequence | np.ndarray, groups: int, count: int) -> list[list[list[int]]]:
    """Positions of the `count` best tokens of each group of heads, sinks first.

    Args:
      scores: `[layers, KV heads, tokens]`.
      groups: 1: all heads of all layers compete; as many as layers: those of a layer; as many as
        layers · KV heads: none.
      count: in each group.
    """
    ranked = np.array(scores, np.float64)
    ranked[..., :SINKS] = np.inf
    order = np.argsort(-ranked.reshape(groups, -1), axis=1, kind="stable")[:, :count]
    kept = np.zeros((groups, ranked.size // groups), bool)
    np.put_along_axis(kept, order, True, axis=1)
    return [[np.flatnonzero(head).tolist() for head in row] for row in kept.reshape(ranked.shape)]


def relative_differences(
    kvpress: Sequence | np.ndarray, kvjax: Sequence | np.ndarray
) -> dict[str, float]:
    """Median and greatest relative difference of scores."""
    theirs, ours = np.array(kvpress, np.float64), np.array(kvjax, np.float64)
    gap = np.abs(theirs - ours) / np.maximum(np.maximum(theirs, ours), 1e-30)
    return {"median": float(np.median(gap)), "most": float(gap.max())}


def joined(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """Figures of several documents: sums, means of shares, and the greatest `gap`."""
    found = {name: sum(each[name] for each in figures) for name in figures[0]}
    means = {name: found[name] / len(figures) for name in ("common", "held")}
    return found | means | {"gap": max(each["gap"] for each in figures)}


def count_kept(positions: Positions) -> int:
    """Tokens that are kept, of all heads."""
    return sum(len(head) for layer in positions for head in layer)


def held(first: Positions, second: Positions) -> float:
    """The share of the first positions that are among the second."""
    layers = zip(first, second, strict=True)
    heads = [head for layer in layers for head in zip(*layer, strict=True)]
    return sum(len(set(a) & set(b)) for a, b in heads) / count_kept(first)


class Kvpress:
    """kvpress as its own pipeline runs it: the press around the prompt pass, then token by token.

    The pipeline reads the context without logits and then the question; here one pass reads
    everything, and computes the logits of the last token alone.
    """

    packages = ("kvpress", "torch", "transformers")

    def __init__(self, folder: str, threads: int, method: str) -> None:
        import kvpress  # pyright: ignore[reportMissingImports]
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        self._torch, self._new_cache = torch, transformers.DynamicCache
        self._names = vars(kvpress)
        self._press = eval(method, {**self._names})
        # Only this attention gives weights, without which ObservedAttentionPress refuses to work.
        observed = isinstance(self._press, kvpress.ObservedAttentionPress)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager" if observed else "sdpa"
        ).eval()
        # After this press the pipeline goes on at the cache's length, otherwise at the prompt's.
        self._rotated_anew = isinstance(self._press, kvpress.KeyRerotationPress)

    def _read(self, prompt: list[int]) -> tuple[Any, Any]:
        """The first token, and the caches that the press left."""
        cache = self._new_cache()
        with contextlib.nullcontext() if self._press is None else self._press(self._model):
            given = self._torch.tensor([prompt])
            result = self._model(input_ids=given, past_key_values=cache, logits_to_keep=1)
        return result.logits[0, -1].argmax(), cache

    def generate(self, prompt: list[int], new: int) -> dict[str, object]:
        """New tokens, seconds to the first one, and seconds of each further one."""
        with self._torch.inference_mode():
            start = time.perf_counter()
            token, cache = self._read(prompt)
            tokens = [token.item()]
            first = time.perf_counter() - start
            at = cache.get_seq_length() if self._rotated_anew else len(prompt)
            tokens += self._write(token, cache, at, new - 1)
            rest = time.perf_counter() - start - first
        return {"tokens": tokens, "first_s": first, "per_token_s": rest / max(new - 1, 1)}

    def _write(self, token: Any, cache: Any, at: int, count: int) -> list[int]:
        """So many tokens after `token`, which stands at position `at`."""
        tokens = []
        for position in range(at, at + count):
            where = self._torch.tensor([[position]])
            result = self._model(
                input_ids=token[None, None], past_key_values=cache, position_ids=where
            )
            token = result.logits[0, -1].argmax()
            tokens.append(token.item())
        return tokens

    def _read_document(self, press: Any, document: list[int], instruction: dict[str, Any]) -> Any:
        """The caches of a document, as the pipeline reads it.

        KVzipPress has its own instruction, which `ending` follows. It would be the end of a chat
        message, and as many tokens as begin a message would count as no part of the document.
        """
        cache = self._new_cache()
        with contextlib.nullcontext() if press is None else press(self._model):
            if press is not None:
                press.prefix_length = 0
                ending = self._torch.tensor([instruction["ending"]], dtype=self._torch.int64)
                press._suffix_ids, press.chunk_size = ending, instruction["piece"]
            self._model.model(input_ids=self._torch.tensor([document]), past_key_values=cache)
        return cache

    def ask(
        self, document: list[int], question: list[int], new: int, instruction: dict[str, Any]
    ) -> dict[str, object]:
        """The answer to a question that comes when the document has been compressed.

        Seconds of the document, of the question and of each further token, and bytes of the caches
        between document and question.
        """
        with self._torch.inference_mode():
            start = time.perf_counter()
            cache = self._read_document(self._press, document, instruction)
            read = time.perf_counter() - start
            return {"read_s": read} | self._answer(cache, len(document), question, new)

    def _answer(self, cache: Any, length: int, question: list[int], new: int) -> dict[str, object]:
        """The rest of `ask`."""
        size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        start, at = time.perf_counter(), length + len(question)
        result = self._model(
            input_ids=self._torch.tensor([question]), past_key_values=cache, logits_to_keep=1,
            position_ids=self._torch.arange(length, at)[None],
        )  # fmt: skip
        token = result.logits[0, -1].argmax()
        tokens = [token.item()]
        first = time.perf_counter() - start
        tokens += self._write(token, cache, at, new - 1)
        rest = time.perf_counter() - start - first
        return {
            "tokens": tokens, "question_s": first, "per_token_s": rest / max(new - 1, 1),
            "cache_bytes": size,
        }  # fmt: skip

    def answers(
        self, methods: list[str], document: list[int], question: list[int], new: int,
        instruction: dict[str, Any],
    ) -> list[dict[str, object]]:  # fmt: skip
        """Returns what `ask` does, without the seconds of the document, which all methods share."""
        cache, evicted, _ = self._read_once(methods, document, instruction)
        answers = []
        for each in evicted:
            self._leave_out(each)
            # A copy: keys of evicted tokens are overwritten.
            with self._torch.inference_mode():
                answers.append(self._answer(copy.deepcopy(cache), len(document), question, new))
        return answers

    def _leave_out(self, evicted: list) -> None:
        """Makes each layer attend to all tokens but those that a press evicts of it."""
        for block, indices in zip(self._model.model.layers, evicted, strict=True):
            block.self_attn.masked_key_indices = indices

    def _read_once(
        self, methods: list[str], document: list[int], instruction: dict[str, Any]
    ) -> tuple[Any, list, Any]:
        """Reads a document for several presses, whose scores are equal.

        Returns:
          The caches, what each press evicts of each layer, and the scores.
        """
        presses = [eval(method, {**self._names}) for method in methods]
        layers, evicted, scores = self._model.model.layers, [], None
        first = next(press for press in presses if press is not None)
        compress = first.compress_post

        def compress_for_all(model):
            nonlocal scores
            scores = first.score_val.clone()
            for press in presses:
                if press is None:
                    evicted.append([None] * len(layers))
                    continue
                press.score_val = scores.clone()  # sinks will get the greatest
                (compress if press is first else press.compress_post)(model)
                evicted.append([block.self_attn.masked_key_indices for block in layers])

        first.compress_post = compress_for_all
        with self._torch.inference_mode():
            cache = self._read_document(first, document, instruction)
        return cache, evicted, scores

    def losses(
        self, methods: list[str], document: list[int], questions: list[list[int]],
        answers: list[list[int]], instruction: dict[str, Any],
    ) -> list[list[float]]:  # fmt: skip
        """Returns the loss of each right answer by method, in nats per token."""
        cache, evicted, _ = self._read_once(methods, document, instruction)
        losses = []
        for each in evicted:
            self._leave_out(each)
            losses.append(
                [
                    self._loss(cache, len(document), *pair)
                    for pair in zip(questions, answers, strict=True)
                ]
            )
        return losses

    def _loss(self, cache: Any, length: int, question: list[int], answer: list[int]) -> float:
        """Returns the loss of an answer behind a question."""
        tokens = self._torch.tensor([question + answer])
        with self._torch.inference_mode():
            logits = self._model(
                input_ids=tokens, past_key_values=copy.deepcopy(cache),
                position_ids=self._torch.arange(length, length + tokens.shape[1])[None],
                logits_to_keep=len(answer) + 1,
            ).logits[0, :-1]  # fmt: skip
            loss = self._torch.nn.functional.cross_entropy(logits, self._torch.tensor(answer))
        return loss.item()

    def repeated(
        self, methods: list[str], document: list[int], instruction: dict[str, Any]
    ) -> dict[str, object]:
        """Scores of all tokens, and what each method keeps."""
        _, evicted, scores = self._read_once(methods, document, instruction)
        positions = []
        for each in evicted:
            kept = self._torch.ones_like(scores[:, 0], dtype=bool)
            for layer, (_, head, at) in enumerate(each):
                kept[layer, head, at] = False
            positions.append([[head.nonzero()[:, 0].tolist() for head in row] for row in kept])
        return {"positions": positions, "scores": scores[:, 0].tolist()}


class Kvjax:
    """kvjax as its users call it."""

    packages = ("jax", "jaxlib", "flax")

    def __init__(self, folder: str, threads: int, method: str) -> None:
        import jax.numpy as jnp

        import kvjax
        from kvjax.models import from_pretrained

        self._kvjax = kvjax
        # Names of kvjax are imported when they are asked for.
        self._names = {name: getattr(kvjax, name) for name in dir(kvjax)}
        self._transform = eval(method, self._names)
        self._model = from_pretrained(folder, jnp.float32)

    def generate(self, prompt: list[int], new: int) -> dict[str, object]:
        """New tokens, seconds to the first one, and seconds of each further one.

        All that the call takes and the further tokens do not counts as the first one's.
        """
        start = time.perf_counter()
        result = self._kvjax.generate(
            self._model, [prompt], transform=self._transform, max_new_tokens=new, end_tokens=()
        )
        whole, each = time.perf_counter() - start, result.tpot_s or 0.0
        first = whole - each * (new - 1)
        return {"tokens": result.tokens[0], "first_s": first, "per_token_s": each}

    def kept(self, prompt: list[int]) -> dict[str, object]:
        """Kept positions of each layer and KV head."""
        from kept_tokens import kept

        context = self._kvjax.read(self._model, [prompt], transform=self._transform)
        rows = [kept(cache)[0][0].tolist() for cache in context.caches]
        return {"positions": [[[at for at in head if at >= 0] for head in row] for row in rows]}

    def ask(
        self, document: list[int], question: list[int], new: int, instruction: dict[str, Any]
    ) -> dict[str, object]:
        """The answer to a question that comes when the document has been compressed.

        Seconds of the document, of the question and of each further token, and bytes of the caches
        between document and question, in which there is room for question and answer.
        """
        import jax

        transform = self._kvjax.calibrated(self._transform, self._model, ())
        transform = in_pieces(transform, instruction)
        start = time.perf_counter()
        context = self._kvjax.read(
            self._model, [document], transform=transform, document=Words(instruction),
            max_prompt=len(document) + len(question), max_new=new,
        )  # fmt: skip
        jax.block_until_ready(context.held)
        read, start = time.perf_counter() - start, time.perf_counter()
        return {"read_s": read, **self._answer(context, question, new, start)}

    def _answer(
        self, context: Any, question: list[int], new: int, start: float
    ) -> dict[str, object]:
        """The rest of `ask`."""
        size = context.nbytes
        result = self._kvjax.generate(
            self._model, [question], context=context, donate=True, max_new_tokens=new,
            end_tokens=(),
        )  # fmt: skip
        each = result.tpot_s or 0.0
        return {
            "tokens": result.tokens[0], "per_token_s": each, "cache_bytes": size,
            "question_s": time.perf_counter() - start - each * (new - 1),
        }  # fmt: skip

    def answers(
        self, methods: list[str], document: list[int], question: list[int], new: int,
        instruction: dict[str, Any],
    ) -> list[dict[str, object]]:  # fmt: skip
        """Returns what `ask` does, without the seconds of the document, which all methods share."""
        transforms, once = self._read_once(
            methods, document, instruction, len(document) + len(question), new
        )
        return [
            self._answer(once.context(each), question, new, time.perf_counter())
            for each in transforms
        ]

    def _read_once(
        self, methods: list[str], document: list[int], instruction: dict[str, Any],
        max_prompt: int, new: int,
    ) -> tuple[list, Any]:  # fmt: skip
        from kvjax.evaluation import ReadOnce

        transforms = [
            in_pieces(self._kvjax.calibrated(eval(each, self._names), self._model, ()), instruction)
            for each in methods
        ]
        return transforms, ReadOnce(
            self._model, [document], transforms, max_prompt=max_prompt, max_new=new,
            document=Words(instruction),
        )  # fmt: skip

    def losses(
        self, methods: list[str], document: list[int], questions: list[list[int]],
        answers: list[list[int]], instruction: dict[str, Any],
    ) -> list[list[float]]:  # fmt: skip
        """Returns the loss of each right answer by method, in nats per token.

        `Sinks()` keeps sinks alone.
        """
        import numpy as np
        from kept_documents import ReadDocument, method_of

        from kvjax.evaluation import answer_nll

        full = self._kvjax.Full()
        transforms = [
            None if text == NOTHING
            else in_pieces(
                self._kvjax.calibrated(eval(text, self._names), self._model, ()), instruction
            )
            for text in methods
        ]  # fmt: skip
        scored = [method_of(each) for each in transforms if each is not None]
        once = ReadDocument(
            self._model, [document], [each for each in scored if each is not None],
            max_prompt=len(document) + max(map(len, questions)), max_new=max(map(len, answers)),
            document=Words(instruction),
        )  # fmt: skip
        shape = self._model.config.num_layers, self._model.config.kv_heads, len(document)
        losses = []
        for each in transforms:
            if each is None:
                stays = np.broadcast_to(np.arange(len(document)) < SINKS, shape)
                context = once.kept(stays, full)
            elif each == full:
                context = once.kept(np.ones(shape, bool), full)
            else:
                context = once.kept_by(each)
            losses.append(answer_nll(self._model, context, answers, questions).tolist())
        return losses

    def repeated(
        self, methods: list[str], document: list[int], instruction: dict[str, Any]
    ) -> dict[str, object]:
        """Scores of all tokens without the size of values, and what each method keeps."""
        import numpy as np
        from kept_tokens import kept

        transforms, once = self._read_once(methods, document, instruction, len(document), 1)
        positions = []
        for transform in transforms:
            rows = []
            for cache in once.context(transform).caches:
                heads = [part.heads for part in cache] if isinstance(cache, tuple) else None
                row = kept(cache)[0][0]
                if heads is not None:  # groups stand one after the other
                    row = row[np.argsort(np.concatenate(heads))]
                rows.append([[at for at in head if at >= 0] for head in row.tolist()])
            positions.append(rows)
        readings = once._observed[0].held  # slots are in the order of tokens
        scores = [
            np.asarray(reading.record.slots["received"][0, :, : len(document)])
            for reading in readings
        ]
        return {"positions": positions, "scores": np.stack(scores).tolist()}


class Words:
    """Encodes the instruction of KVzip, as a tokenizer does."""

    def __init__(self, instruction: dict[str, Any]) -> None:
        self._instruction = instruction

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the tokens of what comes before the first piece, or before a further one."""
        from kvjax.transforms.kvzip.repetition import FIRST

        names = ("first", "ending") if text == FIRST else ("further",)
        return [token for name in names for token in self._instruction[name]]


def in_pieces(transform: Any, instruction: dict[str, Any]) -> Any:
    """Returns the composition whose KVzip repeats a document in pieces of the instruction."""
    import kvjax
    from kvjax.compose.walks import map_methods

    def with_piece(method: Any, heads: Any) -> Any:
        if not isinstance(method, kvjax.KVzip):
            return method
        return dataclasses.replace(method, piece=instruction["piece"])

    return map_methods(with_piece, transform)


SIDES = {"kvpress": Kvpress, "kvjax": Kvjax}


def peak_bytes() -> int:
    """The greatest resident memory since the model was loaded."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])


def answer_requests() -> None:
    """One side: answers requests from standard input, each a line, until there are no more.

    A request is JSON, such as `{"do": "generate", "prompt": [1, 2], "new": 8}`, `{"do": "memory"}`
    or `{"do": "versions"}`, and so is its answer. For KVzip, `ask`, `answers` and `repeated` take a
    document, which is compressed before the question comes, and the instruction to repeat it.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["side"])
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--method", required=True, help="an expression in the framework's names")
    args = parser.parse_args()
    # Both frameworks run on the same cores. XLA takes as many threads as it is given cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    side = SIDES[args.side](args.model, args.threads, args.method)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("do")
        if what == "memory":
            answer = {"peak_bytes": peak_bytes()}
        elif what == "versions":
            found = {name: importlib.metadata.version(name) for name in side.packages}
            answer = {"python": platform.python_version(), **found}
        else:
            answer = getattr(side, what)(**request)
        print(json.dumps(answer), flush=True)


class Worker:
    """A process of one side."""

    def __init__(self, command: Sequence[str | Path], compiled: Path) -> None:
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        }
        self._process: Any = subprocess.Popen(  # with both pipes
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | cache,
        )  # fmt: skip

    def ask(self, what: str, **request: object) -> Any:
        """The answer to a request."""
        self._process.stdin.write(json.dumps({"do": what, **request}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("a process ended, see its message above")
        return json.loads(answer)

    def close(self) -> None:
        """Ends it."""
        self._process.stdin.close()
        self._process.wait()


Start = Callable[[str, str], Worker]  # side and method → a new process


def make_environment(folder: Path) -> Path:
    """An environment with kvpress; returns its Python. What is there already stays."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def measure(start: Start, methods: dict[str, str], prompt: list[int], rounds: int) -> dict:
    """Positions, seconds and memory of a row."""
    workers = {side: start(side, methods[side]) for side in SIDES}
    request = {"what": "generate", "prompt": prompt, "new": NEW_TOKENS}
    for worker in workers.values():  # compiles
        worker.ask(**request)
    row: dict[str, Any] = {}
    if methods["kvpress"] != "None":
        kept = {side: worker.ask("kept", prompt=prompt) for side, worker in workers.items()}
        theirs, ours = (kept[side]["positions"] for side in SIDES)
        scores = kept["kvpress"]["scores"]
        row["positions"] = compare_positions(theirs, ours, scores)
        if "ObservedAttentionPress" in methods["kvpress"]:
            slots = len(ours[0][0])
            by_sum = [[heavy_hitters(score, slots) for score in layer] for layer in scores]
            row["positions_by_sum"] = compare_positions(by_sum, ours, scores)
    calls: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES if number % 2 else reversed(SIDES):
            calls[side].append(workers[side].ask(**request))
    for name in ("first_s", "per_token_s"):
        least = {side: round(min(call[name] for call in calls[side]), 5) for side in SIDES}
        row[name] = least | {"times_as_fast": round(least["kvpress"] / least["kvjax"], 3)}
    for worker in workers.values():
        worker.close()
    row["peak_bytes"] = {}
    for side in SIDES:  # one after the other
        worker = start(side, methods[side])
        worker.ask(**request)
        row["peak_bytes"] |= {side: worker.ask("memory")["peak_bytes"]}
        worker.close()
    return row


def needle_answers(start: Start, methods: dict[str, str], cases: list, tokenizer: Any) -> dict:
    """Right answers of both sides, and in how many cases their tokens are the same."""
    from kvjax.evaluation import is_right

    workers = {side: start(side, methods[side]) for side in SIDES}
    right, same = dict.fromkeys(SIDES, 0), 0
    for case in cases:
        request = {"what": "generate", "prompt": case.prompt, "new": ANSWER_TOKENS}
        tokens = {side: worker.ask(**request)["tokens"] for side, worker in workers.items()}
        same += tokens["kvpress"] == tokens["kvjax"]
        for side, each in tokens.items():
            right[side] += is_right(tokenizer.decode(each), case.answers[0])
    for worker in workers.values():
        worker.close()
    return {"cases": len(cases), "right": right, "same": same}


class KVzipComparison:
    """Rows of `kvzip`.

    Args:
      start: side and method → a new process.
      cases: needles.
      instruction: what the sides get, see `Kvpress` and `Kvjax`.
      rows: where results go.
    """

    def __init__(self, start: Start, cases: list, instruction: dict, rows: Rows) -> None:
        self.start, self.cases, self.instruction, self.rows = start, cases, instruction, rows

    def compare(self) -> None:
        """Scores and positions."""
        if self.rows.has(part="positions"):
            return
        asked = [(name, share) for share in SHARES for name in (0, 1)]
        figures: dict[float, dict[str, list]] = {share: {} for share in SHARES}
        scores = []
        workers = {side: self.start(side, FULL[side]) for side in SIDES}
        for case in self.cases[:DOCUMENTS]:
            found = {}
            for side, worker in workers.items():
                texts = [written(COMPARED[side][name], share) for name, share in asked]
                request = {"document": case.context, "instruction": self.instruction}
                found[side] = worker.ask("repeated", methods=texts, **request)
            theirs, ours = (np.array(found[side]["scores"]) for side in SIDES)
            scores.append(relative_differences(theirs, ours))
            layers, heads, _ = ours.shape
            for number, (name, share) in enumerate(asked):
                kvpress, kvjax = (found[side]["positions"][number] for side in SIDES)
                groups, label = ((1, "of_model"), (layers, "of_layer"))[name]
                pairs = {label: (kvpress, best_scores(ours, groups, count_kept(kvpress) // groups))}
                if name:
                    whole = found["kvpress"]["positions"][number - 1]
                    pairs["by_head"] = whole, kvjax
                else:
                    each = layers * heads
                    pairs["of_head"] = best_scores(theirs, each, len(kvjax[0][0])), kvjax
                for pair, sets in pairs.items():
                    compared = compare_positions(*sets, found["kvpress"]["scores"])
                    figures[share].setdefault(pair, []).append(compared | {"held": held(*sets)})
        pieces = self.instruction | {"ending": [], "piece": SHORT_PIECE}
        in_pieces = []
        for side, worker in workers.items():
            texts = [written(COMPARED[side][0], SHARES[0])]
            document = self.cases[0].context
            answer = worker.ask("repeated", methods=texts, document=document, instruction=pieces)
            in_pieces.append(answer["scores"])
            worker.close()
        most = {name: max(each[name] for each in scores) for name in scores[0]}
        self.rows.add(part="scores", documents=len(scores), piece=PIECE, **most)
        for share in SHARES:
            count = round(share * np.size(in_pieces[0]))
            both = held(*(best_scores(side, 1, count) for side in in_pieces))
            self.rows.add(
                part="scores", documents=1, piece=SHORT_PIECE, share=share, held=both,
                **relative_differences(*in_pieces),
            )  # fmt: skip
        for share, pairs in figures.items():
            for pair, each in pairs.items():
                row = joined(each)
                self.rows.add(part="positions", share=share, sets=pair, **row)

    def answers(self, tokenizer: Any) -> None:
        """Right answers and bytes, case by case."""
        missing = [n for n in range(len(self.cases)) if not self.rows.has(part="answers", case=n)]
        if not missing:
            return
        from kvjax.evaluation import is_right

        methods: dict[str, list[tuple[str, float | None, str]]]
        methods = {side: [("full", None, FULL[side])] for side in SIDES}
        for side, named in KVZIP.items():
            for name, text in named.items():
                methods[side] += [(name, share, written(text, share)) for share in SHARES]
        workers = {side: self.start(side, FULL[side]) for side in SIDES}
        for number in missing:
            case, row = self.cases[number], {}
            for side, worker in workers.items():
                found = worker.ask(
                    "answers", methods=[text for _, _, text in methods[side]],
                    document=case.context, question=case.question, new=ANSWER_TOKENS,
                    instruction=self.instruction,
                )  # fmt: skip
                row[side] = [
                    {
                        "method": name, "share": share, "text": text,
                        "right": is_right(tokenizer.decode(each["tokens"]), case.answers[0]),
                        "cache_bytes": each["cache_bytes"],
                    }
                    for (name, share, text), each in zip(methods[side], found, strict=True)
                ]  # fmt: skip
            self.rows.add(part="answers", case=number, **row)
        for worker in workers.values():
            worker.close()

    def losses(self, documents: list) -> None:
        """Losses of right answers about passages, passage by passage."""
        methods = {side: [FULL[side]] for side in SIDES}
        methods["kvjax"].append(NOTHING)
        for side, named in LOSSES.items():
            methods[side] += [written(text, share) for text in named.values() for share in SHARES]
        missing = [x for x in documents if not self.rows.has(part="losses", passage=x.number)]
        workers = {side: self.start(side, FULL[side]) for side in SIDES if missing}
        for document in missing:
            row = {
                side: worker.ask(
                    "losses", methods=methods[side], document=document.tokens,
                    questions=document.questions, instruction=self.instruction,
                    answers=[tokens for tokens, _ in document.answers],
                )
                for side, worker in workers.items()
            }  # fmt: skip
            losses = {
                side: dict(zip(methods[side], of_side, strict=True))
                for side, of_side in row.items()
            }
            self.rows.add(part="losses", passage=document.number, **losses)
        for worker in workers.values():
            worker.close()
        self.recovery()

    def recovery(self) -> None:
        """Adds what each side recovers of the losses, between kvjax's full cache and its sinks."""
        from kvjax.evaluation import Estimate

        if self.rows.has(part="recovery"):
            return
        passages = [row for row in self.rows.rows if row["part"] == "losses"]
        everything, nothing = FULL["kvjax"], NOTHING
        groups = [n for n, row in enumerate(passages) for _ in row["kvjax"][nothing]]

        def all_losses(side: str, text: str) -> np.ndarray:
            return np.concatenate([row[side][text] for row in passages])

        worst = all_losses("kvjax", nothing)
        worth = worst - all_losses("kvjax", everything)
        for side, named in LOSSES.items():
            for name, text in {"full": FULL[side], **named}.items():
                for share in [None] if name == "full" else SHARES:
                    gained = worst - all_losses(side, written(text, share))
                    estimate = Estimate.ratio(gained.tolist(), worth.tolist(), groups)
                    self.rows.add(
                        part="recovery",
                        side=side,
                        method=name,
                        share=share,
                        passages=len(passages),
                        **estimate._asdict(),
                    )

    def times(self, rounds: int) -> None:
        """Seconds, memory and bytes."""
        case = self.cases[0]
        request = {
            "document": case.context, "question": case.question, "new": ANSWER_TOKENS,
            "instruction": self.instruction,
        }  # fmt: skip
        for name, share in TIMED:
            if self.rows.has(part="times", method=name, share=share):
                continue
            texts = list(FULL.values())
            if share is not None:
                both = KVZIP["kvpress"]["KVzipPress"], KVZIP["kvjax"][name]
                texts = [written(text, share) for text in both]
            workers = [self.start(side, text) for side, text in zip(SIDES, texts, strict=True)]
            for worker in workers:  # compiles
                worker.ask("ask", **request)
            calls = [[worker.ask("ask", **request) for worker in workers] for _ in range(rounds)]
            for worker in workers:
                worker.close()
            row: dict[str, Any] = {}
            for number, side in enumerate(SIDES):
                worker = self.start(side, texts[number])
                worker.ask("ask", **request)
                least = {
                    key: round(min(call[number][key] for call in calls), 5)
                    for key in ("read_s", "question_s", "per_token_s", "cache_bytes")
                }
                row[side] = {"text": texts[number], **least, **worker.ask("memory")}
                worker.close()
            self.rows.add(part="times", method=name, share=share, **row)


def main() -> None:
    """Measures what the file of results does not have yet, or is one side."""
    if sys.argv[1:2] == ["side"]:
        answer_requests()
        return
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("comparison", choices=("methods", "kvzip"))
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--text", required=True, help="UTF-8 file, longer than the longest prompt")
    parser.add_argument("--sample", help="for kvzip: text from which profiles are made")
    parser.add_argument("--data", help="for losses: file of questions in SQuAD's format")
    parser.add_argument("--passages", type=int, default=10, help="for losses")
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of prompts, at least 1024")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="for kvzip")
    parser.add_argument("--cases", type=int, help="needles at the shortest length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--environment", type=Path, help="folder of kvpress's environment")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    kvzip = args.comparison == "kvzip"
    if kvzip and args.sample is None:
        parser.error("kvzip needs --sample")
    if kvzip and "losses" in args.parts and args.data is None:
        parser.error("losses need --data")
    args.tokens = args.tokens or ([1024] if kvzip else [1024, 4096])
    args.cases = (12 if kvzip else 15) if args.cases is None else args.cases

    from common import Rows
    from kept_answers import passages

    from kvjax.evaluation import Haystack
    from kvjax.models import load_tokenizer

    tokenizer, text = load_tokenizer(args.model), Path(args.text).read_text()
    ids, haystack, shortest = tokenizer(text).input_ids, Haystack(tokenizer, text), min(args.tokens)
    if len(ids) < max(args.tokens):
        parser.error(f"--text must have {max(args.tokens)} tokens, got {len(ids)}")
    cases = [
        haystack.case("needle", length=shortest, depth=(seed + 0.5) / args.cases, seed=seed)
        for seed in range(args.cases)
    ]
    settings: dict[str, Any] = {"model": Path(args.model).name, "text": Path(args.text).name}
    if kvzip:
        settings |= {"sample": Path(args.sample).name, "tokens": shortest}
    settings |= {
        "dtype": "float32", "threads": args.threads, "rounds": args.rounds,
        "new_tokens": ANSWER_TOKENS if kvzip else NEW_TOKENS,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        start = make_start(args, args.environment or Path(temporary))
        settings["versions"] = {}
        for side, method in FULL.items():
            process = start(side, method)
            settings["versions"][side] = process.ask("versions")
            process.close()
        benchmark = "vs_kvpress_kvzip" if kvzip else "vs_kvpress"
        rows = Rows(args.out, {"benchmark": benchmark, "settings": settings})
        if kvzip:
            comparison = KVzipComparison(start, cases, instruction_of(tokenizer), rows)
            make_profiles(args)
            if "positions" in args.parts:
                comparison.compare()
            if "answers" in args.parts:
                comparison.answers(tokenizer)
            if "losses" in args.parts:
                comparison.losses(list(passages(tokenizer, args.data, PASSAGE, args.passages)))
            if "times" in args.parts:
                comparison.times(args.rounds)
            return
        for tokens, method in itertools.product(args.tokens, args.methods):
            share = None if method == "full" else SHARE
            if rows.has(method=method, share=share, tokens=tokens):
                continue
            methods = expressions(method, tokens)  # pyright: ignore[reportArgumentType]  # a text
            row = measure(start, methods, ids[:tokens], args.rounds)
            if cases and tokens == shortest:
                row["answers"] = needle_answers(start, methods, cases, tokenizer)
            rows.add(method=method, share=share, tokens=tokens, texts=methods, **row)


def make_start(args: argparse.Namespace, folder: Path) -> Start:
    """Holds what starts a side; from here on, `folder` is the working directory.

    Names of profiles stand in the methods of both sides, and so have no folder.
    """
    for name in ("model", "text", "sample", "data", "out"):
        if getattr(args, name) is not None:
            setattr(args, name, os.path.abspath(getattr(args, name)))
    script, folder = Path(__file__).absolute(), folder.absolute()
    python = {"kvpress": make_environment(folder), "kvjax": sys.executable}
    os.chdir(folder)
    options = ["--model", args.model, "--threads", str(args.threads)]

    def start(side: str, method: str) -> Worker:
        command = [python[side], script, "side", side, *options, "--method", method]
        return Worker(command, folder / "compiled")

    return start


def make_profiles(args: argparse.Namespace) -> None:
    """Makes the profiles of heads that are not in the working directory yet."""
    for file, method in PROFILES.items():
        if not Path(file).exists():
            words = ["--method", method, "--text", args.sample, "--model", args.model]
            command = [sys.executable, "-m", "kvjax.cli.main", "profile", *words, "--out", file]
            subprocess.run(command, check=True)


def instruction_of(tokenizer: Any) -> dict[str, Any]:
    """The instruction that both sides repeat a document with, as `Kvpress` needs it."""
    from kvjax.transforms.kvzip.repetition import FIRST, FURTHER

    ending, first, further = (
        tokenizer.encode(text, add_special_tokens=False) for text in ("\n\n", FIRST, FURTHER)
    )
    if first[-len(ending) :] != ending:
        raise SystemExit(f"the instruction must end in the tokens {ending}, got {first}")
    first = first[: -len(ending)]
    return {"first": first, "further": further, "ending": ending, "piece": PIECE}


if __name__ == "__main__":
    main()
