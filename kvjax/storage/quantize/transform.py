"""Quantisation of keys and values to 8, 4, 3 or 2 bits, which attention reads without decoding."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from kvjax.cache.slots import KVCache
from kvjax.checks import check_choice, check_count
from kvjax.compose.foreseen import frees_at_prompts_end, frees_while_decoding
from kvjax.compose.ring import Ring
from kvjax.protocol import Card, Extent, KVTransform, Stage, State
from kvjax.serialization import named
from kvjax.storage.quantize.payload import IN_GROUPS, Axis, Bits, Form

GROUP, RESIDUAL = 32, 128  # defaults of 4 bits, as in KIVI


def wide_group(head_dim: int) -> int:
    """Returns how many channels share a scale where bytes decide: 64, or the most below that fit.

    Example:
      >>> from kvjax.storage.quantize.transform import wide_group
      >>> [wide_group(head_dim) for head_dim in (128, 96, 80, 36)]
      [64, 48, 40, 36]
    """
    return max(size for size in range(1, 65) if head_dim % size == 0)


@named("quantize")
@dataclass(frozen=True)
class Quantize(KVTransform):
    """Stores keys and values in 8, 4, 3 or 2 bits, behind any method that evicts or merges.

    8 bits are symmetric, with a scale per slot: `scale = max |x| / 127`, `x' = scale · q`. 4 bits
    are asymmetric, in groups of `group` numbers: `scale = (max - min) / 15`,
    `x' = min + scale · q`, with scale and min in the cache's dtype. With 3 and 2 bits, which have 8
    and 4 numbers, scale and min are those with the least squared error instead, as far as three
    rounds of `pallas_kernels.quantise_groups` find them. A group of values is consecutive channels
    of a token. A group of keys is consecutive slots of a channel (`key_axis="channel"`), because
    some channels of keys are much larger than others; or channels of a token, as for values. Groups
    of slots are counted from the first slot of each row and KV head. Keys and values of the tokens
    behind the last complete group are kept unencoded, and so are new tokens until there are
    `residual` of them.

    Where a group or a slot mixes channels, rows are transformed twice before they are rounded.
    First, keys are encoded relative to a mean and a scale for each of their head's channels:
    `k = mean + scale · x`. They come from the keys of the head's first prompt, and stay as long as
    anything of that prompt does. The scale is the standard deviation to the power of 0.75, or less
    with few keys. Second, keys and values are rotated: `x H` and `v H` are encoded, where H is the
    orthonormal Hadamard matrix (`pallas_kernels.hadamard_transform`; where D is not a power of two,
    in blocks of the largest one that divides it). The first makes a channel smaller that is much
    larger than others, as in models that add a bias to their keys; the second spreads the remaining
    excess over all channels. Attention stays the same:
    `q · k = q · mean + ((q · scale) H) · (x H)`, and `Σ p (v H) H = Σ p v`. A step transforms
    queries and outputs, not what is stored. `q · mean` is the same for all keys of a query, so that
    only a soft cap or sinks need it. Keys in groups of slots need neither transformation.

    A prompt is read in the cache's dtype and encoded when it is complete. A decode step multiplies
    with the numbers as they are stored, block by block of slots; of a selection it decodes only the
    selected rows. At head_dim D, the key or the value of a token takes D + 4 bytes with 8 bits, and
    `D / 2 + 2 · D / group · itemsize` with 4. A number of 3 or 2 bits takes 4 bits while a context
    answers and in `kvjax.generate`, and 3 or 2 at rest on one device and in files. Means and scales
    take 8 D bytes per head. In a chain, layers and heads that another part leaves dense
    (`dense_layers`, `outlier_heads`) are stored in fewer bits too. Encoded rows stay the same in
    all later turns, bit for bit, unless they are merged.

    Args:
      bits: 8, 4, 3, 2, or "float8" (float8_e4m3fn with a scale per slot).
      group: numbers that share a scale, 4 bits and fewer only. None: 32 as in KIVI. With 3 and 2
        bits within a token, whose scales would take most of the bytes otherwise, 64, or the
        largest number below that divides head_dim.
      key_axis: "channel" as in KIVI, or "token"; 4 bits and fewer only. The slots of a group must
        stay together: if some are freed, or slots are reordered, the group is rounded again in
        every turn, and errors grow. None: "token" in a chain with a method that does so at the end
        of every prompt (SnapKV, KVMerger, ..., `ClusterKV(clusters=...)`) or with `Offload`,
        otherwise "channel".
        Behind methods that free slots while decoding, "token" must be given. With "channel", groups
        are rounded once more whenever ClusterKV clusters everything anew.
      residual: M, decode steps after which the complete groups of new tokens are encoded; a
        multiple of `group`, with `key_axis="channel"` only; 128 as in KIVI. Behind ClusterKV its
        interval is used instead. It has no effect where a `key_axis` of None has become "token".
      key_bits: bits of keys where values have 4 bits or fewer: any other of 8, 4, 3 and 2; None:
        keys have as many as values. Keys need more than values.
      rotate: True rotates keys and values, "values" values alone, False neither. Keys in groups of
        slots are never rotated. Neither are keys that a part of the chain stores without RoPE
        (`StreamingLLM(reposition=True)`), since RoPE while attending needs the original channels;
        these have no mean, and one scale for both channels of a pair. The default is True, since
        errors of attention outputs were smaller with it in three models (RESULTS.md, "Rotation").

    Raises:
      TypeError, ValueError: a number out of range; bits or an axis that is not offered; an option
        that has no effect with these bits. In a chain: groups of slots behind a method that frees
        slots while decoding; `key_axis="channel"` where a prompt's end frees or reorders slots, or
        before `Offload`. From `init_cache`: a head_dim that is odd, is not a multiple of
        `group`, or, with 3 and 2 bits, of 8.

    Example:
      >>> import kvjax
      >>> size = {"batch": 1, "kv_heads": 2, "head_dim": 64, "max_prompt": 8192, "max_new": 64}
      >>> full = kvjax.nbytes(kvjax.init_cache(kvjax.Full(), **size, dtype="float32").kv.k)
      >>> for bits in (8, 4):
      ...     cache = kvjax.init_cache(kvjax.Quantize(bits), **size, dtype="float32")
      ...     print(round(full / kvjax.nbytes(cache.kv.k), 1))
      3.8
      4.8

    References:
      Liu et al., KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache, arXiv 2402.02750.
      Ashkboos et al., QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs, arXiv 2404.00456, for
      the rotation.
      Lin et al., QServe: W4A8KV4 Quantization and System Co-design for Efficient LLM Serving, arXiv
      2405.04532, for scales of key channels.

    Deviations from the paper:
      KIVI does not rotate. QuaRot folds its matrices into the weights where it can, so that values
      come rotated and the next weights undo it. QServe's scales are in the weights too. They come
      from calibration, use the greatest key instead of the standard deviation, to the power of 0.5,
      and are the same for both channels of a pair. Here no weight changes.
      KIVI's 2 bits lie between a group's extremes, without a fit. Less than one group of a prompt's
      tokens is kept unencoded, where KIVI keeps the last `length mod residual` keys and `residual`
      values. While decoding, the newest 0 to `residual + group - 1` tokens are kept unencoded, keys
      and values alike; KIVI does so with keys. 8 bits and float8 are not in KIVI.
    """

    bits: Bits = 8
    group: int | None = None
    key_axis: Axis | None = None
    residual: int | None = None
    rotate: bool | Literal["values"] = True
    key_bits: Literal[8, 4, 3, 2] | None = None

    stage: ClassVar[Stage] = Stage.REPRESENT
    card = Card(
        acts="prompt, every step (4 bits: every 128)", paper="KIVI, arXiv 2402.02750",
        when="lossless",
        examples=("--method quantize", '--method "chain(quantize, clusterkv)" --budget 0.2'),
    )  # fmt: skip
    # True where keys are encoded in groups of slots.
    groups_slots = property(
        lambda self: self._bits_of_keys in IN_GROUPS and self.key_axis != "token"
    )
    _bits_of_keys = property(lambda self: self.key_bits or self.bits)
    _group = property(lambda self: (self.group or GROUP) if self.bits in IN_GROUPS else 1)
    _residual = property(lambda self: self.residual or RESIDUAL)

    def __post_init__(self):
        check_choice("bits", self.bits, get_args(Bits))
        if self.key_axis is not None:
            check_choice("key_axis", self.key_axis, get_args(Axis))
        self._check_options()
        if self.key_bits is not None:
            others = tuple(bits for bits in (8, *IN_GROUPS) if bits != self.bits)
            check_choice("key_bits", self.key_bits, others)
        if not isinstance(self.rotate, bool):
            check_choice("rotate", self.rotate, (True, False, "values"))
        for name in ("group", "residual"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1)
        if self.groups_slots and self._residual % self._group:
            raise ValueError(
                f"residual must be a multiple of group={self._group}, got {self._residual}"
            )

    def _check_options(self) -> None:
        """Raises if an option is given that has no effect."""
        few = "4, 3 and 2 bits", self.bits in IN_GROUPS
        keys = "keys in 4, 3 and 2 bits", self._bits_of_keys in IN_GROUPS
        slots = "4, 3 and 2 bits with key_axis='channel'", self.groups_slots
        options = {"group": few, "key_bits": few, "key_axis": keys, "residual": slots}
        for name, (form, used) in options.items():
            value = getattr(self, name)
            if value is not None and not used:
                raise ValueError(
                    f"{name} is an option of {form}, got {name}={value!r} with "
                    f"bits={self.bits!r}, key_bits={self.key_bits!r}, key_axis={self.key_axis!r}"
                )

    def in_chain(self, before: tuple[KVTransform, ...], after: tuple[KVTransform, ...]) -> Quantize:
        """Keeps groups of slots away from parts that would break them up, or refuses them.

        In a ring, which frees slots all the time, keys are encoded token by token, and so they are
        where `Offload` fetches them one by one.
        """
        if not self.groups_slots:
            return self
        by_token = dataclasses.replace(self, key_axis="token", residual=None)
        if any(isinstance(part, Ring) for part in before):
            return by_token
        for part in before:
            if frees_while_decoding(part):
                raise ValueError(
                    f"{self!r} encodes groups of slots together, and {part!r} frees slots "
                    "while decoding: take key_axis='token'"
                )
        for part in (*before, *after):
            placed = part.stage == Stage.PLACE
            if not (placed or part.needs.reordered_slots or frees_at_prompts_end(part)):
                continue
            if self.key_axis is None:
                return by_token
            if placed:
                raise ValueError(
                    f"{self!r} encodes groups of slots together, and {part!r} fetches slots one by "
                    "one: take key_axis='token', which is the default here, or 8 bits"
                )
            raise ValueError(
                f"{self!r} encodes groups of slots together, which {part!r} breaks up at the end "
                "of every prompt, so that they would be rounded again in every turn: take "
                "key_axis='token', which is the default here, or 8 bits"
            )
        return self

    def extent(self, extent: Extent) -> Extent:
        """Asks for a flush every `residual` steps where slots are encoded in groups."""
        return extent.every(self._residual) if self.groups_slots else extent

    def _group_of_channels(self, head_dim: int) -> int:
        """Returns how many numbers share a scale, of a model with this head_dim."""
        if self.bits in (3, 2) and self.group is None and not self.groups_slots:
            return wide_group(head_dim)
        return self._group

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, State]:
        """Makes encoded payloads of keys and values."""
        shape, dtype, head_dim = cache.k.shape, cache.k.dtype, cache.k.shape[3]
        if self.bits == 4 and head_dim % 2:
            raise ValueError(f"4 bits need an even head_dim, two values a byte, got {head_dim}")
        if {self.bits, self._bits_of_keys} & {3, 2} and head_dim % 8:
            raise ValueError(
                f"3 and 2 bits need a head_dim that is a multiple of 8, got {head_dim}"
            )
        group = self._group_of_channels(head_dim)
        if head_dim % group:
            raise ValueError(f"head_dim must be a multiple of group={group}, got {head_dim}")
        v = Form(self.bits, group, hadamard=bool(self.rotate))
        if self.groups_slots:
            # Room for the tokens of M steps, and for an incomplete group of the last flush.
            v = dataclasses.replace(v, recent=cache.interval + group - 1)
            k = dataclasses.replace(v, bits=self._bits_of_keys, axis="channel", hadamard=False)
        else:
            # RoPE while attending would mix the wrong channels of keys in another basis.
            rotated = self.rotate is True and not cache.unrotated_keys
            bits = self._bits_of_keys
            group = group if bits in IN_GROUPS else 1
            k = dataclasses.replace(v, bits=bits, group=group, relative=True, hadamard=rotated)
        return cache.replace(k=k.empty(shape, dtype), v=v.empty(shape, dtype)), ()
