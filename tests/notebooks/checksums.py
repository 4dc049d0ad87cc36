"""Notes in notebooks which cells of code were run: `make notebooks` calls it after the run."""

import hashlib
import json
import sys

KEY = "executed_code_sha256"  # in a notebook's metadata, which `jupytext --update` keeps


def checksum(notebook) -> str:
    """Returns a checksum of the cells of code in their order; prose may change without a run."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


if __name__ == "__main__":
    import nbformat

    for path in sys.argv[1:]:
        notebook = nbformat.read(path, as_version=4)
        notebook.metadata[KEY] = checksum(notebook)
        nbformat.write(notebook, path)
