"""Rows of a table as plain dictionaries."""

from __future__ import annotations

from typing import Any

import pandas as pd


def records(rows: pd.DataFrame, *columns: str) -> list[dict[str, Any]]:
    """Rows as dictionaries with all columns, or only these."""
    return [{str(name): cell for name, cell in row.items()} for row in rows[[*columns] or [*rows]].to_dict("records")]
