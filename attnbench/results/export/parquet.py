"""Rows and samples of a run as Parquet: typed columns with their units, for DuckDB, polars, pandas or Spark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from attnbench.errors import UsageError
from attnbench.files import write_output
from attnbench.results.manifest import SEAL
from attnbench.results.record import COLUMNS, FIELDS
from attnbench.results.store import RunFolder

_SAMPLE_UNITS = {"seconds": "seconds", "seq_len": "tokens"}


def write_rows(folder: RunFolder, path: Path) -> int:
    """Write the last row of each cell to ``path``, and return their number.

    Columns and types are those of ``results.csv``; ``options`` is JSON text. The schema carries ``environment.json``,
    and each field its unit. Raises UsageError without pyarrow, and CannotCreate.
    """
    arrow = _arrow("--parquet")
    records = folder.in_order()
    rows = [record.to_json() | {SEAL: record.seal} for record in records]
    of = {bool: arrow.bool_(), int: arrow.int64(), float: arrow.float64()}
    columns = zip(COLUMNS, FIELDS.values(), strict=True)
    fields = [_field(arrow, name, of.get(one.kind, arrow.string()), one.unit) for name, one in columns]
    _write(arrow, rows, fields, folder, path)
    return len(records)


def write_samples(folder: RunFolder, path: Path) -> int:
    """Write a line for every raw sample to ``path``, with its cell, round and position; return their number.

    ``seconds`` is the time of one call, the mean over ``calls``; ``switches`` counts how often another process took the
    core; ``waited`` is the seconds in which threads had no core; ``yardstick`` has the two reference times, or None.
    A sample that was ``stopped`` is no time of the call. Raises UsageError without pyarrow, and CannotCreate.
    """
    arrow = _arrow("--samples")
    records = folder.records()
    rows = [
        {
            "cell_id": cell_id,
            "label": records[cell_id].label,
            "seq_len": records[cell_id].seq_len,
            "round": round_,
            "position": position,
            "seconds": float(one["seconds"]),
            "calls": int(one["calls"]),
            "switches": one.get("switches"),
            "waited": one.get("waited"),
            "yardstick": one.get("yardstick"),
            "stopped": bool(one.get("stopped")),
        }
        for cell_id, rounds in folder.samples().items()
        if cell_id in records
        for round_, samples in sorted(rounds.items())
        for position, one in enumerate(samples)
    ]
    kinds = {
        **dict.fromkeys(("cell_id", "label"), arrow.string()),
        **dict.fromkeys(("seq_len", "round", "position"), arrow.int64()),
        "seconds": arrow.float64(),
        **dict.fromkeys(("calls", "switches"), arrow.int64()),
        "waited": arrow.float64(),
        "yardstick": arrow.list_(arrow.float64()),
        "stopped": arrow.bool_(),
    }
    fields = [_field(arrow, name, kind, _SAMPLE_UNITS.get(name, "")) for name, kind in kinds.items()]
    _write(arrow, rows, fields, folder, path)
    return len(rows)


def _arrow(option: str) -> Any:
    try:
        import_module("pyarrow.parquet")
        return import_module("pyarrow")
    except ImportError:
        raise UsageError(f"{option} needs pyarrow; install it with: pip install 'attnbench[export]'") from None


def _field(arrow: Any, name: str, kind: Any, unit: str) -> Any:
    about = {"unit": unit} if unit else {"format": "json"} if name == "options" else None
    return arrow.field(name, kind, metadata=about)


def _write(arrow: Any, rows: Sequence[Mapping[str, Any]], fields: Sequence[Any], folder: RunFolder, path: Path) -> None:
    about = {"attnbench.run": folder.path.name, "attnbench.environment": json.dumps(folder.environment)}
    columns = {  # a status is a word
        field.name: [str(one) if isinstance(one := row[field.name], str) else one for row in rows] for field in fields
    }
    table = arrow.table(columns, schema=arrow.schema(fields, metadata=about))
    buffer = arrow.BufferOutputStream()
    arrow.parquet.write_table(table, buffer)
    write_output(path, buffer.getvalue().to_pybytes())
