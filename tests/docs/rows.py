"""The figures in README.md and docs/, made from the committed runs: ``python -m tests.docs.rows`` writes them.

A page marks what is made here:

    <!-- rows: NAME -->
    ...
    <!-- end of rows -->

is the text that the function NAME of ``ROWS`` gives. A code block after ``<!-- printed: FOLDER -->`` is an excerpt of
``FOLDER/printed.txt``, what the command printed when the run of that folder was made.
"""

from __future__ import annotations

import textwrap

import numpy as np
import pandas as pd

from attnbench.figures.error_lines import ORACLES
from attnbench.figures.peers import PeerPair, pairs
from attnbench.results.frame.agreement import ROUNDING
from attnbench.units import format_bytes, format_seconds
from tests.docs import (  # noqa: F401  # they add theirs to ROWS
    error_rate_rows,
    headline_rows,
    package_rows,
    recall_rows,
    score_rows,
    selection_rows,
    served_rows,
    swap_rows,
)
from tests.docs.making import HERE, MARK, PAGES, ROWS, digits, points, rows, run, table

ARENA = ("softmax", "sdpa", "identity", "local", "linformer", "linear", "performer", "reformer", "sinkhorn", "bigbird")
"""The variants of the headline table; where one has several settings, the first of them in the run."""


def training(name: str) -> pd.DataFrame:
    """A row for each variant, of the Long Range Arena's encoder at 4096 tokens; index: its name."""
    frame = run(name)
    frame = frame[(frame["level"] == "model") & (frame["pass"] == "training") & (frame["seq_len"] == 4096)]
    return frame.drop_duplicates("variant").set_index("variant")


def published() -> pd.DataFrame:
    """The paper's table 2; index: the variant's name."""
    return pd.read_csv(HERE / "attnbench/figures/published/lra.csv").set_index("variant")


@rows
def lra_cpu() -> str:
    """The headline table: speed and memory here and in the paper."""
    here, paper = training("lra-cpu"), published()
    lines = []
    for name in (*ARENA, "synthesizer"):
        there = paper.loc[name] if name in paper.index else None
        lines.append(
            [
                {"sdpa": "sdpa (fused)", "identity": "identity (no attention at all)"}.get(name, name),
                "1" if name == "softmax" else digits(here["time_median_s"]["softmax"] / here["time_median_s"][name]),
                "–" if there is None else f"{there['relative_speed_4k']:g}",
                format_bytes(int(here["peak_bytes"][name])),
                "–" if there is None else f"{there['memory_gb_4k']:g} GB",
            ]
        )
    return table(["", "speed here", "speed in the paper", "memory here", "memory in the paper"], lines)


@rows
def lra_cpu_says() -> str:
    """What the headline run says in words."""
    here = training("lra-cpu")
    speed = here["time_median_s"]["softmax"] / here["time_median_s"]
    fast = speed[["local", "linformer", "linear"]] / speed["identity"]
    memory = (here["peak_bytes"] / here["peak_bytes"]["identity"]).drop(["softmax", "synthesizer"])
    error = run("lra-cpu")
    error = error[error["inputs"].str.startswith("listops") & (error["sweep"] == "error")]
    error = error.drop_duplicates("variant").set_index("variant")
    wrong = error["rel_error"]
    return points(
        f"**The ceiling is {digits(speed['identity'])}.** A model without attention is {digits(speed['identity'])} "
        "times as fast as softmax here, because projections and feed-forward layers remain. `local`, `linformer` and "
        f"`linear` reach {100 * fast.min():.0f} to {100 * fast.max():.0f} % of it.",
        f"**Memory says little about the fast methods.** The largest of them, `{memory.idxmax()}`, takes "
        f"{digits(memory.max())} times the memory of the model without attention. Exact attention in a fused kernel "
        f"(`sdpa`) takes {digits(memory['sdpa'], 3)} times. It is the naive formula that needs "
        f"{format_bytes(int(here['peak_bytes']['softmax']))}.",
        "**Speed is bought with error.** On q, k and v of a trained Transformer the relative error of BigBird is "
        f"{digits(wrong['bigbird'])}, of Longformer {digits(wrong['longformer'])}, of local windows "
        f"{digits(wrong['local'])}. Performer's 256 positive random features have {digits(wrong['performer'])}; "
        f"mean(V), which ignores the queries, has {digits(error['trivial_error']['performer'])}.",
    )


@rows
def lra_models() -> str:
    """Errors on a trained model's attention beside those on random inputs of the same sizes."""
    frame = run("lra-models-cpu")
    frame = frame[(frame["error_kind"] == "approximation") & (frame["rel_error"] >= ROUNDING)]
    found = frame.pivot_table("rel_error", "label", ["sweep", "inputs"], sort=False)
    random = [f"gaussian:logit_std={std}" for std in ("0.5", "2.0")]
    columns = [(model, inputs) for model in ("minilm", "smollm2") for inputs in (model, *random)]
    head = [inputs.replace("gaussian:logit_std=", "std ") for _, inputs in columns]
    trivial = frame.groupby(["sweep", "inputs"])["trivial_error"].median()
    lines = [
        [f"`{label}`", *(digits(error) for error in row[columns])]
        for label, row in found.sort_values(columns[0]).iterrows()
        if label != "mean-value"
    ]
    own = found.drop(index=[*ORACLES, "mean-value"], errors="ignore")
    better = {column: f"{(own[column] < trivial[column]).sum()} of {own[column].notna().sum()}" for column in columns}
    said = (
        f"Nearer to exact attention than mean(V), oracles apart: on `{model}` {better[model, model]}, and on random "
        f"inputs of the same sizes {better[model, random[0]]} (0.5) and {better[model, random[1]]} (2.0)."
        for model in ("minilm", "smollm2")
    )
    lines.append(["mean(V)", *(digits(trivial[column]) for column in columns)])
    return table(["relative error", *head], lines) + "\n" + points(*said)


@rows
def lra_h100() -> str:
    """The same training step on a GPU, at the greatest length of which all is there."""
    frame = run("lra-h100")
    here = frame[frame["seq_len"] == 3072].drop_duplicates("variant").set_index("variant").sort_values("time_median_s")
    exact = here["time_median_s"]["softmax"]
    lines = [
        [
            str(name),
            format_seconds(row["time_median_s"]),
            "1" if name == "softmax" else digits(exact / row["time_median_s"]),
            format_bytes(int(row["peak_bytes"])),
        ]
        for name, row in here.iterrows()
    ]
    return table(["", "time", "speed", "peak memory"], lines)


@rows
def lra_h100_short() -> str:
    """What launching kernels costs at 1024 tokens."""
    frame = run("lra-h100")
    short = frame[frame["seq_len"] == 1024].drop_duplicates("variant").set_index("variant")["time_median_s"]
    slower = (short / short["softmax"])[["bigbird", "longformer"]]
    return points(
        f"**Short sequences are another matter.** At 1024 tokens BigBird takes {digits(slower['bigbird'])} times as "
        f"long as softmax, and Longformer {digits(slower['longformer'])} times: launching hundreds of small kernels "
        "decides."
    )


FORMS = {
    "linear": "linear:form=triton",
    "local": "flex:window=128",
    "longformer": "flex:global_tokens=1,window=256",
    "bigbird": "bigbird:form=flex",
}
"""Ordinary operations -> the same in fused kernels."""


@rows
def forms_h100() -> str:
    """Ordinary operations beside fused kernels; a dash where the run was stopped before."""
    frame = run("forms-h100")
    times = frame[frame["seq_len"] == 2048].set_index(["pass", "label"])["time_median_s"].dropna()
    lines = []
    for name, kernel in [*FORMS.items(), ("sdpa", "sdpa")]:
        line = ["`sdpa`, exact" if name == kernel else f"`{name}`, `{kernel}`"]
        for direction in ("forward", "training"):
            pair = [times.get((direction, label)) for label in (name, kernel)]
            shown = [format_seconds(one) if one is not None else "-" for one in pair]
            line += ["", shown[1], ""] if name == kernel else [*shown, digits(pair[0] / pair[1]) if all(pair) else "-"]
        lines.append(line)
    return table(["", "forward", "fused", "speed", "training", "fused", "speed"], lines)


@rows
def gpu_h200() -> str:
    """Replays of a CUDA graph of each variant that was measured before the run was stopped."""
    frame = run("gpu-h200")
    frame = frame[frame["status"] == "ok"].sort_values("time_median_s")
    lines = [
        [
            f"`{row['label']}`",
            row["kernel"] if isinstance(row["kernel"], str) else "",
            *(format_seconds(row[name]) for name in ("time_median_s", "device_s")),
            f"{row['kernels']:.0f}",
            f"{1e3 * row['energy_j']:.3g} mJ",
            format_seconds(row["first_call_s"]),
        ]
        for _, row in frame.iterrows()
    ]
    return table(["variant", "kernel", "time", "of its kernels", "kernels", "energy", "first call"], lines)


@rows
def launches_h200() -> str:
    """A call from Python, the time of its kernels, and the call as a CUDA graph."""
    frame = pd.read_csv(HERE / "docs/data/launches-h200.csv", keep_default_na=False)
    frame = frame[(frame["graph_ms"] != "") & (frame["kernel"] != "torch")]
    lines = []
    for _, row in frame.iterrows():
        eager, device, graph = (float(row[f"{name}_ms"]) / 1e3 for name in ("eager", "device", "graph"))
        host = f"{max(0.0, 1 - device / eager):.0%}"
        times = (format_seconds(one) for one in (eager, device, graph))
        lines.append([f"`{row['variant']}`", row["kernel"], str(row["kernels"]), *times, host])
    return table(["variant", "kernel", "kernels", "eager", "of its kernels", "graph", "host, eager"], lines)


@rows
def catalogue_h200() -> str:
    """A layer at 2048 tokens, the ten fastest beside exact attention."""
    frame = run("catalogue-h200")
    frame = frame[(frame["level"] == "layer") & (frame["pass"] == "forward") & frame["time_median_s"].notna()]
    fastest = frame.sort_values("time_median_s").head(10)
    lines = [[row["label"], format_seconds(row["time_median_s"])] for _, row in fastest.iterrows()]
    return table(["layer, 2048 tokens, bfloat16", "time"], lines)


def slopes(name: str) -> pd.DataFrame:
    """Power of n of time and of memory: least squares over the logarithms at all lengths; index: the label."""
    found = {}
    for label, frame in run(name).groupby("label"):
        n = np.log(frame["seq_len"])
        found[label] = {
            "time": np.polyfit(n, np.log(frame["time_median_s"]), 1)[0],
            "least": np.polyfit(n, np.log(frame["time_min_s"]), 1)[0],
            "memory": np.polyfit(n, np.log(frame["peak_bytes"]), 1)[0],
            "lengths": len(frame),
        }
    return pd.DataFrame.from_dict(found, orient="index")


@rows
def long_cpu() -> str:
    """Powers of n that are not 1 within 0.05, in both runs, of the variants that claim to be linear."""
    first, again = slopes("long-cpu"), slopes("long-cpu-again")
    last = again["time"].reindex(first.index).fillna(first["time"])
    within = int((abs(first["time"] - 1) <= 0.05).sum()), int((abs(last - 1) <= 0.05).sum())
    apart = first.index[(abs(first["time"] - 1) > 0.05) | (abs(last - 1) > 0.05)]
    lines = [
        [
            label,
            f"{first['time'][label]:.2f}",
            f"{again['time'][label]:.2f}" if label in again.index else "–",
            f"{first['least'][label]:.2f}",
            f"{first['memory'][label]:.2f}",
        ]
        for label in sorted(apart, key=lambda label: -first["time"][label])
    ]
    says = (
        f"The power is within 1 ± 0.05 for {within[0]} of {len(first)} variants, and for {within[1]} if the second "
        f"run takes the place of the first. The power of the memory is at most {first['memory'].max():.2f}. "
        "The others are"
    )
    head = ["", "time", "time, second run", "least times", "memory"]
    return textwrap.fill(says, 120) + "\n\n" + table(head, lines)


@rows
def long_cpu_million() -> str:
    """Times at the greatest length."""
    frame = run("long-cpu")
    longest = frame[frame["seq_len"] == frame["seq_len"].max()].set_index("label")
    names = ["efficient", "linear", "local", "performer"]
    lines = [
        [
            name,
            format_seconds(longest["time_median_s"][name]),
            format_bytes(int(longest["peak_bytes"][name])),
            format_bytes(int(longest["output_bytes"][name])),
        ]
        for name in names
    ]
    return table(["1,048,576 tokens, one head of 64", "time", "peak memory", "of which output"], lines)


def at(name: str, n: int) -> dict[tuple[tuple[str, str], str], PeerPair]:
    """Pairs of variant and package at one length, by their names and the pass."""
    return {(pair.names, pair.pass_): pair for pair in pairs(run(name)) if pair.n == n}


@rows
def peers_cpu() -> str:
    """Time and memory of each variant over those of the package, tuned and as shipped, at 4096 tokens."""
    tuned, shipped = at("peers-cpu", 4096), at("peers-cpu-as-shipped", 4096)
    lines = []
    for names in dict.fromkeys(names for names, _ in tuned):
        forward, train = tuned[names, "forward"], tuned.get((names, "training"))
        forward_shipped, train_shipped = shipped.get((names, "forward")), shipped.get((names, "training"))
        lines.append(
            [
                f"{names[0]} / {names[1]}",
                *("–" if pair is None else f"{digits(pair.time)} ({digits(pair.least)})" for pair in (forward, train)),
                *(
                    "–" if pair is None else f"{digits(pair.time)} ({digits(pair.least)})"
                    for pair in (forward_shipped, train_shipped)
                ),
                digits(forward.limit),
                digits(forward.above_floor),
                digits(forward.peak),
                "–" if train is None else digits(train.peak),
            ]
        )
    head = ["", "forward", "training", "forward, as shipped", "training, as shipped"]
    return table([*head, "limit, forward", "×floor, forward", "peak, forward", "peak, training"], lines)


@rows
def peers_cpu_lengths() -> str:
    """The same ratios of time at the three lengths, forward."""
    by_length = {n: at("peers-cpu", n) for n in (1024, 4096, 16384)}
    lines = []
    for key in by_length[4096]:
        if key[1] == "forward":
            found = [by_length[n].get(key) for n in by_length]
            lines.append([f"{key[0][0]} / {key[0][1]}", *("–" if one is None else digits(one.time) for one in found)])
    return table(["time, forward", *(f"{n:,} tokens" for n in by_length)], lines)


def renew(text: str) -> str:
    """A page with everything that is made here."""
    return MARK.sub(lambda mark: f"<!-- rows: {mark[1]} -->\n{ROWS[mark[1]]()}<!-- end of rows -->", text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(renew(page.read_text(encoding="utf-8")), encoding="utf-8")
