"""How the bundled model is made: text, sequences, gradient, and a short training."""

from __future__ import annotations

import functools
import re
import sys
import zlib
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer

from kvjax.models import (
    DecoderConfig,
    RopeConfig,
    demo,
    from_pretrained,
    load_tokenizer,
    random_decoder,
)
from kvjax.models.demo.training import corpus, export, initial, train
from kvjax.models.demo.training.tasks import ANSWER, IGNORED, TEXT, Mix, Tasks
from tests.support.hf_models import Stepper
from tests.support.tolerances import close

pytestmark = pytest.mark.lenient  # Optax and the training run under JAX's default promotion

TINY = DecoderConfig(
    vocab_size=512, hidden_size=32, intermediate_size=32, num_layers=2, query_heads=4, kv_heads=2,
    head_dim=8, rope=RopeConfig(rotary_dim=8, theta=500_000.0), max_positions=256,
    tie_embeddings=True, bos_token_id=0, eos_token_ids=(1,),
)  # fmt: skip
STAGES = (
    train.Stage("first", 96, 2, 5, 1e-3, 2e-3, Mix(1.0, 0.0, 0.0, 1, 0)),
    train.Stage("second", 96, 2, 6, 2e-3, 1e-4, Mix(0.5, 0.0, 0.0, 2, 256)),
)
TEXTS = tuple(topics[name] + "\n\n" for name in sorted(topics)[:12])
EXACT = " \n\nQuestion: 482130?\nnaïve 漢字 😀  two  spaces\t\x00\r\n"


@functools.cache
def bundled_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo.directory() / "tokenizer.json"))


def test_documents_are_held_out_by_their_names_alone():
    documents = [(f"topic {i}", f" text {i}\n\nshared ") for i in range(500)]
    training, held_out = corpus.split_documents(documents)
    chosen = {i for i in range(500) if zlib.crc32(f"topic {i}".encode()) % 10 == 0}
    assert held_out == [f"text {i}\n\nshared\n\n" for i in sorted(chosen)]
    assert len(training) == 500 - len(chosen)
    unseen = corpus.without_known_paragraphs(held_out, training)
    assert unseen == "\n\n".join(f"text {i}" for i in sorted(chosen)) + "\n"


@pytest.mark.skipif(sys.version_info[:3] != (3, 11, 7), reason="the bundled text is of 3.11.7")
@pytest.mark.slow
def test_the_bundled_held_out_text_was_held_out():
    training, held_out = corpus.split_documents(corpus.python_documents())
    assert corpus.without_known_paragraphs(held_out, training) == demo.held_out_text()


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Python's library and its help topics, few of each."""
    folder = tmp_path / "library"
    for name, content in {
        "b.py": '"""The module."""\nclass A:\n    """A class."""\n    def m(self):\n'
                '        """A method."""\nasync def f():\n    """A function."""\n',
        "a/__init__.py": 'def f():\n    """A function   of\n    two lines."""\n',
        "a/no_word.py": "x = 1\n",
        "a/template.py": "def {{ name }}():\n",
        "a/zeros.py": "x = 1\0",
        "test_b.py": '"""A test."""',
        "a/tests/b.py": '"""A test."""',
        "site-packages/c.py": '"""Of others."""',
        "text.txt": '"""No module."""',
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    monkeypatch.setattr("sysconfig.get_path", {"stdlib": str(folder)}.__getitem__)
    monkeypatch.setattr("pydoc_data.topics.topics", {"while": "Loops.", "if": "Branches."})


@pytest.mark.usefixtures("library")
def test_documents_are_topics_and_docstrings():
    assert list(corpus.python_documents()) == [
        ("topic if", "Branches."),
        ("topic while", "Loops."),
        ("module a.__init__", "A function   of\ntwo lines."),
        ("module b", "The module.\n\nA class.\n\nA function.\n\nA method."),
    ]


def test_the_tokenizer_reads_digits_in_pairs_and_keeps_every_text():
    tokenizer = bundled_tokenizer()
    assert tokenizer.get_vocab_size() == train.CONFIG.vocab_size
    assert [tokenizer.id_to_token(token) for token in (0, 1)] == [corpus.BOS, corpus.EOS]
    ids = tokenizer.encode("a12345", add_special_tokens=False).ids
    assert [tokenizer.decode([token]) for token in ids] == ["a", "12", "34", "5"]
    assert tokenizer.decode(tokenizer.encode(EXACT).ids) == EXACT


# Sequences, of a tokenizer that reads letters and a filler that has none.

LETTERS = 5000  # letters are ids from here on, filler is below


def letters(tokens: list[int]) -> str:
    """The text of a sequence; filler is a dot in the middle, the end of an answer a bar."""
    return "".join(chr(t - LETTERS) if t >= LETTERS else "|" if t == 1 else "·" for t in tokens)


@pytest.mark.parametrize("free", [0.0, 1.0], ids=["given words", "free words"])
@pytest.mark.parametrize(
    ("mix", "question"),
    [
        ((0.0, 0.0, 0.0), r"Question: [^·|]*?\nAnswer: (?P<told>[^·|]*?)"),
        ((0.0, 1.0, 0.0), r"Question: Which value has the [^·|]*\?\nAnswer: (?P<told>[^·|]*:)"),
        ((0.0, 0.0, 1.0), r"The code of the \w+ \w+ is( the code of the \w+ \w+ is)*?"
                          r" (?P<told>the code of the \w+ \w+ is)"),
    ],
    ids=["needles", "lists", "chains"],
)  # fmt: skip
def test_what_is_asked_for_was_told_before(mix, question, free):
    words = train.FreeWords(("qral", "qux"), ("qru", "qli", "qe"), ("zok", "zum"), frozenset())
    stream = np.random.default_rng(7).integers(2, 4000, 20_000)
    tasks = Tasks(
        lambda text: [LETTERS + ord(letter) for letter in text], stream, words,
        vocab=4000, special=2, bos=0, eos=1,
    )  # fmt: skip
    rng, asked = np.random.default_rng(11), 0
    for _ in range(10):
        tokens, marks = tasks.sequence(rng, 4001, Mix(*mix, questions=6, positions=0, free=free))
        assert len(tokens) == len(marks) == 4001 and tokens[0] == 0 and marks[0] == IGNORED
        assert [mark == TEXT for mark in marks] == [2 <= token < LETTERS for token in tokens]
        text = letters(tokens)
        for match in re.finditer(question + r"(?P<value> \d+\.?)\|", text):
            said = match["told"].replace("the code", "The code") + match["value"].rstrip(".")
            assert said in text[: match.start()]
            answer = slice(match.start("value"), match.end())
            assert marks[answer] == [ANSWER] * len(match["value"] + "|")
            asked += 1
        assert bool(re.search(r"\bq(ral|ux|ru|li|e)(zok|zum)*\b", text)) == free
    assert asked > 15


@pytest.mark.parametrize("stage", train.STAGES, ids=lambda stage: stage.name)
def test_batches_of_the_stages(stage):
    tasks = train.make_tasks(bundled_tokenizer(), TEXTS)
    batch, again, other = (
        tasks.batch(np.random.default_rng(seed), 3, stage.length, stage.mix) for seed in (5, 5, 6)
    )
    assert batch["tokens"].shape == batch["marks"].shape == (3, stage.length + 1)
    assert batch["tokens"].max() < train.CONFIG.vocab_size
    assert (batch["marks"] == ANSWER).any(axis=1).all()
    steps = np.diff(batch["positions"], axis=1)
    assert (steps >= 1).all() and batch["positions"].max() < train.CONFIG.max_positions
    assert all((batch[name] == again[name]).all() for name in batch)
    assert (batch["tokens"] != other["tokens"]).any()


# The gradient, and a whole training.


@pytest.fixture(scope="module")
def trained() -> tuple:
    """A short training: the decoder, its tokenizer, what it reported."""
    lines = []
    model, tokenizer = train.train(TEXTS, config=TINY, stages=STAGES, seed=3, report=lines.append)
    return model, tokenizer, lines


def test_training_learns_and_moves_every_weight(trained):
    model, _, lines = trained
    start = random_decoder(TINY, 3)
    initial.start_near_induction(start, 3)
    weights, first = (jax.tree.leaves(nnx.state(decoder)) for decoder in (model, start))
    assert all((a != b).any() for a, b in zip(weights, first, strict=True))
    losses = [float(re.search(r"text ([\d.]+) nats", line)[1]) for line in lines]
    assert len(losses) == 3 and losses[-1] < losses[0]


def test_the_folder_loads(trained, tmp_path):
    model, tokenizer, _ = trained
    export.save_pretrained(model, tokenizer, tmp_path / "new" / "model")
    loaded, read = (load(tmp_path / "new" / "model") for load in (from_pretrained, load_tokenizer))
    assert loaded.config == TINY
    for stored, weight in zip(
        *(jax.tree.leaves(nnx.state(x)) for x in (loaded, model)), strict=True
    ):
        np.testing.assert_array_equal(stored, weight.astype(jnp.bfloat16).astype(np.float32))
    assert read(EXACT).input_ids == tokenizer.encode(EXACT).ids
    assert (read.bos_token_id, read.eos_token_id) == (0, 1)


@pytest.mark.usefixtures("library")
def test_the_command_writes_the_model_and_what_it_never_saw(trained, capsys, monkeypatch, tmp_path):
    """The training itself is another one, which is short."""
    calls, out = [], tmp_path / "new" / "model"

    def short_training(texts, *, seed, report):
        calls.append((texts, seed))
        report("step 0")
        return trained[:2]

    monkeypatch.setattr(train, "train", short_training)
    monkeypatch.setattr("sys.argv", ["train", "--out", str(out), "--seed", "3"])
    monkeypatch.setattr("pydoc_data.topics.topics", {f"{n}": f"Topic {n}." for n in range(30)})
    train.main()
    chosen = [n for n in range(30) if zlib.crc32(f"topic {n}".encode()) % 10 == 0]
    assert capsys.readouterr().out == "step 0\n"
    ((texts, seed),) = calls
    assert seed == 3 and len(texts) == 32 - len(chosen) and "Topic 1.\n\n" in texts
    unseen = "\n\n".join(f"Topic {n}." for n in sorted(chosen, key=str)) + "\n"
    assert (out / "held_out.txt").read_text() == unseen
    assert from_pretrained(out).config == TINY


def test_forward_and_loss(trained):
    """The logits are the decoder's with a full cache, the loss answers plus half of the text."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, TINY.vocab_size, (2, 151))
    positions = np.stack([np.arange(150), np.sort(rng.choice(250, 150, replace=False))])
    marks = rng.choice([IGNORED, TEXT, ANSWER], tokens.shape, p=(0.3, 0.5, 0.2))
    batch = {"tokens": tokens, "marks": marks, "positions": positions}
    graph, state = nnx.split(trained[0])

    @jax.jit
    def loss_and_logits(batch):
        logits = train.forward(nnx.merge(graph, state), batch["tokens"][:, :-1], batch["positions"])
        return train.loss(state, graph, batch), logits

    (total, metrics), logits = loss_and_logits(jax.tree.map(jnp.asarray, batch))
    close(logits, Stepper(trained[0], 2, 150, 1)(tokens[:, :-1], positions, "prompt"))
    logits, targets, kinds = np.asarray(logits, np.float64), tokens[:, 1:], marks[:, 1:]
    chances = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -np.take_along_axis(chances, targets[..., None], -1)[..., 0]
    answers, text = nats[kinds == ANSWER].mean(), nats[kinds == TEXT].mean()
    close(metrics.answers, answers)
    close(metrics.text, text)
    close(total, answers + 0.5 * text)
    right = (logits.argmax(-1) == targets)[kinds == ANSWER].mean()
    assert float(metrics.accuracy) == pytest.approx(right)
