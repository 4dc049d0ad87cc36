"""One side of `vs_kvpress.py`, a process of its own: a framework, the model and a method.

    python vs_kvpress_worker.py kvpress --model FOLDER --threads 2 --method "SnapKVPress(0.8)"

Each line of its input is a request, answered by a line of JSON: `{"do": "generate", "prompt": [1,
2], "new": 8}`, `{"do": "kept", "prompt": [1, 2]}`, `{"do": "memory"}` or `{"do": "versions"}`. It
runs in the environment of kvpress too, and so it imports neither framework before it is told which.
"""

from __future__ import annotations

import argparse
import contextlib
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
        self._press = eval(method, {**vars(kvpress)})
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
            for position in range(at, at + new - 1):
                where = self._torch.tensor([[position]])
                result = self._model(
                    input_ids=token[None, None], past_key_values=cache, position_ids=where
                )
                token = result.logits[0, -1].argmax()
                tokens.append(token.item())
            rest = time.perf_counter() - start - first
        return {"tokens": tokens, "first_s": first, "per_token_s": rest / max(new - 1, 1)}

    def kept(self, prompt: list[int]) -> dict[str, object]:
        """Kept positions of each layer and KV head, and the scores that the press gave to all.

        Every press takes the same rows of keys and values: given positions for values, it returns
        those that it keeps.
        """
        positions, scores, press = [], [], self._press
        compress = press.compress
        scorer = getattr(press, "press", press)

        def recording(module, hidden_states, keys, values, attentions, kwargs):
            given = module, hidden_states, keys
            of_rows = self._torch.arange(keys.shape[2], dtype=values.dtype)
            kept = compress(*given, of_rows[:, None].expand_as(values), attentions, kwargs)[1]
            positions.append(kept[0, :, :, 0].int().sort().values.tolist())
            scores.append(scorer.score(*given, values, attentions, kwargs)[0].tolist())
            return compress(*given, values, attentions, kwargs)

        press.compress = recording
        with self._torch.inference_mode():
            self._read(prompt)
        press.compress = compress
        return {"positions": positions, "scores": scores}


class Kvjax:
    """kvjax as its users call it."""

    packages = ("jax", "jaxlib", "flax")

    def __init__(self, folder: str, threads: int, method: str) -> None:
        import jax.numpy as jnp

        import kvjax
        from kvjax.models import from_pretrained

        self._kvjax = kvjax
        # Names of kvjax are imported when they are asked for.
        names = {name: getattr(kvjax, name) for name in dir(kvjax)}
        self._transform = eval(method, names)
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
            answer = {"generate": side.generate, "kept": side.kept}[what](**request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
