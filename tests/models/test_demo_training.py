"""How the bundled model is made: gradient, start, interruptions, the folders written."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.models import (
    from_pretrained,
    load_tokenizer,
    random_decoder,
)
from kvjax.models.demo.training import initial, recipe, train, train_step
from kvjax.models.demo.training.tasks import ANSWER, IGNORED, TEXT, Mix
from kvjax.models.rope_scaling import make_rope
from tests.references.attention import softmax_attention
from tests.support.demo_texts import TINY, texts, tiny_tokenizer
from tests.support.hf_models import Stepper, pytorch
from tests.support.tolerances import close

pytestmark = pytest.mark.lenient  # Optax and the training run under JAX's default promotion

STAGES = (
    recipe.Stage("1-short", 96, 2, 5, 1e-3, 2e-3, Mix(1.0, 0.0, 0.0, 1, 0)),
    recipe.Stage("2-long", 140, 2, 6, 2e-3, 1e-4, Mix(0.5, 0.0, 0.0, 2, 256)),
)


# The model with a gradient.


def prompt_logits(model, tokens, positions) -> np.ndarray:
    """Of the decoder with a full cache."""
    step = Stepper(model, *tokens.shape, 1)
    return step(tokens, positions, "prompt")


@functools.partial(jax.jit, static_argnums=0)
def forward(graph, state, tokens, positions):
    return train_step.forward(nnx.merge(graph, state), tokens, positions)


def qkv(tokens: int, batch: int = 2, queries: int = 4, heads: int = 2, dim: int = 8):
    rng = np.random.default_rng(tokens)
    shapes = (batch, queries, tokens, dim), *2 * ((batch, heads, tokens, dim),)
    return tuple(2.0 * rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def reference_attention(q, k, v) -> np.ndarray:
    """In float64; query head h looks at KV head h // G."""
    batch, heads, tokens, _ = k.shape
    at, group = np.arange(tokens), q.shape[1] // heads
    rows = [
        softmax_attention(q[b, h * group : (h + 1) * group], k[b, h], v[b, h], at, at)[0]
        for b, h in itertools.product(range(batch), range(heads))
    ]
    return np.stack(rows).reshape(q.shape)


@pytest.mark.parametrize("tokens", [1, 128, 129, 300])
@pytest.mark.fast_cases("128", "129")
def test_causal_attention(tokens):
    q, k, v = qkv(tokens)
    close(train_step.causal_attention(*map(jnp.asarray, (q, k, v))), reference_attention(q, k, v))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_gradient_of_causal_attention(name):
    """Along a random direction, against central differences of the reference in float64."""
    given = dict(zip("qkv", qkv(150, batch=1), strict=True))
    rng = np.random.default_rng(1)
    weights = rng.standard_normal(given["q"].shape)
    direction = rng.standard_normal(given[name].shape)

    def moved(step: float) -> float:
        changed = given | {name: given[name].astype(np.float64) + step * direction}
        return float((weights * reference_attention(**changed)).sum())

    def ours(x):
        changed = {**given, name: x}
        out = train_step.causal_attention(*(jnp.asarray(changed[key]) for key in "qkv"))
        return jnp.sum(out * jnp.asarray(weights, jnp.float32))

    gradient = np.asarray(jax.jit(jax.grad(ours))(given[name]), np.float64)
    expected = (moved(1e-5) - moved(-1e-5)) / 2e-5
    assert abs(expected) > 0.1
    assert (gradient * direction).sum() == pytest.approx(expected, rel=1e-4)


@functools.cache
def tiny_model():
    model = random_decoder(TINY, 4)
    initial.start_near_induction(model, 4)
    return model


@pytest.mark.slow
def test_forward_equals_the_decoder_with_a_full_cache():
    """Two blocks of queries; positions with gaps as in training."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(TINY.vocab_size, size=(2, 150))
    positions = np.stack([np.arange(150), np.sort(rng.choice(250, 150, replace=False))])
    expected = prompt_logits(tiny_model(), tokens, positions)
    logits = forward(*nnx.split(tiny_model()), jnp.asarray(tokens), jnp.asarray(positions))
    assert expected.std() > 0.3
    close(logits, expected)


def test_loss_is_answers_plus_half_of_the_text():
    graph, state = nnx.split(tiny_model())
    rng = np.random.default_rng(3)
    tokens = rng.integers(2, TINY.vocab_size, (2, 33))
    marks = rng.choice([IGNORED, TEXT, ANSWER], (2, 33), p=(0.3, 0.5, 0.2))
    marks[:, -1] = IGNORED
    positions = np.broadcast_to(np.arange(32), (2, 32))
    loss = jax.jit(lambda batch: train_step.loss(state, graph, batch))

    def batch(**changes):
        given = {"tokens": tokens, "marks": marks, "positions": positions, **changes}
        return {name: jnp.asarray(value, jnp.int32) for name, value in given.items()}

    total, metrics = loss(batch())
    logits = forward(graph, state, jnp.asarray(tokens[:, :-1]), jnp.asarray(positions))
    logits = np.asarray(logits, np.float64)
    targets, kinds = tokens[:, 1:], marks[:, 1:]
    chances = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -np.take_along_axis(chances, targets[..., None], -1)[..., 0]
    answers_, text = nll[kinds == ANSWER].mean(), nll[kinds == TEXT].mean()
    close(metrics.answers, answers_)
    close(metrics.text, text)
    close(total, answers_ + 0.5 * text)

    best = logits.argmax(-1)
    wrong = np.where(best == 5, 6, 5)
    hit = np.where(kinds == ANSWER, np.where(np.arange(32) % 2, best, wrong), wrong)
    # Targets are inputs too, so only the last one can be changed alone: a batch per column.
    assert float(metrics.accuracy) == (best == targets)[kinds == ANSWER].mean()
    changed = np.c_[tokens[:, :-1], hit[:, -1:]]
    assert float(loss(batch(tokens=changed))[0]) == float(total), "the last token is ignored"
    answered = np.c_[marks[:, :-1], [ANSWER, ANSWER]]
    right, wrong = (
        loss(batch(tokens=np.c_[tokens[:, :-1], last[:, -1:]], marks=answered))[1].accuracy
        for last in (best, wrong)
    )
    count = (kinds == ANSWER).sum() + 2
    assert float(right - wrong) == pytest.approx(2 / count)
    silent, metrics = loss(batch(marks=np.where(marks == ANSWER, IGNORED, marks)))
    assert metrics.answers == 0 and float(silent) == pytest.approx(0.5 * float(metrics.text))


def test_learning_rate_goes_through_the_stages():
    stages = recipe.STAGES
    edges = np.cumsum([0] + [stage.steps for stage in stages])
    rates = np.asarray(jax.vmap(recipe.learning_rate(stages))(jnp.arange(edges[-1] + 50)))
    np.testing.assert_allclose(rates[edges[:-1]], [stage.rate for stage in stages], rtol=1e-5)
    np.testing.assert_allclose(rates[200:300], stages[0].last_rate, rtol=1e-5)
    np.testing.assert_allclose(rates[edges[-1] :], stages[-1].last_rate, rtol=1e-4)
    steps = np.abs(np.diff(rates))
    jumps = {int(at) + 1 for at in np.flatnonzero(steps > 1.01 * (2e-3 - 1e-4) / 200)}
    restarts = {
        int(edge)
        for edge, before, after in zip(edges[1:], stages, stages[1:], strict=False)
        if before.last_rate != after.rate
    }
    assert jumps == restarts, "continuous but where a stage starts anew"
    for start, stage in zip(edges[1:], stages[1:], strict=False):
        middle = (stage.rate + stage.last_rate) / 2
        np.testing.assert_allclose(rates[start + stage.steps // 2], middle, rtol=1e-2)


# The start.


@functools.partial(jax.jit, static_argnums=0)
def two_layers(graph, state, tokens, positions):
    """Rotated queries and keys, and values, of the first two layers; one row."""
    model = nnx.merge(graph, state)
    x, rope, found = model.embed(tokens), make_rope(model.config.rope, positions), []
    for block in model.layers[:2]:
        q, k, v = block.attention.project(block.attention_norm(x))
        q, k = rope.rotate(q, positions), rope.rotate(k, positions)
        found.append((q[0], k[0], v[0]))
        x = x + block.attention.merge(train_step.causal_attention(q, k, v))
        x = x + block.mlp(block.mlp_norm(x))
    return found


def attention_of(model, tokens, positions) -> list[np.ndarray]:
    """Attention probabilities `[Q, T, T]` of the first two layers."""
    given = jnp.asarray(tokens)[None], jnp.asarray(positions)[None]
    order, result = np.arange(len(tokens)), []
    for q, k, v in two_layers(*nnx.split(model), *given):
        groups = zip(np.split(np.asarray(q), len(k)), k, v, strict=True)
        result.append(np.concatenate([softmax_attention(*g, order, order)[1] for g in groups]))
    return result


def test_start_is_near_an_induction_head():
    half = 40
    model, plain = random_decoder(recipe.CONFIG, 0), random_decoder(recipe.CONFIG, 0)
    initial.start_near_induction(model, 0)
    segment = np.random.default_rng(1).choice(np.arange(2, 2048), half, replace=False)
    tokens = np.r_[0, segment, segment]
    positions = 3000 + np.arange(len(tokens))
    layers, before = (attention_of(made, tokens, positions) for made in (model, plain))
    group = recipe.CONFIG.query_heads // recipe.CONFIG.kv_heads
    first = np.arange(recipe.CONFIG.query_heads) % group == 0

    at = np.arange(2, len(tokens))
    for back, looking in ((1, first), (2, ~first)):
        share = layers[0][:, at, at - back].mean(-1)
        assert share[looking].min() > 0.85, f"{back} back"
        assert share[~looking].max() < 0.3

    def standing(attention: np.ndarray) -> np.ndarray:
        """Share of earlier tokens with less attention than the one after a token's first time."""
        again = range(half + 1, 2 * half + 1)
        found = [attention[:, t, t - half + 1] for t in again]
        below = [
            (attention[:, t, : t + 1] < own[:, None]).mean(-1)
            for t, own in zip(again, found, strict=True)
        ]
        return np.mean(below, axis=0)

    # One half is chance; five standard deviations of a head's mean are about 0.2.
    found = standing(layers[1])
    by_token, by_the_one_before = found[first][::2], found[first][1::2]
    assert by_token.min() > 0.62 and by_token.mean() > 0.7
    assert by_the_one_before.mean() > 0.57
    assert found[~first].mean() < 0.55
    assert standing(before[1]).mean() < 0.55


def test_start_follows_the_seed():
    def weights(seed: int) -> list[np.ndarray]:
        model = random_decoder(TINY, 0)
        initial.start_near_induction(model, seed)
        return weights_of(model)

    one, same, other = weights(1), weights(1), weights(2)
    assert all((a == b).all() for a, b in zip(one, same, strict=True))
    assert any((a != b).any() for a, b in zip(one, other, strict=True))
    assert all(np.isfinite(leaf).all() and leaf.dtype == np.float32 for leaf in one)


# A whole training.


class Interrupted(Exception):
    pass


def interrupted_after(step: int):
    """A report that stops the training once it hears of this step."""

    def report(line: str) -> None:
        if f"step {step}:" in line:
            raise Interrupted

    return report


@pytest.fixture(scope="module")
def quick_training():
    """Frequent checkpoints, and code that is compiled once for all trainings."""
    step = jax.jit(
        train_step.train_step.__wrapped__,
        static_argnames=("graphdef", "optimizer"), donate_argnames="state",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train_step", step)
        patch.setattr(train, "make_optimizer", functools.cache(train.make_optimizer))
        known = tiny_tokenizer()
        patch.setattr(train, "make_tokenizer", lambda *given: known)
        patch.setattr(train, "_SAVE_EVERY", 4)
        patch.setattr(train, "_REPORT_EVERY", 1)
        yield


def run(out: Path, **changes):
    given = {"config": TINY, "stages": STAGES, "seed": 3, "report": lambda line: None, **changes}
    return train.train(out, given.pop("texts", texts()), **given)


@pytest.fixture(scope="module")
def trained(quick_training, tmp_path_factory):
    """A training without an interruption: its folder, the decoder, what it reported."""
    out, lines = tmp_path_factory.mktemp("training") / "new" / "folder", []
    return out, run(out, report=lines.append), lines


def weights_of(model) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]


def files(out: Path) -> dict[str, bytes]:
    kept = [*out.glob("stages/*/*"), *out.glob("model/*")]
    return {str(path.relative_to(out)): path.read_bytes() for path in kept}


def test_interrupted_trainings_end_with_the_same_weights(trained, tmp_path, monkeypatch):
    """Before the first checkpoint, within a stage, and between a stage's checkpoint and weights."""
    with pytest.raises(Interrupted):
        run(tmp_path, report=interrupted_after(2))

    def full_disk(*given):
        raise Interrupted

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(train, "save_pretrained", full_disk)
        run(tmp_path)
    assert not list(tmp_path.glob("stages/*"))
    with pytest.raises(Interrupted):
        run(tmp_path, report=interrupted_after(9))
    lines = []
    model = run(tmp_path, report=lines.append)
    assert lines[0] == "resumed at step 8"
    assert len(lines) == 1 + 3, "steps 8, 9 and 10"
    for ours, theirs in zip(weights_of(model), weights_of(trained[1]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert files(tmp_path) == files(trained[0])


def test_a_finished_training_is_not_trained_again(trained):
    before, lines = files(trained[0]), []
    run(trained[0], report=lines.append)
    assert lines == ["resumed at step 11"]
    assert files(trained[0]) == before


def test_training_learns_and_reports(trained):
    _, model, lines = trained
    assert len(lines) == 11 and lines[0].startswith("1-short step 0: answers ")
    assert lines[-1].startswith("2-long step 10: answers ")
    start = random_decoder(TINY, 3)
    initial.start_near_induction(start, 3)
    pairs = zip(weights_of(model), weights_of(start), strict=True)
    assert all((a != b).any() for a, b in pairs), "every weight moved"
    text = [float(re.search(r"text ([\d.]+) nats", line)[1]) for line in lines]
    assert text[-1] < text[0]


def test_seeds_give_other_weights(trained, tmp_path):
    other = run(tmp_path, seed=4)
    weights = (tmp_path / "stages" / "1-short" / "model.safetensors").read_bytes()
    assert weights != files(trained[0])["stages/1-short/model.safetensors"]
    assert other.config == TINY


@pytest.mark.parametrize("folder", ["stages/1-short", "model"])
def test_folders_load_here_and_in_transformers(trained, folder):
    torch = pytorch()
    import transformers

    path = trained[0] / folder
    ours = from_pretrained(path)
    assert ours.config == TINY
    reference = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokens = np.random.default_rng(0).integers(TINY.vocab_size, size=(2, 60))
    positions = np.broadcast_to(np.arange(60), tokens.shape)
    with torch.no_grad():
        expected = reference(torch.from_numpy(tokens)).logits.numpy()
    logits = prompt_logits(ours, tokens, positions)
    assert expected.std() > 0.3
    assert np.abs(logits - expected).max() < 1e-4
    assert reference.generation_config.eos_token_id == 1
    assert reference.generation_config.bos_token_id == 0
    mode = (path / "model.safetensors").stat().st_mode
    assert mode == (path / "config.json").stat().st_mode, "readable for those who read the others"


def test_every_stage_keeps_its_own_weights(trained):
    out, model, _ = trained
    kept = files(out)
    one, two, end = (
        kept[f"{folder}/model.safetensors"]
        for folder in ("stages/1-short", "stages/2-long", "model")
    )
    assert one != two and two == end
    stored = weights_of(from_pretrained(out / "model"))
    for ours, theirs in zip(weights_of(model), stored, strict=True):
        np.testing.assert_array_equal(theirs, ours.astype(jnp.bfloat16).astype(np.float32))


def test_the_tokenizer_of_a_folder(trained):
    kept, text = load_tokenizer(trained[0] / "model"), "The amber falcon = 482130.\n\n  Ünï 😀"
    assert kept(text).input_ids == tiny_tokenizer().encode(text).ids
    assert kept(text).input_ids[0] == kept.bos_token_id == 0 and kept.eos_token_id == 1
    assert kept.decode(kept(text, add_special_tokens=False).input_ids) == text


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 4},
        {"config": dataclasses.replace(TINY, intermediate_size=48)},
        {"stages": STAGES[:1]},
        {"stages": (dataclasses.replace(STAGES[0], rate=2e-3), STAGES[1])},
        {"texts": texts()[:-1]},
    ],
    ids=["seed", "config", "stages", "rate", "texts"],
)
def test_a_folder_with_other_settings_is_refused(trained, changes):
    before = {path: path.stat().st_mtime_ns for path in trained[0].rglob("*")}
    with pytest.raises(
        ValueError, match=r"folder holds a training with other (settings|text): see"
    ):
        run(trained[0], **changes)
    assert {path: path.stat().st_mtime_ns for path in trained[0].rglob("*")} == before


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"texts": ()}, ValueError, "no text to train on"),
        (
            {"texts": ("A short text.\n\n",)},
            ValueError,
            r"text must have more than 140 tokens, got \d",
        ),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"seed": 2**32}, ValueError, "seed must be below"),
        ({"seed": 0.5}, TypeError, "seed must be an int"),
        (
            {"config": dataclasses.replace(TINY, vocab_size=300)},
            ValueError,
            "tokenizer has 512 tokens, .* 300",
        ),
        (
            {"config": dataclasses.replace(TINY, tie_embeddings=False)},
            ValueError,
            "tie",
        ),
    ],
)
def test_bad_input_leaves_no_folder(quick_training, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        run(tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


# The command line.


@pytest.fixture
def command(quick_training, monkeypatch):
    """`main`, with a tiny model."""
    small = functools.partial(train.train, config=TINY, stages=STAGES)
    monkeypatch.setattr(train, "train", small)
    return train.main


def test_command_trains_on_a_file(command, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(texts()), encoding="utf-8")
    given = ["--out", str(tmp_path / "out"), "--text", str(text), "--seed", "7"]
    assert command(given) == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 11 and "2-long step 10" in printed.out
    assert from_pretrained(tmp_path / "out" / "model").config == TINY
    assert command(given) == 0
    assert capsys.readouterr().out == "resumed at step 11\n"
    assert command([*given[:-1], "8"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"train: error: .*other settings.*\n", printed.err)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "missing.txt", "No such file"),
        (lambda folder: folder, "Is a directory"),
        (lambda folder: write(folder / "x", b"\xff\xfe\x00"), "utf-8"),
        (lambda folder: write(folder / "x", b""), "no text to train on"),
        (lambda folder: write(folder / "x", b" \n\n \n\n"), "no text to train on"),
        (lambda folder: write(folder / "few.txt", b"Too short."), "must have more than"),
    ],
    ids=["missing", "directory", "binary", "empty", "blank", "short"],
)
def test_texts_that_cannot_be_read(command, tmp_path, capsys, make, message):
    out = tmp_path / "out"
    assert command(["--out", str(out), "--text", str(make(tmp_path))]) == 2
    printed = capsys.readouterr()
    assert re.fullmatch(rf"train: error: .*{message}.*\n", printed.err)
    assert not out.exists()


def test_an_output_that_is_a_file(command, tmp_path, capsys):
    text = write(tmp_path / "text.txt", "".join(texts()).encode())
    assert command(["--out", str(text), "--text", str(text)]) == 2
    assert re.fullmatch(r"train: error: .*exists.*\n", capsys.readouterr().err)


@pytest.mark.parametrize("given", [[], ["--out", "x", "--seed", "one"], ["--out", "x", "--what"]])
def test_wrong_arguments(given, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main(given)
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err.splitlines()[-1]
