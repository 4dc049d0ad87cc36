"""One side of `vs_kvpress.py` and of `vs_kvpress_kvzip.py`, a process of its own.

It has a framework, the model and a method.

    python vs_kvpress_worker.py kvpress --model FOLDER --threads 2 --method "SnapKVPress(0.8)"

Each line of its input is a request, answered by a line of JSON: `{"do": "generate", "prompt": [1,
2], "new": 8}`, `{"do": "kept", "prompt": [1, 2]}`, `{"do": "memory"}` or `{"do": "versions"}`. For
KVzip, `ask`, `answers` and `repeated` take a document, which is compressed before the question
comes, and the instruction to repeat it. The process runs in the environment of kvpress too, and so
it imports neither framework before it is told which.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.metadata
import json
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any


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
            for block, indices in zip(self._model.model.layers, each, strict=True):
                block.self_attn.masked_key_indices = indices
            # A copy: keys of evicted tokens are overwritten.
            with self._torch.inference_mode():
                answers.append(self._answer(copy.deepcopy(cache), len(document), question, new))
        return answers

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
        start = time.perf_counter()
        context = self._kvjax.read(
            self._model, [document], transform=transform, repetition=self._repetition(instruction),
            max_prompt=len(document) + len(question), max_new=new,
        )  # fmt: skip
        jax.block_until_ready(context.caches)
        read, start = time.perf_counter() - start, time.perf_counter()
        return {"read_s": read} | self._answer(context, question, new, start)

    def _repetition(self, instruction: dict[str, Any]) -> Any:
        first = (*instruction["first"], *instruction["ending"])
        further, piece = tuple(instruction["further"]), instruction["piece"]
        return self._kvjax.Repetition(first, further, piece)

    def _answer(self, context: Any, question: list[int], new: int, start: float) -> dict:
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
            self._kvjax.calibrated(eval(each, self._names), self._model, ()) for each in methods
        ]
        return transforms, ReadOnce(
            self._model, [document], transforms, max_prompt=max_prompt, max_new=new,
            repetition=self._repetition(instruction),
        )  # fmt: skip

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
        readings = once._observed.caches  # slots are in the order of tokens
        scores = [np.asarray(reading.repetition[0, :, : len(document)]) for reading in readings]
        return {"positions": positions, "scores": np.stack(scores).tolist()}


SIDES = {"kvpress": Kvpress, "kvjax": Kvjax}


def peak_bytes() -> int:
    """The greatest resident memory since the model was loaded."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1))


def main() -> None:
    """Answers requests until there are no more."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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


if __name__ == "__main__":
    main()
