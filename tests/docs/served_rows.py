"""The figures of docs/served.md, from the suites ``operators`` and ``served``."""

from __future__ import annotations

import pandas as pd

from attnbench.units import format_bytes, format_seconds
from tests.docs.making import digits, points, rows, run, table

EXACT = "sdpa"
_HARD = ("path", "deltaformer", "parallax", "fox")
"""Operators that look at all pairs, as exact attention does."""


def _column(frame: pd.DataFrame, sweep: str, n: int, name: str = "time_median_s") -> pd.Series:
    """A value for each label, of one sweep and length."""
    return frame[(frame["sweep"] == sweep) & (frame["seq_len"] == n)].set_index("label")[name]


def _over(values: pd.Series, label: str) -> str:
    """A time over the exact operator's; a dash without one."""
    return digits(values[label] / values[EXACT]) if label in values else "–"


def _short(error: float) -> str:
    return f"{error:.2g}" if error < 1 else digits(error)


@rows
def operators_cpu() -> str:
    """Each operator's time over that of exact attention, and its state."""
    frame = run("operators-cpu")
    kinds = [("forward", 1024), ("forward", 16384), ("training", 4096), ("decode", 16384)]
    times = [_column(frame, *kind) for kind in kinds]
    states, far = _column(frame, "decode", 16384, "state_bytes"), _column(frame, "distance", 1024, "rel_error")
    lines = [
        [f"`{label}`", *(_over(one, label) for one in times), format_bytes(int(states[label])), _short(far[label])]
        for label in times[0].index
    ]
    heads = ["forward, 1k", "forward, 16k", "training, 4k", "a token at 16k", "cache or state", "distance from softmax"]
    return table(["time over sdpa's", *heads], lines)


@rows
def operators_cpu_says() -> str:
    """Lengths from which a recurrence is faster than exact attention."""
    frame = run("operators-cpu")
    faster = {}
    for n in (1024, 4096, 16384):
        times = _column(frame, "forward", n)
        faster[n] = [label for label in times.index if label not in (EXACT, *_HARD) and times[label] < times[EXACT]]
    recurrent = [label for label in _column(frame, "forward", 1024).index if label not in (EXACT, *_HARD)]
    slow = [f"`{one}`" for one in recurrent if one not in faster[16384]]
    trained = _column(frame, "training", 4096)
    wins = [f"`{one}`" for one in recurrent if trained[one] < trained[EXACT]]
    step, state = _column(frame, "decode", 16384), _column(frame, "decode", 16384, "state_bytes")
    gain = step[EXACT] / step[recurrent]
    but = f" All but {', '.join(slow)} are at 16,384." if slow else " All are at 16,384."
    return points(
        f"**A recurrence pays from some length on.** Of {len(recurrent)}, {len(faster[1024])} are faster than the "
        f"fused kernel of exact attention at 1,024 tokens and {len(faster[4096])} at 4,096.{but}",
        f"**Training pays later.** At 4,096 tokens {len(wins)} are faster in training: {', '.join(wins)}.",
        f"**A token pays most.** After 16,384 tokens a step is {digits(gain.min())} to {digits(gain.max())} times as "
        f"fast, since it reads {format_bytes(int(state[recurrent].min()))} to "
        f"{format_bytes(int(state[recurrent].max()))} in place of {format_bytes(int(state[EXACT]))}.",
        "**Another operator is no approximation.** Its distance from softmax attention says how far it is from that, "
        "and nothing about its worth; scores do.",
    )


@rows
def served_cpu() -> str:
    """Several tokens in one step, and the way back."""
    frame = run("served-cpu")
    frame = frame[(frame["sweep"] == "drafts") & (frame["seq_len"] == 16384)]
    lines = []
    for label in frame["label"].unique():
        mine = frame[frame["label"] == label].set_index("new_tokens")
        steps = mine["time_median_s"]
        each = steps[16] / (16 * steps[1])
        back = format_seconds(mine["rollback_s"][16])
        lines.append([f"`{label}`", *(format_seconds(steps[count]) for count in (1, 4, 16)), digits(each), back])
    return table(["after 16,384 tokens", "1 token", "4", "16", "16 at once / 16 alone", "way back to 8"], lines)


@rows
def served_cpu_unequal() -> str:
    """Sequences of one length and of several, and pages."""
    frame = run("served-cpu")
    frame = frame[frame["sweep"] == "unequal"]
    lines = []
    for label in frame["label"].unique():
        mine = frame[frame["label"] == label].set_index("padding")
        cells = [f(mine[column][share]) for share in (0.0, 0.5) for column, f in _SHOWN]
        lines.append([f"`{label}`", *cells])
    return table(["batch of 8, at most 4096", "equal", "cache or state", "unequal", "cache or state"], lines)


_SHOWN = (("time_median_s", format_seconds), ("state_bytes", lambda count: format_bytes(int(count))))


@rows
def served_cpu_types() -> str:
    """The type in which a state is kept, and its error after so many steps."""
    frame = run("served-cpu")
    errors, times = frame[frame["sweep"] == "state-errors"], frame[frame["sweep"] == "state-types"]
    lines = []
    for label in errors["label"].unique():
        for kind in ("float32", "bfloat16", "float16"):
            of_kind = [one[(one["label"] == label) & (one["state_dtype"] == kind)] for one in (errors, times)]
            after = of_kind[0].set_index("seq_len")["own_error"]
            step = format_seconds(of_kind[1]["time_median_s"].iloc[0])
            lines.append([f"`{label}`", kind, step, *(f"{after[n]:.2g}" for n in (1024, 4096, 16384))])
    return table(["", "state kept as", "a step", "error after 1k", "after 4k", "after 16k"], lines)


@rows
def served_cpu_requests() -> str:
    """First token, further tokens and cache or state after a prompt; the first token behind a kept prefix."""
    frame = run("served-cpu")
    asked = frame[(frame["sweep"] == "requests") & (frame["seq_len"] == 16384)].set_index("label")
    prefix = frame[frame["sweep"] == "prefix"].set_index(["label", "kept_prefix"])["first_token_s"]
    lines = []
    for label, one in asked.iterrows():
        behind = [format_seconds(prefix[label, kept]) if (label, kept) in prefix else "–" for kept in (0, 3072)]
        first, each = format_seconds(one["first_token_s"]), format_seconds(one["token_s"])
        lines.append([f"`{label}`", first, each, format_bytes(int(one["state_bytes"])), *behind])
    heads = ["first token of 16k", "a further token", "cache or state", "first token of 4k", "3,072 of them kept"]
    return table(["", *heads], lines)


@rows
def served_cpu_says() -> str:
    """The findings on drafts, on the type of a state and on pages."""
    frame = run("served-cpu")
    drafts = frame[(frame["sweep"] == "drafts") & (frame["seq_len"] == 16384)]
    steps = drafts.pivot_table("time_median_s", "label", "new_tokens")
    each = steps[16] / (16 * steps[1])
    errors = frame[frame["sweep"] == "state-errors"]
    worst = errors[(errors["state_dtype"] == "bfloat16") & (errors["seq_len"] == 16384)].set_index("label")["own_error"]
    decayed = worst.drop("linear")
    pages = frame[(frame["sweep"] == "unequal") & (frame["padding"] == 0)].set_index("label")["time_median_s"]
    return points(
        f"**Drafts are cheap to verify with most.** {(each < 1).sum()} of {len(each)} take less time for 16 tokens in "
        f"one step than for 16 steps, `{each.idxmin()}` {digits(each.min())} of it. `{each.idxmax()}` takes "
        f"{digits(each.max())}.",
        f"**A sum without decay cannot be kept in bfloat16.** After 16,384 steps `linear` is off by "
        f"{digits(worst['linear'])}; states that decay are off by at most {digits(decayed.max())}.",
        f"**Pages cost a copy on a CPU.** `sdpa:page=16` gathers them and takes "
        f"{digits(pages['sdpa:page=16'] / pages['sdpa'])} times as long as one block of memory.",
    )
