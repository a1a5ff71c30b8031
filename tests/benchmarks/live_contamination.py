"""Whether any of the traces that are known reaches the cell after it. See `make selfcheck`.

Each trace is left by a variant of its own in a real run. A witness that is measured between them must get what it gets
in a run of its own: the same outputs, sizes and counts.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TRACES = Path(__file__).parents[1] / "harness" / "test_traces.py"
PLUGIN = f"""
import importlib.util, os, random, sys
from pathlib import Path
sys.path.append({str(TRACES.parents[2])!r})  # what leaves traces imports others of the tests
import torch
from torch import nn
from attnbench import register

spec = importlib.util.spec_from_file_location("traces", {str(TRACES)!r})
traces = importlib.util.module_from_spec(spec)
spec.loader.exec_module(traces)
HERE = Path(__file__).parent

def variant(name, leave):
    class Own(nn.Module):
        "Leaves a trace in its first call, before which it tells its process."
        def __init__(self, shape):
            super().__init__()
            self.called = False
        def forward(self, q, k, v, *, key_mask=None):
            if not self.called:
                self.called = True
                with (HERE / "calls").open("a") as file:
                    file.write(f"{{name}} {{os.getpid()}}\\n")
                leave()
            return torch.softmax(q @ k.mT, -1) @ v
    register(name, family="reference", source="-", formula="-", cost="-")(Own)

for i, (change, _) in enumerate(traces.CASES.values()):
    variant(f"own-{{i}}", change)
    variant(f"witness-{{i}}", lambda: None)
"""
_spec = importlib.util.spec_from_file_location("traces", TRACES)
assert _spec is not None
assert _spec.loader is not None
traces = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(traces)
CASES = traces.CASES
UNDONE = ("gradient mode", "how gradients are computed")
"""A call is measured within guards of torch, which put these back at their end: nothing is left to be told."""
SHAPE = "seq_len: 128, heads: 2, head_dim: 16"
MEASURED = ("peak_bytes", "matmul_flops", "exponentials", "input_bytes", "output_bytes", "rel_error", "cosine")


def rows(folder: Path, name: str, variants: list[str]) -> dict[str, dict[str, Any]]:
    sweep = f"{{name: w, measure: [time, memory, error], matrix: {{variant: [{', '.join(variants)}], {SHAPE}}}}}"
    (folder / f"{name}.yaml").write_text(f"name: {name}\nsweeps: [{sweep}]\n")
    command = [sys.executable, "-m", "attnbench", "run", f"{name}.yaml", "--plugin", "own.py", "--quick", "--unchecked"]
    command += ["--device", "cpu", "--threads", "1"]  # and unchecked: a trace may break a law before it can be left
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    (records,) = (folder / "results" / name).glob("*/records.jsonl")
    return {row["variant"]: row for row in map(json.loads, records.read_text().splitlines())}


def left(folder: Path, cases: Sequence[str]) -> None:
    """Leave each trace, beside a witness, and fail if one is not told or reaches a witness."""
    (folder / "own.py").write_text(PLUGIN)
    places = [list(CASES).index(words) for words in cases]
    own, witnesses = ([f"{kind}-{i}" for i in places] for kind in ("own", "witness"))
    alone = rows(folder, "alone", witnesses[:1])[witnesses[0]]
    (folder / "calls").unlink()
    found = rows(folder, "all", [name for pair in zip(own, witnesses, strict=True) for name in pair])
    told = {name for name, words in zip(own, cases, strict=True) if words in found[name]["warnings"]}
    untold = [words for name, words in zip(own, cases, strict=True) if name not in told and words not in UNDONE]
    reached = [
        (witness, column, found[witness][column], alone[column])
        for witness in witnesses
        for column in MEASURED
        if found[witness][column] != alone[column]
    ]
    calls = [line.split() for line in (folder / "calls").read_text().splitlines()]
    after = [
        (name, other)
        for i, (name, process) in enumerate(calls)
        for other, same in calls[i + 1 :]
        if name in told and same == process and other != name
    ]
    print(f"\n{len(cases)} traces: {len(untold)} untold, {len(after)} later cells in the process of one, ", end="")
    print(f"{len(reached)} of {len(MEASURED) * len(witnesses)} numbers of witnesses differ from those of one alone")
    assert (untold, after, reached) == ([], [], [])
    assert {row["status"] for row in found.values() if row["variant"].startswith("witness")} == {"ok"}


def test_no_trace_reaches_the_cell_after_it(tmp_path: Path) -> None:
    left(tmp_path, list(CASES))
