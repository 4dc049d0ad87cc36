"""The references themselves, on cases small enough to compute by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.references.attention import softmax_attention
from tests.references.best_match import best_match
from tests.references.budgets import rows_budget
from tests.references.column_sums import column_sums
from tests.references.h2o import H2O
from tests.references.merge import merge
from tests.references.pyramidkv import PyramidKV, layer_budgets
from tests.references.rope import inverse_frequencies, rope
from tests.references.slots import best
from tests.references.snapkv import SnapKV, pool
from tests.references.streaming_llm import StreamingLLM


def weighted(weights: list[float], queries: list[float] | None = None):
    """One channel, one query head: with scale 1 and query 1, p[t, s] is proportional to weights[s].

    The query -1 makes it 1 / weights[s], the query 0 uniform.  Values are the token's index.
    """
    size = len(weights)
    q = np.ones((1, size, 1)) if queries is None else np.reshape(queries, (1, size, 1))
    return q, np.log(weights)[:, None], np.arange(size)[:, None], np.arange(size)


def decode_one(method, position: int, weight: float, query: float = 1.0) -> float:
    key, value = np.log([weight]), np.array([float(position)])
    return method.decode(np.array([[query]]), key, value, position).item()


def random_prompt(length: int, group: int = 2, dim: int = 4, seed: int = 0):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(group, length, dim))
    k, v = rng.normal(size=(2, length, dim))
    return q, k, v, np.arange(length)


# --- attention ------------------------------------------------------------------------------------


def test_attention_by_hand():
    out, p = softmax_attention(*weighted([1, 3, 4]), np.arange(3), scale=1.0)
    np.testing.assert_allclose(p[0], [[1, 0, 0], [1 / 4, 3 / 4, 0], [1 / 8, 3 / 8, 1 / 2]])
    np.testing.assert_allclose(out[0, :, 0], [0, 3 / 4, 11 / 8])


def test_attention_window_padding_and_nothing_visible():
    q, k, v, _ = weighted([1, 3, 4])
    _, p = softmax_attention(q, k, v, [0, 1, 2], [0, 1, 2], scale=1.0, window=2)
    np.testing.assert_allclose(p[0, 2], [0, 3 / 7, 4 / 7])
    out, p = softmax_attention(q, k, v, [-1, 0, 5], [-1, 3, 4], scale=1.0)
    np.testing.assert_allclose(p[0], [[0, 0, 0], [0, 0, 0], [0, 3 / 7, 4 / 7]])
    np.testing.assert_array_equal(out[0, :2], 0)


def test_log_mass_is_a_repeated_key_and_minus_infinity_is_free():
    q, k, v, _ = random_prompt(3)
    key_positions = np.zeros(3, int)
    once, _ = softmax_attention(
        q, k, v, [0, 0, 0], key_positions, log_mass=[np.log(2), 0, -np.inf], soft_cap=1.5
    )
    i = [0, 0, 1]
    twice, _ = softmax_attention(q, k[i], v[i], [0, 0, 0], key_positions, soft_cap=1.5)
    np.testing.assert_allclose(once, twice)


def test_soft_cap_and_default_scale():
    q, k = np.full((1, 1, 4), 2.0), np.array([[1.0] * 4, [0.0] * 4])
    _, p = softmax_attention(q, k, k, [1], [0, 1], soft_cap=3.0)
    x = np.exp(3 * np.tanh(4 / 3))  # 4 * 2 / sqrt(4) = 4
    np.testing.assert_allclose(p[0, 0], [x / (1 + x), 1 / (1 + x)])


def test_column_sums_by_hand():
    q, k, _, positions = weighted([1, 3, 4])
    sums = column_sums(q, k, positions, positions, scale=1.0)
    np.testing.assert_allclose(sums, [[1 + 1 / 4 + 1 / 8, 3 / 4 + 3 / 8, 1 / 2]])


def test_rope_by_hand_and_relative():
    x = np.array([[1.0, 10.0, 0.0, 0.0, 7.0]])
    y = rope(x, [3], [0.5, 0.1], factor=2.0)
    expected = [2 * np.cos(1.5), 20 * np.cos(0.3), 2 * np.sin(1.5), 20 * np.sin(0.3), 7]
    np.testing.assert_allclose(y[0], expected)
    np.testing.assert_allclose(inverse_frequencies(4, 100.0), [1, 0.1])
    q, k, *_ = random_prompt(1)
    near, far = (rope(q[0], [p + 2], [1, 0.1]) @ rope(k, [p], [1, 0.1]).T for p in (0, 40))
    np.testing.assert_allclose(near, far)


# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "length", "expected"),
    [(7, 3, 7), (0.5, 100, 50), (0.5, 10, 10), (0.1, 100, 33), (0.35, 101, 35), (1.0, 50, 50)],
)
def test_rows_budget(budget, length, expected):
    assert rows_budget(budget, length, 33) == expected


def test_layer_budgets_by_hand():
    assert layer_budgets(28, 8, 20, 1000, 3) == [47, 28, 9]
    assert layer_budgets(28, 8, 20, 38, 3) == [38, 28, 18]
    # shares 3.9, 2.63, 1.37, 0.1: two of eight are missing after rounding down
    assert layer_budgets(10, 8, 20, 1000, 4) == [12, 11, 9, 8]
    # shares 3, 2.5, 2, 1.5, 1: one is missing, the tie goes to the lower layer
    assert layer_budgets(4, 2, 2, 1000, 5) == [5, 5, 4, 3, 3]
    assert layer_budgets(28, 8, 20, 1000, 1) == [28]
    # beta 1.1 is 11 / 10: shares 12 and 10, whatever its binary value
    assert layer_budgets(19, 8, 1.1, 1000, 2) == [20, 18]
    # nothing to share out: a float budget of a row shorter than the window
    assert layer_budgets(3, 8, 20, 3, 4) == [8, 8, 8, 8]


@pytest.mark.parametrize("num_layers", [1, 2, 3, 7, 32])
@pytest.mark.parametrize("budget", [9, 10, 37, 64, 128])
def test_layer_budgets_add_up_exactly(budget, num_layers):
    for length in range(1, 300):
        budgets = layer_budgets(budget, 8, 20, length, num_layers)
        assert sum(budgets) == num_layers * budget
        if length > budget:
            assert sorted(budgets, reverse=True) == budgets
            assert num_layers == 1 or 8 <= budgets[-1] <= budgets[0] <= length
        else:
            assert min(budgets) >= length


# --- StreamingLLM ---------------------------------------------------------------------------------


def test_streaming_llm_keeps_sinks_and_recent():
    method = StreamingLLM(6, sinks=2, scale=1.0)
    method.prompt(*weighted([1] * 10))
    assert method.kept == [0, 1, 6, 7, 8, 9]
    out = decode_one(method, 10, 1.0)
    np.testing.assert_allclose(out, (0 + 1 + 6 + 7 + 8 + 9 + 10) / 7)
    assert method.kept == [0, 1, 7, 8, 9, 10]


def test_streaming_llm_float_budget_is_fixed_at_the_prompts_end():
    method = StreamingLLM(0.5, sinks=2, scale=1.0)
    method.prompt(*weighted([1] * 10))
    for position in range(10, 20):
        decode_one(method, position, 1.0)
    assert method.kept == [0, 1, 17, 18, 19]
    q, k, v, positions = weighted([1] * 4)
    method.prompt(q, k, v, positions + 20)  # 24 tokens so far: 12 slots, 9 live
    assert method.kept == [0, 1, 17, 18, 19, 20, 21, 22, 23]


def test_streaming_llm_short_row_under_a_float_budget():
    method = StreamingLLM(0.5, sinks=4, scale=1.0)
    method.prompt(*weighted([1, 1, 1]))  # B = min(3, max(1, 5)) = 3: it may grow to sinks + 1
    decode_one(method, 3, 1.0)
    decode_one(method, 4, 1.0)
    assert method.kept == [0, 1, 2, 3, 4]
    decode_one(method, 5, 1.0)
    assert method.kept == [0, 1, 2, 3, 5]


def test_streaming_llm_repositions_by_rank():
    method = StreamingLLM(3, sinks=1, reposition=True, inv_freq=np.array([1.0]), scale=2.0)
    unit = np.tile([1.0, 0.0], (8, 1))
    values = np.arange(16.0).reshape(8, 2)
    method.prompt(unit[None], unit, values, np.arange(8))
    assert method.kept == [0, 6, 7]
    out = method.decode(unit[:1], unit[0], np.array([5.0, -1.0]), 8)
    weights = np.exp(2 * np.cos([3, 2, 1, 0]))  # ranks 0..3, the query at 3
    expected = weights @ [[0, 1], [12, 13], [14, 15], [5, -1]] / weights.sum()
    np.testing.assert_allclose(out[0], expected)


def test_streaming_llm_reposition_equals_rotated_keys_before_any_eviction():
    q, k, v, positions = random_prompt(12)
    inv_freq = inverse_frequencies(4)
    moved = StreamingLLM(20, reposition=True, inv_freq=inv_freq)
    plain = StreamingLLM(20)
    a = moved.prompt(q, k, v, positions)
    b = plain.prompt(rope(q, positions, inv_freq), rope(k, positions, inv_freq), v, positions)
    np.testing.assert_allclose(a, b)


# --- H2O ------------------------------------------------------------------------------------------


def test_h2o_by_hand():
    # column sums 2.086, 1.086, 1.172, 1.344, 0.211, 0.1
    method = H2O(4, scale=1.0)
    method.prompt(*weighted([1, 1, 2, 4, 1, 1]))
    assert method.kept == [0, 3, 4, 5]
    np.testing.assert_allclose(method.slots.scores[0, 1], 1 / 2 + 4 / 9 + 4 / 10)
    out = decode_one(method, 6, 2.0)
    np.testing.assert_allclose(out, (0 + 3 * 4 + 4 + 5 + 6 * 2) / 9)
    assert method.kept == [0, 3, 5, 6]  # 4 had 0.211 + 1/9, and was no longer recent
    np.testing.assert_allclose(method.slots.scores[0, 2:], [1 / 10 + 1 / 9, 2 / 9])
    decode_one(method, 7, 1.0, query=-1.0)
    assert method.kept == [0, 3, 6, 7]


def test_h2o_odd_budget_gives_the_extra_slot_to_the_recent():
    method = H2O(5, scale=1.0)
    method.prompt(*weighted([1, 1, 2, 4, 1, 1]))
    assert method.kept == [0, 2, 3, 4, 5]


def test_h2o_fills_free_slots_before_it_evicts():
    method = H2O(8, scale=1.0)
    method.prompt(*weighted([1, 1, 2, 4, 1, 1]))
    decode_one(method, 6, 1.0)
    decode_one(method, 7, 1.0)
    assert method.kept == list(range(8))
    decode_one(method, 8, 1.0)
    assert method.kept == [0, 1, 2, 3, 5, 6, 7, 8]


def test_h2o_row_of_one_token_under_a_float_budget_grows_to_two():
    method = H2O(0.5, scale=1.0)
    method.prompt(*weighted([1]))  # B = min(1, max(0, 2)) = 1
    decode_one(method, 1, 1.0)
    assert method.kept == [0, 1]
    decode_one(method, 2, 1.0)
    assert method.kept == [0, 2]


def test_h2o_second_turn_carries_the_scores_on():
    method = H2O(4, scale=1.0)
    method.prompt(*weighted([1, 1, 2, 4, 1, 1]))
    before = method.slots.scores[0].copy()
    q, k, v, positions = weighted([1, 1])
    method.prompt(q, k, v, positions + 6)
    assert method.kept == [0, 3, 6, 7]
    np.testing.assert_allclose(method.slots.scores[0, 1], before[1] + 4 / 8 + 4 / 9)


@pytest.mark.parametrize(("how", "kept"), [("mean", [0, 2]), ("sum", [0, 2]), ("max", [1, 2])])
def test_h2o_group_reduction(how, kept):
    method = H2O(2, group_reduce=how)
    q, k, v, positions = np.zeros((2, 3, 1)), np.zeros((3, 1)), np.zeros((3, 1)), np.arange(3)
    method.prompt(q, k, v, positions, last=False)
    for token, score in zip(method.slots.tokens, [[4, 4], [7, 0], [0, 0]], strict=True):
        token.score = np.array(score, float)
    method._evict()
    assert method.kept == kept


def test_ties_keep_the_lower_position():
    assert best(np.array([1.0, 2.0, 1.0, 2.0, 1.0]), 3) == [0, 1, 3]


# --- SnapKV and PyramidKV -------------------------------------------------------------------------


def test_pooling_by_hand():
    x = np.array([[3.0, 0.0, 0.0, 6.0, 0.0]])
    np.testing.assert_allclose(pool(x, 3, "avg"), [[1, 1, 2, 2, 2]])
    np.testing.assert_allclose(pool(x, 3, "max"), [[3, 3, 6, 6, 6]])
    np.testing.assert_allclose(pool(x, 1, "max"), x)
    np.testing.assert_allclose(pool(x[:, :2], 7, "max"), [[3, 3]])


@pytest.mark.parametrize(
    ("kernel", "pooling", "kept"),
    [(1, "max", [0, 2, 4]), (1, "avg", [0, 2, 4]), (3, "max", [0, 1, 4]), (3, "avg", [1, 2, 4])],
)
def test_snapkv_by_hand(kernel, pooling, kept):
    # the prefix in proportion: 6, 0.1, 3.5, 3; maxima of three: 6, 6, 3.5, 3.5;
    # sums of three: 6.1, 9.6, 6.6, 6.5 (averages without the padding zeros would favour 1 and 3)
    method = SnapKV(3, observation=1, kernel=kernel, pooling=pooling, scale=1.0)
    method.prompt(*weighted([6, 0.1, 3.5, 3, 1]))
    assert method.kept == kept
    decode_one(method, 5, 1.0)
    assert method.kept == [*kept, 5]


def test_snapkv_softmax_runs_over_prefix_and_window_together():
    method = SnapKV(9, observation=2, kernel=1, scale=1.0)
    method.prompt(*weighted([1, 2, 3, 4]))
    np.testing.assert_allclose(method.prefix_scores(), [(1 / 6 + 0.1) / 2, (2 / 6 + 0.2) / 2])


def test_snapkv_second_turn_takes_its_own_queries_and_protects_the_newest():
    method = SnapKV(4, observation=2, kernel=1, scale=1.0)
    method.prompt(*weighted([1, 2, 4], queries=[0, 0, -1]))
    decode_one(method, 3, 1.0)
    decode_one(method, 4, 1.0)
    q, k, v, positions = weighted([1])
    method.prompt(q, k, v, positions + 5)
    # query 5 gives (1, 2, 4, 1) / 10
    assert method.kept == [1, 2, 4, 5]


def test_pyramidkv_is_snapkv_with_the_layers_budget():
    prompt = random_prompt(100)
    budgets = layer_budgets(30, 8, 20, 100, 4)
    for layer in range(4):
        pyramid = PyramidKV(30, layer, 4)
        snap = SnapKV(budgets[layer], observation=8)
        pyramid.prompt(*prompt)
        snap.prompt(*prompt)
        assert pyramid.kept == snap.kept
        assert len(pyramid.kept) == budgets[layer]


# --- all methods ----------------------------------------------------------------------------------

METHODS = {
    "streaming_llm": lambda budget: StreamingLLM(budget),
    "reposition": lambda budget: StreamingLLM(
        budget, reposition=True, inv_freq=inverse_frequencies(4)
    ),
    "h2o": lambda budget: H2O(budget),
    "snapkv": lambda budget: SnapKV(budget, observation=8),
    "pyramidkv": lambda budget: PyramidKV(budget, 0, 2),
}


@pytest.mark.parametrize("name", METHODS)
def test_chunks_and_padding_change_nothing(name):
    q, k, v, positions = random_prompt(40)
    whole = METHODS[name](20)
    expected = whole.prompt(q, k, v, positions)
    assert 15 < len(whole.kept) < 40

    order = np.r_[np.arange(15), [0, 1], np.arange(15, 40)]
    padded_positions = np.where((order < 2) & (np.arange(42) > 2), -1, positions[order])
    parts = METHODS[name](20)
    out = []
    for part, last in ((slice(0, 16), False), (slice(16, 42), True)):
        i = order[part]
        out.append(parts.prompt(q[:, i], k[i], v[i], padded_positions[part], last=last))
    out = np.concatenate(out, axis=1)
    np.testing.assert_array_equal(out[:, 15:17], 0)
    np.testing.assert_allclose(np.delete(out, [15, 16], axis=1), expected)
    assert parts.kept == whole.kept


@pytest.mark.parametrize("name", METHODS)
def test_lossless_while_the_budget_covers_everything(name):
    method = METHODS[name](44)
    q, k, v, positions = random_prompt(44)
    full, _ = softmax_attention(q, k, v, positions, positions)
    if name == "reposition":
        turned = (rope(x, positions, inverse_frequencies(4)) for x in (q, k))
        full, _ = softmax_attention(*turned, v, positions, positions)
    out = method.prompt(q[:, :40], k[:40], v[:40], positions[:40])
    np.testing.assert_allclose(out, full[:, :40])
    for t in range(40, 44):
        np.testing.assert_allclose(method.decode(q[:, t], k[t], v[t], t), full[:, t])
    assert method.kept == list(range(44))


# --- merge ----------------------------------------------------------------------------------------


def test_merge_by_hand():
    keys = np.array([[1.0], [4.0], [10.0], [9.0]])
    log_mass = np.log([1.0, 2.0, 1.0, 1.0])
    log_mass[3] = -np.inf
    positions = np.array([3, 5, 6, -1])
    k, v, m, p = merge(keys, -keys, log_mass, positions, np.array([1, 1, 2, 3]))
    np.testing.assert_allclose(k[:, 0], [0, 3, 10, 0])
    np.testing.assert_allclose(v, -k)
    np.testing.assert_allclose(m, [-np.inf, np.log(3), 0, -np.inf])
    np.testing.assert_array_equal(p, [-1, 5, 6, -1])
    k, *_ = merge(keys, keys, log_mass, positions, np.array([1, 1, 2, 3]), np.array([3, 1, 1, 1]))
    np.testing.assert_allclose(k[1], 7 / 4)


def test_merge_refuses_chains():
    with pytest.raises(ValueError, match="target"):
        merge(np.ones((3, 1)), np.ones((3, 1)), np.zeros(3), np.arange(3), np.array([1, 2, 2]))


# --- best matches ---------------------------------------------------------------------------------


def test_best_matches_by_hand():
    a, b = np.array([[1.0], [2.0], [-1.0], [5.0]]), np.array([[3.0], [3.0], [-4.0]])
    chunks = [([0, 2], [0, 1, 2]), ([3], [])]
    best, match, margin = best_match(a, b, chunks, lambda x, y: float(x @ y))
    assert best.tolist() == [3, -np.inf, 4, -np.inf]
    assert match.tolist() == [0, 0, 2, 0] and margin == 7
