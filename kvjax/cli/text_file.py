"""Text files that are named on the command line."""

from __future__ import annotations

from pathlib import Path


def read_text(path: str) -> str:
    """The text of a UTF-8 file, line ends as they are.

    Raises:
      ValueError: it cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise ValueError(f"{path} is not UTF-8 text: {where}") from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
