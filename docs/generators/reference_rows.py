"""The rows of the committed reference runs, as the pages show them."""

from __future__ import annotations

import json
from functools import cache

import pandas as pd

from attnbench.plots.load import read_results
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
def rows(run: str) -> pd.DataFrame:
    """Those that were measured."""
    frame = read_results(RUNS / run)
    return frame[frame["status"] == "ok"]


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
    frame = rows(run)
    frame = frame[frame["time_median_s"].notna()]
    lines = []
    for _, row in frame[frame["variant"] == name].sort_values(["level", "pass", "label", "seq_len"]).iterrows():
        same = frame[frame["label"] == "softmax"]
        for axis in ("sweep", "level", "pass", "seq_len", "batch", "heads", "causal", "dtype", "inputs"):
            same = same[same[axis] == row[axis]]
        exact = f"{same['time_median_s'].iloc[0] / row['time_median_s']:.2g}" if len(same) else "-"
        peak = "-" if pd.isna(row["peak_bytes"]) else format_bytes(int(row["peak_bytes"]))
        above = "-" if pd.isna(row["floor_s"]) else f"{row['time_median_s'] / row['floor_s']:.2g}"
        passed = f"{row['level']} {row['pass']}" + (", causal" if row["causal"] else "")
        lines.append(
            [_options(row), str(row["seq_len"]), passed, format_seconds(row["time_median_s"]), exact, above, peak]
        )
    return lines


def _errors(run: str, name: str) -> list[list[str]]:
    frame = rows(run)
    frame = frame[(frame["variant"] == name) & frame["rel_error"].notna()]
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
        for _, row in frame.iterrows()
    ]


def _scores(run: str, name: str) -> list[list[str]]:
    frame = rows(run)
    frame = frame[(frame["variant"] == name) & frame["score"].notna()]
    lines = []
    for (sweep, _), same in frame.groupby(["sweep", "label"], sort=False):
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
