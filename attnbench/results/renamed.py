"""Rows of older versions under the names that their rules have today."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from attnbench.contract.spec import Spec, parse_spec
from attnbench.errors import UsageError


class Rule(NamedTuple):
    """The rule that a variant's name stood for until its default became another one."""

    options: Mapping[str, str | bool]
    """Options that choose it today; older rows lack them."""
    own_form: str = ""
    """Difference from the source, if older rows do not say it."""


_RULES = {
    "msa": Rule({"score": "relu"}),
    "sparge": Rule(
        {"rule": "holding", "smooth_k": False},
        "keeps own blocks and the block that passes the share; the authors' code keeps neither",
    ),
}
_PAIRWISE = ("additive", "bilinear", "deltaformer", "differential", "fox", "gated-softmax", "parallax", "path")
"""Variants that the family ``kernel`` held before ``pairwise`` existed."""


def named_as_today(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with today's label, options, family and positions, as JSON or CSV has it; its numbers are untouched.

    Rows before schema 3 say ``sinusoid`` of positions that training changes: ``trained-sinusoid``. Rows of the days
    when ``torch`` was the default form name it among their options.
    """
    row = dict(row)
    if row.get("family") == "kernel" and row.get("variant") in _PAIRWISE:
        row["family"] = "pairwise"
    if row.get("positions") == "sinusoid" and str(row.get("schema_version")) in ("1", "2"):
        row["positions"] = "trained-sinusoid"
    rule = _RULES.get(str(row.get("variant")))
    if rule or '"form": "torch"' in str(row.get("options")):
        with suppress(ValueError, TypeError, KeyError, AttributeError, UsageError):  # it is no row: others refuse it
            options, label = json.loads(row["options"]), parse_spec(row["label"])
            if options.get("form") == "torch" and "form" not in dict(label.options):
                del options["form"]
            if rule and not rule.options.keys() & options.keys():
                options |= rule.options
                row["label"] = Spec.of(label.name, {**dict(label.options), **rule.options}).label
                row |= {"own_form": row["own_form"] or rule.own_form} if "own_form" in row else {}
            row["options"] = json.dumps(options)
    return row
