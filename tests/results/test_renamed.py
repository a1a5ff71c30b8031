"""Rows of older versions stand under the names that their rules have today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.files import read_stored
from attnbench.results.renamed import named_as_today
from attnbench.results.table import read_table
from attnbench.suite.axes import POSITIONS
from tests.committed import REFERENCE

RUNS = sorted(path.parent for path in REFERENCE.glob("*/results.csv.xz"))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_committed_row_has_a_label_a_family_and_options_of_today(run: Path) -> None:
    rows = read_table(read_stored(run / "results.csv").decode())
    known = {(row["label"], row["options"], row["family"]): row for row in rows if row["variant"] in VARIANTS.names()}
    for row in known.values():
        if row["status"] != "unsupported":
            entry = VARIANTS.get(row["variant"])
            today = dict(entry.complete(parse_spec(row["label"])).options)
            assert row["family"] == entry.family
            assert {name: today[name] for name in json.loads(row["options"])} == json.loads(row["options"])
    assert {row.get("positions", "") for row in rows} <= {*POSITIONS, ""}


def row(**more: object) -> dict[str, object]:
    return {"schema_version": 2, "variant": "linear", "label": "linear", "options": "{}", "status": "ok", **more}


MSA = '{"block": 64, "blocks": 4}'
FORM = '{"chunk": 5, "form": "torch"}'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (row(family="kernel", variant="fox"), {"family": "pairwise"}),
        (row(family="kernel"), {}),
        (row(positions="sinusoid"), {"positions": "trained-sinusoid"}),
        (row(positions="sinusoid", schema_version=3), {}),
        (row(variant="msa", label="msa", options=MSA), {"label": "msa:block=64,score=relu"}),
        (row(variant="msa", label="msa:block=8", options='{"block": 8}'), {"label": "msa:block=8,score=relu"}),
        (row(variant="msa", label="msa", options='{"score": "product"}'), {}),
        (row(variant="msa", label="msa", options="no JSON"), {}),
        (row(variant="sparge", label="sparge"), {"label": "sparge:rule=holding,smooth_k=false"}),
        (row(label="linear:chunk=5", options=FORM), {"options": '{"chunk": 5}'}),
        (row(label="linear:chunk=5,form=torch", options=FORM), {}),
        (row(options='{"form": "triton"}'), {}),
        (row(variant="performer", label="performer:eps=0.1"), {"status": "unsupported"}),
    ],
)
def test_what_changed_its_name_gets_the_name_of_today(before: dict[str, object], after: dict[str, object]) -> None:
    found = named_as_today(before)
    assert {name: found[name] for name in after} == after
    assert named_as_today(found) == found
    assert after or found == before
