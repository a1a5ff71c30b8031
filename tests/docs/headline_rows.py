"""What the pages say of the committed runs in which speed, memory and score are of the same models."""

from __future__ import annotations

from attnbench.plots.scored import problems
from attnbench.scores import learnt
from attnbench.units import format_bytes, format_seconds
from tests.docs.making import digits, points, rows, run, table


@rows
def headline_cpu() -> str:
    """Time, memory and score of each model, the fastest first."""
    frame = run("headline-cpu")
    timed = frame[frame["sweep"] == "speed"].set_index("label").sort_values("time_median_s")
    (problem,) = [one for one in problems(frame) if one.parts]
    scores = {one.label: one for one in problem.parts}
    exact = timed["time_median_s"]["softmax"]
    lines = []
    for label, row in timed.iterrows():
        one = scores[str(label)]
        lines.append(
            [
                f"`{label}`",
                format_seconds(row["time_median_s"]),
                digits(exact / row["time_median_s"]),
                format_bytes(int(row["peak_bytes"])),
                f"{one.over_seeds.mean:.2f}" + ("" if learnt(one, problem.floor) else "°"),
            ]
        )
    return table(["", "training step", "speed", "peak memory", "score"], lines)


@rows
def headline_cpu_says() -> str:
    """What the run says in words."""
    frame = run("headline-cpu")
    timed = frame[frame["sweep"] == "speed"].set_index("label")["time_median_s"]
    (problem,) = [one for one in problems(frame) if one.parts]
    scores = {one.label: one.over_seeds.mean for one in problem.parts}
    learned = {one.label for one in problem.parts if learnt(one, problem.floor)}
    near = [label for label in learned if label not in ("softmax", "sdpa") and scores[label] >= 0.95]
    near.sort(key=lambda label: timed[label])
    lost = sorted((label for label in scores if label not in learned and label != "identity"), key=lambda one: timed[one])
    return points(
        f"**As good as softmax, and faster:** "
        + ", ".join(f"`{one}` ({scores[one]:.2f}, {digits(timed['softmax'] / timed[one])} times the speed)" for one in near)
        + f". Exact attention in a fused kernel (`sdpa`) has {digits(timed['softmax'] / timed['sdpa'])} times the speed.",
        "**Fast, and no better than no attention at all:** " + ", ".join(f"`{one}`" for one in lost) + ".",
    )
