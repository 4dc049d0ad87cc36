"""Profiles of heads: from which scores they are made, kept in files, and found again."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import kvjax
from kvjax import ByHead
from kvjax.budgets.profile import shares
from kvjax.compose import origins
from kvjax.evaluation import ReadOnce, measure_fidelities
from kvjax.generation.calibration import sample_of, with_named
from kvjax.generation.model import as_functional
from kvjax.generation.planning import plan
from kvjax.models import random_decoder
from kvjax.registry import METHODS
from kvjax.serialization import TRANSFORMS
from tests.generation.test_generate import CONFIG, RAGGED, generate, model
from tests.references import head_shares
from tests.references.repetition import repetition
from tests.references.snapkv import SnapKV, pool
from tests.support.defaults import change_default
from tests.support.marks import some_slow

SNAPKV = kvjax.SnapKV(0.5, window=8)
SHARES = [[[0.8, 1.0], [0.1, 1.0]], [[0.2, 1.0], [0.4, 1.0]]]
UNEQUAL = kvjax.kit.HeadProfile(np.array(SHARES))
EVEN = ByHead(kvjax.KVzip(0.5), kvjax.kit.HeadProfile(np.ones((2, 2, 3))))
VOCAB, LAYERS, HEADS, GROUP, DIM = 64, 2, 2, 2, 8
SAMPLE = [np.random.default_rng(7).integers(VOCAB, size=n).tolist() for n in (60, 41)]


def looked_up(params, tokens, positions, caches, *, layers, phase, last, logits_at):
    """A model whose queries, keys and values are looked up by token and layer."""
    written = []
    for q, k, v, cache in zip(*params, caches, strict=True):
        q, k, v = (x[tokens].transpose(0, 2, 1, 3) for x in (q, k, v))  # [B, H, T, D]
        _, cache = kvjax.attend(cache, q, k, v, positions, phase=phase, last=last)
        written.append(cache)
    return jnp.zeros((len(tokens), 1, VOCAB)), tuple(written)


TABLES = [
    np.random.default_rng(n).normal(size=(LAYERS, VOCAB, heads, DIM)).astype(np.float32) * scale
    for n, (heads, scale) in enumerate(((HEADS * GROUP, 2.0), (HEADS, 1.5), (HEADS, 1.0)))
]
LOOKED_UP = kvjax.models.FunctionalModel(
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
        (kvjax.KVzip(0.5), kvzip_score),
        (kvjax.OwnQueries(0.5, piece=16), kvzip_score),
    ],
    ids=["snapkv", "kvzip", "own_queries"],
)
def test_it_is_made_of_the_references_scores(method, score):
    """Shares differ by a token at most, where rounding decides which side of a threshold it is."""
    profile = kvjax.calibrated(ByHead(method), LOOKED_UP, SAMPLE).profile
    scores = [
        np.array([[score(text, n, h) for h in range(HEADS)] for n in range(LAYERS)])
        for text in SAMPLE
    ]
    for budget in (0.05, 0.2, 0.5):
        expected = head_shares.shares(scores, budget)
        np.testing.assert_allclose(shares(profile.table, budget), expected, atol=1.01 / 41)
        assert np.ptp(expected) > 0.02


def test_a_profile_serves_the_methods_that_are_profiled_by_the_same():
    """One file of a model's profile serves both methods for documents."""
    made = [
        kvjax.calibrated(ByHead(method), LOOKED_UP, SAMPLE)
        for method in (kvjax.KVzip(0.5), kvjax.OwnQueries(0.5, use=1.0, piece=16))
    ]
    assert made[0].profile == made[1].profile


def test_layers_with_a_window_get_the_mean_of_the_others():
    """They are rings, and hold their windows: the others share the budget."""
    sizes = tuple(map(jnp.asarray, TABLES)), LAYERS, HEADS * GROUP, HEADS, DIM, VOCAB
    windowed = kvjax.models.FunctionalModel(looked_up, *sizes, windows=(None, 16))
    tx = ByHead(kvjax.SnapKV(0.5, window=8, kernel=3))
    profile = kvjax.calibrated(tx, windowed, SAMPLE).profile
    scores = [np.array([[snapkv_score(text, 0, h) for h in range(HEADS)]]) for text in SAMPLE]
    for budget in (0.05, 0.2, 0.5):
        first, second = shares(profile.table, budget)
        expected = head_shares.shares(scores, budget)[0]
        np.testing.assert_allclose(first, expected, atol=1.01 / 41)
        np.testing.assert_allclose(second, first.mean(), rtol=1e-5)
    rings = kvjax.models.FunctionalModel(looked_up, *sizes, windows=(16, 16))
    with pytest.raises(ValueError, match=r"without a sliding window.*\(16, 16\)"):
        kvjax.calibrated(ByHead(SNAPKV), rings, SAMPLE)


def test_a_file_brings_it_back_and_is_refused_for_other_weights(tmp_path):
    path = tmp_path / "heads.safetensors"
    tx = kvjax.calibrated(ByHead(kvjax.KVzip(0.5)), model(), RAGGED[:1])
    kvjax.save_calibration(path, tx, model())
    assert kvjax.load_calibration(path, model()) == tx.profile
    assert path.stat().st_size < 20_000
    other = random_decoder(CONFIG, seed=4)
    with pytest.raises(ValueError, match=r"heads.safetensors is of another model: its weights.*"
                       r"there, .* here"):  # fmt: skip
        kvjax.load_calibration(path, other)
    with pytest.raises(ValueError, match="of another model"):
        kvjax.calibrated(ByHead(kvjax.KVzip(0.5), str(path)), other, [])
    named = kvjax.parse(f"by_head(kvzip, profile={str(path)!r})", 0.25)
    assert kvjax.parse(kvjax.unparse(named)) == named
    found = kvjax.calibrated(named, model(), [])
    assert found.profile == tx.profile and found.base == kvjax.KVzip(0.25)


def test_a_file_is_refused_for_another_method_or_shape(tmp_path):
    """Parameters that change no score do not count."""
    path = str(tmp_path / "heads.safetensors")
    kvjax.save_calibration(path, EVEN, model())
    roomy = kvjax.ByHead(kvjax.KVzip(0.5, room=8), path)
    other = kvjax.ByHead(kvjax.KVzip(0.5, values=False), path)
    assert kvjax.calibrated(roomy, model(), []).profile == EVEN.profile
    assert with_named(roomy, CONFIG, weights=False).profile == EVEN.profile
    made = []
    chosen = kvjax.PerLayer(lambda layer, _: other if layer else kvjax.ByHead(SNAPKV))
    for refused in (
        lambda: kvjax.calibrated(chosen, model(), RAGGED[:1], on_made=made.append),
        lambda: with_named(chosen, CONFIG, weights=False),
    ):
        with pytest.raises(ValueError, match=r"of by_head\(kvzip\), and by_head\(kvzip\(val"):
            refused()
    assert not made, "files come first"
    with pytest.raises(ValueError, match="2 layers of 2 KV heads, expected 4 layers of 2"):
        with_named(roomy, dataclasses.replace(CONFIG, num_layers=4), weights=False)
    unnamed = kvjax.ByHead(kvjax.KVzip(0.5))
    assert with_named(unnamed, CONFIG, weights=False) is unnamed


def test_a_method_without_a_name_is_refused_before_anything_is_read():
    class Mine(kvjax.SnapKV):
        """Has no name in texts."""

    def call(*args, **options):
        pytest.fail("the model was called")

    unread = kvjax.models.FunctionalModel(call, (), LAYERS, HEADS * GROUP, HEADS, DIM, VOCAB)
    with pytest.raises(ValueError, match=r"needs a name \(kvjax.register\)"):
        kvjax.calibrated(ByHead(Mine(0.5)), unread, SAMPLE)


def test_where_it_cannot_be_written_is_an_error_of_the_system(tmp_path):
    path = tmp_path / "nowhere" / "heads"
    with pytest.raises(FileNotFoundError, match="nowhere"):
        kvjax.save_calibration(path, EVEN, model())


def test_what_is_no_profile_is_refused(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(ValueError, match="cannot read"):
        kvjax.load_calibration(path, model())
    path.write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match="holds no calibration"):
        kvjax.load_calibration(path, model())
    save_file({"table": np.ones((1, 1, 1))}, path, metadata={"format": "another"})
    with pytest.raises(ValueError, match="holds no calibration: it has the format 'another'"):
        kvjax.load_calibration(path, model())


def test_it_is_made_once_for_a_model_a_method_and_a_text(tmp_path, monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    functional, made = as_functional(model()), []

    def found(method=SNAPKV, sample=RAGGED[:1], of=functional):
        tx = kvjax.calibrated(ByHead(method), of, sample, on_made=lambda *x: made.append(x))
        return tx.profile

    first = found()
    assert found() == found(kvjax.SnapKV(0.1, window=8)) == first and len(made) == 1
    assert made[0][0] == ByHead(SNAPKV) and made[0][1] > 0
    found(kvjax.SnapKV(0.5, window=4))
    found(sample=RAGGED[2:])
    found(of=as_functional(random_decoder(CONFIG, seed=4)))
    assert len(made) == 4 and len(list((tmp_path / "calibrations").iterdir())) == 4
    for path in (tmp_path / "calibrations").iterdir():
        path.write_bytes(b"damaged")
    assert found() == first and len(made) == 5
    monkeypatch.setenv("KVJAX_CACHE", "off")
    assert found() == first and len(made) == 6


def test_methods_that_are_profiled_by_the_same_find_the_same_kept_profile(tmp_path, monkeypatch):
    """A kept profile is found by the instruction of the method that makes it."""
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    made = []

    def count(method: kvjax.KVTransform, word: int) -> int:
        document = SimpleNamespace(encode=lambda text, add_special_tokens: [word] * 3)
        kvjax.calibrated(
            ByHead(method), LOOKED_UP, SAMPLE, document=document,
            on_made=lambda *_: made.append(method),
        )  # fmt: skip
        return len(made)

    queries, repeated = kvjax.OwnQueries(0.5, piece=16), kvjax.KVzip(0.5)
    assert [count(repeated, 1), count(queries, 1)] == [1, 1]
    assert [count(queries, 2), count(repeated, 2)] == [2, 2]


def test_a_file_keeps_its_parameters_when_a_default_changes(tmp_path, monkeypatch):
    path = str(tmp_path / "heads.safetensors")
    profile = kvjax.calibrated(ByHead(kvjax.KVzip(0.5)), model(), RAGGED[:1]).profile
    kvjax.save_calibration(path, ByHead(kvjax.KVzip(0.5), profile), model())
    with monkeypatch.context() as patch:
        change_default(patch, kvjax.KVzip, kernel=1)
        assert kvjax.load_calibration(path, model()) == profile
        kept = kvjax.calibrated(ByHead(kvjax.KVzip(0.5, kernel=3), path), model(), [])
        assert kept.profile == profile
        with pytest.raises(
            ValueError, match=r"of by_head\(kvzip\(kernel=3\)\), and by_head\(kvzip\) needs one"
        ):
            kvjax.calibrated(ByHead(kvjax.KVzip(0.5), path), model(), [])
        kvjax.save_calibration(path, kept, model())
    assert kvjax.load_calibration(path, model()) == profile
    with monkeypatch.context() as patch:
        change_default(patch, kvjax.KVzip, room=8)  # it changes no score
        assert kvjax.load_calibration(path, model()) == profile


def test_a_file_that_lacks_parameters_is_refused(tmp_path):
    """As earlier versions wrote them, and later ones see them that have more parameters."""
    path = tmp_path / "heads.safetensors"
    kvjax.save_calibration(path, EVEN, model())
    with safe_open(path, framework="numpy") as file:
        about, table = file.metadata(), file.get_tensor("table")
    for method, said in (
        ("by_head(kvzip)", "kvzip needs sinks="),
        (about["method"].replace("kernel=3, ", ""), "kvzip needs kernel="),
        (about["method"].replace("kernel", "smooth"), "kvzip has no parameter 'smooth'"),
        (about["method"].replace("kvzip", "kvzap"), "unknown method 'kvzap'"),
    ):
        save_file({"table": table}, path, metadata={**about, "method": method})
        with pytest.raises(ValueError, match=rf"which kvjax 0.* wrote, .*{said}.*Make another"):
            kvjax.load_calibration(path, model())


def test_what_is_kept_is_made_again_when_a_method_has_changed(tmp_path, monkeypatch):
    """Its defaults, its source, or kvjax; and each time where its source cannot be read."""
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    monkeypatch.setattr("kvjax.registry.METHODS", dict(METHODS))
    monkeypatch.setattr("kvjax.serialization.TRANSFORMS", dict(TRANSFORMS))
    functional, made = as_functional(model()), []

    @dataclasses.dataclass(frozen=True)
    class Mine(kvjax.SnapKV):
        """A method of one's own."""

    kvjax.register("mine", Mine)

    def count(method: kvjax.KVTransform) -> int:
        kvjax.calibrated(
            ByHead(method), functional, RAGGED[:1], on_made=lambda *_: made.append(method)
        )
        return len(made)

    assert [count(Mine(0.5, window=8)), count(Mine(0.5, window=8))] == [1, 1]
    with monkeypatch.context() as patch:
        change_default(patch, kvjax.SnapKV, kernel=3)
        change_default(patch, Mine, kernel=3)
        assert [count(Mine(0.5, window=8)), count(Mine(0.5, window=8))] == [2, 2]
    with monkeypatch.context() as patch:
        patch.setattr(origins, "VERSION", "99.0")
        assert [count(Mine(0.5, window=8)), count(Mine(0.5, window=8))] == [3, 3]
    with monkeypatch.context() as patch:
        patch.setattr(origins, "source_of", lambda method: "changed" * (method is Mine))
        assert [count(Mine(0.5, window=8)), count(Mine(0.5, window=8))] == [4, 4]
    with monkeypatch.context() as patch:
        patch.setattr(origins, "source_of", lambda method: None)
        assert [count(Mine(0.5, window=8)), count(Mine(0.5, window=8))] == [5, 6]


NAMED = {
    "alone": lambda by_head: by_head,
    "chain": lambda by_head: kvjax.chain(by_head, kvjax.Quantize(8)),
    "per layer": lambda by_head: kvjax.PerLayer(PerLayerOf(by_head)),
    "everywhere": kvjax.Everywhere,
}


@dataclasses.dataclass(frozen=True)
class PerLayerOf:
    first: kvjax.KVTransform

    def __call__(self, layer: int, num_layers: int) -> kvjax.KVTransform:
        return kvjax.Full() if layer else self.first


@pytest.mark.parametrize("name", some_slow(NAMED, exhaustive={"chain"}))
def test_a_profile_that_is_named_is_read_wherever_a_model_is(tmp_path, name):
    path = str(tmp_path / "heads.safetensors")
    kvjax.save_calibration(path, ByHead(SNAPKV, UNEQUAL), model())
    named = NAMED[name](kvjax.ByHead(SNAPKV, path))
    loaded = NAMED[name](kvjax.ByHead(SNAPKV, UNEQUAL))
    layers = kvjax.bind(loaded, LAYERS)
    prompt, size = RAGGED[:1], {"max_new": 64}
    entries = {
        "read": lambda tx: kvjax.read(model(), prompt, transform=tx, **size).layers,
        "ReadOnce": lambda tx: ReadOnce(model(), prompt, [tx], **size).context(tx).layers,
        "calibrated": lambda tx: kvjax.bind(kvjax.calibrated(tx, model(), []), LAYERS),
    }
    for entry, layers_of in entries.items():
        assert layers_of(named) == layers, entry
    results = [generate(prompt, tx, max_new_tokens=2) for tx in (named, loaded)]
    results.append(ended(kvjax.stream(model(), prompt, transform=named, max_new_tokens=2)))
    assert len({(*result.tokens[0], result.cache_bytes) for result in results}) == 1
    first, second = measure_fidelities(model(), [named, loaded], prompt, new_tokens=2)
    np.testing.assert_array_equal(first.error, second.error)
    plans = [plan(model(), tx, max_prompt=64, max_new=16) for tx in (named, loaded)]
    assert plans[0].request == plans[1].request


def ended(stream):
    list(stream)
    return stream.result


def test_one_reading_takes_any_named_profile_and_keeps_what_it_has_read(tmp_path):
    path, other = (str(tmp_path / name) for name in ("heads", "other"))
    for place in (path, other):
        kvjax.save_calibration(place, ByHead(SNAPKV, UNEQUAL), model())
    named, later = kvjax.ByHead(SNAPKV, path), kvjax.ByHead(SNAPKV, other)
    once = ReadOnce(model(), RAGGED[:1], [named])
    (tmp_path / "heads").unlink()
    assert once.context(named).layers == once.context(later).layers
    with pytest.raises(ValueError, match="there is no HeadProfile at"):
        ReadOnce(model(), RAGGED[:1], [named])


def test_entry_points_refuse_a_profile_of_other_weights(tmp_path):
    path = str(tmp_path / "heads.safetensors")
    kvjax.save_calibration(path, ByHead(SNAPKV, UNEQUAL), random_decoder(CONFIG, seed=4))
    tx = kvjax.ByHead(SNAPKV, path)
    for refused in (
        lambda: kvjax.read(model(), RAGGED[:1], transform=tx),
        lambda: kvjax.generate(model(), RAGGED[:1], transform=tx),
        lambda: kvjax.stream(model(), RAGGED[:1], transform=tx),
        lambda: ReadOnce(model(), RAGGED[:1], [tx]),
        lambda: measure_fidelities(model(), [tx], RAGGED[:1]),
    ):
        with pytest.raises(ValueError, match="of another model: its weights"):
            refused()


def test_calibrated_gives_each_its_profile(tmp_path, monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    made, snapkv = [], kvjax.SnapKV(0.5, window=8)
    tx = kvjax.chain(kvjax.ByHead(snapkv), kvjax.Quantize(8))
    found = kvjax.calibrated(tx, model(), RAGGED[:1], on_made=lambda *x: made.append(x))
    profile = found.parts[0].profile
    assert found == kvjax.chain(kvjax.ByHead(snapkv, profile), kvjax.Quantize(8))
    choice = kvjax.PerLayer(lambda layer, _: kvjax.Full() if layer else kvjax.ByHead(snapkv))
    layers = kvjax.bind(kvjax.calibrated(choice, model(), RAGGED[:1]), 2)
    assert layers[0] == kvjax.bind(kvjax.ByHead(snapkv, profile), 2)[0]
    assert layers[1] == kvjax.Full() and len(made) == 1
    assert kvjax.calibrated(found, model(), []) is found


def test_a_sample_comes_from_all_over_the_text():
    assert sample_of(range(10_000), None) == [
        list(range(start, start + 1024)) for start in (0, 4488, 8976)
    ]
    assert [len(x) for x in sample_of(range(10_000), 1024)] == [448] * 3
    assert [x[0] for x in sample_of(range(30), None)] == [0, 10, 20]
