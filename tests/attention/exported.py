"""Exported programs of a method, and another process that loads and runs them.

`python -m tests.attention.exported FOLDER METHOD ...` runs the programs of these cases and writes
what comes out.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import NoReturn

import jax
import jax.export
import numpy as np

import kvjax
import kvjax.attention.attend as attending
from kvjax.protocol import KVTransform
from tests.compose.test_conformance import CASES, LENGTHS, STEPS, WIDTH, tokens
from tests.support.attending import (
    LOOKING,
    has_probe,
    new_cache,
    right,
    the_rope,
)


def document(read, cache, *new, **options):
    """Reads the document that begins with these tokens."""
    return read(kvjax.begin_document(cache), *new, **options)


def programs(transform: KVTransform, cache, batch=3) -> dict[str, jax.export.Exported]:
    """A prompt, what looks at it if the method has a probe, a step, and a flush if there is one.

    Args:
      cache: an empty one, or its shapes with the memory that its arrays are in.
      batch: how many rows it has.
    """
    made = {}
    rope = jax.eval_shape(the_rope)
    looking = [("probe", LOOKING)] if has_probe(transform) else []
    for phase, width in (("prompt", WIDTH), *looking, ("decode", 1)):
        last = phase != "prompt" or not looking
        call = functools.partial(kvjax.attend, phase=phase, last=last)
        if not last:
            call = functools.partial(document, call)
        given = jax.eval_shape(lambda width=width: tokens().at(right([0] * 3, LENGTHS, width)))
        given = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in given]
        made[phase] = jax.export.export(jax.jit(call))(cache, *given, rope=rope)
        after = jax.eval_shape(call, cache, *given, rope=rope)[1]
        if jax.tree.structure(after) == jax.tree.structure(cache):
            continue
        cache = after  # a prompt has added frequencies
    if kvjax.flush_interval(cache) is not None:
        made["flush"] = jax.export.export(jax.jit(kvjax.flush))(cache)
    return made


def results(made: dict[str, jax.export.Exported], cache, rows=(0, 1, 2)) -> list[np.ndarray]:
    """Outputs of the prompts of the standard run and of its steps, and where the tokens stand."""
    own, lengths, found = tokens().rows(rows), np.array(LENGTHS)[list(rows)], []
    interval = kvjax.flush_interval(cache)
    at = right([0] * len(rows), lengths, WIDTH)
    out, cache = made["prompt"].call(cache, *own.at(at), rope=the_rope())
    found.append(out)
    if "probe" in made:
        where = right(lengths.tolist(), [LOOKING] * len(rows), LOOKING)
        _, cache = made["probe"].call(cache, *own.at(where), rope=the_rope())
    for step in range(STEPS):
        now = (lengths + step)[:, None]
        out, cache = made["decode"].call(cache, *own.at(now), rope=the_rope())
        found.append(out)
        if interval is not None and (step + 1) % interval == 0:
            cache = made["flush"].call(cache)
    parts = jax.tree.leaves(cache, is_leaf=lambda x: isinstance(x, kvjax.LayerCache))
    return [np.asarray(x) for x in (*found, *(part.kv.position for part in parts))]


def refuse(*args: object, **options: object) -> NoReturn:
    """Stands where code would be traced that decides or attends."""
    raise AssertionError("a method is traced again")


def main(folder: Path, names: list[str]) -> None:
    """Runs what was loaded, without the functions that trace a step, a prompt or a flush."""
    for name in ("_attend", "_attend_groups", "_attend_layer", "_decide", "_flush"):
        setattr(attending, name, refuse)
    for name in names:
        paths = sorted((folder / name).iterdir())
        made = {path.stem: jax.export.deserialize(bytearray(path.read_bytes())) for path in paths}
        np.savez(folder / f"{name}.npz", *results(made, new_cache(CASES[name])))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
