"""Defines what methods learn from a model: values that are measured once, on sample text."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import jax
import numpy as np

from kvjax.cache.slots import KVCache
from kvjax.messages import brief
from kvjax.protocol import Full, KVTransform, MethodHeads, State, Step
from kvjax.serialization import static_value


@dataclass(frozen=True)
class Calibration:
    """Arrays and values that a method, a `Learner`, has learned from its model.

    A subclass is a frozen dataclass. Its fields are NumPy arrays `[layers, KV heads, ...]`, and
    numbers, texts and tuples of them. Arrays are copied and cannot be changed; those of floats are
    in float32. Calibrations with equal fields are equal, and they are hashable, since compiled code
    is looked up by methods and what they have learned.

    Args:
      cut_to: KV heads that the arrays are cut to, as `HeadGroups` needs them; None: all.

    Example:
      >>> from dataclasses import dataclass
      >>> import kvjax, numpy as np
      >>> @dataclass(frozen=True)
      ... class MeanKeys(kvjax.kit.Calibration):
      ...     means: np.ndarray  # [layers, KV heads, head_dim]
      >>> keys = MeanKeys(np.zeros((2, 4, 64)))
      >>> keys == MeanKeys(np.zeros((2, 4, 64))), keys.shape  # layers and KV heads
      (True, (2, 4))
      >>> keys.of_heads((0, 3)).means.shape
      (2, 2, 64)
    """

    cut_to: MethodHeads = field(default=None, kw_only=True)

    def __init_subclass__(cls, **kwargs):
        """Keeps the decorator of a subclass from comparing arrays field by field."""
        super().__init_subclass__(**kwargs)
        static_value(cls)
        cls.__eq__, cls.__hash__, cls.__repr__ = cls.__eq__, cls.__hash__, cls.__repr__

    def __post_init__(self):
        for name, value in list(vars(self).items()):
            if isinstance(value, np.ndarray | jax.Array):
                floats = np.issubdtype(value.dtype, np.floating)
                copy = np.array(value, np.float32 if floats else None, order="C")
                copy.setflags(write=False)
                object.__setattr__(self, name, copy)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        shapes = {name: list(x.shape) for name, x in self.arrays.items()}
        shown = [f"{name}={x!r}" for name, x in (shapes | self.others).items()]
        return f"{type(self).__name__}({', '.join(shown)}, id={self.id})"

    @functools.cached_property
    def _digest(self) -> bytes:
        # Comparing digests is quick, and transforms are compared at every call.
        shapes = [(name, x.shape, x.dtype.name) for name, x in self.arrays.items()]
        text = repr((shapes, self.others, self.cut_to)).encode()
        return hashlib.sha256(text + b"".join(x.tobytes() for x in self.arrays.values())).digest()

    @property
    def id(self) -> str:
        """Eight letters that tell calibrations apart in texts."""
        return self._digest.hex()[:8]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The fields that are arrays."""
        names = [x.name for x in dataclasses.fields(self)]
        return {x: getattr(self, x) for x in names if isinstance(getattr(self, x), np.ndarray)}

    @property
    def others(self) -> dict[str, Any]:
        """The other fields, but for `cut_to`."""
        names = {x.name for x in dataclasses.fields(self)} - {"cut_to", *self.arrays}
        return {name: getattr(self, name) for name in sorted(names)}

    @property
    def shape(self) -> tuple[int, ...]:
        """Layers and KV heads of the model."""
        return next(iter(self.arrays.values())).shape[:2]

    def check_model(self, num_layers: int, kv_heads: int | None = None) -> None:
        """Raises ValueError unless it has `num_layers` layers and, if given, `kv_heads` heads."""
        layers, heads = self.shape
        if layers != num_layers or kv_heads not in (None, heads):
            expected = f"{num_layers} layers" + ("" if kv_heads is None else f" of {kv_heads}")
            raise ValueError(
                f"{self!r} is of another model: it has {layers} layers of {heads} KV heads, "
                f"expected {expected}"
            )

    def of_heads(self, heads: MethodHeads) -> Self:
        """Cuts all arrays to some KV heads: the same in all layers, or those of each layer.

        Raises:
          ValueError: it has not as many heads.
        """
        if heads is None or self.cut_to is not None:
            return self
        layers, numbers = np.arange(self.shape[0])[:, None], np.array(heads)
        if numbers.max() >= self.shape[1]:
            raise ValueError(f"{self!r} must be for all heads of the model, got one for some")
        cut: Any = {name: x[layers, numbers] for name, x in self.arrays.items()}
        return dataclasses.replace(self, **cut, cut_to=heads)


@dataclass(frozen=True)
class Learner(KVTransform):
    """Base class of methods that learn from a model: `kvjax.calibrated` lets them.

    The model reads each text of a sample with `reader`, the full cache by default. What `observe`
    returns in every layer goes to `learn`, which makes the calibration. A subclass has a field for
    the calibration, `learns`, `planned`, `observe` and `learn`.

    Class attributes:
      learns: the field that holds the calibration, or the path of its file, or None; and the class
        of the calibration.
      kept: whether the calibration is kept in the user's cache, where later processes find it: for
        what belongs to a model and hardly to a text.
      dtype: of keys and values while a text is read; None: that of the platform.

    Example:
      >>> from dataclasses import dataclass
      >>> import kvjax, numpy as np
      >>> @dataclass(frozen=True)
      ... class MeanKeys(kvjax.kit.Calibration):
      ...     means: np.ndarray  # [layers, KV heads, head_dim]
      >>> @dataclass(frozen=True)
      ... class FarKeys(kvjax.kit.Learner):  # `on_prompt` and `extent` are left out here
      ...     keys: MeanKeys | str | None = None
      ...     learns = ("keys", MeanKeys)
      ...     def planned(self, model):
      ...         shape = model.num_layers, model.kv_heads, model.head_dim
      ...         return self.with_learned(MeanKeys(np.zeros(shape)))
      ...     def observe(self, reader, cache, state, step):
      ...         return cache.k.read()[0].mean(1)
      ...     def learn(self, model, observed):
      ...         return MeanKeys(np.mean(observed, axis=0))  # over the texts
      >>> observed = [[np.full((1, 4), n) for n in (1.0, 2.0)]]  # of one text, in two layers
      >>> method = FarKeys().with_learned(FarKeys().learn(None, observed))
      >>> method.lacks_calibration, method.keys.means[:, 0, 0].tolist()
      (False, [1.0, 2.0])
    """

    learns: ClassVar[tuple[str, type[Calibration]]]
    kept: ClassVar[bool] = False
    dtype: ClassVar[str | None] = None

    @property
    def learned(self) -> Any:
        """The calibration, the path of its file, or None."""
        return getattr(self, self.learns[0])

    @property
    def lacks_calibration(self) -> bool:
        """Tells whether it needs a calibration that is not there, or only named."""
        return not isinstance(self.learned, Calibration)

    def with_learned(self, calibration: Calibration | str | None) -> Self:
        """Returns the method with another calibration, or with the path of one."""
        field: Any = {self.learns[0]: calibration}
        return dataclasses.replace(self, **field)

    def check_learned(self) -> None:
        """Raises TypeError unless its calibration is one of its kind, a path, or None."""
        name, kind = self.learns
        if not isinstance(self.learned, kind | str | None):
            raise TypeError(
                f"{name} must be {kind.__name__}, which kvjax.calibrated makes, or the path of "
                f"one, got {brief(self.learned)}"
            )

    def unlearned(self) -> ValueError:
        """Returns the error of a method that is used before it has learned."""
        return ValueError(
            f"{brief(self)} needs {self.learns[0]}=, which it learns from its model: "
            "kvjax.calibrated(transform, model, sample) gives it"
        )

    def source(self) -> KVTransform:
        """Returns the method without the parts on which its calibration does not depend."""
        return self

    def planned(self, model: Any) -> KVTransform:
        """Returns a transform that takes as many bytes as this one will once it has learned.

        It stands for the method in plans, and where its decisions are traced before it has learned.

        Args:
          model: has `num_layers`, `kv_heads`, `head_dim` and `windows`, as a
            `kvjax.models.FunctionalModel` does; so in the members below.
        """
        raise NotImplementedError(f"{type(self).__name__} must say what it will have learned")

    def reader(self, model: Any, lengths: Sequence[int]) -> KVTransform:
        """Returns the transform that reads the sample, whose requests `observe` can read.

        Args:
          lengths: tokens of each text.

        Raises:
          ValueError: nothing can be learned from such a model or such texts.
        """
        return Full()

    def observe(self, reader: KVTransform, cache: KVCache, state: State, step: Step) -> Any:
        """Returns arrays for `learn` when a layer has read one text; is traced.

        Args:
          reader: the transform that has read the text, bound to the layer.
          cache, state, step: arguments of `reader.on_prompt`, of one row.
        """
        raise NotImplementedError(f"{type(self).__name__} must say what it observes")

    def learn(self, model: Any, observed: Sequence[Sequence[Any]]) -> Calibration:
        """Makes the calibration from the results of `observe`.

        Args:
          model: as in `reader`.
          observed: result for each text and layer, with NumPy arrays in the place of JAX's.
        """
        raise NotImplementedError(f"{type(self).__name__} must say what it learns")
