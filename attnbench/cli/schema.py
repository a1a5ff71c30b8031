"""``attnbench schema``: what may stand in a suite, as an editor wants it."""

from __future__ import annotations

from attnbench.cli import console


def schema() -> None:
    """Print the JSON Schema of a suite: with it an editor completes keys and marks mistakes."""
    from attnbench.suite.schema import Suite

    console.data({"$schema": "https://json-schema.org/draft/2020-12/schema", **Suite.model_json_schema()})
