"""What has been encoded once is read as it was in later turns, whatever is evicted meanwhile."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Codebook, Quantize, chain
from kvjax.storage.codebook.payload import CodebookPayload
from tests.support import attending
from tests.support.attending import Tokens, new_cache, one_layer, right
from tests.support.marks import some_slow

FIRST, BUDGET = (40, 32, 24), 24  # tokens of the first prompts; slots that evictors leave


def snapkv(budget=BUDGET):
    return kvjax.SnapKV(budget, window=8, kernel=3)


EVICTING = {
    "snapkv": snapkv(),
    "kvmerger": kvjax.KVMerger(BUDGET),
    "pyramidkv": kvjax.PyramidKV(BUDGET, window=8),
    "kvcrush": kvjax.KVCrush(snapkv(), representatives=4),
    "streaming_llm": kvjax.StreamingLLM(BUDGET),
    "reposition": kvjax.StreamingLLM(BUDGET, reposition=True),
    "h2o": kvjax.H2O(BUDGET),
    "chelsea": kvjax.Chelsea(BUDGET, chunk=8, sinks=2, recent=4, interval=3),
    "every": kvjax.Every(snapkv(), steps=4),
    "when_full": kvjax.WhenFull(snapkv(), room=8),
    "per_layer": kvjax.PerLayer(lambda layer, num_layers: snapkv()),
    "everywhere": kvjax.Everywhere(snapkv()),
    "head_groups": kvjax.HeadGroups((((0,), snapkv()), ((1,), kvjax.StreamingLLM(BUDGET)))),
}
KEEPING = {
    "full": kvjax.Full(),
    "quest": kvjax.Quest(16, page=4, dense_layers=()),
    "clusterkv": kvjax.ClusterKV(
        16, tokens_per_cluster=4, sinks=2, interval=4, new_clusters=2, chunk=64, dense_layers=()
    ),
}
FORMS = {
    "8 bits": Quantize(8),
    "float8": Quantize("float8"),
    "4 bits": Quantize(4, group=4),
    "4 bits, token": Quantize(4, group=4, key_axis="token"),
    "codebook": Codebook(0.9, 0.9, capacity=0.4, interval=4),
}
FREES_WHILE_DECODING = (
    "streaming_llm", "reposition", "h2o", "chelsea", "every", "when_full", "head_groups",
)  # fmt: skip


read = jax.jit(lambda payload: payload.read())


class Script(NamedTuple):
    """How a conversation goes on: turns of `new` tokens, and decode steps after each."""

    turns: int
    new: int
    steps: int
    dtype: str = "float32"

    @property
    def tokens(self) -> int:
        return FIRST[0] + self.turns * (self.new + self.steps)


def alike(tokens: Tokens) -> Tokens:
    """Keys and values around few directions, of which a book needs few entries."""
    rng = np.random.default_rng(5)

    def around(x):
        middle = rng.normal(size=(6, x.shape[-1]))[rng.integers(6, size=x.shape[:-1])]
        return (middle + 0.3 * x).astype(np.float32)

    return tokens._replace(k=around(tokens.k), v=around(tokens.v))


def encoded(payload) -> np.ndarray:
    """Which slots `[B, H, S]` are encoded, and not kept as they came until more have come."""
    if isinstance(payload, CodebookPayload):
        return np.asarray(payload.index) < payload.book.entries
    slots = np.arange(payload.shape[2])
    waiting = np.zeros((*payload.shape[:2], 0)) if payload.recent is None else payload.recent.slots
    return ~(np.asarray(waiting)[..., None] == slots).any(2)


def stored(transform, cache) -> dict[tuple[str, int, int, int], np.ndarray]:
    """What is read of each encoded token that is alone in its slot, by row, head and position."""
    rows = {}
    for part in attending.parts(transform, cache):
        kv = part.cache.kv
        alone = np.asarray(kv.live) & (np.asarray(kv.log_mass) == 0)
        for name, payload in (("k", kv.k), ("v", kv.v)):
            read_rows = np.asarray(read(payload))
            for row, head, slot in np.argwhere(alone & encoded(payload)):
                at = name, int(row), part.heads[head], int(kv.position[row, head, slot])
                rows[at] = read_rows[row, head, slot]
    return rows


def conversation(transform, tokens: Tokens, script: Script):
    """The cache after the first prompts and after each turn; rows sit out in turn."""
    dtype = jnp.dtype(script.dtype)
    cache = new_cache(
        transform, max_prompt=FIRST[0] + script.turns * script.new,
        max_new=max(script.turns * script.steps, 1), dtype=dtype,
    )  # fmt: skip
    length = np.array(FIRST)
    _, cache = attending.prompt(
        transform, cache, tokens, right((0, 0, 0), FIRST, FIRST[0]), dtype=dtype
    )
    yield cache
    steps = 0
    for turn in range(script.turns):
        counts = np.where(np.arange(3) == turn % 4, 0, script.new)  # of the fourth nobody
        positions = right(length, counts, script.new)
        _, cache = attending.prompt(transform, cache, tokens, positions, dtype=dtype)
        length = length + counts
        if kvjax.flush_interval(cache) is not None:
            cache = attending.flush(cache, None)
        for step in range(script.steps):
            _, cache = attending.decode(transform, cache, tokens, length, dtype=dtype)
            length, steps = length + 1, step + 1
            cache = attending.flushed(cache, steps)
        yield cache


def check(transform, script: Script, tokens: Tokens) -> None:
    """What is encoded after a turn is read after the next one as it was, if it is still there."""
    before, stayed = {}, {"k": 0, "v": 0}
    for cache in conversation(transform, tokens, script):
        after = stored(transform, cache)
        for at in before.keys() & after.keys():
            np.testing.assert_array_equal(after[at], before[at], err_msg=str(at))
            stayed[at[0]] += 1
        before = after
    assert min(stayed.values()) > script.turns, "hardly anything stays from turn to turn"


def of_form(form: str, script: Script) -> Tokens:
    tokens = Tokens.random(length=script.tokens, seed=3)
    return alike(tokens) if form == "codebook" else tokens


MANY = {
    "8 bits": ("h2o", "chelsea", "head_groups", "kvcrush"),
    "float8": ("kvmerger", "every"),
    "4 bits": ("snapkv", "kvmerger", "everywhere"),
    "4 bits, token": ("streaming_llm", "when_full", "reposition"),
    "codebook": ("snapkv", "every", "kvmerger", "head_groups"),
}
CASES = [
    *((name, form) for form, chosen in MANY.items() for name in chosen),
    *(("full", form) for form in FORMS),
    ("quest", "4 bits"), ("clusterkv", "8 bits"), ("clusterkv", "4 bits"),
]  # fmt: skip


# Each form under a method, and some that keep everything; all others run before a release.
EACH = {
    ("full", "4 bits"), ("full", "codebook"), ("head_groups", "8 bits"), ("every", "float8"),
    ("kvmerger", "codebook"), ("clusterkv", "4 bits"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "form"), some_slow(CASES, exhaustive={*CASES} - EACH))
def test_what_is_encoded_stays_as_it_is(name, form):
    """Compares turns in which slots stay: turns of one token, or for ClusterKV of a whole cluster,
    for which it always has room."""
    if name in EVICTING:
        parts, script = (EVICTING[name], FORMS[form]), Script(turns=6, new=2, steps=1)
    else:
        parts = FORMS[form], KEEPING[name]
        script = Script(turns=12, new=4 if name == "clusterkv" else 1, steps=0)
    check(one_layer(chain(*parts)), script, of_form(form, script))


def test_what_cannot_be_stored_so():
    for name in FREES_WHILE_DECODING:
        with pytest.raises(ValueError, match="take key_axis='token'"):
            one_layer(chain(EVICTING[name], FORMS["4 bits"]))
    with pytest.raises(ValueError, match="merge at the prompt's end only"):
        chain(EVICTING["chelsea"], FORMS["codebook"])
    for name in ("quest", "clusterkv"):
        with pytest.raises(ValueError, match="unrotated"):
            chain(FORMS["codebook"], KEEPING[name])
    with pytest.raises(ValueError, match="merges slots while decoding"):
        chain(kvjax.CaM(EVICTING["streaming_llm"]), FORMS["codebook"])
    with pytest.raises(ValueError, match="represent"):
        chain(FORMS["codebook"], EVICTING["h2o"])


BOOKS = "codebook", "bfloat16", snapkv()


@pytest.mark.parametrize(
    ("form", "dtype", "base"),
    some_slow(
        [
            ("8 bits", "bfloat16", snapkv()), ("float8", "float16", kvjax.Full()),
            ("4 bits", "bfloat16", snapkv()), ("4 bits", "float16", kvjax.Full()), BOOKS,
        ],
        exhaustive=[("4 bits", "bfloat16", snapkv()), BOOKS],
    ),
)  # fmt: skip
def test_in_16_bits(form, dtype, base):
    script = Script(turns=8, new=1, steps=1, dtype=dtype)
    check(one_layer(chain(base, FORMS[form])), script, of_form(form, script))


def test_keys_in_groups_of_slots_are_the_default_where_slots_stay():
    assert Quantize(4).groups_slots and chain(Quantize(4), KEEPING["quest"]).parts[0].groups_slots
    for name in ("snapkv", "kvmerger", "everywhere"):
        for form in (Quantize(4), Quantize(4, residual=32)):
            stored = chain(EVICTING[name], form).parts[-1]
            assert stored == Quantize(4, key_axis="token"), name
        with pytest.raises(ValueError, match=r"take key_axis='token'.* or 8 bits"):
            chain(EVICTING[name], Quantize(4, key_axis="channel"))
    anew = kvjax.ClusterKV(64, clusters=4, dense_layers=())
    assert chain(Quantize(4), anew).parts[0] == Quantize(4, key_axis="token")
    with pytest.raises(ValueError, match=r"breaks up.*key_axis='token'"):
        chain(Quantize(4, key_axis="channel"), anew)
    for name in ("per_layer", "pyramidkv"):
        stored = one_layer(chain(EVICTING[name], Quantize(4))).parts[-1]
        assert stored == Quantize(4, key_axis="token"), name
