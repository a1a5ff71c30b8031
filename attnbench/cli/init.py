"""``attnbench init``: a first suite of one's own."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from attnbench.cli.screen import console
from attnbench.errors import CannotCreate, UsageError

TEXT = """\
# A suite of attnbench. It runs as it is; "attnbench run FILE --dry-run" says what it would take and runs nothing.
name: {name}
description: My first suite.
sweeps:
  - name: speed
    level: operator          # operator: attention alone; layer: with its projections; model: a whole model
    pass: forward            # forward, backward, training (both), decode (a token), stepwise (all in turn), generate
    measure: [time, memory, error]
    matrix:                  # every combination of these values is one cell, and one row of the results
      variant:               # "attnbench list" shows the names, "attnbench show NAME" the options
        - softmax
        - sdpa
        - local
        - {{name: performer, features: [64, 256]}}    # a list of values: each is measured
      seq_len: 512..2048     # doubling; 512..2048+512 goes in steps; [512, 2048] is a list
      heads: 4
      head_dim: 64

# Further keys, with their defaults. Take the # away to use them.
# min_time: 0.5              # least seconds spent on samples of a cell
# rounds: 3                  # shuffled visits of each cell
# profiles:                  # other values on another type of device
#   cuda: {{batch: 8, dtype: bfloat16}}
# exclude:                   # cells to leave out
#   - {{variant: softmax, seq_len: ">=2048"}}
"""


def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="File to write; it must not exist.")] = Path(
        "suite.yaml"
    ),
) -> None:
    """Write a commented first suite, which runs as it is."""
    from attnbench.contract.spec import parse_scalar
    from attnbench.files import write_output

    if file.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{file} does not end in .yaml; write attnbench init {shlex.quote(str(file))}.yaml")
    if file.exists() or file.is_symlink():
        raise CannotCreate(f"{file} exists already and stays as it is; choose another name")
    name = _name(file.stem)
    write_output(file, TEXT.format(name=name if parse_scalar(name) == name else f'"{name}"'))
    console.line(f"wrote {file}")
    console.note(f"run it: attnbench run {shlex.quote(str(file))}")


def _name(stem: str) -> str:
    from pydantic import TypeAdapter, ValidationError

    from attnbench.suite.sweep import Name

    try:
        return str(TypeAdapter(Name).validate_python(stem))
    except ValidationError:
        return "mine"
