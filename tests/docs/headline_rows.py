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
    scores = {one.label.removesuffix("†"): one for one in problem.parts}
    exact = timed["time_median_s"]["softmax"]
    lines = []
    for label, row in timed.iterrows():
        one = scores[str(label)]
        lines.append(
            [
                f"`{one.label}`",
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
    scores = {one.label.removesuffix("†"): one.over_seeds.mean for one in problem.parts}
    learned = {one.label.removesuffix("†") for one in problem.parts if learnt(one, problem.floor)}
    speed, peak = timed["softmax"] / timed, frame[frame["sweep"] == "speed"].set_index("label")["peak_bytes"]
    others = sorted(scores.keys() - {"softmax", "sdpa", "identity"}, key=lambda one: -speed[one])
    solved = [
        f"`{one}` ({scores[one]:.3f}, {digits(speed[one])} times the speed)" for one in others if scores[one] > 0.95
    ]
    between = [
        f"`{one}` ({scores[one]:.2f}, {digits(speed[one])})" for one in others if one in learned and scores[one] <= 0.95
    ]
    return points(
        f"**Within five points of softmax ({scores['softmax']:.3f}):** {', '.join(solved)}. Exact attention in a fused "
        f"kernel (`sdpa`) has {digits(speed['sdpa'])} times the speed of softmax and "
        f"{digits(peak['sdpa'] / peak['softmax'])} times its memory.",
        f"**In between, with their speed:** {', '.join(between)}.",
        "**No better than no attention at all:** "
        + ", ".join(f"`{one}`" for one in others if one not in learned)
        + ".",
    )
