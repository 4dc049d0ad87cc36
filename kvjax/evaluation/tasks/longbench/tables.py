"""Tables that LongBench publishes (MIT licence, see LICENSE-LONGBENCH.txt)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

_TABLES = json.loads(Path(__file__).with_name("longbench.json").read_text(encoding="utf-8"))

PROMPTS: Mapping[str, str] = _TABLES["prompts"]
"""Prompt of each task, with `{context}` and, if the task has a question, `{input}`."""

MAX_NEW: Mapping[str, int] = _TABLES["max_new"]
"""Maximum number of new tokens for each task."""

CHINESE_PUNCTUATION: str = _TABLES["chinese_punctuation"]
"""Punctuation that Chinese scores ignore, in addition to ASCII punctuation."""
