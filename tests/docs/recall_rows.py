"""The figures of docs/scores.md on the size of a state, from the run ``recall-state-cpu``."""

from __future__ import annotations

import pandas as pd

from attnbench.units import format_bytes
from tests.docs.making import digits, points, rows, run, table

ENOUGH = 0.9


def by_label() -> pd.DataFrame:
    """Mean and extremes of the score, bytes of the state, chance and family; index: the label."""
    return run("recall-state-cpu").groupby("label", sort=False).agg(
        score=("score", "mean"), low=("score", "min"), high=("score", "max"), bytes=("state_bytes", "first"),
        chance=("chance_score", "first"), family=("family", "first"), variant=("variant", "first"),
    )  # fmt: skip


@rows
def recall_state_cpu() -> str:
    """Every setting that looks up nine in ten, the smallest state first."""
    found = by_label()
    good = found[found["score"] >= ENOUGH].sort_values(["bytes", "score"], ascending=[True, False])
    lines = [
        [f"`{label}`", format_bytes(int(one["bytes"])), f"{one['score']:.2f}", f"{one['low']:.2f} to {one['high']:.2f}"]
        for label, one in good.iterrows()
    ]
    return table(["", "state", "score", "two seeds"], lines)


@rows
def recall_state_cpu_says() -> str:
    """What decides beside the bytes."""
    found = by_label()
    good, exact = found[found["score"] >= ENOUGH], found.loc["softmax"]
    smallest = good["bytes"].idxmin()
    mixed = found[(found["variant"] != "identity") & (found["high"] < found["chance"] + 0.03)]
    large = mixed[mixed["bytes"] >= good["bytes"].min()]
    rank = found["score"].corr(found["bytes"], method="spearman")
    return points(
        f"**{len(good)} of {len(found)} settings reach {ENOUGH:g}**, of {found['variant'].nunique()} variants. The "
        f"smallest state among them is that of `{smallest}`: {format_bytes(int(good['bytes'].min()))}, where softmax "
        f"keeps {format_bytes(int(exact['bytes']))}, {digits(exact['bytes'] / good['bytes'].min())} times as much.",
        f"**Bytes alone decide little.** Their rank correlation with the score is {rank:.2f}. {len(large)} settings "
        f"stay at chance ({found['chance'].iloc[0]:.3f}) with a state at least as large as that one: "
        f"{', '.join(f'`{label}`' for label in large.index)}. They may only learn more slowly: all have 350 steps and "
        "one learning rate.",
    )
