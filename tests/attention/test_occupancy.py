"""What caches hold and what is room: exact for every stored form, and foreseen from shapes."""

import jax
import pytest

import kvjax
from kvjax.attention.layer import layer_caches
from kvjax.attention.occupancy import occupancy
from kvjax.kit import Extent
from kvjax.models import DecoderConfig, RopeConfig, random_decoder

LAYERS, HEADS, DIM = 2, 2, 8
CONFIG = DecoderConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=LAYERS, query_heads=4,
    kv_heads=HEADS, head_dim=DIM, rope=RopeConfig(rotary_dim=DIM), max_positions=512,
)  # fmt: skip
TOKENS, MAX_PROMPT, MAX_NEW = 20, 64, 16
ROW = 4 * DIM  # bytes of a key or value in float32
SLOT = 4 + 4 + 1  # position, mass, pin
# Method → live slots, bytes of a free slot, and bytes of free places beside the slots of a head.
FORMS = {
    "full": (TOKENS, 2 * ROW + SLOT, 0),
    "snapkv(budget=12, window=4)": (12, 2 * ROW + SLOT, 0),
    "h2o(budget=12)": (12, 2 * ROW + SLOT + 2 * 4, 0),  # sums of two query heads
    "kvzip(budget=12, room=8)": (12, 2 * ROW + SLOT + 1, 0),  # whether it is of the document
    "quantize": (TOKENS, 2 * (DIM + 4) + SLOT, 0),
    # Two numbers a byte, and a scale and a least number for each group of 8. Of 20 tokens, 4 are in
    # no whole group of slots; 16 + 7 places for them and for the tokens between two flushes.
    "quantize(bits=4, group=8, key_axis='channel', residual=16)": (
        TOKENS, 2 * (DIM // 2 + 2 * 4) + SLOT, 2 * (16 + 7 - 4) * (ROW + 4),
    ),
    # 16 new tokens wait: as many rows on the device, and at the end of those in host memory.
    "chain(clusterkv(budget=20, dense_layers=()), offload)": (
        TOKENS, 2 * ROW + SLOT, 2 * 16 * (ROW + ROW + 4),
    ),
}  # fmt: skip


def read(method: str, tokens: int, **sizes: int) -> kvjax.Context:
    sizes = {"max_prompt": MAX_PROMPT, "max_new": MAX_NEW, **sizes}
    model, prompt = random_decoder(CONFIG), [[n % 64 for n in range(tokens)]]
    transform = kvjax.parse(method)
    return kvjax.read(model, prompt, transform=transform, dtype="float32", **sizes).awake()


@pytest.mark.parametrize("method", FORMS)
def test_room_is_what_is_free(method):
    context = read(method, TOKENS)
    live, slot, beside = FORMS[method]
    held = context.occupancy
    capacity = kvjax.bind(context.transform, LAYERS)[0].extent(Extent(MAX_PROMPT, MAX_NEW)).total
    assert held.kept_slots == live and held.room_slots == capacity - live
    assert held.lists == LAYERS * HEADS
    assert held.room_bytes == held.lists * ((capacity - live) * slot + beside)
    assert held.kept_bytes + held.room_bytes == context.nbytes


@pytest.mark.parametrize("method", FORMS)
def test_at_rest_little_is_free(method):
    """Only places that round the slots up are free, and no more is kept than when awake."""
    awake = read(method, TOKENS)
    context = awake.at_rest()
    held = context.occupancy
    assert (held.lists, held.live) == awake.occupancy[:2]
    assert held.free <= held.live / 16 + LAYERS
    assert held.kept_bytes + held.room_bytes == context.nbytes
    assert held.kept_bytes <= awake.occupancy.kept_bytes


def test_unused_entries_of_a_codebook_are_room():
    context = read("chain(snapkv(budget=12, window=4), codebook(interval=4))", TOKENS)
    held = context.occupancy
    free = places = 0
    for part in layer_caches(context.caches):
        free += part.kv.slots * HEADS - int(part.kv.live.sum())
        for payload in (part.kv.k, part.kv.v):
            places += payload.entries.shape[2] - int(payload.count.sum())
    # A reference of 16 bits and a norm, for a key and for a value.
    assert held.room_bytes == free * (2 * (2 + 4) + SLOT) + places * ROW
    assert held.kept_bytes + held.room_bytes == context.nbytes


def test_groups_of_heads_and_windows():
    groups = kvjax.HeadGroups(
        (((0,), kvjax.SnapKV(8, window=2)), ((1,), kvjax.SnapKV(16, window=2)))
    )
    tx = kvjax.PerLayer(lambda layer, _: kvjax.Ring(24) if layer else groups)
    prompt = [[n % 64 for n in range(40)]]
    context = kvjax.read(
        random_decoder(CONFIG), prompt, transform=tx, max_prompt=MAX_PROMPT, max_new=MAX_NEW,
        dtype="float32",
    ).awake()  # fmt: skip
    held = context.occupancy
    assert held.live == 8 + 16 + 2 * 23, "a ring's window has room for the query's own token"
    assert held.free == 2 * MAX_NEW + 2
    assert held.room_bytes == held.free * (2 * ROW + SLOT)


@pytest.mark.parametrize("method", [name for name in FORMS if "axis" not in name])
def test_shapes_say_what_a_whole_prompt_leaves(method):
    """Before anything runs: all but which rows wait to be encoded follows from sizes."""
    context = read(method, MAX_PROMPT)
    shapes = jax.eval_shape(lambda: context.caches)
    assert occupancy(shapes) == context.occupancy


def test_room_fills_with_tokens():
    context = read("quantize", TOKENS)
    before, size = context.occupancy, context.nbytes
    result = kvjax.generate(
        random_decoder(CONFIG), [[1, 2, 3]], context=context, max_new_tokens=4, end_tokens=()
    )
    after = result.context.occupancy
    assert after.kept_slots - before.kept_slots == 3 + 4
    assert after.kept_bytes + after.room_bytes == size
