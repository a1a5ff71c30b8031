"""Rows of older versions under the names that their rules have today."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from attnbench.contract.spec import Spec, parse_spec
from attnbench.errors import UsageError
from attnbench.measure.status import Status


class FormerRule(NamedTuple):
    """The rule that a variant's name stood for until its default became another one."""

    options: Mapping[str, str | bool] = {}
    """Options that choose it today; older rows lack them."""
    defaults: tuple[str, ...] = ()
    """Other options with another default today."""
    own_form: str = ""
    """Difference from the source, if older rows do not say it."""
    gone: str = ""
    """An option that it no longer has, with 0 as its default."""


_RULES = {
    "msa": FormerRule({"score": "relu"}, ("block",)),
    "performer": FormerRule(gone="eps"),
    "sparge": FormerRule(
        {"rule": "holding", "smooth_k": False},
        own_form="keeps own blocks and the block that passes the share; the authors' code keeps neither",
    ),
}
_PAIRWISE = ("additive", "bilinear", "deltaformer", "differential", "fox", "gated-softmax", "parallax", "path")
"""Variants that the family ``kernel`` held before ``pairwise`` existed."""


def named_as_today(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with today's label, options, family and positions, as JSON or CSV has it; its numbers are untouched.

    Rows before schema 3 say ``sinusoid`` of positions that training changes: ``trained-sinusoid``. A row that was
    measured with an option that is gone is ``unsupported``, so that nothing shows it.
    """
    row = dict(row)
    if row.get("family") == "kernel" and row.get("variant") in _PAIRWISE:
        row["family"] = "pairwise"
    if str(row.get("schema_version")) not in ("1", "2"):
        return row
    if row.get("positions") == "sinusoid":
        row["positions"] = "trained-sinusoid"
    with suppress(ValueError, TypeError, KeyError, AttributeError, UsageError):  # it is no row: others refuse it
        options, label = json.loads(row["options"]), dict(parse_spec(row["label"]).options)
        rule = _RULES.get(row["variant"], FormerRule())
        if rule.gone in label:
            reason = f"measured with {rule.gone}={label[rule.gone]}, an option that {row['variant']} no longer has"
            return row | {"status": Status.UNSUPPORTED.value, "reason": reason}
        for unsaid in {rule.gone, "form"} & options.keys() - label.keys():
            if options[unsaid] in (0.0, "torch", "auto"):
                del options[unsaid]
        if rule.options and not rule.options.keys() & options.keys():
            label = {**{name: options[name] for name in rule.defaults}, **label, **rule.options}
            options |= rule.options
            row |= {"own_form": row["own_form"] or rule.own_form} if "own_form" in row else {}
            row["label"] = Spec.of(row["variant"], label).label
        row["options"] = json.dumps(options)
    return row
