"""The folder of the model that a command is to use."""

from __future__ import annotations

from pathlib import Path

_BUNDLED = (
    "config.json", "model.safetensors", "tokenizer.json", "document.txt", "document.json",
    "held_out.txt",
)  # fmt: skip


def model_folder(given: str | None) -> Path:
    """The folder of a model.

    Args:
      given: path of a folder or id on the Hugging Face hub, whose files are downloaded; None: the
        bundled model.

    Raises:
      ValueError: there is no such model, or files of the bundled model are missing.
    """
    # Imported here: kvjax does without kvjax.models, and help without what they import.
    if given is not None:
        from kvjax.models.loading import local_directory

        return local_directory(given)
    from kvjax.models import demo

    folder = demo.directory()
    missing = [name for name in _BUNDLED if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"the bundled model in {folder} is incomplete: no {', '.join(missing)}")
    return folder
