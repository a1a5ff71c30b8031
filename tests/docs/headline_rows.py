"""What the pages say of the committed runs in which speed, memory and score are of the same models."""

from __future__ import annotations

from attnbench.results.frame.scored import Problem, problems
from attnbench.results.intervals import learnt
from attnbench.units import format_bytes, format_seconds
from tests.docs.making import digits, points, rows, run, table


@rows
def headline_cpu() -> str:
    return _models("headline-cpu")


@rows
def headline_cpu_says() -> str:
    return _says("headline-cpu")


@rows
def headline_long_cpu() -> str:
    return _models("headline-long-cpu")


@rows
def headline_long_cpu_says() -> str:
    return _says("headline-long-cpu")


def _models(name: str) -> str:
    """Time, memory and score of each model, the fastest first."""
    frame = run(name)
    timed = frame[frame["sweep"] == "speed"].set_index("label").sort_values("time_median_s")
    problem = _problem(name)
    scores = {one.label.removesuffix("†"): one for one in problem.parts}
    exact = timed["time_median_s"]["softmax"]
    lines = []
    for label, row in timed.iterrows():
        one = scores[str(label)]
        several = len(one.by_seed) > 1 and one.ends is not None
        lines.append(
            [
                f"`{one.label}`",
                format_seconds(row["time_median_s"]),
                digits(exact / row["time_median_s"]),
                format_bytes(int(row["peak_bytes"])),
                f"{one.over_seeds.mean:.2f}"
                + ("" if learnt(one, problem.floor) else "°")
                + (f" ({one.ends[0]:.2f} to {one.ends[1]:.2f})" if several and one.ends else ""),
                *([f"{one.rate:g}"] if several else []),
            ]
        )
    head = ["", "training step", "speed", "peak memory", "score"]
    return table([*head, "rate"] if len(lines[0]) > len(head) else head, lines)


def _problem(name: str) -> Problem:
    (problem,) = [one for one in problems(run(name)) if one.parts]
    return problem


def _says(name: str) -> str:
    """What the run says in words."""
    frame = run(name)
    speeds = frame[frame["sweep"] == "speed"].set_index("label")
    timed, peak = speeds["time_median_s"], speeds["peak_bytes"]
    problem = _problem(name)
    scores = {one.label.removesuffix("†"): one.over_seeds.mean for one in problem.parts}
    learned = {one.label.removesuffix("†") for one in problem.parts if learnt(one, problem.floor)}
    speed = timed["softmax"] / timed
    others = sorted(scores.keys() - {"softmax", "sdpa", "identity"}, key=lambda one: -speed[one])
    near = scores["softmax"] - 0.05
    solved = [
        f"`{one}` ({scores[one]:.3f}, {digits(speed[one])} times the speed)" for one in others if scores[one] > near
    ]
    between = [
        f"`{one}` ({scores[one]:.2f}, {digits(speed[one])})" for one in others if one in learned and scores[one] <= near
    ]
    return points(
        f"**Within five points of softmax ({scores['softmax']:.3f}):** {', '.join(solved) or 'none'}. "
        f"Exact attention in a fused kernel (`sdpa`) has {digits(speed['sdpa'])} times the speed of softmax and "
        f"{digits(peak['sdpa'] / peak['softmax'])} times its memory.",
        f"**In between, with their speed:** {', '.join(between)}.",
        "**Not shown to be better than no attention at all:** "
        + ", ".join(f"`{one}`" for one in others if one not in learned)
        + ".",
    )
