"""What is compiled for TPUs that are not there: a decode step and a prompt of every kind of cache.

Arguments are shapes alone, so that no size is too large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import kvjax
from tests.gpu.gpu_programs import SLOTS, Heads, layer_call, methods, repeated, stores_of
from tests.support.ahead_of_time import Program

HEADS = Heads(8, 4, 128, "bfloat16")
OTHER_HEADS = [
    Heads(8, 4, 96, "bfloat16"), Heads(2, 16, 256, "bfloat16"), Heads(1, 64, 256, "float32"),
]  # fmt: skip
KERNEL = "tpu_attention"
PROMPT = 1024
# A prompt takes up to half a minute to compile, so that not every method has one here.
PROMPTS = ("Full", "SnapKV", "H2O", "ClusterKV", "Quest", "Quantize 4, channel")

# XLA for TPUs cannot cut single rows of 16 bits out of an array in host memory.
OFFLOAD = "Sublane slicing size must be multiple of element packing factor"
KNOWN = {"ClusterKV, Offload": OFFLOAD}
# Budgets are multiples of 8, or XLA would store 8 heads of a slot together.
BY_KERNEL = {
    "Full": kvjax.Full(),
    "SnapKV": kvjax.SnapKV(6552),
    "H2O": kvjax.H2O(6551),  # and a slot for the new token
    "Quantize 8": kvjax.Quantize(8),
    "Quantize 4, token": kvjax.Quantize(4, key_axis="token"),
    "Quantize 4, channel": kvjax.Quantize(4),
}


def programs() -> Iterator[Program]:
    """All of them."""
    for name, transform in methods().items():
        call, args = layer_call(transform, HEADS, "decode", SLOTS, 1, "xla")
        yield _program(f"step of {name}", call, args, known=KNOWN.get(name))
    for name, transform in BY_KERNEL.items():
        yield _by_kernel(name, transform, HEADS)
    for heads in OTHER_HEADS:
        yield _by_kernel(f"Full, {heads}", kvjax.Full(), heads)
    for name in PROMPTS:
        call, args = layer_call(methods()[name], HEADS, "prompt", PROMPT, PROMPT, "xla")
        yield _program(f"prompt of {name}", call, args)


def _by_kernel(name: str, transform: kvjax.KVTransform, heads: Heads) -> Program:
    """Many steps: XLA lays out a cache anew before a loop, where that serves what is in it."""
    call, args = layer_call(transform, heads, "decode", SLOTS, 1, "pallas")
    return _program(f"loop by the kernel of {name}", repeated(call), args, kernel=KERNEL)


def _program(name: str, call: Callable, args: tuple, **about) -> Program:
    return Program(name, call, args, stores_of(args[0]), donated=True, **about)
