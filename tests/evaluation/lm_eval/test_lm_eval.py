"""The model of lm-evaluation-harness: what its numbers and texts are, and the harness's command."""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvjax
from kvjax.evaluation.tasks import Frame, ruler
from kvjax.models import demo, from_pretrained, load_tokenizer
from tests.support.hf_models import Stepper
from tests.support.tolerances import close

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'kvjax[lm-eval]'")

from lm_eval.api.instance import Instance

import kvjax.lm_eval as lm_eval_model
from kvjax.lm_eval import KVJaxLM

HERE, DEMO = Path(__file__).parent, str(demo.directory())
CONTEXT, OTHER = "def add(a, b):\n    return", "class Point:\n    def"
PAIRS = [
    (CONTEXT, " a + b"), (OTHER, " __init__(self, x, y):\n        self.x = x"), (CONTEXT, " a"),
    ("", "import os"), (CONTEXT, " b - a\n\n"),
]  # fmt: skip


@functools.cache
def model(transform: str = "full", budget: float | None = None, **options: Any) -> KVJaxLM:
    return KVJaxLM(DEMO, transform, budget, **options)


def asked(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, each, 0) for each in arguments]


def scores(lm: KVJaxLM, *pairs: tuple[str, str]) -> list[tuple[float, bool]]:
    return lm.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)


def texts(lm: KVJaxLM, *pairs: tuple[str, dict]) -> list[str]:
    return lm.generate_until(asked("generate_until", *pairs), disable_tqdm=True)


def one_pass(tokens: list[int]) -> np.ndarray:
    """Log-probabilities of the next token at each place, in one pass without a method, float64."""
    step = Stepper(from_pretrained(DEMO), 1, len(tokens), 1)
    logits = step([tokens], np.arange(len(tokens))[None], "prompt")[0].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def expected(context: list[int], continuation: list[int]) -> tuple[float, bool]:
    found = one_pass([*context, *continuation])[len(context) - 1 : -1]
    likely = found[np.arange(len(continuation)), continuation]
    return likely.sum(), (found.argmax(-1) == continuation).all()


def test_log_likelihoods_are_those_of_one_pass():
    lm = model(batch_size=2)
    for (context, continuation), (score, greedy) in zip(PAIRS, scores(lm, *PAIRS), strict=True):
        before = lm.tokenizer(context).input_ids  # with the token that begins a text
        after = lm.tokenizer(continuation, add_special_tokens=False).input_ids
        wanted, greedy_one = expected(before, after)
        close(score, wanted)
        assert greedy is bool(greedy_one)


def test_what_a_greedy_choice_writes_is_greedy():
    written = kvjax.generate(
        model().model, [model().tok_encode(CONTEXT)], max_new_tokens=4, end_tokens=()
    ).tokens[0]
    requests = [(("", ""), model().tok_encode(CONTEXT), x) for x in (written, [*written, 0])]
    greedy = [x for _, x in model()._loglikelihood_tokens(requests, disable_tqdm=True)]
    assert greedy == [True, False]


def test_a_shared_context_is_read_once(monkeypatch):
    read, contexts = lm_eval_model.read_awake, []

    def counted(model, rows, **options):
        contexts.extend(rows)
        return read(model, rows, **options)

    monkeypatch.setattr(lm_eval_model, "read_awake", counted)
    scores(model(batch_size=2), *PAIRS)
    assert len(contexts) == len(set(contexts)) == 3


def test_a_method_compresses_the_context_and_batches_change_nothing():
    """The first token comes after the whole context, and the method takes away from later ones."""
    full, tokens = model(batch_size=2), model().tok_encode
    long, after = tokens("def add(a, b):\n" * 20), tokens(" return a + b", add_special_tokens=False)
    requests = [(None, long, after[:1]), (None, long, after), (None, tokens(OTHER), after)]

    def found(lm: KVJaxLM) -> list[float]:
        return [score for score, _ in lm._loglikelihood_tokens(requests, disable_tqdm=True)]

    alone, together = (found(model("streaming_llm", 8, batch_size=n)) for n in (1, 2))
    close(alone, together)
    apart = np.abs(np.subtract(alone, found(full)))
    assert apart[0] < 1e-4 and apart[1] > 0.1


def test_a_rolling_text_is_scored_window_by_window():
    """Each token is predicted once, in windows of `max_length` tokens."""
    lm, text = model(max_length=16, batch_size=2), "import os\nimport sys\n\nprint(os.name)\n" * 2
    tokens = lm.tok_encode(text)
    assert len(tokens) > 32
    total, start = 0.0, 0
    while start < len(tokens):
        end = min(start + 16, len(tokens))
        begin = max(end - 17, 0)
        row = [lm.prefix_token_id, *tokens][begin : end + 1] if not start else tokens[begin:end]
        total += expected(row[: len(row) - (end - start)], row[len(row) - (end - start) :])[0]
        start = end
    found = lm.loglikelihood_rolling(asked("rolling", (text,), ("x",)), disable_tqdm=True)
    close(found[0], total, "accumulated")
    assert len(found) == 2 and found[1] < 0


def test_texts_are_those_of_generate_up_to_a_stop():
    lm = model(batch_size=2)
    until, most = {"until": ["\n"], "max_gen_toks": 12}, {"max_gen_toks": 5}
    requests = [(OTHER, until), (CONTEXT, until), (CONTEXT, most)]
    found = texts(lm, *requests)
    for (context, settings), text in zip(requests, found, strict=True):
        tokens = lm.tok_encode(context)
        result = kvjax.generate(
            lm.model, [tokens], max_new_tokens=settings["max_gen_toks"], end_tokens=[1]
        )
        whole = lm.tokenizer.decode(result.tokens[0])
        assert text == (whole.split("\n")[0] if settings is until else whole)


def test_draws_differ_and_follow_the_seed_of_numpy():
    request = (CONTEXT, {"do_sample": True, "temperature": 2.0, "max_gen_toks": 8})

    def drawn() -> list[str]:
        np.random.seed(3)
        return texts(model(), request, request)

    first = drawn()
    assert first == drawn() and first[0] != first[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"num_beams": 4}, "kvjax has no num_beams = 4"),
     ({"max_gen_toks": 64}, "max_gen_toks must leave room for a context in 64 tokens, got 64")],
)  # fmt: skip
def test_what_a_task_may_not_ask_for(settings, message):
    with pytest.raises(ValueError, match=message):
        texts(model(max_length=64), (CONTEXT, settings))


def test_a_long_context_loses_its_first_tokens(caplog):
    lm, pair = model(max_length=16), ("x" + "\n" * 3 + CONTEXT * 3, " a + b")
    tokens = lm.tok_encode("".join(pair))
    with caplog.at_level(logging.WARNING):
        ((score, _),) = scores(lm, pair)
    count = len(lm.tok_encode(pair[1], add_special_tokens=False))
    close(score, expected(tokens[-17:-count], tokens[-count:])[0])
    assert "tokens of a context are cut" in caplog.text
    with pytest.raises(ValueError, match="at most max_length = 16 tokens, got 40"):
        lm._loglikelihood_tokens([(None, [1], [5] * 40)], disable_tqdm=True)


def test_a_chat_template_and_its_first_token():
    lm = KVJaxLM(DEMO)
    lm.tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    message = [{"role": "user", "content": "Hello"}]
    rendered = lm.apply_chat_template(message)
    assert rendered.endswith("[Hello]>") and rendered.startswith(lm.tokenizer.bos_token)
    assert lm.tok_encode(rendered).count(lm.tokenizer.bos_token_id) == 1
    assert lm.chat_template(True) == lm.tokenizer.chat_template
    assert "/" not in lm.tokenizer_name


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"transform": "snapkv"}, ValueError, "budget"),
        ({"transform": "snapkw", "budget": 0.2}, ValueError, "snapkw"),
        ({"batch_size": "auto"}, TypeError, "batch_size must be an int, got 'auto'"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"max_length": 10**6}, ValueError, "at most the model's 8448 positions, got 1000000"),
    ],
)
def test_what_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        KVJaxLM(DEMO, **options)


def run(folder: Path, *options: str) -> dict[str, dict]:
    """Runs the harness's command in a folder; returns the results of each task."""
    cache = {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "kvjax.lm_eval", "--model", "kvjax", "--include_path", str(HERE),
         "--output_path", "out", *options],
        cwd=folder, env={**os.environ, **cache}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "out").rglob("results_*.json")
    found = json.loads(path.read_text())["results"]
    path.unlink()
    return found


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_the_command_on_wikitext(tmp_path, data_dir):
    """The harness reports of local tasks what the model class computes."""
    text = (data_dir / "text" / "wikitext2.test.txt").read_text(encoding="utf-8")
    pieces = [text[start : start + 300] for start in (1000, 9000)]
    choices = [{"context": text[start : start + 400], "right": 0,
                "choices": [text[start + 400 : start + 430], text[start : start + 30]]}
               for start in (2000, 12000)]  # fmt: skip
    write_lines(tmp_path / "pieces.jsonl", [{"text": piece} for piece in pieces])
    write_lines(tmp_path / "choices.jsonl", choices)
    found = run(
        tmp_path, "--model_args", f"pretrained={DEMO},transform=chain(h2o, quantize),budget=0.5",
        "--tasks", "kvjax_pieces,kvjax_choices", "--batch_size", "2",
    )  # fmt: skip
    lm = model("chain(h2o, quantize)", 0.5, batch_size=2)
    total = sum(lm.loglikelihood_rolling(asked("rolling", *((x,) for x in pieces)), True))
    size = sum(len(piece.encode()) for piece in pieces)
    close(found["kvjax_pieces"]["byte_perplexity,none"], np.exp(-total / size))
    better = []
    for case in choices:
        (right, _), (wrong, _) = scores(lm, *((case["context"], x) for x in case["choices"]))
        better.append(right > wrong)
    assert found["kvjax_choices"]["acc,none"] == np.mean(better)


@pytest.mark.slow
def test_the_command_finds_needles(tmp_path, data_dir, smollm2):
    """SmolLM2 finds needles with the full cache, and with a window those that are in it."""
    text = (data_dir / "text" / "wikitext2.test.txt").read_text("utf-8")
    tokenizer = load_tokenizer(smollm2)
    task = ruler(
        "niah_single_2", tokenizer, text, length=512, cases=4, seed=0,
        frame=Frame.of(tokenizer, chat=False),
    )  # fmt: skip
    rows = [{"prompt": tokenizer.decode(x.prompt), "answer": x.answers[0]} for x in task.cases]
    write_lines(tmp_path / "needles.jsonl", rows)
    results = [
        run(tmp_path, "--tasks", "kvjax_needles", "--batch_size", "4",
            "--model_args", f"pretrained={smollm2},{method}")["kvjax_needles"]
        for method in ("transform=full", "transform=streaming_llm,budget=64")
    ]  # fmt: skip
    near = [x.answers[0] in tokenizer.decode(x.prompt[-60:]) for x in task.cases]  # and four sinks
    assert [x["exact_match,number"] for x in results] == [1.0, np.mean(near)]
    assert np.mean(near) < 1


@pytest.mark.slow
def test_the_harness_own_model_says_the_same(smollm2):
    """SmolLM2 with the full cache: log-likelihoods, greedy answers and texts.

    The harness computes in float64, since its rounding in float32 is the larger one.
    """
    pytest.importorskip("accelerate", reason="the harness's hf needs torch and accelerate")
    from lm_eval.models.huggingface import HFLM

    settings = {"batch_size": 2, "max_length": 64}
    ours = KVJaxLM(str(smollm2), dtype="float32", **settings)
    hf = HFLM(str(smollm2), device="cpu", dtype="float64", **settings)
    pairs = [("The capital of France is", x) for x in (" Paris", " a city", " Berlin.")]
    pairs += [("", "Once upon a time"), ("One two three", " four five six")]
    until = {"until": ["\n"], "max_gen_toks": 16, "do_sample": False}
    rolling = asked("rolling", ("The ship sailed at dawn. " * 20,))
    prompts = [("Once upon a time", until), ("The capital of France is", until)]
    here, there = scores(ours, *pairs), scores(hf, *pairs)
    np.testing.assert_allclose(*([x for x, _ in side] for side in (here, there)), atol=1e-4)
    assert [x for _, x in here] == [x for _, x in there]
    totals = [x.loglikelihood_rolling(rolling, disable_tqdm=True) for x in (ours, hf)]
    np.testing.assert_allclose(*totals, atol=1e-4)
    assert texts(ours, *prompts) == texts(hf, *prompts)
