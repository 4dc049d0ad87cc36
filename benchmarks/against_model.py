"""Generation with a whole model in this checkout against another one, and PyTorch beside both.

    python benchmarks/against_model.py --torch --other ../before --model FOLDER --text essays.txt \\
        --out benchmarks/results/against_smollm2.json

A process of each checkout loads the model, `--load-rounds` times anew: the row `loading` has the
seconds, and the most memory beyond what the process had before. For each method and length of
prompt, both compile first: `--compile-rounds` times from nothing, one process after the other. Then
they generate the same tokens from the same prompt in turns, so that drift of the machine hits both
alike. Profiles of heads are made before, of the text's end. `ratio` divides the median of this
checkout by that of the other one; below 1 this checkout is faster. `quarters` are the quartiles of
the ratios of single rounds. `same_tokens` counts how many tokens both generated alike before the
first difference.

PyTorch (`--torch`, where transformers and torch are installed) reads the same weights with
`scaled_dot_product_attention` and the full cache. The floors are the time to read the weights and
the cache once at the machine's bandwidth, and the time of a prompt's matrix products at its best
rate. Rows are written as they come, so that a run that was stopped goes on.

The other checkout needs a `.venv` of its own, with its own kvjax.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

METHODS = {
    "full": "Full()",
    "snapkv": "SnapKV(0.2)",
    "h2o": "H2O(0.2)",
    "pyramidkv": "PyramidKV(0.2)",
    "clusterkv": "ClusterKV(1024)",
    "quest": "Quest(1024, spread=1.0)",
    "spindlekv": "SpindleKV(0.5)",
    "quantize": "Quantize(8)",
    "by_head(kvzip)": "ByHead(KVzip(0.2, room=64))",
}

SAMPLE_TOKENS = 1024  # the end of the text, of which profiles of heads are made


def work(checkout: str, model_path: str) -> None:
    """Answers each request, a line of JSON, by what one call of `generate` took."""
    import jax
    from flax import nnx

    import kvjax
    from kvjax.evaluation.memory import resident
    from kvjax.models import from_pretrained

    if not Path(kvjax.__file__).is_relative_to(checkout):
        raise SystemExit(f"{sys.executable} imports {kvjax.__file__}, which is not in {checkout}")
    before, start = resident("VmRSS"), time.perf_counter()
    model = from_pretrained(model_path)
    jax.block_until_ready(nnx.state(model))
    loading = {"seconds": time.perf_counter() - start, "peak": resident("VmHWM") - before}
    print(json.dumps(loading), flush=True)
    transforms: dict[str, kvjax.KVTransform] = {}
    for line in sys.stdin:
        request = json.loads(line)
        method = request["method"]
        if method not in transforms:
            # Names of kvjax are imported when they are asked for.
            transform = eval(METHODS[method], {name: getattr(kvjax, name) for name in dir(kvjax)})
            transforms[method] = kvjax.calibrated(transform, model, [request["sample"]])
        if request["from_nothing"]:
            jax.clear_caches()
        result = kvjax.generate(
            model, [request["prompt"]], transform=transforms[method],
            max_new_tokens=request["new"], end_tokens=(),
        )  # fmt: skip
        answer = {
            "first_token": result.ttft_s, "step": result.tpot_s, "compile": result.compile_s,
            "tokens": [int(token) for token in result.tokens[0]],
        }  # fmt: skip
        print(json.dumps(answer), flush=True)


def work_in_torch(model_path: str) -> None:
    """Answers the same requests by PyTorch; a GGUF file is dequantised by transformers."""
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    path, options = Path(model_path), {}
    if path.is_file():
        path, options = path.parent, {"gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa", **options
    ).eval()
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        cache, tokens = transformers.DynamicCache(), []
        inputs = torch.tensor([request["prompt"]])
        times = [time.perf_counter()]
        with torch.inference_mode():
            for _ in range(request["new"]):
                logits = model(input_ids=inputs, past_key_values=cache, logits_to_keep=1).logits
                inputs = logits[:, -1].argmax(-1, keepdim=True)
                tokens.append(int(inputs))
                times.append(time.perf_counter())
        step = (times[-1] - times[1]) / (request["new"] - 1)
        answer = {"first_token": times[1] - times[0], "step": step, "compile": 0.0}
        print(json.dumps({**answer, "tokens": tokens}), flush=True)


class Worker:
    """A process of a checkout, or of PyTorch; `loading` is what the model took."""

    def __init__(self, python: Path | str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [str(python), __file__, *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.loading = self._answer()

    def ask(self, **request: object) -> dict[str, Any]:
        """Sends a request and waits for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("a process ended, see its message above")
        return json.loads(answer)


def ratio(answers: dict[str, list[dict[str, Any]]], figure: str) -> dict[str, Any]:
    """Returns the medians of a figure in milliseconds, their ratio and its quartiles."""
    values = {side: [answer[figure] for answer in each] for side, each in answers.items()}
    medians = {side: statistics.median(each) for side, each in values.items()}
    ratios = [this / other for this, other in zip(values["this"], values["other"], strict=True)]
    return {
        "milliseconds": {side: milliseconds(median) for side, median in medians.items()},
        "ratio": round(medians["this"] / medians["other"], 3),
        "quarters": [round(x, 3) for x in statistics.quantiles(ratios, n=4)],
    }


def milliseconds(seconds: float) -> float:
    """Rounds a time."""
    return round(1e3 * seconds, 2)


def alike(this: list[int], other: list[int]) -> int:
    """Counts the tokens before the first difference."""
    pairs = list(zip(this, other, strict=True))
    return next((i for i, (mine, its) in enumerate(pairs) if mine != its), len(pairs))


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--other", type=Path, help="a checkout with a .venv of its own")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model", required=True, help="a folder or a GGUF file")
    parser.add_argument("--text", type=Path, help="the prompts are its first tokens")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["full", "snapkv"])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[64, 2048])
    parser.add_argument("--new", type=int, default=33, help="new tokens of a call")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile-rounds", type=int, default=3)
    parser.add_argument("--load-rounds", type=int, default=3, help="how often both load the model")
    parser.add_argument("--torch", action="store_true", help="run PyTorch beside them")
    parser.add_argument("--out", required=False)
    args = parser.parse_args()
    if args.worker == "torch":
        return work_in_torch(args.model)
    if args.worker is not None:
        return work(args.worker, args.model)
    if args.other is None or args.text is None or args.out is None:
        parser.error("--other, --text and --out are needed")

    # Not at the top: they import kvjax, which in a worker is the other checkout's.
    import jax
    from common import Rows
    from flax import nnx

    from kvjax.evaluation.speed.floors import prompt_flops
    from kvjax.evaluation.speed.machine import measure_machine
    from kvjax.models import abstract_decoder, load_tokenizer, read_config

    here, other = Path(__file__).resolve().parent.parent, args.other.resolve()
    commit = ["git", "-C", str(other), "rev-parse", "--short", "HEAD"]
    about = {
        "benchmark": "against_model",
        "other": subprocess.run(commit, capture_output=True, text=True).stdout.strip(),
        "model": Path(args.model).name,
        "new_tokens": args.new,
    }
    rows = Rows(args.out, about)
    config = read_config(args.model)
    model = abstract_decoder(config, dtype="float32")
    weight_bytes = sum(x.size * 4 for x in jax.tree.leaves(nnx.state(model)))
    ids = load_tokenizer(args.model)(args.text.read_text(), add_special_tokens=False).input_ids
    machines = []  # other work of the machine may disturb some measurements
    pythons = {"this": (sys.executable, here), "other": (other / ".venv/bin/python", other)}
    loading: dict[str, list[dict[str, Any]]] = {"this": [], "other": []}
    sides: dict[str, Worker] = {}
    for _ in range(args.load_rounds):
        for side, (python, checkout) in pythons.items():
            if side in sides:
                sides.pop(side).end()
            sides[side] = Worker(python, "--model", args.model, "--worker", checkout)
            loading[side].append(sides[side].loading)
    if not rows.has(method="loading"):
        peaks = {side: min(each["peak"] for each in loads) for side, loads in loading.items()}
        rows.add(method="loading", loading=ratio(loading, "seconds"), peak_bytes=peaks)
    if args.torch:
        sides["torch"] = Worker(sys.executable, "--model", args.model, "--worker", "torch")
    for method in args.methods:
        for tokens in args.prompt_tokens:
            if rows.has(method=method, prompt_tokens=tokens):
                continue
            request = {
                "method": method, "prompt": ids[:tokens], "new": args.new,
                "sample": ids[-SAMPLE_TOKENS:],
            }  # fmt: skip
            compiled: dict[str, list] = {"this": [], "other": []}
            timed: dict[str, list] = {side: [] for side in sides}
            if method != "full":
                timed.pop("torch", None)
            for number in range(args.compile_rounds):
                for side in sorted(compiled, reverse=bool(number % 2)):
                    compiled[side].append(sides[side].ask(**request, from_nothing=True))
            for number in range(args.rounds):
                for side in sorted(timed, reverse=bool(number % 2)):
                    timed[side].append(sides[side].ask(**request, from_nothing=False))
            machines.append(measure_machine("float32"))
            bandwidth = max(machine.bandwidth for machine in machines)
            products = max(machine.products for machine in machines)
            texts = {side: answers[0]["tokens"] for side, answers in timed.items()}
            cache_bytes = 8 * config.num_layers * config.kv_heads * config.head_dim * tokens
            rows.add(
                method=method, text=METHODS[method], prompt_tokens=tokens,
                step=ratio(timed, "step"), first_token=ratio(timed, "first_token"),
                compile=ratio(compiled, "compile"),
                same_tokens=alike(texts["this"], texts["other"]),
                floors_milliseconds={
                    "weights": milliseconds(weight_bytes / bandwidth),
                    "full_cache": milliseconds(cache_bytes / bandwidth),
                    "prompt_products": milliseconds(prompt_flops(model, tokens) / products),
                },
            )  # fmt: skip


if __name__ == "__main__":
    main()
