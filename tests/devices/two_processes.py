"""One of two processes that share a mesh of eight virtual devices; prints JSON.

`python -m tests.devices.two_processes NUMBER PORT METHOD`; "alone" in place of a number is one
process with one of its devices.
"""

from __future__ import annotations

import json
import sys

import jax

from tests.devices.many_devices import generate, model, transform


def main(number: str, port: str, method: str) -> None:
    if number != "alone":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(number))
    for across in ("rows", "heads"):
        sizes = () if number == "alone" else (2, 4, across == "heads")
        result = generate(model(*sizes), transform(method))
        found = {"tokens": result.tokens, "devices": jax.device_count()}
        print(json.dumps({f"{across} across": found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
