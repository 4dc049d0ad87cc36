"""What is alike in a cache, against its definitions in NumPy float64."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.evaluation.diagnosis import plots
from kvjax.evaluation.diagnosis.diagnosis import Diagnosis
from kvjax.evaluation.diagnosis.redundancy import (
    EPSILON,
    OBSERVED,
    SHARE,
    Redundancy,
    find_redundancy,
)
from kvjax.evaluation.fidelity.full_run import FullRun
from tests.evaluation.diagnosis.test_diagnosis import TABLE, of
from tests.evaluation.fidelity.test_fidelity import (
    KV_HEADS,
    LAYERS,
    PROMPTS,
    QUERY_HEADS,
    tiny_model,
    tiny_reference,
)
from tests.references.attention import softmax_attention
from tests.support.tolerances import close

TOKENS = len(PROMPTS[0])
MIDDLE = LAYERS // 2


@pytest.fixture(scope="module")
def run() -> FullRun:
    return FullRun(tiny_model(), PROMPTS, OBSERVED, new_tokens=2)


@pytest.fixture(scope="module")
def found(run) -> Redundancy:
    return find_redundancy(run)


@pytest.fixture(scope="module")
def layers() -> list:
    """Queries, keys and values of the first row in each layer."""
    return tiny_reference().read(PROMPTS[0])[1]


def cosine(a, b) -> np.ndarray:
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


def test_similarity_by_distance(found, layers):
    assert found.distances == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    assert found.similarity.shape == (LAYERS, KV_HEADS, len(found.distances))
    for layer, (_, keys, _) in enumerate(layers):
        for number, distance in enumerate(found.distances):
            expected = cosine(keys[:, :-distance], keys[:, distance:]).mean(-1)
            close(found.similarity[layer, :, number], expected, "accumulated")


def test_runs_are_those_that_merge(found, layers):
    """From the last token to the first, one joins the next where their keys are alike."""
    assert found.run.shape == (LAYERS, KV_HEADS, TOKENS)
    for layer, (_, keys, _) in enumerate(layers):
        for head in range(KV_HEADS):
            joins = cosine(keys[head, :-1], keys[head, 1:]) > EPSILON
            number = np.concatenate(([0], np.cumsum(~joins)))
            expected = np.bincount(number)[number]
            np.testing.assert_array_equal(found.run[layer, head], expected)
            left = found.merged()[layer, head]
            assert left == pytest.approx((number[-1] + 1) / TOKENS)
    assert found.run.max() > 1


def test_bits_are_the_most_attended_tokens(found, layers):
    assert found.bits.shape == (QUERY_HEADS, TOKENS)
    count = int(SHARE * TOKENS)
    assert (found.bits.sum(1) == count).all()
    place = np.arange(TOKENS)
    for layer, (q, keys, values) in enumerate(layers):
        retained = []
        for head in range(QUERY_HEADS):
            own = head // (QUERY_HEADS // KV_HEADS)
            _, p = softmax_attention(q[head : head + 1], keys[own], values[own], place, place)
            best = np.argsort(-p[0].sum(0), kind="stable")[:count]
            retained.append(np.isin(place, best))
        if layer == MIDDLE:
            np.testing.assert_array_equal(found.bits, retained)
        shares = [(np.sum(retained, 0) == heads).mean() for heads in range(QUERY_HEADS + 1)]
        close(found.agreement[layer], shares, "rounding")


def test_clusters_hold_every_token_once(run, found):
    """Sinks apart; a token's cluster gets the attention of all of its tokens."""
    assert found.layer == MIDDLE
    assert (found.cluster[:, :16] == -1).all() and (found.cluster[:, 16:] >= 0).all()
    attention = np.asarray(run.truth[MIDDLE].attention, np.float64)[:, 0, :, :TOKENS].mean(0)
    attention = attention.reshape(KV_HEADS, -1, TOKENS).mean(1)
    for head in range(KV_HEADS):
        label = found.cluster[head]
        expected = [attention[head, label == own].sum() for own in label]
        close(found.cluster_attention[head], expected, "accumulated")


def test_books_hold_no_more_than_what_is_kept(found):
    assert found.kept.shape == (LAYERS,) and found.entries.shape == (LAYERS, 2)
    assert (found.entries <= found.kept[:, None] + 1e-9).all() and (found.entries > 0).all()
    assert found.kept[0] >= found.kept[-1], "deep layers keep less"


def test_pictures(found, tmp_path):
    whole = of(*TABLE)
    diagnosis = Diagnosis(*list(vars(whole).values())[:-1], redundancy=found)
    names = plots.draw(diagnosis, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(names) and len(names) == 8
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
    assert diagnosis.as_json()["redundancy"] == found.summary()
    assert all(len(values) == LAYERS for values in found.summary().values())
