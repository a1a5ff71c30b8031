"""The lengths from which on sub-quadratic variants beat the best exact kernel of their machine, in one run."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from attnbench.answers.report.answer import CLOSE, Sentence
from attnbench.answers.report.rows import Relative
from attnbench.answers.report.views import View
from attnbench.measure.crossover import crossover
from attnbench.measure.statistics import Ratio
from attnbench.results.frame.marks import error_text

_ROUNDS = 2
"""Fewest for a verdict; docs/report.md has how often such a one is wrong."""


def exact_labels(rows: pd.DataFrame) -> set[str]:
    """The labels of kernels that compute softmax attention itself, up to rounding."""
    exact = rows[(rows["family"] == "exact") & (rows["target"] == "softmax")]
    return {*exact["label"]} - {*rows.loc[rows["error_kind"] == "approximation", "label"]}


class Crossing(NamedTuple):
    """The shortest measured length from which on a variant is faster than the best exact kernel, and this in words.

    The length is infinite if the variant is not faster at the longest. ``best`` is the kernel there. ``close``: exact,
    or with an error of at most 0.1.
    """

    n: float
    said: str
    label: str
    error: str
    close: bool
    best: str


def crossings(view: View, beside: Mapping[Hashable, Relative], exact: Collection[str]) -> list[Crossing]:
    """The sub-quadratic variants of a view with a ratio to ``exact`` ones, the first to cross and fastest first."""
    rows = view.setting.ok[view.setting.ok.index.isin(beside)]
    rows = rows[(rows["claimed_time_exponent"] < 2) & (rows["family"] != "reference") & ~rows["label"].isin(exact)]
    points = view.at[view.n]().points
    known = {label: (kind, y) for label, kind, y in points[["label", "kind", "y"]].itertuples(index=False)}
    found = []
    for label, part in rows.sort_values("seq_len").groupby("label", sort=False):
        lengths, ratios = [int(n) for n in part["seq_len"]], [_ratio(beside[index]) for index in part.index]
        since = len(ratios)
        while since and (ratio := ratios[since - 1]) and ratio.verdict == "slower":  # the exact one
            since -= 1
        n, said = math.inf, "not shown" if ratios[-1] else "no verdict"
        if since < len(ratios):
            one, n = crossover(lengths, ratios, names=("", "")), lengths[since]
            said = f"{one.n:.0f} ({one.low} to {one.high})" if one.n else f"{n} or less"
        kind, error = known.get(label, ("", math.nan))
        text = kind if kind in ("exact", "learned") else error_text(error, "distance" * (kind == "other"))
        close = kind == "exact" or (kind == "measured" and error <= CLOSE)
        best, speed = beside[part.index[min(since, len(ratios) - 1)]].base, beside[part.index[-1]].speed
        found.append((n, said == "no verdict", -speed, Crossing(n, said, str(label), text, close, best)))
    return [one for *_, one in sorted(found)]


def _ratio(one: Relative) -> Ratio | None:
    """Time of the best exact kernel over that of the row; None without a verdict."""
    if one.low is None or one.high is None or one.rounds < _ROUNDS or one.said.word == "withheld":
        return None
    return Ratio(one.speed, one.low, one.high, 0, (one.low, one.high), one.noise, one.rounds)


def sentences(view: View, found: Sequence[Crossing]) -> Iterator[Sentence]:
    """The headlines: the earliest crossover of all, and of the close approximations."""
    end = f"n = {max(view.at)}" + f" ({view.setting.name})" * bool(view.setting.name)
    close = [one for one in found if one.close]
    for ones, what in ((found, "sub-quadratic variant"), (close, f"approximation within an error of {CLOSE:g}")):
        one = next(iter(ones), None)
        if one is None or (ones is close and one is found[0]):
            continue
        if one.n == math.inf:
            verb = "is shown to beat" if one.said == "not shown" else "has a verdict against"
            yield [(f"No {what} {verb} the best exact kernel, {one.best}, at {end}.", False)]
        else:
            error = one.error if one.error != "-" else "not measured"
            told = f", {what} (error: {error}), beats the best exact kernel, {one.best}."
            start = f"From n = {one.said} on, " if one.n == max(view.at) else f"From n = {one.said} on, up to {end}, "
            yield [(start, False), (one.label, True), (told, False)]
