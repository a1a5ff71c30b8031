"""Rows of older versions stand under the names that their rules have today."""

from __future__ import annotations

import json

import pytest

from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.results.renamed import named_as_today
from attnbench.suite.axes import POSITIONS
from tests.committed import REFERENCE, rows_of

RUNS = sorted(
    run.parent.name for run in REFERENCE.glob("*/environment.json") if not run.parent.name.startswith("swap-")
)


@pytest.mark.parametrize("run", RUNS)
def test_a_committed_row_has_a_label_a_family_and_options_of_today(run: str) -> None:
    frame = rows_of(run).drop_duplicates(["label", "options", "family"])
    for row in frame[frame["variant"].isin(list(VARIANTS.names()))].to_dict("records"):
        entry = VARIANTS.get(str(row["variant"]))
        today = dict(entry.complete(parse_spec(row["label"])).options)
        assert row["family"] == entry.family
        assert {name: today[name] for name in json.loads(row["options"])} == json.loads(row["options"]), row["label"]
    assert set(rows_of(run)["positions"]) <= {*POSITIONS, ""}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"family": "kernel", "variant": "fox"}, {"family": "pairwise"}),
        ({"family": "kernel", "variant": "performer"}, {}),
        ({"positions": "sinusoid", "schema_version": 2}, {"positions": "trained-sinusoid"}),
        ({"positions": "sinusoid", "schema_version": 3}, {}),
        ({"variant": "msa", "label": "msa:block=8", "options": '{"block": 8}'}, {"label": "msa:block=8,score=relu"}),
        ({"variant": "msa", "label": "msa", "options": '{"score": "product"}'}, {}),
        ({"variant": "msa", "label": "msa", "options": "no JSON"}, {}),
        (
            {"variant": "sparge", "label": "sparge", "options": "{}", "own_form": ""},
            {"label": "sparge:rule=holding,smooth_k=false"},
        ),
        (
            {"variant": "linear", "label": "linear:chunk=5", "options": '{"chunk": 5, "form": "torch"}'},
            {"options": '{"chunk": 5}'},
        ),
        ({"variant": "linear", "label": "linear:form=torch", "options": '{"form": "torch"}'}, {}),
        ({"variant": "linear", "label": "linear:form=triton", "options": '{"form": "triton"}'}, {}),
    ],
)
def test_what_changed_its_name_gets_the_name_of_today(before: dict[str, object], after: dict[str, object]) -> None:
    found = named_as_today(before)
    assert {name: found[name] for name in after} == after
    assert named_as_today(found) == found
    if not after:
        assert found == before
