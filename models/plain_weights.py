"""Checks that a folder holds plain weights of a complete model: not quantised, no adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvjax.files import read_json

_PLAIN = "only float32, float16 and bfloat16 weights are read"

_METHODS = {
    "gptq": "GPTQ", "awq": "AWQ", "fp8": "FP8", "fbgemm_fp8": "FP8", "finegrained_fp8": "FP8",
    "mxfp4": "MXFP4", "hqq": "HQQ", "aqlm": "AQLM", "eetq": "EETQ", "spqr": "SpQR", "vptq": "VPTQ",
}  # fmt: skip
"""Values of `quant_method` → usual spelling; other values are shown as they are."""

_FILES = {
    "quantize_config.json": "GPTQ",  # AutoGPTQ before `quantization_config`
    "quant_config.json": "AWQ",  # AutoAWQ before it
    "hf_quant_config.json": "NVIDIA ModelOpt",
}
"""Files beside `config.json` that describe quantisation → its method."""

_TENSORS = {
    (".qweight", ".qzeros", ".g_idx"): "GPTQ or AWQ",
    (".weight_scale_inv",): "FP8",
    (".weight_packed", ".weight_scale", ".weight_zero_point", ".input_scale"): "compressed-tensors",
    (".absmax", ".quant_map", ".SCB", "__nf4", "__fp4"): "bitsandbytes",
    (".W_q",): "HQQ",
    (".codebooks",): "AQLM",
    (".scales", ".biases"): "MLX",  # last, since GPTQ and AWQ also have scales
}
"""Endings of tensor names that only checkpoints with quantised weights have → the method."""


def check_folder(folder: Path, raw: Mapping[str, Any]) -> None:
    """Raises ValueError if files describe quantised weights or an adapter.

    Args:
      folder: folder of the model.
      raw: the content of its `config.json`.

    Raises:
      ValueError: they do. The message names the file, and the method or the adapter's model.
    """
    for key, method in (
        ("quantization", "MLX"),
        ("compression_config", "compressed-tensors"),
        ("quantization_config", _method(raw.get("quantization_config"))),
    ):
        if raw.get(key) is not None:
            shown = _METHODS.get(method.lower(), method)
            raise ValueError(
                f"{folder / 'config.json'}: {key} ({method}) is not supported: the weights are "
                f"quantised with {shown}, {_PLAIN}"
            )
    for name, method in _FILES.items():
        if (folder / name).exists():
            raise ValueError(f"{folder / name}: the weights are quantised with {method}, {_PLAIN}")
    check_no_adapter(folder)


def _method(quantization: Any) -> str:
    """Returns the name of the method in a `quantization_config`."""
    stated = quantization if isinstance(quantization, dict) else {}
    of_bitsandbytes = any("load_in_" in name for name in stated)
    unnamed = "bitsandbytes" if of_bitsandbytes else "a method that is not named"
    return str(stated.get("quant_method") or unnamed)


def check_no_adapter(folder: Path) -> None:
    """Raises ValueError if a folder holds an adapter, alone or beside a model.

    Raises:
      ValueError: it does. The message names the model that the adapter was trained for.
    """
    path = folder / "adapter_config.json"
    if not path.exists():
        return
    base = read_json(path).get("base_model_name_or_path") or "a model that it does not name"
    has_model = (folder / "config.json").exists()
    subject = "beside the model there is" if has_model else "this is"
    out = ", or remove this file to load the model without it" if has_model else ""
    raise ValueError(
        f"{path}: {subject} an adapter of {base}, and adapters are not applied: "
        f"merge it into its model first (merge_and_unload of PEFT) and load the result{out}"
    )


def check_names(names: Iterable[str], folder: Path) -> None:
    """Raises ValueError if tensors have names that only checkpoints with quantised weights have.

    Raises:
      ValueError: they do. The message names the first tensor and the method.
    """
    names = list(names)
    for endings, method in _TENSORS.items():
        quantised = next((name for name in names if name.endswith(endings)), None)
        if quantised is not None:
            raise ValueError(
                f"{folder}: the weights are quantised with {method} (tensor {quantised}), {_PLAIN}"
            )
