"""Published claims with the verdicts of the committed runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pandas as pd

from attnbench.answers.claims.assessment import Judgement, judge_all_rows, needed_by, rows_by_run, rows_of
from attnbench.answers.claims.claims import claims
from attnbench.results.frame.settings import RUN
from generators.markdown import code, page, source, table, text
from generators.reference_rows import RUNS, all_rows

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


@cache
def judged() -> list[Judgement]:
    """Every claim, held to the committed runs."""
    return [judge_all_rows(claim, rows()) for claim in claims()]


@cache
def rows() -> pd.DataFrame:
    """The rows of these runs."""
    runs = [all_rows(name).assign(**{RUN: name}) for name in FROM if (RUNS / name).is_dir()]
    return pd.concat(runs, ignore_index=True)


def pages() -> Iterator[tuple[str, str]]:
    """One page."""
    found = judged()
    parts = [
        "# Published claims",
        "This page has what papers and articles say, in our words, beside what two cores measured here. The runs are "
        + ", ".join(f"[{name}](runs.md#{name})" for name in FROM if (RUNS / name).is_dir())
        + ". The verdicts are computed when this page is built.",
        "A claim *holds* if the whole 95 % interval says so at every measured point, and *fails* if it says so at no "
        "point. Otherwise it *depends on* the setting. It is *open* if all intervals hold both answers, and not tested "
        "while a row is missing that its suite would measure. A verdict is about this machine and these sizes. "
        "`attnbench claims --run` measures what is missing on yours, and prints the same list.",
        table(["claim", "verdict", "what was seen"], [_row(one) for one in found]),
        "## Where each claim comes from",
        "The last two columns name the rows that it reads: the claim has no verdict while one of them is missing. "
        "`attnbench claims results/reference --json` names each by its run and `cell_id`.",
        table(["claim", "source", "measured by", "sweeps", "rows"], [_origin(one) for one in found]),
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
    read = rows_of(rows(), needed_by(claim, rows()))
    sweeps = ", ".join(map(code, dict.fromkeys(map(str, read["sweep"]))))
    counts = ", ".join(f"[{name}](runs.md#{name}): {len(cells)}" for name, cells in rows_by_run(read).items())
    return [text(claim.says), source(claim.source), code(claim.command), sweeps, counts]
