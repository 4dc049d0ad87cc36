"""Reads prompts once for many methods, each of which compresses them later."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import jax
from jax.typing import DTypeLike

from kvjax.attention.dropped import check_dropped
from kvjax.compose.bind import bind
from kvjax.devices import automatic
from kvjax.generation.calibration import with_named
from kvjax.generation.compiler import Compiler
from kvjax.generation.context import Context
from kvjax.generation.documents import Document
from kvjax.generation.fingerprints import Fingerprint
from kvjax.generation.generate import AskedSizes, read
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.new_caches import LayerStates, states_of_layers
from kvjax.generation.observe import Observe, compress_layer, decide_layer, reads_alone
from kvjax.generation.prompt_checks import as_rows
from kvjax.generation.turns import Start, first_turn
from kvjax.protocol import KVTransform, Needs
from kvjax.registry import as_transform


class ReadOnce:
    """Prompts that a model has read once, for any of several methods to compress.

    Methods that differ only in what they do when a prompt has been read share the prompt pass. Each
    layer keeps the full prompt's keys and values, and what the methods need of its attention: the
    sums of probabilities (H2O, CaM), the last queries (SnapKV, PyramidKV, ...), or the record of a
    probe (KVzip). Methods whose probes do not go together share a pass with those of their probe
    alone. Two cases need a prompt pass for each method: a method that changes the pass
    (PyramidInfer without a budget drops hidden states), and a model on a mesh.

    Args:
      model, prompts, max_prompt, max_new, max_length, dtype, buckets, on_layer, on_compile,
        document: as in `kvjax.read`.
      transforms: the methods, or their texts as in `kvjax.generate`; `context` takes any of them.
        Calibrations that they name are read from their files.

    Raises:
      TypeError, ValueError: as `kvjax.read`, for any of the methods.

    Example:
      >>> import kvjax, kvjax.evaluation
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=512))
      >>> methods = [kvjax.SnapKV(40), kvjax.H2O(8)]
      >>> once = kvjax.evaluation.ReadOnce(model, [list(range(64))], methods)
      >>> [once.context(tx).caches[0].kv.live.sum(-1).tolist() for tx in methods]
      [[[40, 40]], [[8, 8]]]
    """

    @automatic()
    def __init__(
        self,
        model: LanguageModel | FunctionalModel,
        prompts: Sequence[Sequence[int]],
        transforms: Sequence[KVTransform | str],
        *,
        max_prompt: int | None = None,
        max_new: int = 512,
        max_length: int | None = None,
        dtype: DTypeLike | None = None,
        buckets: Sequence[int] | None = None,
        on_layer: Callable[[int], None] | None = None,
        on_compile: Callable[[str], None] | None = None,
        document: Document | None = None,
    ) -> None:
        prompts = as_rows(prompts)
        methods = [as_transform(transform, "ReadOnce") for transform in transforms]
        self._model, self._prompts = as_functional(model), prompts
        functional = self._model
        # A file that changes later changes nothing.
        self._named = functools.cache(lambda tx: with_named(tx, functional))
        methods = [self._named(method) for method in methods]
        sizes = AskedSizes(max_new, max_prompt, max_length, dtype, buckets)
        self._options = {**sizes._asdict(), "on_compile": on_compile, "document": document}
        widths, self._size = sizes.of_caches(self._model, prompts, methods)
        self._compiler = Compiler(on_compile, on_layer)
        self._observed: list[Context] = []
        for needs in _together(self._needs(tx) for tx in methods if not self._reads_alone(tx)):
            observe = Observe(needs)
            size = self._size._replace(max_new=0)  # nothing is written into the observed caches
            layers = (observe,) * self._model.num_layers
            start = Start(observe, layers, size, widths)
            observed = first_turn(self._model, prompts, start, self._compiler, document, last=False)
            fingerprint = Fingerprint.of(self._model)
            self._observed.append(dataclasses.replace(observed, fingerprint=fingerprint))

    @automatic()
    def context(self, transform: KVTransform | str) -> Context:
        """Returns the context that `kvjax.read` returns for the same prompts and this method.

        Args:
          transform: one of the `transforms`, or any that needs no more of the prompt than they do.

        Raises:
          ValueError: the method needs more of the prompt's attention than was observed.
        """
        transform = self._named(as_transform(transform, "ReadOnce"))
        if self._reads_alone(transform):
            return read(self._model, self._prompts, transform=transform, **self._options)
        context = self._compressed(transform, self._observed_for(transform))
        return context.at_rest(donate=True, compiler=self._compiler)

    def _observed_for(self, transform: KVTransform) -> Context:
        """Returns the readings that have all that a method needs."""
        needs = self._needs(transform)
        for observed in self._observed:
            wanted = observed.transform.wanted  # pyright: ignore[reportAttributeAccessIssue]
            if _together((wanted, needs)) == [wanted]:
                return observed
        raise ValueError(
            f"{transform!r} needs more of the prompt than was observed: name it to ReadOnce"
        )

    def _compressed(self, transform: KVTransform, observed: Context) -> Context:
        """Returns the context, awake, of the caches that a method makes of the readings.

        Layers that are alike share compiled code.
        """
        layers, size, compiler = self._bind(transform), self._size, self._compiler
        without_caches = dataclasses.replace(
            observed, held=(), transform=transform, layers=layers, size=size
        )
        states = compiler.run("the caches", states_of_layers, layers, size)
        caches = []
        for layer, (bound, reading) in enumerate(zip(layers, observed.held, strict=True)):
            attention, (parts, all_heads) = self._model.attention(layer), states[layer]
            decided = decide_layer(bound, size, attention, all_heads, reading, compiler)  # pyright: ignore[reportArgumentType]  # all are readings
            caches.append(
                compiler.run(
                    "the compression of a layer", compress_layer, bound, size, attention,
                    LayerStates(parts), None, decided,
                )
            )  # fmt: skip
        # The rest is copied, so that a call may take over the memory of the context.
        held = tuple(jax.block_until_ready(caches))
        check_dropped(held)
        return dataclasses.replace(without_caches.copy(), held=held)

    def _bind(self, transform: KVTransform) -> tuple[KVTransform, ...]:
        return bind(transform, self._model.num_layers, self._model.windows, self._size.max_tokens)

    def _needs(self, transform: KVTransform) -> Needs:
        """Returns what all layers of a method need of a prompt's attention."""
        needs = (Observe.of(layer).wanted for layer in self._bind(transform))
        return functools.reduce(Needs.union, needs)

    def _reads_alone(self, transform: KVTransform) -> bool:
        """Returns whether a method needs a prompt pass of its own: see the class."""
        return any(reads_alone(layer, self._size) for layer in self._bind(transform))


def _together(every: Iterable[Needs]) -> list[Needs]:
    """Returns the unions of needs whose probes go together, in the order in which they come."""
    unions: list[Needs] = []
    for needs in every:
        for number, union in enumerate(unions):
            with contextlib.suppress(ValueError):  # their probes do not go together
                unions[number] = union.union(needs)
                break
        else:
            unions.append(needs)
    return unions
