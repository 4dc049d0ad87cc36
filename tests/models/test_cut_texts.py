"""A text gives the same logits however it is cut: at once, in chunks, in turns, token by token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax.evaluation
from kvjax.generation import decode_loop, prompt_pass
from kvjax.generation.model import as_functional
from kvjax.models import DecoderConfig, RopeConfig, from_pretrained, random_decoder, read_config
from kvjax.models.config import ROPE_TYPES
from tests.models.family_cases import NAMED
from tests.models.test_families import save_reference, transformers_config
from tests.support.hf_models import SIZES, reference_logits
from tests.support.marks import some_slow
from tests.support.tolerances import close

ORIGINAL = 16  # the context before it was stretched, for all types but the plain one
SHORT, LONG = (1.0, 1.1, 1.2, 1.3), (4.0, 3.0, 2.0, 1.5)
TOKENS = 24
IDS = np.random.default_rng(0).integers(0, 64, TOKENS).tolist()


@functools.cache
def model(kind: str = "longrope"):
    factors = {"short_factors": SHORT, "long_factors": LONG} if kind == "longrope" else {}
    rope = RopeConfig(
        rotary_dim=8, type=kind, theta=1000.0, factor=4.0, original_max_positions=ORIGINAL,
        **factors,
    )  # fmt: skip
    made = random_decoder(
        DecoderConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
            kv_heads=2, head_dim=8, rope=rope, max_positions=256,
        )
    )  # fmt: skip
    made.embed.embedding[...] *= 50  # so that attention is not uniform
    return made


def read_in_pieces(functional, tokens: list[int], max_prompt: int, pieces) -> np.ndarray:
    """Logits of all tokens, by a user's own loop: `pieces` are a length, phase and last each."""
    layers = kvjax.bind(kvjax.Full(), functional.num_layers, functional.windows, len(tokens))
    sizes = {name: getattr(functional, name) for name in ("kv_heads", "query_heads", "head_dim")}
    options = [functional.attention(number) for number in range(functional.num_layers)]
    caches = tuple(
        kvjax.init_cache(
            layer, batch=1, max_prompt=max_prompt, max_new=len(tokens) - max_prompt, **sizes,
            **attention.static,
        )
        for layer, attention in zip(layers, options, strict=True)
    )  # fmt: skip
    call = jax.jit(functional.apply, static_argnames=("layers", "phase", "last"))
    logits, start = [], 0
    for length, phase, last in pieces:
        at = jnp.arange(start, start + length)[None]
        given = jnp.array([tokens[start : start + length]]), at, caches
        new, caches = call(functional.params, *given, layers=layers, phase=phase, last=last)
        logits.append(np.asarray(new[0]))
        start += length
    assert start == len(tokens)
    return np.concatenate(logits)


def cuts(tokens: int) -> dict[str, tuple]:
    """The longest prompt that a cache is made for, and the pieces of a text."""
    last = tokens - 18
    chunks = [(9, "prompt", False), (9, "prompt", False), (last, "prompt", True)]
    decoded = [(1, "decode", True)]
    return {
        "chunks": (tokens, chunks),
        "turns": (tokens, [(12, "prompt", True), (tokens - 12, "prompt", True)]),
        "decoding": (5, [(5, "prompt", True), *decoded * (tokens - 5)]),
        "answers": (tokens - 8, [(6, "prompt", True), *decoded * 8, (tokens - 14, "prompt", True)]),
    }


def check_cuts(functional, tokens: list[int]) -> None:
    whole = read_in_pieces(functional, tokens, len(tokens), [(len(tokens), "prompt", True)])
    assert whole.std() > 0.3, "all logits are nearly alike"
    for name, (max_prompt, pieces) in cuts(len(tokens)).items():
        found = read_in_pieces(functional, tokens, max_prompt, pieces)
        close(found, whole, "accumulated", name)


@pytest.mark.parametrize(
    "kind",
    some_slow(
        ROPE_TYPES, "dynamic", "longrope",
        exhaustive={*ROPE_TYPES} - {"dynamic", "longrope", "yarn"},
    ),
)  # fmt: skip
def test_every_type_of_rope(kind):
    check_cuts(as_functional(model(kind)), IDS)


# The first case of each family whose attention is its own; the others run before a release.
NAMES = [f"{family}-{name}" for family in NAMED for name in NAMED[family]]
LIKE_OTHERS = {"mistral", "ministral", "qwen2", "qwen3", "glm", "glm4", "olmo2", "phi3"}
FIRST = {f"{family}-{next(iter(NAMED[family]))}" for family in NAMED if family not in LIKE_OTHERS}
FIRST |= {"phi3-longrope"}


@pytest.mark.parametrize("name", some_slow(NAMES, exhaustive={*NAMES} - FIRST))
def test_every_family(tmp_path, name):
    family, _, case = name.partition("-")
    transformers_config(family, NAMED[family][case]).save_pretrained(tmp_path)
    made = random_decoder(read_config(tmp_path))
    made.embed.embedding[...] *= 20
    check_cuts(as_functional(made), (IDS * 2)[:30])


def decided(context: kvjax.Context) -> int | None:
    return context.size.max_length


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_turns_and_answers_are_those_of_one_prompt(kind):
    """Through `read`, `generate` and `ReadOnce`, whose prompts and room are padded."""
    sizes = {"max_prompt": 40, "max_new": 8}
    whole = kvjax.read(model(kind), [IDS], **sizes)
    first = kvjax.read(model(kind), [IDS[:12]], **sizes)
    turn = [IDS[12:23]]
    result = kvjax.generate(model(kind), turn, context=first, max_new_tokens=1, end_tokens=())
    expected = kvjax.read(model(kind), [IDS[:23] + result.tokens[0]], **sizes)
    close(result.context.logits, expected.logits)
    once = kvjax.evaluation.ReadOnce(model(kind), [IDS], [kvjax.Full()], **sizes).context(
        kvjax.Full()
    )
    close(once.logits, whole.logits)
    assert decided(whole) == decided(first) == decided(once) == decided(result.context)


def test_what_was_asked_for_decides_and_not_its_padding(monkeypatch):
    """Short factors up to the original context, whatever the caches have room for."""
    seen = []
    first_turn = decode_loop.first_turn

    def spy(model, prompts, start, *args, **options):
        seen.append(start.size)
        return first_turn(model, prompts, start, *args, **options)

    monkeypatch.setattr(decode_loop, "first_turn", spy)
    for new in (4, 5):
        kvjax.generate(model(), [IDS[:12], IDS[:3]], max_new_tokens=new)
    assert [size.max_length for size in seen] == [1, ORIGINAL + 1]
    assert seen[0].max_prompt == seen[0].max_new == 64
    assert decided(kvjax.read(model(), [IDS[:12]], max_new=4)) == 1
    assert decided(kvjax.read(model(), [IDS[:12]], max_prompt=13, max_new=4)) == ORIGINAL + 1
    assert decided(kvjax.read(model("dynamic"), [IDS[:12]], max_prompt=30, max_new=10)) == 40
    assert decided(kvjax.read(model("yarn"), [IDS[:12]], max_new=60)) is None
    assert decided(kvjax.read(model(), [IDS[:12]], max_new=4, max_length=100)) == ORIGINAL + 1


def test_lengths_that_compute_alike_share_compiled_code():
    kvjax.read(model(), [IDS[:17]], max_new=4)
    before = prompt_pass._read_layer._cache_size()
    for length in (18, 20, 23):
        kvjax.read(model(), [IDS[:length]], max_new=4)
    assert prompt_pass._read_layer._cache_size() == before


def test_a_saved_context_goes_on_as_it_began(tmp_path):
    """Made for a long text, of which it has read what would be a short one."""
    context = kvjax.read(model(), [IDS[:10]], max_prompt=40, max_new=8)
    kvjax.save_context(tmp_path / "own", context, model=model())
    loaded = kvjax.load_context(tmp_path / "own", model())
    for each in (loaded, loaded.copy(), loaded.repeat(2)):
        result = kvjax.generate(model(), [[1, 2]] * each.rows, context=each, max_new_tokens=4)
        expected = kvjax.generate(model(), [[1, 2]], context=context, max_new_tokens=4)
        assert result.tokens == expected.tokens * each.rows


@pytest.fixture(scope="module")
def phi3(tmp_path_factory):
    """A model of Phi-3's shape whose original context has 16 tokens, and that of transformers."""
    folder = tmp_path_factory.mktemp("phi3")
    changes = {**NAMED["phi3"]["longrope"], "max_position_embeddings": 128}
    reference = save_reference(folder, "phi3", **changes)
    return from_pretrained(folder), reference


@pytest.mark.parametrize("new", [4, 12])
def test_a_greedy_text_crosses_the_original_context(phi3, new):
    """As `transformers` reads the whole text, with the factors of its length from the beginning."""
    ours, reference = phi3
    prompt = np.random.default_rng(3).integers(0, SIZES["vocab_size"], 12).tolist()
    written = kvjax.generate(ours, [prompt], max_new_tokens=new, end_tokens=()).tokens[0]
    text = np.array(prompt + written)
    logits = reference_logits(reference, text, len(text))
    assert written == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_max_length_is_a_count():
    with pytest.raises(TypeError, match="max_length must be an int"):
        kvjax.read(model(), [IDS], max_length=2.5)
