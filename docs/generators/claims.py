"""Published claims with the verdicts of the committed runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pandas as pd

from attnbench.decision.claim_points import points_of, read_from
from attnbench.decision.claims import Claim, claims
from attnbench.decision.judging import Judgement, judge
from attnbench.plots.load import read_results
from generators.markdown import code, page, source, table, text
from generators.reference_rows import RUNS

FROM = (
    "claims-cpu",
    "score-cpu",
    "lra-cpu",
    "decoding-cpu",
    "heads-cpu",
    "claims-24-cpu",
    "claims-1-thread-cpu",
    "share-cpu",
    "founding-cpu",
    "positions-cpu",
)
"""The runs that the claims' suites made, those of them that are committed."""

VERDICTS = {
    "holds": "It holds.",
    "fails": "It fails.",
    "depends on": "It depends on the setting.",
    "open": "It is open.",
    "not tested here": "It was not tested here.",
}


def judged() -> list[Judgement]:
    """Every claim, held to the committed runs."""
    table = pd.concat(_tables().values(), ignore_index=True)
    return [judge(claim, table) for claim in claims()]


@cache
def _tables() -> dict[str, pd.DataFrame]:
    return {name: read_results(RUNS / name) for name in FROM if (RUNS / name).is_dir()}


def read_by(claim: Claim) -> list[str]:
    """The committed runs without which the claim would be judged by other points, or by none."""
    tables = _tables()
    seen = list(points_of(claim, pd.concat(tables.values(), ignore_index=True)))
    return [
        name
        for name, own in tables.items()
        if (own["suite"] == claim.suite).any()
        and list(points_of(claim, pd.concat([one for other, one in tables.items() if other != name]))) != seen
    ]


def pages() -> Iterator[tuple[str, str]]:
    """One page."""
    found = judged()
    parts = [
        "# Published claims",
        "This page has what papers and articles say, in our words, beside what two cores measured here. The runs are "
        + ", ".join(f"[{name}](runs.md#{name})" for name in FROM if (RUNS / name).is_dir())
        + ". The verdicts are computed when this page is built.",
        "A claim *holds* if the whole 95 % interval says so at every measured point, and *fails* if it says so at no "
        "point. Otherwise it *depends on* the setting. It is *open* if all intervals hold both answers. A verdict is "
        "about this machine and these sizes. `attnbench claims --run` measures what is missing on yours, and prints "
        "the same list.",
        table(["claim", "verdict", "what was seen"], [_row(one) for one in found]),
        "## Where each claim comes from",
        "The last two columns name the rows that it reads: without this sweep, or without this run, the claim would be "
        "judged by other points.",
        table(["claim", "source", "measured by", "sweeps", "runs"], [_origin(one) for one in found]),
    ]
    yield "reference/claims.md", page(*parts)


def _row(one: Judgement) -> list[str]:
    note = f" {one.claim.note}" if one.claim.note else ""
    return [
        text(one.claim.says),
        f"**{VERDICTS[one.verdict]}**",
        text(one.evidence + "." * (not one.evidence.endswith("."))) + text(note),
    ]


def _origin(one: Judgement) -> list[str]:
    claim = one.claim
    rows = pd.concat(_tables().values(), ignore_index=True)
    sweeps = ", ".join(map(code, read_from(claim, rows, "sweep")))
    runs = ", ".join(f"[{name}](runs.md#{name})" for name in read_by(claim))
    return [text(claim.says), source(claim.source), code(claim.command), sweeps, runs]
