"""Whether a folder holds the plain weights of a whole model: not quantised, and no adapter."""

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
"""Names of `quant_method` that are written otherwise; the others are shown as they are."""

_FILES = {
    "quantize_config.json": "GPTQ",  # AutoGPTQ before `quantization_config`
    "quant_config.json": "AWQ",  # AutoAWQ before it
    "hf_quant_config.json": "NVIDIA ModelOpt",
}
"""A file beside `config.json` that says how the weights are quantised."""

_TENSORS = {
    (".qweight", ".qzeros", ".g_idx"): "GPTQ or AWQ",
    (".weight_scale_inv",): "FP8",
    (".weight_packed", ".weight_scale", ".weight_zero_point", ".input_scale"): "compressed-tensors",
    (".absmax", ".quant_map", ".SCB", "__nf4", "__fp4"): "bitsandbytes",
    (".W_q",): "HQQ",
    (".codebooks",): "AQLM",
    (".scales", ".biases"): "MLX",  # last: GPTQ and AWQ have scales too
}
"""Endings of names that tensors have beside quantised weights alone."""


def check_folder(folder: Path, raw: Mapping[str, Any]) -> None:
    """Raises where files say that the weights are quantised, or that an adapter belongs to them.

    Args:
      folder: of the model.
      raw: the content of its `config.json`.

    Raises:
      ValueError: they do; names the file, and the method or the adapter's model.
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
    """Gives the name of the method in a `quantization_config`."""
    stated = quantization if isinstance(quantization, dict) else {}
    of_bitsandbytes = any("load_in_" in name for name in stated)
    unnamed = "bitsandbytes" if of_bitsandbytes else "a method that is not named"
    return str(stated.get("quant_method") or unnamed)


def check_no_adapter(folder: Path) -> None:
    """Raises where a folder holds an adapter, alone or beside a model.

    Raises:
      ValueError: it does; names the model that it was trained for.
    """
    path = folder / "adapter_config.json"
    if not path.exists():
        return
    base = read_json(path).get("base_model_name_or_path") or "a model that it does not name"
    whole = (folder / "config.json").exists()
    what = "beside the model there is" if whole else "this is"
    out = ", or remove this file to load the model without it" if whole else ""
    raise ValueError(
        f"{path}: {what} an adapter of {base}, and adapters are not applied: "
        f"merge it into its model first (merge_and_unload of PEFT) and load the result{out}"
    )


def check_names(names: Iterable[str], folder: Path) -> None:
    """Raises where tensors have names that stand beside quantised weights alone.

    Raises:
      ValueError: they do; names the first and the method.
    """
    names = list(names)
    for endings, method in _TENSORS.items():
        quantised = next((name for name in names if name.endswith(endings)), None)
        if quantised is not None:
            raise ValueError(
                f"{folder}: the weights are quantised with {method} (tensor {quantised}), {_PLAIN}"
            )
