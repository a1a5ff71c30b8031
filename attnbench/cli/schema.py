"""``attnbench schema``: the keys of a suite, for an editor."""

from __future__ import annotations

from typing import Any

from attnbench.cli.screen import console


def schema() -> None:
    """Print the JSON Schema of a suite, with which an editor completes keys and marks mistakes."""
    from attnbench.suite.schema import Suite

    console.data({"$schema": "https://json-schema.org/draft/2020-12/schema", **_plain(Suite.model_json_schema())})


def _plain(value: Any) -> Any:
    """Remove defaults that mean "nothing" and titles that repeat a key: an editor would show both."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _plain(one)
        for key, one in value.items()
        if not (key == "default" and (one is None or isinstance(one, dict) or one == []))
        and not (key == "title" and isinstance(one, str))
    }
