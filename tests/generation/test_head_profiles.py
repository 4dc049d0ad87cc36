"""Profiles of heads: from which scores they are made, kept in files, and found again."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import kvjax
from kvjax.budgets.profile import shares
from kvjax.generation.head_profiles import kept_profile, sample_of, with_profiles_of_files
from kvjax.generation.model import as_functional
from kvjax.models import random_decoder
from tests.generation.test_generate import CONFIG, RAGGED, model
from tests.references import head_shares
from tests.references.h2o import H2O
from tests.references.repetition import repetition
from tests.references.snapkv import SnapKV, pool

SNAPKV = kvjax.SnapKV(0.5, window=8)
VOCAB, LAYERS, HEADS, GROUP, DIM = 64, 2, 2, 2, 8
SAMPLE = [np.random.default_rng(7).integers(VOCAB, size=n).tolist() for n in (60, 41)]


def looked_up(params, tokens, positions, caches, *, layers, phase, last, logits_at):
    """A model whose queries, keys and values are looked up by token and layer."""
    written = []
    for q, k, v, transform, cache in zip(*params, layers, caches, strict=True):
        q, k, v = (x[tokens].transpose(0, 2, 1, 3) for x in (q, k, v))  # [B, H, T, D]
        _, cache = kvjax.attend(transform, cache, q, k, v, positions, phase=phase, last=last)
        written.append(cache)
    return jnp.zeros((len(tokens), 1, VOCAB)), tuple(written)


TABLES = [
    np.random.default_rng(n).normal(size=(LAYERS, VOCAB, heads, DIM)).astype(np.float32) * scale
    for n, (heads, scale) in enumerate(((HEADS * GROUP, 2.0), (HEADS, 1.5), (HEADS, 1.0)))
]
LOOKED_UP = kvjax.FunctionalModel(
    looked_up, tuple(map(jnp.asarray, TABLES)), LAYERS, HEADS * GROUP, HEADS, DIM, VOCAB
)


def of_head(text, layer: int, head: int):
    """Queries `[G, S, D]`, keys and values `[S, D]` of a text in one head."""
    q, k, v = (x[layer, text] for x in TABLES)
    group = slice(head * GROUP, (head + 1) * GROUP)
    return q[:, group].transpose(1, 0, 2), k[:, head], v[:, head]


def snapkv_score(text, layer, head) -> np.ndarray:
    q, k, v = of_head(text, layer, head)
    reference = SnapKV(len(text), 8, 3)
    reference.prompt(q, k, v, np.arange(len(text)))
    return np.append(reference.prefix_scores(), np.zeros(8))


def h2o_score(text, layer, head) -> np.ndarray:
    q, k, v = of_head(text, layer, head)
    reference = H2O(len(text))
    reference.prompt(q, k, v, np.arange(len(text)))
    return reference.slots.scores.mean(0)


def kvzip_score(text, layer, head) -> np.ndarray:
    q, k, v = of_head(text, layer, head)
    at = np.arange(len(text))
    _, score = repetition((k, v, at), [(q, k, v, at + len(text))])
    size = np.sqrt((v.astype(np.float64) ** 2).sum(-1))
    return pool(score * size / np.median(size), 3, "avg")


@pytest.mark.parametrize(
    ("method", "score"),
    [
        (kvjax.SnapKV(0.5, window=8, kernel=3), snapkv_score),
        (kvjax.H2O(0.5), h2o_score),
        (kvjax.KVzip(0.5), kvzip_score),
    ],
    ids=["snapkv", "h2o", "kvzip"],
)
def test_it_is_made_of_the_references_scores(method, score):
    """Shares differ by a token at most, where rounding decides which side of a threshold it is."""
    profile = kvjax.calibrate_heads(LOOKED_UP, method, SAMPLE)
    scores = [
        np.array([[score(text, n, h) for h in range(HEADS)] for n in range(LAYERS)])
        for text in SAMPLE
    ]
    for budget in (0.05, 0.2, 0.5):
        expected = head_shares.shares(scores, budget)
        np.testing.assert_allclose(shares(profile.table, budget), expected, atol=1.01 / 41)
        assert np.ptp(expected) > 0.02
    assert profile.method.startswith(type(method).__name__.lower())
    assert "budget" not in profile.method


def test_layers_with_a_window_get_the_mean_of_the_others():
    """They are rings, and hold their windows: the others share the budget."""
    sizes = tuple(map(jnp.asarray, TABLES)), LAYERS, HEADS * GROUP, HEADS, DIM, VOCAB
    windowed = kvjax.FunctionalModel(looked_up, *sizes, windows=(None, 16))
    profile = kvjax.calibrate_heads(windowed, kvjax.SnapKV(0.5, window=8, kernel=3), SAMPLE)
    scores = [np.array([[snapkv_score(text, 0, h) for h in range(HEADS)]]) for text in SAMPLE]
    for budget in (0.05, 0.2, 0.5):
        first, second = shares(profile.table, budget)
        expected = head_shares.shares(scores, budget)[0]
        np.testing.assert_allclose(first, expected, atol=1.01 / 41)
        np.testing.assert_allclose(second, first.mean(), rtol=1e-5)
    rings = kvjax.FunctionalModel(looked_up, *sizes, windows=(16, 16))
    with pytest.raises(ValueError, match=r"without a sliding window.*\(16, 16\)"):
        kvjax.calibrate_heads(rings, SNAPKV, SAMPLE)


def test_a_file_brings_it_back_and_is_refused_for_other_weights(tmp_path):
    path = tmp_path / "heads.safetensors"
    profile = kvjax.calibrate_heads(model(), kvjax.KVzip(0.5), RAGGED[:1])
    kvjax.save_profile(path, profile, model())
    assert kvjax.load_profile(path, model()) == profile
    assert path.stat().st_size < 20_000
    other = random_decoder(CONFIG, seed=4)
    with pytest.raises(ValueError, match=r"heads.safetensors is of another model: its weights.*"
                       r"there, .* here"):  # fmt: skip
        kvjax.load_profile(path, other)
    with pytest.raises(ValueError, match="of another model"):
        kvjax.calibrated(kvjax.ByHead(kvjax.KVzip(0.5), str(path)), other, [])
    named = kvjax.parse(f"by_head(kvzip, profile={str(path)!r})", 0.25)
    assert kvjax.parse(kvjax.unparse(named)) == named
    found = kvjax.calibrated(named, model(), [])
    assert found.profile == profile and found.base == kvjax.KVzip(0.25)


def test_a_file_is_refused_for_another_method_or_shape(tmp_path):
    """Parameters that change no score do not count."""
    path = str(tmp_path / "heads.safetensors")
    kvjax.save_profile(path, kvjax.HeadProfile(np.ones((2, 2, 3)), "kvzip"), model())
    fitted = kvjax.ByHead(kvjax.KVzip(0.5, fit=True, room=8), path)
    other = kvjax.ByHead(kvjax.KVzip(0.5, values=False), path)
    assert kvjax.calibrated(fitted, model(), []).profile.method == "kvzip"
    assert with_profiles_of_files(fitted, 2, 2).profile.method == "kvzip"
    made = []
    chosen = kvjax.PerLayer(lambda layer, _: other if layer else kvjax.ByHead(SNAPKV))
    for refused in (
        lambda: kvjax.calibrated(chosen, model(), RAGGED[:1], on_profile=made.append),
        lambda: with_profiles_of_files(chosen, 2, 2),
    ):
        with pytest.raises(ValueError, match=r"of kvzip, and by_head here needs one of kvzip\(val"):
            refused()
    assert not made, "files come first"
    with pytest.raises(ValueError, match="2 layers of 2 KV heads, and this one 4 of 2"):
        with_profiles_of_files(fitted, 4, 2)
    unnamed = kvjax.ByHead(kvjax.KVzip(0.5))
    assert with_profiles_of_files(unnamed, 4, 2) is unnamed


def test_a_method_without_a_name_is_refused_before_anything_is_read():
    class Mine(kvjax.SnapKV):
        """Has no name in texts."""

    def call(*args, **options):
        pytest.fail("the model was called")

    unread = kvjax.FunctionalModel(call, (), LAYERS, HEADS * GROUP, HEADS, DIM, VOCAB)
    with pytest.raises(ValueError, match=r"needs a name \(kvjax.register\)"):
        kvjax.calibrate_heads(unread, Mine(0.5), SAMPLE)


def test_where_it_cannot_be_written_is_an_error_of_the_system(tmp_path):
    path = tmp_path / "nowhere" / "heads"
    with pytest.raises(FileNotFoundError, match="nowhere"):
        kvjax.save_profile(path, kvjax.HeadProfile(np.ones((2, 2, 3)), "kvzip"), model())


def test_what_is_no_profile_is_refused(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(ValueError, match="cannot read"):
        kvjax.load_profile(path, model())
    path.write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match="is no profile of heads"):
        kvjax.load_profile(path, model())
    save_file({"table": np.ones((1, 1, 1))}, path, metadata={"format": "another"})
    with pytest.raises(ValueError, match="is no profile of heads: it has no format"):
        kvjax.load_profile(path, model())


def test_it_is_made_once_for_a_model_a_method_and_a_text(tmp_path, monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    functional, made = as_functional(model()), []

    def found(method=SNAPKV, sample=RAGGED[:1], of=functional):
        return kept_profile(of, method, sample, on_made=lambda *what: made.append(what))

    first = found()
    assert found() == found(kvjax.SnapKV(0.1, window=8)) == first and len(made) == 1
    assert made[0][0] == first and made[0][1] > 0
    found(kvjax.SnapKV(0.5, window=4))
    found(sample=RAGGED[2:])
    found(of=as_functional(random_decoder(CONFIG, seed=4)))
    assert len(made) == 4 and len(list((tmp_path / "profiles").iterdir())) == 4
    for path in (tmp_path / "profiles").iterdir():
        path.write_bytes(b"damaged")
    assert found() == first and len(made) == 5
    monkeypatch.setenv("KVJAX_CACHE", "off")
    assert found() == first and len(made) == 6


def test_calibrated_gives_each_its_profile(tmp_path, monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    made, snapkv = [], kvjax.SnapKV(0.5, window=8)
    tx = kvjax.chain(kvjax.ByHead(snapkv), kvjax.Quantize(8))
    found = kvjax.calibrated(tx, model(), RAGGED[:1], on_profile=lambda *x: made.append(x))
    assert found == kvjax.chain(kvjax.ByHead(snapkv, made[0][0]), kvjax.Quantize(8))
    choice = kvjax.PerLayer(lambda layer, _: kvjax.Full() if layer else kvjax.ByHead(snapkv))
    layers = kvjax.bind(kvjax.calibrated(choice, model(), RAGGED[:1]), 2)
    assert layers[0] == kvjax.bind(kvjax.ByHead(snapkv, made[0][0]), 2)[0]
    assert layers[1] == kvjax.Full() and len(made) == 1
    assert kvjax.calibrated(found, model(), []) is found


def test_a_sample_comes_from_all_over_the_text():
    assert sample_of(range(10_000), None) == [
        list(range(start, start + 1024)) for start in (0, 4488, 8976)
    ]
    assert [len(x) for x in sample_of(range(10_000), 1024)] == [448] * 3
    assert [x[0] for x in sample_of(range(30), None)] == [0, 10, 20]


def test_the_instruction_is_of_the_tokenizer():
    class Tokenizer:
        def __call__(self, text, add_special_tokens):
            assert not add_special_tokens
            return type("Ids", (), {"input_ids": [ord(c) for c in text]})

    made = kvjax.Repetition.of(Tokenizer())
    assert "".join(map(chr, made.first)) == "\n\nRepeat the previous context exactly.\n\n"
    assert "".join(map(chr, made.further)).endswith("exactly, starting with")
    assert made.piece == 2048 and json.dumps(made.first)
