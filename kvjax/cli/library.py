"""Libraries: folders whose folders are contexts of documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kvjax.files import is_hidden
from kvjax.generation.context_files import holds_context
from kvjax.generation.prompt_checks import bucket

TOGETHER = 8192  # most tokens that are read together, padding included


def places(files: Sequence[str], library: Path) -> list[Path]:
    """Returns the folder of each document in a library: the name of its file without the ending.

    Raises:
      ValueError: a file has no name for a folder, or that of another file; or the library is
        something else.
    """
    if library.exists() and not library.is_dir():
        raise ValueError(f"{library} is in the way, and stays as it is: it is not a folder")
    if holds_context(library):
        raise ValueError(
            f"{library} is in the way, and stays as it is: it is the folder of one document, and "
            "several make a library"
        )
    by_name: dict[str, str] = {}
    for file in files:
        name = Path(file).stem
        if file == "-" or not name or is_hidden(Path(name)):
            raise ValueError(f"{file} has no name for a folder of the library: give it a file")
        if name in by_name:
            raise ValueError(
                f"{by_name[name]} and {file} would both be {library / name}: give them different "
                "names, or read them into different libraries"
            )
        by_name[name] = file
    return [library / name for name in by_name]


def documents(folder: str | Path) -> list[Path]:
    """Returns the folders of the documents in a library, by name; none: it is not a library."""
    folder = Path(folder)
    if not folder.is_dir() or holds_context(folder):
        return []
    return sorted(x for x in folder.iterdir() if not is_hidden(x) and holds_context(x))


def check_no_library(folder: Path, instead: str) -> None:
    """Raises ValueError if a folder is a library; `instead` says what to do."""
    if there := documents(folder):
        names = ", ".join(x.name for x in there[:3]) + ", ..." * (len(there) > 3)
        raise ValueError(f"{folder} is a library of {len(there)} documents ({names}): {instead}")


def batches(
    lengths: Sequence[int], most: int | None, together: int = TOGETHER
) -> Iterator[tuple[int, list[int]]]:
    """Yields the documents that are read together, and the length that they are padded to.

    Few lengths and numbers of documents are compiled for: a length is one of four per power of two.

    Args:
      lengths: tokens of each document.
      most: tokens above which nothing is padded; None: no limit.
      together: most tokens that are read together; a longer document is read alone.

    Example:
      >>> from kvjax.cli.library import batches
      >>> list(batches([300, 5000, 70, 310, 3000], most=8000))
      [(128, [2]), (320, [0, 3]), (3072, [4]), (5120, [1])]
    """
    by_width: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        by_width.setdefault(bucket(length, most, None), []).append(number)
    for width in sorted(by_width):
        numbers, rows = by_width[width], max(together // width, 1)
        yield from ((width, numbers[i : i + rows]) for i in range(0, len(numbers), rows))
