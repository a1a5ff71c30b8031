"""The rows of the committed reference runs, as the pages show them."""

from __future__ import annotations

import json
from functools import cache

import pandas as pd

from attnbench.results.read import read_results
from attnbench.units import format_bytes, format_seconds
from generators.markdown import ROOT, code, table

RUNS = ROOT / "results/reference"
SPEED = (
    ("lra-cpu", "Training step of the Long Range Arena's encoder"),
    ("catalogue-cpu", "Every variant once, as a layer"),
    ("headline-cpu", "Training step of a small encoder on recall"),
    ("headline-long-cpu", "Training step of a small encoder on recall, at twice the length"),
)
"""Runs of which a page shows times, and what they measured."""
ERRORS = ("lra-cpu", "lra-models-cpu", "catalogue-cpu", "catalogue-models-cpu")
"""Runs of which a page shows errors."""


@cache
def all_rows(run: str) -> pd.DataFrame:
    """Those of a run. It is read once for all pages."""
    return read_results(RUNS / run)


@cache
def rows(run: str) -> pd.DataFrame:
    """Those that were measured."""
    frame = all_rows(run)
    return frame[frame["status"] == "ok"]


@cache
def rows_with(run: str, column: str) -> dict[str, pd.DataFrame]:
    """Variant -> its measured rows that have a number in a column."""
    frame = rows(run)
    return dict(iter(frame[frame[column].notna()].groupby("variant")))


@cache
def environment(run: str) -> dict[str, object]:
    """``environment.json`` of a run."""
    path = RUNS / run / "environment.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def of_variant(name: str) -> str:
    """Times, errors and scores of one variant in the committed runs; empty where it is in none of them."""
    parts = []
    for run, what in SPEED:
        lines = list(_times(run, name))
        if lines:
            head = ["options", "n", "pass", "time", "times softmax's speed", "times its floor", "peak memory"]
            parts += [f"{what}, {_link(run)}:", table(head, lines)]
    if parts:
        parts.append(
            "The [floor](../measuring/time.md#the-limits-of-the-machine) is the least time that the FLOPs and bytes of "
            "the call need at the rates of that machine."
        )
    lines = [line for run in ERRORS for line in _errors(run, name)]
    if lines:
        parts += [
            "Error of the output against exact attention, and of the trivial answer mean(V):",
            table(["options", "inputs", "n", "error", "what the number means", "mean(V)", "run"], lines),
        ]
    lines = list(_scores("score-cpu", name))
    if lines:
        parts += [f"Scores after training, mean and range over seeds, {_link('score-cpu')}:"]
        parts += [table(["options", "task", "n", "score", "range", "seeds", "chance"], lines)]
    return "\n\n".join(part.strip() for part in parts)


def _link(run: str) -> str:
    return f"run [{run}](../reference/runs.md#{run})"


def _times(run: str, name: str) -> list[list[str]]:
    if name not in (timed := rows_with(run, "time_median_s")):
        return []
    lines = []
    for _, row in timed[name].sort_values(["level", "pass", "label", "seq_len"]).iterrows():
        softmax = _softmax(run).get(tuple(row[axis] for axis in _ALIKE))
        exact = f"{softmax / row['time_median_s']:.2g}" if softmax else "-"
        peak = "-" if pd.isna(row["peak_bytes"]) else format_bytes(int(row["peak_bytes"]))
        above = "-" if pd.isna(row["floor_s"]) else f"{row['time_median_s'] / row['floor_s']:.2g}"
        passed = f"{row['level']} {row['pass']}" + (", causal" if row["causal"] else "")
        lines.append(
            [_options(row), str(row["seq_len"]), passed, format_seconds(row["time_median_s"]), exact, above, peak]
        )
    return lines


_ALIKE = ("sweep", "level", "pass", "seq_len", "batch", "heads", "causal", "dtype", "inputs")
"""Columns in which a row agrees with that of softmax beside which its speed is."""


@cache
def _softmax(run: str) -> dict[tuple[object, ...], float]:
    """Those columns -> the first time of softmax without options."""
    frame = rows_with(run, "time_median_s").get("softmax", pd.DataFrame(columns=[*_ALIKE, "label", "time_median_s"]))
    found: dict[tuple[object, ...], float] = {}
    for _, row in frame[frame["label"] == "softmax"].iterrows():
        found.setdefault(tuple(row[axis] for axis in _ALIKE), row["time_median_s"])
    return found


def _errors(run: str, name: str) -> list[list[str]]:
    if name not in (compared := rows_with(run, "rel_error")):
        return []
    return [
        [
            _options(row),
            code(row["inputs"]),
            str(row["seq_len"]),
            f"{row['rel_error']:.2g}",
            str(row["error_kind"]),
            f"{row['trivial_error']:.2g}",
            _link(run).removeprefix("run "),
        ]
        for _, row in compared[name].iterrows()
    ]


def _scores(run: str, name: str) -> list[list[str]]:
    if name not in (scored := rows_with(run, "score")):
        return []
    lines = []
    for (sweep, _), same in scored[name].groupby(["sweep", "label"], sort=False):
        first, scores = same.iloc[0], same["score"]
        spread = f"{scores.min():.2f} to {scores.max():.2f}"
        lines.append(
            [
                _options(first),
                "longer recall" if sweep == "longer" else str(sweep),
                str(first["seq_len"]),
                f"{scores.mean():.2f}",
                spread,
                str(len(same)),
                f"{first['chance_score']:.2f}",
            ]
        )
    return lines


def _options(row: pd.Series) -> str:
    return code(str(row["label"]).partition(":")[2]) or "defaults"
