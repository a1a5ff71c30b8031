"""What docs/scores.md says of the committed runs of trainings."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd

import attnbench
from attnbench.results.frame.scored import Problem, family_of, problems
from attnbench.results.intervals import Summary, difference, learnt
from tests.docs.making import digits, points, rows, run, table

PUBLISHED = Path(attnbench.__file__).parent / "figures" / "published" / "lra.csv"
TASKS = ("recall", "copy", "digits", "longer")
"""The sweeps of the suite ``score`` that train."""
HALVES = ({0, 1}, {2, 3, 4})


@cache
def found(sweep: str) -> tuple[Problem, dict[str, Summary]]:
    """A sweep of the run, and its summaries by short names."""
    frame = run("score-cpu")
    (problem,) = [one for one in problems(frame[frame["sweep"] == sweep]) if one.parts]
    return problem, {name_of(one.label): one for one in problem.parts}


def name_of(label: str) -> str:
    """``synthesizer:mode=random`` as it is, others without their budget."""
    name, _, options = label.removesuffix("†").partition(":")
    return f"{name}:{options}" if "mode=" in options else name


def names() -> list[str]:
    """Best mean over the tasks first."""
    every = [found(sweep)[1] for sweep in TASKS]
    return sorted(every[0], key=lambda name: -sum(one[name].over_seeds.mean for one in every))


def shown(sweep: str, name: str) -> str:
    """``0.99 (0.96 to 1.00)``, with ° where nothing was learnt from other tokens."""
    problem, parts = found(sweep)
    one = parts[name]
    assert one.ends is not None
    low, high = one.ends
    return f"{one.over_seeds.mean:.2f} ({low:.2f} to {high:.2f})" + ("" if learnt(one, problem.floor) else "°")


@rows
def score_cpu() -> str:
    """Scores of the suite ``score``: mean over five seeds, with its 95 % interval."""
    lines = [[f"`{name}`", *(shown(sweep, name) for sweep in TASKS)] for name in names()]
    return table(["", "recall", "copy", "digits", "longer recall"], lines)


def said(name: str, sweep: str) -> str:
    """``worse on recall (0.13, softmax 0.99)``."""
    parts = found(sweep)[1]
    family = family_of(found(one)[0] for one in TASKS)
    verdict = difference(parts[name], parts["softmax"], family).verdict
    words = {"no difference found": "no difference found on", "better": "better on", "worse": "worse on"}[verdict]
    here, exact = (parts[one].over_seeds.mean for one in (name, "softmax"))
    task = {"longer": "the longer recall"}.get(sweep, sweep)
    return f"{words} {task} ({here:.2f} against {exact:.2f})"


def against(name: str) -> str:
    """A variant beside softmax on all tasks."""
    return "; ".join(said(name, sweep) for sweep in TASKS)


def pair(one: str, other: str, sweep: str) -> str:
    """Two variants on a task, paired by seed."""
    parts = found(sweep)[1]
    gap = difference(parts[one], parts[other]).of
    assert gap is not None
    assert gap.low is not None
    assert gap.high is not None
    task = {"longer": "the longer recall"}.get(sweep, sweep)
    return f"{gap.mean:+.2f} on {task} ({gap.low:+.2f} to {gap.high:+.2f})"


def unlearnt(sweep: str) -> str:
    """Who is not shown to be better than without mixing."""
    problem, parts = found(sweep)
    return ", ".join(f"`{name}`" for name in names() if not learnt(parts[name], problem.floor) and name != "identity")


def speed(name: str, sweep: str = "speed") -> float:
    """Speed of a training step, over the speed of softmax in the same model."""
    frame = run("score-cpu")
    frame = frame[frame["sweep"] == sweep].set_index("label")["time_median_s"]
    labels = {name_of(label): label for label in frame.index}
    return float(frame[labels["softmax"]] / frame[labels[name]])


@rows
def score_cpu_says() -> str:
    """The questions that scores answer, with what was measured."""
    return points(
        "**Is Linformer's quality that of the Transformer?** " + _sentence(against("linformer")) + " "
        "`attnbench score linformer:rank=16 softmax --task recall`",
        "**Is Performer's?** " + _sentence(against("performer")) + " "
        "`attnbench score performer:features=32 softmax --task copy`",
        "**Why train a Performer rather than a linear Transformer?** Performer less linear: "
        + "; ".join(pair("performer", "linear", sweep) for sweep in TASKS)
        + f". At 256 tokens a training step of Performer has {digits(speed('performer', 'speed-longer'))} times the "
        f"speed of softmax, one of linear {digits(speed('linear', 'speed-longer'))} times. "
        "`attnbench score performer:features=32 linear --task recall`",
        "**Does local attention fall behind on lookups?** " + _sentence(against("local")) + " A key that lies outside "
        "of its block cannot be seen, and two layers of blocks reach no further. "
        "`attnbench score local:block=16 softmax --task recall`",
        "**Which method loses what?** Not shown to be better than without mixing tokens are: on recall, which asks for "
        f"contents, {unlearnt('recall')}; on copy, which asks for places, {unlearnt('copy')}; on digits, which asks to "
        f"sum up the whole sequence, {unlearnt('digits')}. The dense `synthesizer` copies and cannot look anything up. "
        "`attnbench plot RUN --figure scores`",
        "**Does the order of Long Range Arena's table 1 come back?** On other tasks, in part. Rank correlation with "
        f"that table's average, over the {len(arena())} methods of both: {in_order()}. {out_of_order()} On its own "
        "data it was not tried, which takes days of a GPU. `attnbench run lra-score`",
        "**Does quality hold on short sequences?** The table is that question at 64 tokens, the last column at 256, "
        f"against the same model with softmax. At 128 tokens recall is {at_128()}, over three seeds. `attnbench score "
        "performer:features=32 linear linformer:rank=32 softmax --n 128 --rates 0.004`",
    )


@cache
def arena() -> pd.Series[float]:
    """Averages of table 1 of Tay et al. 2021, by the short names of the run's variants with their default mode."""
    published = pd.read_csv(PUBLISHED).set_index("variant")["average"].astype(float)
    return published[[name for name in names() if name in published.index]]


def in_order() -> str:
    """``+0.12 on recall (p = 0.75)``: Spearman's rank correlation of each task's means with the published averages."""
    from scipy.stats import spearmanr

    told = []
    for sweep in TASKS:
        parts = found(sweep)[1]
        rank = spearmanr([parts[name].over_seeds.mean for name in arena().index], arena())
        task = "the longer recall" if sweep == "longer" else sweep
        told.append(f"{rank.statistic:+.2f} on {task} (p = {rank.pvalue:.2f})")
    return ", ".join(told)


def out_of_order() -> str:
    """The methods that stand furthest from their published places."""
    every = [found(sweep)[1] for sweep in TASKS]
    mine = pd.Series({name: sum(one[name].over_seeds.mean for one in every) for name in arena().index})
    here, there = (one.rank(ascending=False).astype(int) for one in (mine, arena()))
    moved = (here - there).abs().sort_values(ascending=False, kind="stable")
    far = [name for name in moved.index if moved[name] >= 3]
    said = ", ".join(f"`{name}` ({there[name]} there, {here[name]} here)" for name in far)
    return f"Three places or more from theirs by the mean over all four: {said or 'none'}."


def at_128() -> str:
    """``0.95 with softmax, 0.46 with performer (0.26 to 0.79)``: means, and the seeds that lie furthest apart."""
    means = run("score-short-cpu").groupby("label")["score"].agg(["mean", "min", "max"])
    means = means.sort_values("mean", ascending=False).drop("identity")
    told = [f"{one['mean']:.2f} with `{name_of(str(label))}`" for label, one in means.iterrows()]
    ends = [f" ({one['min']:.2f} to {one['max']:.2f})" for _, one in means.iterrows()]
    return ", ".join(name + end for name, end in zip(told, ends, strict=True))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def halves() -> pd.DataFrame:
    """For each task: the order of the variants in one half of the seeds beside the other, and how far means lie apart.

    Columns rank (Spearman's), apart (mean over variants of the difference between the two means) and reach (of all
    means, the largest less the least).
    """
    from scipy.stats import spearmanr

    lines = {}
    for sweep in TASKS:
        parts = found(sweep)[1]
        means = pd.DataFrame(
            {
                side: {name: sum(one.by_seed[seed] for seed in half) / len(half) for name, one in sorted(parts.items())}
                for side, half in enumerate(HALVES)
            }
        )
        lines[sweep] = {
            "rank": float(spearmanr(means[0], means[1]).statistic),
            "apart": float((means[0] - means[1]).abs().mean()),
            "reach": float(means.to_numpy().max() - means.to_numpy().min()),
        }
    return pd.DataFrame.from_dict(lines, orient="index")


@rows
def score_cpu_halves() -> str:
    """Whether one half of the seeds says what the other says."""
    lines = [
        [
            {"longer": "longer recall"}.get(str(sweep), str(sweep)),
            f"{one['rank']:.2f}",
            f"{one['apart']:.3f}",
            f"{one['reach']:.2f}",
        ]
        for sweep, one in halves().iterrows()
    ]
    head = ["seeds 0 and 1 beside 2, 3 and 4", "rank correlation", "mean distance of the means", "best less worst"]
    return table(head, lines)


@rows
def score_rates() -> str:
    """Validation scores by learning rate, mean of two seeds, of the sweep that chose them."""
    frame = run("score-rates")
    frame = frame.assign(bare=frame["task"].str.partition(":")[0])
    lines = []
    for (task, label), part in frame.groupby(["bare", "label"], sort=False):
        by_rate = part.groupby("learning_rate")["val_score"].mean()
        best = by_rate.max()
        lines.append([f"{task}, `{label}`", *(f"**{one:.2f}**" if one == best else f"{one:.2f}" for one in by_rate)])
    lines.sort(key=lambda line: line[0].startswith("copy"))
    rates = sorted(frame["learning_rate"].unique())
    return table(["", *(f"{rate:g}" for rate in rates)], lines)
