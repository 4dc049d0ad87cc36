"""Records of a data set: a JSON object a line, with fields of known kinds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvjax.files import read_regular
from kvjax.messages import brief

MOST_BYTES = 2**30
"""Size of the largest file of records that is read."""

TEXT, TEXTS, INDEX = "a text", "a list of texts", "a whole number from 0"
"""Kinds of fields."""

Record = dict[str, Any]
Check = Callable[[Record], None]
"""Raises ValueError for a record whose fields do not go together."""


def find_file(data: str | Path, names: tuple[str, ...]) -> Path:
    """The file of records: `data` itself, or the first of the names that this folder has.

    Raises:
      ValueError: there is none.
    """
    path = Path(data)
    if not path.is_dir():
        return path
    found = next((path / name for name in names if (path / name).exists()), None)
    if found is None:
        raise ValueError(f"{path} has no {' or '.join(names)}")
    return found


def read_records(path: Path, fields: Mapping[str, str], check: Check | None = None) -> list[Record]:
    """The records of a file.

    Args:
      path: of a JSON object a line, in UTF-8; empty lines are left out.
      fields: name → kind. Records may have others.
      check: of each record.

    Raises:
      ValueError: the file cannot be read, or has no record, or a line is no object with these
        fields; names the file, the line and the field.
    """
    return parse_records(read_regular(path, MOST_BYTES), str(path), fields, check)


def parse_records(
    content: bytes, name: str, fields: Mapping[str, str], check: Check | None = None
) -> list[Record]:
    """The records of a content; `name` is what messages call it, else as `read_records`.

    Example:
      >>> from kvjax.evaluation.tasks.records import TEXT, parse_records
      >>> parse_records(b'{"question": "How many?"}', "test.jsonl", {"question": TEXT})
      [{'question': 'How many?'}]
      >>> parse_records(b'{"question": 7}', "test.jsonl", {"question": TEXT})
      Traceback (most recent call last):
      ...
      ValueError: line 1 of test.jsonl: question must be a text, got 7
    """
    records = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            try:
                record = _parse(line, fields)
                if check is not None:
                    check(record)
            except ValueError as error:
                raise ValueError(f"line {number} of {name}: {error}") from error
            records.append(record)
    if not records:
        raise ValueError(f"{name} is empty")
    return records


def _parse(line: bytes, fields: Mapping[str, str]) -> Record:
    try:
        record = json.loads(line.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error}") from error
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"it must be a JSON object, got {brief(record)}")
    for name, kind in fields.items():
        if name not in record:
            raise ValueError(f"it has no {name}, which must be {kind}")
        if not _is(kind, record[name]):
            raise ValueError(f"{name} must be {kind}, got {brief(record[name])}")
    return record


def _is(kind: str, value: object) -> bool:
    if kind == INDEX:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if kind == TEXTS:
        return isinstance(value, list) and bool(value) and all(map(_is_text, value))
    return _is_text(value)


def _is_text(value: object) -> bool:
    """Whether a value is a text that can be encoded: JSON may hold halves of characters."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
