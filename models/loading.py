"""From a Hugging Face checkpoint to a `Decoder`, one tensor at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding
from jax.typing import DTypeLike

from kvjax.messages import brief, printable, quiet
from kvjax.regular_files import check_regular, read_json

from .config import DecoderConfig
from .decoder import Decoder
from .families import FAMILIES, check_layers, parse_config, read_raw_config
from .safetensors_files import STORED_DTYPES, StoredTensor, list_tensors, read_tensors
from .tensor_names import ParameterPath, Weight

ShardingRule = Callable[[str, tuple[int, ...]], Sharding | None]
"""Checkpoint name and shape in the decoder → placement, None for the default device."""

_TOKENIZER_FILES = ("tokenizer*", "*.json", "*.model", "*.jinja", "*.txt", "*/*.jinja")
_MOST_TOKENIZER_BYTES = 2**30
_CHECKED_AT_ONCE = 2**18  # elements, which fit into a cache

_DTYPES = ("float32", "bfloat16", "float16")
# Buffers that checkpoints of Llama and ChatGLM carry: they follow from the configuration.
_NOT_WEIGHTS = re.compile(r"(^|\.)rotary_(pos_)?emb\.inv_freq$")


def from_pretrained(
    directory_or_hub_id: str | os.PathLike[str],
    dtype: DTypeLike | None = None,
    sharding: Sharding | ShardingRule | None = None,
    *,
    allow_nonfinite: bool = False,
) -> Decoder:
    """Loads a Hugging Face model, weights included.

    Only safetensors are read, never pickle, and no code of the checkpoint is run. Names, shapes
    and element types of all tensors are checked before the first one is read; then each is read,
    cast and placed before the next, and nothing is ever initialised at random.

    Args:
      directory_or_hub_id: a folder with `config.json` and `model.safetensors` (or an index and its
        shards), or else a Hugging Face id, which is downloaded.
      dtype: of the weights: float32, bfloat16 or float16. None (default): float32 on a CPU, where
        it is several times faster than bfloat16; elsewhere the checkpoint's own, as its
        `config.json` states it.
      sharding: where the weights go: one `jax.sharding.Sharding` for all, or a function from the
        checkpoint's tensor name and the shape in the decoder (weights of projections are
        `[in, out]`, the transpose of the file's) to a Sharding or None. Of a tensor that holds
        several weights it is asked for each. None (default): the default device.
      allow_nonfinite: load weights that are NaN or infinite, in the file or once they are cast.

    Returns:
      A `Decoder`.

    Raises:
      ValueError: the folder or the id cannot be read; the model is not supported; a tensor is
        missing, unknown, misshapen, of a type that no weight has, stored twice, not finite, or
        cannot be placed. The message names it.
      TypeError: `sharding` is neither a Sharding nor callable.

    Example:
      >>> from kvjax.models import from_pretrained
      >>> model = from_pretrained("llama-3.2-1b", dtype="bfloat16")  # doctest: +SKIP
    """
    if sharding is not None and not isinstance(sharding, Sharding) and not callable(sharding):
        raise TypeError(f"sharding must be a Sharding, a function or None, got {sharding!r}")
    if dtype is not None:
        _check_dtype(dtype)
    folder = local_directory(directory_or_hub_id)
    raw = read_raw_config(folder)
    config = parse_config(raw, folder / "config.json")
    stored = list_tensors(folder)
    check_layers(raw, config, stored, folder / "config.json")
    if dtype is None:
        dtype = _default_dtype(raw, stored, sharding)
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    )
    parameters = dict(nnx.to_flat_state(state))
    names = _match(stored, FAMILIES[raw["model_type"]].weights(config), parameters)
    filled = {}
    for name, tensor in read_tensors(stored, names):
        with np.errstate(over="ignore"):  # what becomes infinite is refused
            tensor = tensor.astype(jnp.dtype(dtype), copy=False)
        if not allow_nonfinite and not _is_finite(tensor):
            raise ValueError(
                f"tensor {printable(name)} of {printable(stored[name].file)} has NaN or infinite "
                f"values in {tensor.dtype}: allow_nonfinite=True loads it as it is"
            )
        for path, part in _parts(tensor, names[name], parameters):
            value = _place(name, part, sharding)
            filled[path] = parameters[path].replace(value)
        del tensor, part  # frees the tensor before the next one is read
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def local_directory(directory_or_hub_id: str | os.PathLike[str]) -> Path:
    """The folder of a model: the given one, or the snapshot of a Hugging Face id.

    Of a repository only its configuration, its safetensors and its tokenizer are downloaded.

    Raises:
      ValueError: it is neither a folder nor an id that can be downloaded; one line says why.
    """
    folder = Path(directory_or_hub_id)
    if folder.is_dir():
        return folder
    given = os.fspath(directory_or_hub_id)
    shown = printable(given)
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", given):
        raise ValueError(f"{shown} is not a directory, nor the form of a Hugging Face id")
    # Imported here: most callers have a folder, and the client takes a while to import.
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                given,
                allow_patterns=["*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja"],
                ignore_patterns=["*/*", "consolidated*"],
            )
        )
    except Exception as error:  # the client's failures have no common base
        reason = _one_line(error)
        raise ValueError(
            f"{shown} is not a directory, and cannot be downloaded from Hugging Face: {reason}"
        ) from error


def _check_dtype(dtype: DTypeLike) -> None:
    try:
        known = jnp.dtype(dtype).name in _DTYPES
    except TypeError:
        known = False
    if not known:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")


def _default_dtype(
    raw: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    sharding: Sharding | ShardingRule | None,
) -> str:
    platform = jax.default_backend()
    if isinstance(sharding, Sharding):
        platform = next(iter(sharding.device_set)).platform
    if platform == "cpu":
        return "float32"
    first = next(iter(stored.values())).dtype
    stated = raw.get("dtype") or raw.get("torch_dtype") or STORED_DTYPES.get(first)
    return stated if stated in _DTYPES else "float32"


def _match(
    stored: Mapping[str, StoredTensor],
    weights: Mapping[str, Weight],
    parameters: Mapping[tuple, nnx.Variable],
) -> dict[str, Weight]:
    """Tensor names to read, each with its place. Every place has one, and no tensor is unknown."""
    names: dict[str, Weight] = {}
    taken: dict[tuple[ParameterPath, ...], str] = {}
    for name, tensor in stored.items():
        if _NOT_WEIGHTS.search(name):
            continue
        if name not in weights:
            raise ValueError(
                f"tensor {printable(name)} of {printable(tensor.file)} is unknown to this "
                "model type"
            )
        weight = weights[name]
        shapes = [parameters[path].get_value().shape for path in weight.parts]
        _check_tensor(name, tensor, weight, shapes)
        if weight.parts in taken:
            _check_equal(taken[weight.parts], name, stored)
        else:
            taken[weight.parts] = name
            names[name] = weight
    alike: dict[tuple[ParameterPath, ...], list[str]] = {}
    for name, weight in weights.items():
        alike.setdefault(weight.parts, []).append(name)
    missing = [" or ".join(found) for parts, found in alike.items() if parts not in taken]
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing: {', '.join(missing[:8])}")
    return names


def _parts(
    tensor: np.ndarray, weight: Weight, parameters: Mapping[ParameterPath, nnx.Variable]
) -> Iterator[tuple[ParameterPath, np.ndarray]]:
    """The parameters that a tensor holds, as views of it, in the decoder's orientation."""
    start = 0
    for path in weight.parts:
        shape = parameters[path].get_value().shape
        end = start + (shape[-1] if weight.transpose else shape[0])
        part = tensor[start:end]
        yield path, part.T if weight.transpose else part
        start = end


def _check_tensor(
    name: str, tensor: StoredTensor, weight: Weight, shapes: Sequence[tuple[int, ...]]
) -> None:
    stored = [shape[::-1] if weight.transpose else shape for shape in shapes]
    expected = (sum(shape[0] for shape in stored), *stored[0][1:])
    if tensor.shape != expected:
        raise ValueError(
            f"tensor {printable(name)} of {printable(tensor.file)} has shape {list(tensor.shape)}, "
            f"expected {list(expected)}"
        )
    if tensor.dtype not in STORED_DTYPES:
        raise ValueError(
            f"tensor {printable(name)} of {printable(tensor.file)} has type {tensor.dtype}, "
            f"expected one of {', '.join(STORED_DTYPES)}"
        )


def _check_equal(first: str, second: str, stored: Mapping[str, StoredTensor]) -> None:
    """A tied table may be stored under both names, but then both must be equal."""
    (_, a), (_, b) = read_tensors(stored, (first, second))
    if not np.array_equal(a, b):
        raise ValueError(
            f"tensors {first} and {second} differ, but config.json ties them (tie_word_embeddings)"
        )


def _is_finite(tensor: np.ndarray) -> bool:
    """Whether no value is NaN or infinite.

    The bits of a float without its sign are an integer that grows with it, and NaNs come after
    infinity. This is many times faster than `np.isfinite` where elements have 16 bits, and takes
    no array of the tensor's size.
    """
    bits = np.dtype(f"u{tensor.dtype.itemsize}")
    infinity, sign = (np.array(x, tensor.dtype).view(bits) for x in (np.inf, -0.0))
    flat = tensor.reshape(-1).view(bits)
    return all(
        (flat[start : start + _CHECKED_AT_ONCE] & ~sign).max() < infinity
        for start in range(0, flat.size, _CHECKED_AT_ONCE)
    )


def _place(name: str, tensor: np.ndarray, sharding: Sharding | ShardingRule | None) -> jax.Array:
    if sharding is not None and not isinstance(sharding, Sharding):
        sharding = sharding(name, tensor.shape)
    try:
        value = jax.device_put(tensor, sharding)
    except (ValueError, TypeError) as error:
        reason = _one_line(error)
        raise ValueError(
            f"tensor {printable(name)} of shape {list(tensor.shape)} cannot be placed as "
            f"{sharding}: {reason}"
        ) from error
    # Wait for the transfer, or the host would hold many tensors at a time.
    return value.block_until_ready()


def random_decoder(config: DecoderConfig, seed: int = 0) -> Decoder:
    """A decoder with random float32 weights, for tests and demonstrations.

    Args:
      config: what the decoder is made of.
      seed: equal seeds give equal weights.

    Returns:
      A `Decoder`.

    Example:
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128)).num_layers
      2
    """
    return Decoder(config, rngs=nnx.Rngs(seed))


def load_tokenizer(directory_or_hub_id: str | os.PathLike[str]) -> Any:
    """The tokenizer of a Hugging Face model, from `transformers`.

    A `tokenizer.json` is taken as it is: rebuilt from the class that `tokenizer_config.json` names,
    as `AutoTokenizer` does, it may lose its normalizer and its unknown token. No code of the
    checkpoint is run.

    Args:
      directory_or_hub_id: as in `from_pretrained`.

    Returns:
      A `transformers` tokenizer.

    Raises:
      ValueError: the folder or the id cannot be read, or there is no working tokenizer in it.

    Example:
      >>> from kvjax.models import load_tokenizer
      >>> load_tokenizer("llama-3.2-1b")("Once upon a time").input_ids  # doctest: +SKIP
    """
    folder = local_directory(directory_or_hub_id)
    _check_tokenizer_files(folder)
    try:
        with quiet():  # transformers has much to say, such as that there is no PyTorch
            # Imported here: models work without a tokenizer, and this takes a while.
            from transformers import AutoTokenizer, PreTrainedTokenizerFast

            fast = (folder / "tokenizer.json").is_file()
            kind = PreTrainedTokenizerFast if fast else AutoTokenizer
            tokenizer = kind.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a broken file raises whatever its parser raises
        raise ValueError(
            f"cannot load the tokenizer of {printable(folder)}: {_one_line(error)}"
        ) from error
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        # transformers makes an empty one where a folder describes a tokenizer and lacks it.
        shown = printable(folder)
        raise ValueError(f"{shown} has no vocabulary: the tokenizer's files are missing")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if type(getattr(backend, "model", None)).__name__ == "BPE":
        # Spaces are cleaned up for other tokenizers. transformers leaves it out for these, and
        # says so where a file asks for it.
        tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def _check_tokenizer_files(folder: Path) -> None:
    """Raises ValueError unless what transformers reads is regular files with sound values."""
    paths = {path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)}
    for path in sorted(paths):
        if path.exists() and not path.is_dir():
            check_regular(path, _MOST_TOKENIZER_BYTES)
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        raw = read_json(folder / name) if (folder / name).is_file() else {}
        length = raw.get("model_max_length", 0)
        if length is not None and not isinstance(length, int | float):
            raise ValueError(
                f"{printable(folder / name)}: model_max_length must be a number, "
                f"got {brief(length)}"
            )


def _one_line(error: Exception) -> str:
    return printable(" ".join(str(error).split())) or type(error).__name__
