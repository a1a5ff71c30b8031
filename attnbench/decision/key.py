"""What was measured, apart from by whom: rows of two runs belong together if they have the same key.

A cell's id will not do: it is also that of its suite, its sweep and the method, so that the same variant at the same
shape has another one in another suite.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from attnbench.record import Record, options_of


@dataclass(frozen=True, slots=True)
class Key:
    """Columns of a row that decide what its numbers are about; see :class:`attnbench.record.Record` for each."""

    variant: str
    options: str
    """JSON object of all options that have a value, sorted by name."""
    level: str
    pass_: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    seq_len: int
    kv_len: int
    q_start: int
    causal: bool
    mask: str
    bias: str
    sink: str
    padding: float
    new_tokens: int
    added_tokens: int
    query_stride: int
    architecture: str
    compile: bool
    launch: str
    dtype: str
    inputs: str
    seed: int
    task: str | None
    process: str
    threads: int | None
    layers: int | None
    ffn: int | None
    positions: str
    protocol: str | None
    """protocol to guide describe a training; all are None for everything else."""
    steps: int | None
    learning_rate: float | None
    pretrain_steps: int | None
    guide: float | None

    def to_json(self) -> dict[str, Any]:
        """Column -> value, in the names of ``results.csv``, without those that do not apply."""
        columns = {name.rstrip("_"): value for name, value in asdict(self).items()}
        return {name: value for name, value in columns.items() if value not in (None, "")}


_NAMES = tuple(field.name for field in fields(Key))


def key_of(record: Record) -> Key:
    """The key of a row."""
    columns = {name: getattr(record, name) for name in _NAMES}
    return Key(**{**columns, "options": _sorted(options_of(record.options, record.label))})


def _sorted(options: str) -> str:
    """The same JSON object for the same options; a text that is none stays as it is."""
    try:
        return json.dumps(json.loads(options), sort_keys=True)
    except ValueError:
        return options
