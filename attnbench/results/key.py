"""The subject of a measurement, whoever made it: rows of two runs belong together if they have the same key.

A cell's id will not do: it is also that of its suite, its sweep and the method, so that the same variant at the same
shape has another one in another suite.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from attnbench.results.record import FIELDS, Record
from attnbench.suite.axes import AXES

_NO_AXES = {
    *("options", "level", "pass_", "process", "threads"),
    *("layers", "ffn", "protocol", "steps", "pretrain_steps", "guide", "model"),
}
NAMES = tuple(name for name in FIELDS if name in AXES or name in _NO_AXES)
"""Fields of a record that decide what its numbers are about: every axis, and the settings that are none."""


@dataclass(frozen=True, slots=True)
class Key:
    """The values of a row that decide what its numbers are about."""

    values: tuple[object, ...]
    """In the order of :data:`NAMES`. ``options`` is a JSON object sorted by name."""

    def but(self, **columns: object) -> Key:
        """The same key with other values in some columns."""
        return Key(tuple(columns.get(name, value) for name, value in zip(NAMES, self.values, strict=True)))

    def to_json(self) -> dict[str, Any]:
        """Column -> value, in the names of ``results.csv``, without those that do not apply."""
        columns = zip(NAMES, self.values, strict=True)
        return {name.rstrip("_"): value for name, value in columns if value not in (None, "")}


def key_of(record: Record) -> Key:
    """The key of a row."""
    return Key(tuple(getattr(record, name) for name in NAMES)).but(options=_sorted(record.options))


def _sorted(options: str) -> str:
    """The same JSON object for the same options; a text that is none stays as it is."""
    try:
        return json.dumps(json.loads(options), sort_keys=True)
    except ValueError:
        return options
