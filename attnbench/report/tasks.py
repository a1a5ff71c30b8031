"""Scores by training for the scripts: a panel for each task, and the mean over tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from attnbench.plots.scored import Problem, about, family_of, hidden_options, left_out, means, problems
from attnbench.report.numbers import compact
from attnbench.scores import Summary, difference, joint, learnt


def found_in(frame: pd.DataFrame) -> list[Problem]:
    """The tasks with a score, and the mean over those of one model last."""
    found = [one for one in problems(frame) if one.parts]
    return [*found, *means(found)]


def as_data(one: Problem, families: list[str], family: int) -> dict[str, Any]:
    """A task for the scripts.

    Args:
        family: how many differences from softmax stand together in all tasks.
        families: names, to which new ones are added; a part holds the place of its own.
    """
    families += [name for name in dict.fromkeys(part.family for part in one.parts) if name not in families]
    reference, still = one.reference, one.no_mixing
    return {
        "name": one.heading,
        "chance": compact(one.chance),
        "still": compact(still.over_seeds.mean) if still else None,
        "reference": reference.label if reference else None,
        "band": [compact(end) for end in reference.ends] if reference and reference.ends else None,
        "parts": [_part(one, part, families.index(part.family), family) for part in one.parts],
    }


def _part(one: Problem, part: Summary, place: int, family: int) -> dict[str, Any]:
    low, high = part.ends or (None, None)
    data = {
        "label": part.label,
        "family": place,
        "mean": compact(part.over_seeds.mean),
        "low": compact(low),
        "high": compact(high),
        "seeds": [compact(score) for score in part.by_seed.values()],
        "hollow": part.ends is not None and not learnt(part, one.floor),
    }
    if one.reference is not None and part is not one.reference:
        found = difference(part, one.reference, family)
        if found.of is not None:
            ends = [compact(end) for end in (found.of.low, found.of.high)]
            data["less"] = [compact(found.of.mean), *ends, found.verdict]
    return data


def notes(frame: pd.DataFrame, found: Sequence[Problem]) -> list[str]:
    """What was trained and how, what hollow marks mean, and which labels have no score."""
    several = any(len(part.by_seed) > 1 for one in found for part in one.parts)
    single = any(len(part.by_seed) == 1 for one in found for part in one.parts)
    bars = ["Bars: 95 % t-intervals over seeds; ticks: single seeds."] if several else []
    bars += ["With one seed the bar is the interval over test examples, which knows nothing of other seeds."] * single
    lines = ["dotted line: chance, the best constant answer"] * any(one.chance is not None for one in found)
    lines += ["dashed line: identity, which mixes no tokens"] * any(one.no_mixing is not None for one in found)
    lines += ["band: softmax's interval"] * any(bool(one.reference and one.reference.ends) for one in found)
    hollow = any(part.ends is not None and not learnt(part, one.floor) for one in found for part in one.parts)
    said = "; ".join(lines)
    lines = [f"{said[:1].upper()}{said[1:]}."] if said else []
    lines += ["Hollow: its interval is not above identity's (without identity, not above chance)."] * hollow
    family = family_of(found)
    bars += [f"Differences: {joint(family)}, better or worse if it excludes 0."] * any(
        one.reference is not None for one in found
    )
    plain = [one for one in found if one.setting and one.choices]
    return [" ".join([*bars, *lines]), hidden_options(plain), *left_out(frame, plain)]


def how(frame: pd.DataFrame, found: Sequence[Problem]) -> str:
    """One line: the model, how it was trained and on what, as far as all tasks agree."""
    return " · ".join(about(frame, [one for one in found if one.choices])[:2])
