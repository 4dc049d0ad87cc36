"""`kvjax.generate`: the same tokens as a plain loop, compiled once, for anybody's model."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.evaluation import ReadOnce
from kvjax.generation import decode_loop, prompt_checks, prompt_pass
from kvjax.generation.model import as_functional
from kvjax.generation.prompt_checks import check_prompts
from kvjax.generation.sampling import unsupported_settings
from kvjax.models import Decoder, DecoderConfig, RopeConfig, random_decoder
from tests.support.cases import OF_A_TEXT
from tests.support.decoders import louder

VOCAB, POSITIONS, NEW = 64, 256, 12
PADDED_NEW = 64  # caches have room for so many new tokens
CONFIG = DecoderConfig(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=2, query_heads=4,
    kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=POSITIONS,
)  # fmt: skip
RNG = np.random.default_rng(5)
RAGGED = [RNG.integers(VOCAB, size=size).tolist() for size in (53, 9, 41)]


@functools.cache
def model():
    return louder(random_decoder(CONFIG, seed=3))


def generate(prompts=RAGGED, transform=None, **options):
    options = {"max_new_tokens": NEW, **options}
    return kvjax.generate(
        options.pop("model", None) or model(), prompts, transform=transform, **options
    )


def method(name: str) -> kvjax.KVTransform:
    """A method as the command line makes it, with a budget that compresses the longer rows."""
    transform = kvjax.parse(OF_A_TEXT.get(name, name), 36)
    return kvjax.calibrated(transform, model(), [RAGGED[0]])


def by_hand(
    functional: kvjax.models.FunctionalModel, prompt: list[int], new: int = NEW
) -> list[int]:
    """Greedy continuation: one call per token, prompt tokens included, with the full cache."""
    layers = kvjax.bind(kvjax.Full(), functional.num_layers)
    caches = tuple(
        kvjax.init_cache(
            layer, batch=1, kv_heads=functional.kv_heads, query_heads=functional.query_heads,
            head_dim=functional.head_dim, max_prompt=1, max_new=len(prompt) + new,
        )
        for layer in layers
    )  # fmt: skip
    step = jax.jit(functools.partial(functional.apply, layers=layers, phase="decode"))
    tokens = list(prompt)
    for position in range(len(prompt) + new - 1):
        at = jnp.array([[position]])
        logits, caches = step(functional.params, jnp.array([[tokens[position]]]), at, caches)
        if position >= len(prompt) - 1:
            tokens.append(int(jnp.argmax(logits[0, -1])))
    return tokens[len(prompt) :]


def compiled() -> tuple[int, int]:
    prompts = prompt_pass._read_layer._cache_size() + prompt_pass._read_whole._cache_size()
    return prompts, decode_loop._decode._cache_size()


def test_greedy_equals_a_plain_loop():
    result = generate([RAGGED[0]])
    expected = by_hand(as_functional(model()), RAGGED[0])
    assert result.tokens == [expected]
    assert len(set(expected)) > 3, "a model that repeats itself shows nothing"
    assert result.prompt_tokens == [53] and result.ended == [False]
    assert result.ttft_s > 0 and result.tpot_s > 0 and result.compile_s >= 0


def test_one_bucket_compiles_once():
    generate([RAGGED[0]])
    before = compiled()
    for length in (50, 64, 33):
        generate([RNG.integers(VOCAB, size=length).tolist()], seed=length)
    assert compiled() == before
    pieces = []
    generate([RAGGED[1]], on_tokens=pieces.append)
    assert compiled() == before, "streaming runs the same code"
    generate([RNG.integers(VOCAB, size=65).tolist()])
    assert compiled() == (before[0] + 1, before[1] + 1)
    generate([RNG.integers(VOCAB, size=128).tolist()])
    assert compiled() == (before[0] + 1, before[1] + 1)


def test_other_numbers_compile_nothing():
    """Nor do another limit, other end tokens, another seed and other weights."""
    generate([RAGGED[0]])
    before = compiled()
    generate([RAGGED[0]], model=random_decoder(CONFIG, seed=8))
    hot = kvjax.Sampling(0.7)
    for options in (
        {"max_new_tokens": 17}, {"sampling": hot, "seed": 3}, {"end_tokens": [5, 6]},
        {"sampling": kvjax.Sampling(1.2, top_k=5, top_p=0.9, min_p=0.01)},
    ):  # fmt: skip
        generate([RAGGED[0]], **options)
    assert compiled() == before


@pytest.mark.parametrize("temperature", [1e-38, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature):
    assert generate(sampling=kvjax.Sampling(temperature)).tokens == generate().tokens


def test_the_models_own_end_tokens():
    """They hold unless others are given."""
    whole = generate().tokens
    ends = (whole[0][4],)
    own = model()
    named = random_decoder(dataclasses.replace(CONFIG, eos_token_ids=ends), seed=3)
    nnx.update(named, nnx.state(own))
    expected = [cut_at(row, ends) for row in whole]
    assert generate(model=named).tokens == generate(end_tokens=ends).tokens == expected
    assert generate(model=named, end_tokens=()).tokens == whole != expected


def test_one_new_token():
    result = generate(max_new_tokens=1)
    assert result.tokens == [row[:1] for row in generate().tokens]
    assert result.tpot_s is None
    pieces = []
    generate(max_new_tokens=1, on_tokens=pieces.append)
    assert pieces == [result.tokens]


def loops_of(monkeypatch) -> list:
    """What the decode loops of all calls from now on end with."""
    loops, finish = [], decode_loop.Writing._finish

    def finished(one):
        loops.append(one._loop)
        finish(one)

    monkeypatch.setattr(decode_loop.Writing, "_finish", finished)
    return loops


def cut_at(row: list[int], ends: tuple[int, ...]) -> list[int]:
    stop = next((i for i, token in enumerate(row) if token in ends), len(row))
    return row[:stop]


@pytest.mark.parametrize("transform", [None, pytest.param(kvjax.H2O(36), marks=pytest.mark.slow)])
def test_end_tokens_stop_rows_separately(transform, monkeypatch):
    whole = generate(transform=transform).tokens
    ends = (whole[0][4], whole[1][0])  # the second row ends at once
    expected = [cut_at(row, ends) for row in whole]
    assert len({len(row) for row in expected}) > 1, "rows must end at different places"

    loops, pieces = loops_of(monkeypatch), []
    result = generate(transform=transform, end_tokens=ends, on_tokens=pieces.append)
    assert result.tokens == expected
    assert result.ended == [len(row) < NEW for row in expected]
    cuts = zip(whole, expected, strict=True)
    assert result.ended_by == [row[len(cut)] if len(cut) < NEW else None for row, cut in cuts]
    joined = [[token for piece in pieces for token in piece[row]] for row in range(len(RAGGED))]
    assert joined == expected, "an end token is not streamed"

    result = generate([RAGGED[0]], end_tokens=whole[0][:1], transform=transform)
    assert result.tokens == [[]] and result.ended == [True] and result.tpot_s is None
    assert int(loops[1].step) == 1, "the loop stops when all rows have"

    for cache in loops[0].caches:
        # A row that is finished writes nothing more; the newest token is never written.
        stored = [min(len(row), NEW - 1) for row in expected]
        lengths = [len(p) + n for p, n in zip(RAGGED, stored, strict=True)]
        assert cache.kv.length.tolist() == lengths
        if transform is None:
            assert (cache.kv.live.sum(-1) == jnp.array(lengths)[:, None]).all()
        assert not cache.kv.dropped.any()


# Sampling


def test_seeds():
    hot = kvjax.Sampling(temperature=1.0)
    same = [generate(sampling=hot, seed=1).tokens for _ in range(2)]
    assert same[0] == same[1]
    assert generate(sampling=hot, seed=2).tokens != same[0]
    twins = generate([RAGGED[0], RAGGED[0], RAGGED[1]], sampling=hot).tokens
    assert twins[0] != twins[1], "each row draws with its own key"
    pieces = []
    generate(sampling=hot, seed=1, on_tokens=pieces.append)
    assert [[t for piece in pieces for t in piece[row]] for row in range(3)] == same[0]


def test_temperature_is_the_distributions():
    logits = jnp.array([[0.0, 1.0, 2.0]])
    keys = jax.random.split(jax.random.key(0), 20_000)
    rows = jnp.broadcast_to(logits, (len(keys), 3))
    drawn = np.bincount(kvjax.Sampling(0.5).choose(rows, keys), minlength=3) / len(keys)
    np.testing.assert_allclose(drawn, jax.nn.softmax(logits[0] / 0.5), atol=0.01)


def allowed(logits: np.ndarray, top_k, top_p, min_p) -> np.ndarray:
    """The tokens that may be drawn, by the definitions, in float64."""
    logits = logits.astype(np.float64)
    keep = np.ones(len(logits), bool)
    if top_k is not None:
        keep &= logits >= np.sort(logits)[::-1][:top_k][-1]
    if top_p is not None:
        p = np.where(keep, np.exp(logits - logits.max()), 0.0)
        p /= p.sum()
        above = np.array([p[logits > own].sum() for own in logits])  # what is more likely
        # In float32 a sum this near to top_p may fall on either side.
        assume((np.abs(above - top_p) > 1e-4).all())
        assume((np.abs(np.cumsum(np.sort(p)[::-1]) - top_p) > 1e-4).all())
        keep &= above < top_p
    if min_p is not None:
        p = np.exp(logits - logits.max())
        assume((np.abs(p - min_p) > 1e-4 * min_p).all())
        keep &= p >= min_p
    return keep


probability = st.floats(1 / 64, 63 / 64, width=32)


@settings(max_examples=80, deadline=None)
@given(
    # XLA takes a subnormal number for zero.
    logits=st.lists(st.floats(-8, 8, width=32, allow_subnormal=False), min_size=12, max_size=12),
    top_k=st.none() | st.integers(1, 20),
    top_p=st.none() | probability,
    min_p=st.none() | probability,
)
def test_cut_allows_what_the_definitions_allow(logits, top_k, top_p, min_p):
    logits = np.array(logits, np.float32)
    expected = allowed(logits, top_k, top_p, min_p)
    cut = np.asarray(kvjax.Sampling(1.0, top_k, top_p, min_p).cut(jnp.asarray(logits)[None]))[0]
    np.testing.assert_array_equal(np.isfinite(cut), expected)
    np.testing.assert_array_equal(cut[expected], logits[expected])


def test_top_p_1_cuts_nothing():
    # In float32 the running sum of so many reaches 1 before its end.
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 50_000)) * 6, jnp.float32)
    assert jnp.array_equal(kvjax.Sampling(1.0, top_p=1.0).cut(logits), logits)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": -1.0}, ValueError),
        ({"temperature": float("nan")}, ValueError),
        ({"temperature": 1.0, "top_k": 0}, ValueError),
        ({"temperature": 1.0, "top_p": 0.0}, ValueError),
        ({"temperature": 1.0, "min_p": float("nan")}, ValueError),
        ({"top_k": 5}, ValueError),
        ({"repetition_penalty": 0.0}, ValueError),
        ({"repetition_penalty": "1.1"}, TypeError),
    ],
)
def test_bad_sampling(options, error):
    with pytest.raises(error):
        kvjax.Sampling(**options)


def penalised(logits: np.ndarray, tokens: list[int], penalty: float) -> np.ndarray:
    """Logits after a repetition penalty, by its definition, in float64."""
    logits = logits.astype(np.float64)
    for token in set(tokens):
        logits[token] = logits[token] * penalty if logits[token] < 0 else logits[token] / penalty
    return logits


@functools.cache
def logits_of(prompt: tuple[int, ...]) -> np.ndarray:
    return np.asarray(kvjax.read(model(), [list(prompt)], max_prompt=POSITIONS // 2).logits[0])


def written_by_hand(prompt: list[int], penalty: float, count: int) -> list[int]:
    """Greedy tokens with a penalty, each from a prompt of its own."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(penalised(logits_of(tuple(tokens)), tokens, penalty).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("penalty", [pytest.param(0.8, marks=pytest.mark.slow), 1.3])
def test_a_repetition_penalty_counts_prompt_and_text(penalty):
    """Row by row, over a batch, a context, its turns and their repetition."""
    sampling = kvjax.Sampling(repetition_penalty=penalty)
    rows = [RAGGED[1], RAGGED[1][:4]]
    expected = [written_by_hand(row, penalty, 6) for row in rows]
    assert generate(rows, sampling=sampling, max_new_tokens=6).tokens == expected
    assert generate(rows, max_new_tokens=6).tokens != expected
    context = kvjax.read(model(), [RAGGED[1]], max_prompt=64, max_new=16)
    first = generate(None, context=context, sampling=sampling, max_new_tokens=2)
    second = generate(None, context=first.context, sampling=sampling, max_new_tokens=4)
    assert first.tokens[0] + second.tokens[0] == expected[0]
    turns = generate([[7, 9], [11]], context=context, sampling=sampling, max_new_tokens=4).tokens
    assert turns == [written_by_hand([*RAGGED[1], *turn], penalty, 4) for turn in ([7, 9], [11])]


def test_a_draw_takes_the_penalty_first():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, VOCAB)), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 3)
    tokens = [[1, 2, 3], [5], list(range(VOCAB))]
    seen = jnp.stack([jnp.zeros(VOCAB, bool).at[jnp.array(row)].set(True) for row in tokens])
    by_hand = [
        penalised(np.asarray(row), ids, 1.7) for row, ids in zip(logits, tokens, strict=True)
    ]
    sampling = kvjax.Sampling(0.7, top_k=20, repetition_penalty=1.7)
    plain = dataclasses.replace(sampling, repetition_penalty=1.0)
    drawn = sampling.choose(logits, keys, seen)
    assert (
        drawn.tolist() == plain.choose(jnp.asarray(np.stack(by_hand), jnp.float32), keys).tolist()
    )
    with pytest.raises(ValueError, match="needs seen"):
        sampling.choose(logits, keys)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, kvjax.Sampling()),
        ({"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1},
         kvjax.Sampling(repetition_penalty=1.1)),
        ({"do_sample": True}, kvjax.Sampling(1.0, top_k=50)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05},
         kvjax.Sampling(0.6, 20, 0.95, 0.05)),
        ({"do_sample": True, "top_k": 0, "typical_p": 1.0, "num_beams": 1, "length_penalty": 0.5},
         kvjax.Sampling(1.0)),
        ({"do_sample": False, "typical_p": 0.9, "suppress_tokens": None, "eos_token_id": [1, 2]},
         kvjax.Sampling()),
    ],
)  # fmt: skip
def test_the_sampling_that_a_model_asks_for(settings, expected):
    assert kvjax.Sampling.from_settings(settings) == expected


def test_every_setting_of_transformers_is_sorted():
    """A setting that is in no list is one that kvjax says that it lacks."""
    from transformers import GenerationConfig

    named = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    lacking = unsupported_settings({name: "something" for name in named} | {"do_sample": True})
    assert named - set(lacking) >= {"temperature", "repetition_penalty", "use_cache", "max_length"}
    assert {"no_repeat_ngram_size", "suppress_tokens", "typical_p", "num_beams"} <= set(lacking)
    assert not unsupported_settings(GenerationConfig._get_default_generation_params())


# Logits that are NaN


def with_break(where: int) -> Decoder:
    """The model with NaN in the embedding of one token."""
    broken = nnx.clone(model())
    broken.embed.embedding[...] = broken.embed.embedding[...].at[where].set(jnp.nan)
    return broken


@pytest.mark.parametrize(("sampling", "streaming"), [(None, False), (kvjax.Sampling(0.8), True)])
def test_logits_that_are_nan_end_the_call(sampling, streaming):
    tokens = generate(sampling=sampling).tokens
    # The first token that no row has read or written before, and the step that reads it.
    row, step = next(
        (row, step)
        for step in range(NEW - 1)
        for row in range(3)
        if not any(tokens[row][step] in [*RAGGED[i], *tokens[i][:step]] for i in range(3))
    )
    options = {"on_tokens": lambda new: None} if streaming else {}
    with pytest.raises(FloatingPointError, match=f"row {row}: .*NaN or infinite"):
        generate(model=with_break(tokens[row][step]), sampling=sampling, **options)
    broken, mark = with_break(RAGGED[1][0]), RAGGED[1][0]
    prompts = [[t for t in row if t != mark] for row in RAGGED]
    prompts[1] = RAGGED[1]
    with pytest.raises(FloatingPointError, match="row 1: the logits for new token 1, at"):
        generate(prompts, model=broken, sampling=sampling, **options)


# Lost tokens


@dataclasses.dataclass(frozen=True)
class KeepsTooMuch(kvjax.KVTransform):
    """Promises `slots` of the prompt and NEW more, and evicts nothing."""

    slots: int

    def extent(self, extent: kvjax.kit.Extent) -> kvjax.kit.Extent:
        return extent.keep(self.slots).hold(self.slots + NEW)


@pytest.mark.slow
def test_lost_tokens_are_an_error():
    tx = KeepsTooMuch(20)
    half = kvjax.HeadGroups((((1,), kvjax.Full()), ((0,), tx)))
    # The last new token is never stored.
    lost = max(len(row) for row in RAGGED) + NEW - 1 - (20 + NEW)
    assert lost > 0
    message = rf"{{}} lost tokens .* up to {lost} of a row: KeepsTooMuch.* keeps more than its"
    for transform, cache in ((tx, r"caches\[0\]"), (half, r"caches\[0\]\[1\]")):
        with pytest.raises(RuntimeError, match=message.format(cache)):
            generate(transform=transform, buckets=[64])
    with pytest.raises(RuntimeError, match="up to"):
        list(kvjax.stream(model(), RAGGED, transform=tx, max_new_tokens=NEW, buckets=[64]))
    with pytest.raises(RuntimeError, match="up to"):
        kvjax.read(model(), RAGGED, transform=tx, max_new=1, buckets=[64])
    with pytest.raises(RuntimeError, match="up to"):
        ReadOnce(model(), RAGGED, [tx], max_new=1, buckets=[64]).context(tx)


# Other models


def attention_layer(weights, tokens, positions, caches, layers, phase, last, logits_at):
    """One layer of attention between an embedding and a projection."""
    x = weights["embed"][tokens]

    def heads(name: str, count: int):
        return (x @ weights[name]).reshape(*x.shape[:2], count, 8).swapaxes(1, 2)

    rope = kvjax.Rope(1.0 / 100.0 ** (jnp.arange(0, 8, 2, dtype=jnp.float32) / 8))
    out, cache = kvjax.attend(
        caches[0], heads("q", 4), heads("k", 2), heads("v", 2), positions,
        phase=phase, last=last, rope=rope,
    )  # fmt: skip
    x = x + out.swapaxes(1, 2).reshape(*x.shape[:2], 32) @ weights["o"]
    if logits_at is not None:
        x = jnp.take_along_axis(x, logits_at[..., None], axis=1)
    return x @ weights["out"], (cache,)


SHAPES = {"embed": (VOCAB, 32), "q": (32, 32), "k": (32, 16), "v": (32, 16), "o": (32, 32),
          "out": (32, VOCAB)}  # fmt: skip
SIZES = {"num_layers": 1, "query_heads": 4, "kv_heads": 2, "head_dim": 8, "vocab_size": VOCAB}


def weights() -> dict:
    rng = np.random.default_rng(1)
    return {
        name: jnp.asarray(rng.normal(size=shape) / 3, jnp.float32) for name, shape in SHAPES.items()
    }


def plain_apply(params, tokens, positions, caches, *, layers, phase, last=True, logits_at=None):
    return attention_layer(params, tokens, positions, caches, layers, phase, last, logits_at)


def plain_model() -> kvjax.models.FunctionalModel:
    return kvjax.models.FunctionalModel(plain_apply, weights(), **SIZES)


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, tokens, positions, caches, *, layers, phase, last=True, logits_at=None):
        params = {
            name: self.param(name, linen.initializers.zeros, shape)
            for name, shape in SHAPES.items()
        }
        return attention_layer(params, tokens, positions, caches, layers, phase, last, logits_at)


def linen_model() -> kvjax.models.FunctionalModel:
    return kvjax.models.FunctionalModel(LinenModel().apply, {"params": weights()}, **SIZES)


class NNXModel(nnx.Module):
    num_layers, query_heads, kv_heads, head_dim, vocab_size = SIZES.values()

    def __init__(self):
        self.weights = nnx.Dict({name: nnx.Param(value) for name, value in weights().items()})

    def __call__(self, tokens, positions, caches, *, layers, phase, last=True, logits_at=None):
        params = {name: value[...] for name, value in self.weights.items()}
        return attention_layer(params, tokens, positions, caches, layers, phase, last, logits_at)


class CallableModel:
    """Neither a module nor a pytree: it holds its arrays itself."""

    num_layers, query_heads, kv_heads, head_dim, vocab_size = SIZES.values()

    def __init__(self):
        self.weights = weights()

    def __call__(self, *args, **kwargs):
        return plain_apply(self.weights, *args, **kwargs)


@functools.cache
def plain_texts() -> list[list[int]]:
    return [by_hand(plain_model(), prompt) for prompt in RAGGED[:2]]


@pytest.mark.parametrize(
    "make",
    [pytest.param(plain_model, marks=pytest.mark.slow), linen_model, NNXModel,
     pytest.param(CallableModel, marks=pytest.mark.slow)],
)  # fmt: skip
def test_other_peoples_models(make):
    own = make()
    expected = plain_texts()
    assert len(set(expected[0])) > 3
    assert generate(RAGGED[:2], model=own).tokens == expected
    before = compiled()
    assert generate(RAGGED[:2], model=own).tokens == expected
    assert compiled() == before


def all_logits(*args, logits_at=None, **options):
    """Returns the logits of every token, which `LanguageModel` allows."""
    return plain_apply(*args, logits_at=None, **options)


def in_bfloat16(*args, **options):
    logits, caches = plain_apply(*args, **options)
    return logits.astype(jnp.bfloat16), caches


def too_few(*args, **options):
    logits, caches = plain_apply(*args, **options)
    return logits[..., 1:], caches


def caches_in_a_list(*args, **options):
    logits, caches = plain_apply(*args, **options)
    return logits, list(caches)


@pytest.mark.parametrize("apply", [all_logits, caches_in_a_list])
def test_what_a_model_may_return(apply):
    """Prompts are padded, so that the last of all logits are not those of a row's newest token."""
    own = kvjax.models.FunctionalModel(apply, weights(), **SIZES)
    assert generate(RAGGED[:2], model=own).tokens == plain_texts()


def test_logits_of_sixteen_bits_are_saved_and_loaded(tmp_path):
    own = kvjax.models.FunctionalModel(in_bfloat16, weights(), **SIZES)
    context = kvjax.read(own, RAGGED[:1], max_new=8)
    assert context.logits.dtype == jnp.float32
    kvjax.save_context(tmp_path / "context", context, model=own)
    again = kvjax.load_context(tmp_path / "context", own)
    answers = [kvjax.generate(own, None, context=x, max_new_tokens=4) for x in (context, again)]
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].context.logits.dtype == jnp.float32


def test_logits_of_another_vocabulary_are_refused():
    own = kvjax.models.FunctionalModel(too_few, weights(), **SIZES)
    with pytest.raises(ValueError, match=rf"a vocabulary of {VOCAB}: .*, {VOCAB - 1}\)"):
        generate(RAGGED[:2], model=own)


class Half:
    num_layers, query_heads, kv_heads = 1, 4, "2"

    def __call__(self): ...


# Bad input, and what it costs


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ([], ValueError, "at least one prompt"),
        ([[1], []], ValueError, "row 1 is empty"),
        ("Hello", TypeError, "token ids, got the text"),
        ([[[1, 2]]], TypeError, "sequence of token ids"),
        ([[1.0]], TypeError, "integers, got float"),
        ([[1], [3, -1]], ValueError, r"\[0, 64\), got -1 in row 1"),
        (5, TypeError, "token ids of each row, got 5"),
        (np.array([1, 2]), TypeError, "sequence of token ids, got 1"),
        ([[1] * (POSITIONS + 1)], ValueError, "256 positions, got a prompt of 257"),
        ([[1] * (POSITIONS - NEW + 1)], ValueError, "256 positions, got a prompt of 245 tokens"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ({"buckets": [16, 32]}, ValueError, "must hold 53 tokens"),
        ({"transform": kvjax.SnapKV}, TypeError, "transforms"),
        ({"end_tokens": (2**40,)}, ValueError, "end tokens"),
        ({"end_tokens": 5}, TypeError, "sequence of token ids, got 5"),
        ({"dtype": "int7"}, TypeError, "floating dtype, got 'int7'"),
        ({"sampling": {"temperature": 1}}, TypeError, "kvjax.Sampling, got {'temperature': 1}"),
        ({"context": "book"}, TypeError, "kvjax.Context.*got 'book'"),
        ({"model": object()}, TypeError, "callable"),
        ({"model": Half()}, TypeError, "lacks kv_heads, head_dim, vocab_size"),
    ],
)
def test_what_is_refused(prompts, error, message):
    with pytest.raises(error, match=message):
        generate(**(prompts if isinstance(prompts, dict) else {"prompts": prompts}))


@pytest.mark.parametrize("of", [np.array, jnp.array])
def test_prompts_may_be_arrays(of):
    lists = [[3, 1, 4], [1, 5, 9]]
    expected = generate(lists, max_new_tokens=2).tokens
    assert generate(of(lists), max_new_tokens=2).tokens == expected
    assert generate([of(row) for row in lists], max_new_tokens=2).tokens == expected


def test_the_last_position_is_used():
    layers = kvjax.bind(kvjax.Full(), 1)
    check_prompts(CONFIG, [[1] * (POSITIONS - NEW)], layers, NEW)
    result = generate([[1] * (POSITIONS - 4)], max_new_tokens=4)
    assert len(result.tokens[0]) == 4


def test_repositioned_keys_go_beyond_the_models_positions():
    tx = kvjax.StreamingLLM(budget=32, reposition=True)
    result = generate([[1, 2] * (POSITIONS // 2 - 2)], tx)
    assert len(result.tokens[0]) == NEW


@pytest.mark.slow
def test_bytes():
    """Of one layer's cache: three rows, 2 KV heads of 8 channels, and what is kept of a slot."""
    full, half = (generate(model=plain_model(), dtype=t) for t in (jnp.float32, jnp.bfloat16))
    snapkv = generate(model=plain_model(), transform=method("snapkv"))
    slots, used_dropped_length = 3 * 2 * (64 + PADDED_NEW), 3 * (2 * 8 + 4)
    position_mass_pinned = 4 + 4 + 1
    assert full.cache_bytes == slots * (8 * 4 * 2 + position_mass_pinned) + used_dropped_length
    assert half.cache_bytes == full.cache_bytes - slots * 8 * 2 * 2
    assert full.full_cache_bytes == full.cache_bytes == snapkv.full_cache_bytes
    assert half.full_cache_bytes == half.cache_bytes
    assert snapkv.cache_bytes == full.cache_bytes - 3 * 2 * (64 - 36) * (8 * 4 * 2 + 9)


def test_buckets():
    at = [prompt_checks.bucket(n, None, None) for n in (1, 64, 65, 256, 257, 511, 513, 1025, 4097)]
    assert at == [64, 64, 128, 256, 320, 512, 640, 1280, 5120]
    for length in range(256, 5000):
        assert length <= prompt_checks.bucket(length, None, None) <= 1.25 * length + 1
    assert prompt_checks.bucket(30, None, (128, 32, 64)) == 32
    assert prompt_checks.bucket(250, POSITIONS, None) == POSITIONS


def test_committed_parameters_compile_the_loop_once(caplog):
    """Where parameters lie decides where caches lie: nothing is compiled inside the clock."""
    functional = as_functional(plain_model())
    committed = dataclasses.replace(
        functional, params=jax.device_put(functional.params, jax.devices()[0])
    )
    with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
        generate([[5, 6, 7]], kvjax.H2O(24), model=committed)
    compiled = [
        record for record in caplog.records
        if "Finished XLA compilation" in record.getMessage() and "_decode" in record.getMessage()
    ]  # fmt: skip
    assert len(compiled) == 1


def test_a_method_is_named_by_its_text():
    """By every call that is given a model; what it computes is that of the transform."""
    text, transform = "snapkv(budget=8, window=4)", kvjax.SnapKV(8, window=4)
    expected = kvjax.generate(model(), RAGGED, transform=transform, max_new_tokens=4).tokens
    assert kvjax.generate(model(), RAGGED, transform=text, max_new_tokens=4).tokens == expected
    steps = kvjax.stream(model(), RAGGED, transform=text, max_new_tokens=4)
    assert [[x for new in row for x in new] for row in zip(*steps, strict=True)] == expected
    context = kvjax.read(model(), RAGGED, transform=text, max_new=4)
    assert context.transform == transform
    once = ReadOnce(model(), RAGGED, [text])
    assert once.context(text).transform == transform
    assert kvjax.calibrated(text, model(), []) == transform
    with pytest.raises(ValueError, match="snapkv needs budget="):
        kvjax.generate(model(), RAGGED, transform="snapkv")
    with pytest.raises(ValueError, match="did you mean snapkv"):
        kvjax.read(model(), RAGGED, transform="snapvk(budget=8)")
    with pytest.raises(TypeError, match=r"bind takes transforms.*kvjax.parse makes"):
        kvjax.bind("full", 2)


def test_settings_of_sampling_are_not_arguments_of_their_own():
    for call in (kvjax.generate, kvjax.stream):
        with pytest.raises(TypeError, match=r"top_k by sampling=kvjax.Sampling\(temperature=0.7, "):
            call(model(), RAGGED, temperature=0.7, top_k=5)
        with pytest.raises(TypeError, match="unexpected keyword argument 'frob'"):
            call(model(), RAGGED, frob=1)
