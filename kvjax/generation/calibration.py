"""Calibrates methods that measure a model once, on sample text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.attention.layer import Reading
from kvjax.checks import check_count, check_number
from kvjax.compiled_code import compiled
from kvjax.compose.walks import MethodHeads, chosen, map_methods, walk
from kvjax.compose.wrappers import LayerChoice
from kvjax.devices import automatic
from kvjax.generation.compiler import Compiler
from kvjax.generation.documents import Document
from kvjax.generation.head_profiles import OnMade, with_profiles
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.new_caches import CacheSize
from kvjax.generation.observe import Observe
from kvjax.generation.prompt_checks import check_prompts
from kvjax.generation.turns import first_turn
from kvjax.protocol import Full, KVTransform, Needs
from kvjax.registry import as_transform
from kvjax.transforms.chelsea.outlier_heads import OutlierHeads
from kvjax.transforms.infinigen.infinigen import InfiniGen
from kvjax.transforms.infinigen.projections import InfiniGenCalibration, partial_projection
from pallas_kernels import soft_matching

CALIBRATION_TOKENS = 1024
"""Tokens at the beginning of a prompt that serve as the sample where no other text does."""


@automatic()
def calibrate_outlier_heads(
    model: LanguageModel | FunctionalModel,
    sample: Sequence[Sequence[int]],
    threshold: float,
    fraction: float = 0.04,
    *,
    chunk: int = 256,
    sinks: int = 16,
    recent: int = 64,
) -> OutlierHeads:
    """Finds the heads whose keys resemble each other least, which Chelsea leaves uncompressed.

    The model reads the sample with the full cache. In each KV head, every token of set A has an
    edge to the most similar token of set B, as in Chelsea's first pass; sinks and recent tokens are
    in neither set. A head's score is the share of A whose edge is not above `threshold`, averaged
    over the rows. The outliers are the `fraction` of all heads with the highest scores, at least
    one head.

    Args:
      model: as for `kvjax.generate`.
      sample: token ids of each row; rows may differ in length. The paper samples WikiText-2.
      threshold: cosine above which an edge counts. It should lie between the similarities in most
        heads and those in the outliers.
      fraction: share of heads, rounded to the nearest count; 0.04 as in the paper.
      chunk, sinks, recent: numbers of tokens, as in `Chelsea`.

    Returns:
      The `outlier_heads` for `Chelsea`, the highest score first, ties to the lower head.

    Raises:
      TypeError, ValueError: what `kvjax.generate` raises for prompts, a row that is too short to
        have tokens between sinks and recent ones, a threshold outside (-1, 1], a fraction
        outside (0, 1] or one by which all heads would be outliers.

    Example:
      >>> import kvjax
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128))
      >>> heads = kvjax.calibrate_outlier_heads(model, [list(range(64))], 0.9, sinks=4, recent=8)
      >>> len(heads.heads), heads.num_layers, heads.kv_heads
      (1, 2, 2)

    References:
      Hu et al., Efficient Long-Context LLM Inference via KV Cache Clustering, arXiv 2506.11418,
      appendix B.
    """
    functional = as_functional(model)
    check_count("chunk", chunk, 2)
    check_count("sinks", sinks, 0)
    check_count("recent", recent, 0)
    check_number("threshold", threshold, above=-1, most=1)
    check_number("fraction", fraction, above=0, most=1)
    check_prompts(functional, sample, (Full(),), 0)
    lengths = np.array([len(row) for row in sample])
    if lengths.min() < sinks + recent + 2:
        raise ValueError(
            f"every row of the sample must have at least sinks + recent + 2 = "
            f"{sinks + recent + 2} tokens, got {lengths.min()}"
        )
    caches = _read(functional, sample, Full())
    scores = _scores((chunk, sinks, recent), caches, lengths, threshold)
    count = max(1, round(fraction * scores.size))
    # A stable sort leaves the lower head first where scores are equal.
    ranked = np.argsort(-np.asarray(scores), axis=None, kind="stable")[:count]
    heads = tuple(divmod(int(head), functional.kv_heads) for head in ranked)
    return OutlierHeads(heads, functional.num_layers, functional.kv_heads)


@compiled(static_argnums=0)
def _scores(
    matching: tuple[int, int, int],
    readings: tuple[Reading, ...],
    lengths: Int[Array, " B"],
    threshold: Float[Array, ""],
) -> Float[Array, "N H"]:
    """Returns the share of set A without an edge above the threshold, per layer and KV head."""
    chunk, sinks, recent = matching
    shares = []
    for reading in readings:
        # Keys without the sinks; the recent ones are beyond `count`.
        keys = reading.kv.k.read()[:, :, sinks:]
        count = jnp.broadcast_to(lengths[:, None] - sinks - recent, keys.shape[:2])
        similarity, _ = soft_matching(keys, count, chunk=chunk)
        edges = similarity > -jnp.inf
        unmatched = edges & (similarity <= threshold)
        shares.append((unmatched.sum(-1) / edges.sum(-1)).mean(0))
    return jnp.stack(shares)


@automatic()
def calibrate_infinigen(
    model: LanguageModel | FunctionalModel, sample: Sequence[Sequence[int]], share: float = 0.2
) -> InfiniGenCalibration:
    """Finds the few channels of skewed queries and keys by which `InfiniGen` predicts attention.

    The model reads the sample with the full cache. In each KV head, the rotated queries q of its
    group are the rows of one matrix, and A holds the right singular vectors of that matrix. A is
    orthogonal, so it changes no product of a query and a key, `qA · kA = q · k`, but it gathers
    most of the product in few channels. Let k be the head's rotated keys. The result P has the
    columns of A for the `n = max(1, int(share · D))` channels with the largest `Σ |q A|`, and for
    the n channels with the largest `Σ |k A|`.

    Args:
      model: as for `kvjax.generate`.
      sample: token ids of each row; rows may differ in length. It should have several times as many
        tokens as a head has channels.
      share: share of the channels, for queries and for keys; 0.2 as in the authors' code.

    Returns:
      The `calibration` for `InfiniGen`: at most 2n channels per head, padded with zeros to the
      largest number that a head has. Model and sample determine it, except for the channels' signs.

    Raises:
      TypeError, ValueError: what `kvjax.generate` raises for prompts, a share outside (0, 1].

    Example:
      >>> from kvjax.generation.calibration import calibrate_infinigen
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=3, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128))
      >>> calibration = calibrate_infinigen(model, [list(range(64))])
      >>> calibration.num_layers, calibration.kv_heads, calibration.head_dim
      (3, 2, 8)
      >>> calibration.channels in (1, 2)
      True

    References:
      Lee et al., InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV
      Cache Management, OSDI 2024, arXiv 2406.19707.
    """
    functional = as_functional(model)
    check_number("share", share, above=0, most=1)
    check_prompts(functional, sample, (Full(),), 0)
    observe = Observe(Needs(query_window=max(map(len, sample))))
    # float32: a calibration should not depend on the dtype in which a platform stores keys.
    readings = _read(functional, sample, observe, jnp.float32)
    projections = [
        [partial_projection(q, k, share) for q, k in _per_head(reading)] for reading in readings
    ]
    # A channel may be among the first n of queries and of keys, so that heads differ in number.
    channels = max(p.shape[1] for heads in projections for p in heads)
    padded = [
        [np.pad(p, ((0, 0), (0, channels - p.shape[1]))) for p in heads] for heads in projections
    ]
    return InfiniGenCalibration(np.array(padded, np.float32))


def calibrated(
    transform: KVTransform | str,
    model: LanguageModel | FunctionalModel,
    sample: Sequence[Sequence[int]],
    *,
    document: Document | None = None,
    on_profile: OnMade | None = None,
) -> KVTransform:
    """Returns the composition with every `InfiniGen` calibrated, and a profile in every `ByHead`.

    In `HeadGroups`, a method gets the part of the calibration that is for its heads. A profile is
    read from the file that `ByHead` names, or made by `calibrate_heads` from the sample. It is then
    kept in the user's cache folder, and found there for the same weights, method and sample.

    Args:
      transform: any, or its text as in `kvjax.generate`.
      model: as for `calibrate_infinigen`, which is called once, and only if there is an
        `InfiniGen` without calibration.
      sample: token ids of some texts; as for `calibrate_infinigen` and `calibrate_heads`.
      document: as for `calibrate_heads`.
      on_profile: is called with a profile that had to be made, and the seconds that it took.

    Raises:
      TypeError, ValueError: what the calibrations raise; the file of a profile holds none, or one
        of another model.

    Example:
      >>> import kvjax
      >>> kvjax.calibrated(kvjax.H2O(budget=64), model=None, sample=[])
      H2O(budget=64, group_reduce='mean')
    """
    transform = as_transform(transform, "calibrated")
    transform = with_profiles(transform, model, lambda: sample, document, on_profile)
    layers = [transform]
    # The methods of a layer's choice are known only once it is asked for each layer.
    if any(isinstance(part, LayerChoice) for part in walk(transform)):
        num_layers = as_functional(model).num_layers
        layers = [chosen(transform, layer, num_layers) for layer in range(num_layers)]
    parts = (part for layer in layers for part in walk(layer))
    if not any(isinstance(part, InfiniGen) and part.calibration is None for part in parts):
        return transform
    return map_methods(WithCalibration(calibrate_infinigen(model, sample)), transform)


@dataclass(frozen=True)
class WithCalibration:
    """Gives a calibration to every `InfiniGen` that has none; a function for `map_methods`.

    Args:
      calibration: of all heads.
    """

    calibration: InfiniGenCalibration

    def __call__(self, method: KVTransform, heads: MethodHeads) -> KVTransform:
        """Returns the method, with the calibration of its heads if it lacks one."""
        if not isinstance(method, InfiniGen) or method.calibration is not None:
            return method
        calibration = self.calibration
        if heads is not None:  # the same in all layers, or those of each layer
            layers = np.arange(calibration.num_layers)[:, None]
            calibration = InfiniGenCalibration(calibration.projections[layers, np.array(heads)])
        return dataclasses.replace(method, calibration=calibration)


def _read(
    model: FunctionalModel,
    sample: Sequence[Sequence[int]],
    transform: KVTransform,
    dtype: DTypeLike | None = None,
) -> tuple[Any, ...]:
    """Reads the sample and returns what every layer has read of it, uncompressed."""
    width, layers = max(map(len, sample)), (transform,) * model.num_layers
    size = CacheSize.of(model, len(sample), width, 0, dtype, width)
    widths = [width] * len(sample)
    context = first_turn(
        model, sample, widths, transform, layers, size, Compiler(), on_layer=None, last=False
    )
    return context.caches


def _per_head(reading: Reading) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the queries `[M, D]` and keys `[N, D]` of every KV head, of all tokens and rows."""
    arrays = *reading.queries, reading.kv.k.read(), reading.kv.position
    queries, query_position, keys, position = map(np.asarray, arrays)
    batch, kv_heads, _, head_dim = keys.shape
    queries = queries.reshape(batch, kv_heads, -1, *queries.shape[2:])  # [B, H, G, T, D]
    no_padding = np.broadcast_to((query_position >= 0)[:, None], (batch, *queries.shape[2:4]))
    return [
        (queries[:, head][no_padding].reshape(-1, head_dim), keys[:, head][position[:, head] >= 0])
        for head in range(kv_heads)
    ]
