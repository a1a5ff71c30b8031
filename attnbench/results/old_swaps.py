"""Rows of a swap that an older attnbench kept in files of their own, as rows of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.errors import CorruptResults
from attnbench.measure.status import Status
from attnbench.results.journal import Journal
from attnbench.results.manifest import OPENING
from attnbench.results.record import Record
from attnbench.results.swaps import EXACT
from attnbench.suite.cell import Cell, Pretrained

_NAMES = {"cosine": "feature_cosine", "trained_parameters": "trainable_params"}
"""Columns that have another name today."""
_SAME = {field.name for field in fields(Record)} - {"label", "seed", "steps", "causal", "status", "layers", "batch"}


def old_rows(file: Path, environment: Mapping[str, Any]) -> list[Record]:
    """Every row of the file, in order. Raises CorruptResults."""
    found = []
    lines = Journal(file, str(environment.get(OPENING, ""))).read().rows
    for number, line in enumerate(lines, start=1):
        try:
            found.append(_record_of(line, str(environment.get("device", "cpu"))))
        except (TypeError, ValueError, KeyError) as error:
            raise CorruptResults(f"{file}:{number}: not a row of a swap ({error}); restore it") from None
    return found


def _record_of(line: Mapping[str, Any], device: str) -> Record:
    label, layers = str(line["label"]), str(line["layers"])
    alone = layers.isdecimal()
    cell = Cell(
        suite="swap",
        sweep=EXACT if label == EXACT else "each" if alone else "together",
        variant=parse_spec("sdpa" if label == EXACT else label),
        shape=Shape(batch=line["batch"], seq_len=line["length"], causal=line["causal"]),
        level="pretrained",
        device=device,
        seed=line["seed"],
        measure=("loss",),
        pretrained=Pretrained(line["model"], "", line["windows"], line["steps"], line["learning_rate"], line["redraw"]),
        replaced="all" if layers in ("all", "none") else layers.removeprefix("only ").replace(",", "+"),
        tuned=line["steps"],
        train=line["train"] or "all",
    )
    columns = {_NAMES.get(name, name): value for name, value in line.items()}
    known = {name: value for name, value in columns.items() if name in _SAME and value is not None}
    losses = json.dumps(known.pop("window_losses", ()) or "").strip('"')
    row = Record.of(cell, Status(line["status"]), window_losses=losses)
    left = f"layers left as they are: {line['layers_left']}" if line["layers_left"] else ""
    unknown = {"heads": 0, "kv_heads": 0, "head_dim": 0, "v_dim": 0}  # the rows did not say
    return replace(row, **{**known, **unknown, "warnings": left, "method_version": 0})
