"""Two methods of one file each beside KVzip: needles, and the loss of right answers.

    python benchmarks/one_file_methods.py --model FOLDER --text essays.txt --data dev-v2.0.json \\
        --out benchmarks/results/one_file_smollm2

`asked` is `examples/asked_by_the_model.py`: questions that the model writes itself score a
document. `gate` is the class `Gate` of `docs/writing-a-method.md`: a ridge regression from keys and
values to the logarithm of KVzip's scores. All questions come after the text. It runs `kvjax eval`
into two folders below `--out`, and can be interrupted and called again at any time.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from common import parser_of
from every_method import run_command

HOME = Path(__file__).resolve().parents[1]
ASKED = HOME / "examples" / "asked_by_the_model.py"
PAGE = HOME / "docs" / "writing-a-method.md"
METHODS = ("kvzip(BUDGET, room=64)", "asked(BUDGET, room=64)", "gate(BUDGET, room=64)")
BUDGETS = (0.5, 0.2)
IMPORTS = """\
import jax
import jax.numpy as jnp
from dataclasses import dataclass

import kvjax
from kvjax.kit import pytree_node
"""  # which earlier blocks of the page have


def write_gate(file: Path) -> None:
    """Writes the page's class `Gate` into a module that registers it."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    block = next(block for block in blocks if "class Gate(" in block)
    file.write_text(f'{IMPORTS}\n{block}\nkvjax.register("gate", Gate)\n')


def main() -> None:
    """Runs it."""
    parser = parser_of(__doc__, "model", "data", "out")
    parser.add_argument("--text", required=True, help="what needles are hidden in")
    parser.add_argument("--length", type=int, default=1400, help="tokens of a prompt")
    parser.add_argument("--cases", type=int, default=20, help="of each task")
    args = parser.parse_args()
    for name in ("model", "text", "data"):
        setattr(args, name, os.path.abspath(getattr(args, name)))
    out = Path(args.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(out)
    write_gate(Path("gate.py"))
    methods = [
        method.replace("BUDGET", f"budget={budget}") for method in METHODS for budget in BUDGETS
    ]
    common = [
        "--import", "gate.py", "--import", str(ASKED), "--method", ",".join(methods), "--text",
        args.text, "--lengths", str(args.length), "--question", "after", "--cases", str(args.cases),
    ]  # fmt: skip
    tasks = {"squad": ["--data", args.data], "niah_single_2": ["--max-new", "16"]}
    for task, options in tasks.items():
        words = ["eval", task, *common, *options, "--out", f"{task}_{out.name}"]
        run_command(Path("commands.json"), task, words, args.model)
    Path("gate.py").unlink()


if __name__ == "__main__":
    main()
