"""What pandas says slowly of tables with a hundred columns and few rows."""

from __future__ import annotations

from typing import Any

import pandas as pd


def varies(column: pd.Series[Any]) -> bool:
    """Whether rows differ in a column; NaN equals NaN."""
    values = column.to_numpy()
    if not len(values):
        return False
    return not bool(column.isna().all() if pd.isna(values[0]) else (values == values[0]).all())


def records(rows: pd.DataFrame, *columns: str) -> list[dict[str, Any]]:
    """Rows as plain dictionaries, of these columns where some are named."""
    names = columns or [str(name) for name in rows]
    cells = [rows[name].tolist() for name in names]
    return [dict(zip(names, row, strict=True)) for row in zip(*cells, strict=True)]
