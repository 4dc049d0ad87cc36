"""Tables that LongBench publishes (MIT licence, see LICENSE-LONGBENCH.txt)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

_TABLES = json.loads(Path(__file__).with_name("longbench.json").read_text(encoding="utf-8"))

PROMPTS: Mapping[str, str] = _TABLES["prompts"]
"""Task → prompt, with `{context}` and, where there is a question, `{input}`."""

MAX_NEW: Mapping[str, int] = _TABLES["max_new"]
"""Task → most new tokens."""

CHINESE_PUNCTUATION: str = _TABLES["chinese_punctuation"]
"""Punctuation that counts in no Chinese score, beside that of ASCII."""
