"""The figures of docs/selection.md, from the suites ``selection``, ``prefill``, ``generate`` and ``kernels``."""

from __future__ import annotations

import pandas as pd

from attnbench.units import format_bytes, format_seconds
from tests.docs.making import digits, points, rows, run, table

ON = ("smollm2", "gaussian:logit_std=1.0", "gaussian:logit_std=4.0", "clustered", "sink")
"""The inputs of the tables, a language model's first."""


def over_inputs(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """One row for each label, one column for each of ``ON``."""
    kinds = {one: next((on for on in ON if one.startswith(on)), "") for one in frame["inputs"].unique()}
    return frame.assign(on=frame["inputs"].map(kinds)).pivot_table(column, "label", "on", sort=False)[list(ON)]


@rows
def selection_cpu() -> str:
    """What each method keeps and loses on a real model's attention and on others, and what it costs."""
    frame = run("selection-cpu")
    frame = frame[frame["sweep"].isin(["prompts", "oracles"]) & (frame["label"] != "sdpa")]
    errors, real = over_inputs(frame, "rel_error"), frame[frame["inputs"] == "smollm2"].set_index("label")
    exact = run("selection-cpu").query("label == 'sdpa' and inputs == 'smollm2' and sweep == 'prompts'")
    lines = []
    for label, one in real.sort_values("rel_error").iterrows():
        share = [f"{100 * one[name]:.0f} %" if pd.notna(one[name]) else "–" for name in ("kept_pairs", "kept_mass")]
        cost = digits(one["time_median_s"] / exact["time_median_s"].iloc[0]) if one["time_median_s"] > 0 else "–"
        chosen = format_seconds(one["select_s"]) if one["select_s"] > 0 else "–"
        lines.append([f"`{label}`", *share, *(f"{error:.2g}" for error in errors.loc[label]), cost, chosen])
    heads = ["pairs kept", "mass kept", "error", "gaussian 1", "gaussian 4", "clustered", "sink", "time / sdpa's"]
    return table(["n = 1024, causal", *heads, "of which choosing"], lines)


@rows
def selection_cpu_says() -> str:
    """Which inputs decide the order."""
    frame = run("selection-cpu")
    timed = frame[(frame["sweep"] == "prompts") & (frame["label"] != "sdpa")]
    errors = over_inputs(timed, "rel_error")
    exact = frame[(frame["label"] == "sdpa") & (frame["sweep"] == "prompts")].set_index("inputs")["time_median_s"]
    faster = int((timed["time_median_s"].to_numpy() < exact[timed["inputs"]].to_numpy()).sum())
    real = timed[timed["inputs"] == "smollm2"].set_index("label")
    half = errors.loc[[label for label in errors.index if real["kept_pairs"][label] <= 0.5]]
    best = [f"`{half[on].idxmin().partition(':')[0]}` on `{on}` ({half[on].min():.2g})" for on in ON]
    top, sinks = real.loc["topk:keys=256"], real.loc["streaming"]
    return points(
        f"**Choosing seldom pays at this length.** Of {len(timed)} cells of methods that choose, {faster} take less "
        "time than the fused kernel of exact attention on the same inputs. With 1,024 keys the whole matrix is small.",
        f"**The inputs decide the order.** Of the methods that keep at most half of the pairs, the best is {best[0]}, "
        f"{', '.join(best[1:-1])} and {best[-1]}. Only the first of these is a language model's attention.",
        f"**More mass is not less error.** On `smollm2`, `topk` keeps {100 * top['kept_mass']:.0f} % of the mass and "
        f"has an error of {top['rel_error']:.2g}. `streaming` keeps {100 * sinks['kept_mass']:.0f} % and has "
        f"{sinks['rel_error']:.2g}. The error is (1 - mass) times the distance between the mean of the "
        "dropped values and that of the kept ones.",
    )


@rows
def prefill_cpu() -> str:
    """Time of a prompt at the attention shape of a published model, over the fused kernel's."""
    frame = run("prefill-cpu")
    lines = []
    for (sweep, n), part in frame.groupby(["sweep", "seq_len"], sort=False):
        if n != frame.loc[frame["sweep"] == sweep, "seq_len"].max():
            continue
        exact = part.loc[part["label"] == "sdpa", "time_median_s"].iloc[0]
        for _, one in part.iterrows():
            chosen = f"{100 * one['select_s'] / one['time_median_s']:.0f} %" if one["select_s"] > 0 else "–"
            shape = f"{sweep}, n = {n}"
            ratio = digits(one["time_median_s"] / exact)
            memory = format_bytes(int(one["peak_bytes"]))
            lines.append([shape, f"`{one['label']}`", format_seconds(one["time_median_s"]), ratio, chosen, memory])
    return table(["shape", "", "time", "over sdpa's", "choosing", "peak memory"], lines)


@rows
def generate_cpu() -> str:
    """First token, further tokens and cache, at the attention shape of Llama 3 8B."""
    frame = run("generate-cpu")
    frame = frame[(frame["sweep"] == "prompts") & (frame["seq_len"] == frame["seq_len"].max())]
    lines = [
        [
            f"`{one['label']}`",
            format_seconds(one["first_token_s"]),
            format_seconds(one["token_s"]),
            format_bytes(int(one["state_bytes"])),
        ]
        for _, one in frame.sort_values("token_s").iterrows()
    ]
    return table([f"prompt of {frame['seq_len'].iloc[0]} tokens", "first token", "a further token", "cache"], lines)


@rows
def kernels_cpu() -> str:
    """The implementations of exact attention that a CPU has."""
    frame = run("kernels-cpu")
    frame = frame[(frame["seq_len"] == 2048) & frame["sweep"].isin(["forward", "training"])]
    lines = []
    for label in frame["label"].unique():
        cells = []
        for sweep, causal in (("forward", False), ("forward", True), ("training", True)):
            here = frame[(frame["label"] == label) & (frame["sweep"] == sweep) & (frame["causal"] == causal)]
            cells += [format_seconds(here["time_median_s"].iloc[0])] if len(here) else ["–"]
            cells += [format_bytes(int(here["peak_bytes"].iloc[0]))] if len(here) else ["–"]
        lines.append([f"`{label}`", *cells])
    head = ["forward", "memory", "causal", "memory", "training, causal", "memory"]
    return table(["n = 2048, 8 heads of 64, float32", *head], lines)
