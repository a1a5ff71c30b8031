"""The sentences that answer: the fastest, by how much, in how much memory, at which error, score or loss."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from attnbench.answers.report.table_rows import times, tokens
from attnbench.answers.report.views import View
from attnbench.figures.kit.ticks import plain
from attnbench.measure.status import Status
from attnbench.results.frame.contenders import Contenders, contenders
from attnbench.results.frame.marks import by_host
from attnbench.results.frame.relative import APART, BASELINE, FEW_CLEAN, Relation, apart
from attnbench.results.frame.scored import Problem
from attnbench.results.frame.settings import by_model, records
from attnbench.results.frame.words import configuration, in_words, short_names
from attnbench.results.intervals import MEAN, learnt
from attnbench.results.swaps import EXACT, MEAN_VALUE, SwapLine, lines
from attnbench.suite.cell import STEPS, UNTOUCHED
from attnbench.units import format_bytes, format_seconds

CLOSE = 0.1
"""Relative error, or nats of loss, up to which an approximation is called close."""
ENOUGH = 5
"""Rounds with which the ratio of two medians has an interval that says something."""
_WITHIN = {
    "rel_error": (f"an error of {CLOSE:g}", "error {}"),
    "loss_delta": (f"{CLOSE:g} nats of the untouched model's loss", "{} nats from it"),
    "hidden_error": (f"an error of {CLOSE:g} in the last features", "error {}"),
}
"""Column -> the bound of a close approximation, and the format of its number."""

Part = tuple[str, bool]
"""Some words, and True for the sentence's subject."""
Sentence = Sequence[Part]


def answer(
    frame: pd.DataFrame, views: Sequence[View], problems: Sequence[Problem], beside: Mapping[Hashable, Relation]
) -> list[Sentence]:
    """A few sentences on the first view at the longest length with softmax, and on the scores (their mean last).

    ``beside``: row -> its numbers relative to softmax.
    """
    if not views:
        said = [*_scores(problems, {}, {})]
        if said:
            return said
        if frame["time_median_s"].notna().any():
            return [[("No row of this run has a speed in examples per second; its times stand in the table.", False)]]
        nothing = "No row of this run has a time: it holds errors, or how its cells failed."
        return [*_replaced(frame)] or [[(nothing, False)]]
    speaker = _Speaker(frame, views[0], beside)
    said = [*speaker.speeds(), *speaker.scores(problems)]
    return [*said, *speaker.fastest(said), *speaker.longer()]


class _Speaker:
    def __init__(self, frame: pd.DataFrame, view: View, beside: Mapping[Hashable, Relation]) -> None:
        self.frame, self.view, self.beside = frame, view, beside
        timed = view.setting.ok[view.setting.ok["time_median_s"] > 0]
        with_base = {*timed.loc[timed["variant"] == BASELINE, "seq_len"]} & view.at.keys()
        with_exact = {*timed.loc[timed["family"] == "exact", "seq_len"]} & view.at.keys()
        self.n = max(with_base or with_exact or view.at)
        self.found = view.at[self.n]()
        self.rows = _ok(self.found).sort_values("time_median_s", kind="stable")
        self.fair = self.rows[self.rows["family"] != "reference"]
        self.names, _ = short_names(view.setting.rows)

    def speeds(self) -> Iterator[Sentence]:
        errors = self._agreed()
        points = errors.points.set_index("label") if errors else pd.DataFrame(columns=["kind", "y"])
        fair = self.fair.assign(**{name: self.fair["label"].map(points[name].to_dict()) for name in ("kind", "y")})
        exact = fair[(fair["family"] == "exact") | (fair["kind"] == "exact")]
        yield self._exact(exact)
        yield from self._busy()
        near = fair[fair["kind"] == "measured"]
        if len(near):
            yield self._near(near, exact, errors)

    def fastest(self, told: Sequence[Sentence]) -> Iterator[Sentence]:
        names = {words for sentence in told for words, strong in sentence if strong}
        if len(self.fair) and self._name(self.fair.iloc[0]) not in names:
            row = self.fair.iloc[0]
            yield [
                ("Fastest of all, whatever it answers: ", False),
                (self._name(row), True),
                self._speed(row)
                if row.name in self.beside
                else (f" with {format_seconds(row['time_median_s'])}", False),
                (f"{_decoding(row)}{self._tied(row, self.fair)}.", False),
            ]

    def _agreed(self) -> Contenders | None:
        if self.found.agreed.column in _WITHIN:
            return self.found
        return contenders(self.frame, self.view.setting, self.n, "examples_per_s", "rel_error", None)

    def _exact(self, exact: pd.DataFrame) -> Sentence:
        start = f"At n = {tokens(self.n)}, "
        if exact.empty:
            return [
                (f"{start}no exact attention was measured: nothing here says how much faster the others are.", False)
            ]
        best = exact.iloc[0]
        one = "the fastest exact attention" if len(exact) > 1 else "the only exact attention measured"
        what = f" is {one}: {format_seconds(best['time_median_s'])} for {self.view.what} ({configuration(best)})"
        what += _decoding(best)
        end = f"{self._tied(best, exact)}."
        return [(start, False), (self._name(best), True), (what, False), self._speed(best), (end, False)]

    def _apart(self, row: pd.Series[Any]) -> Mapping[Hashable, str]:
        noise = max((one.noise for one in self.beside.values()), default=0.0)
        return apart(self.view.setting, row["label"], noise)

    def _tied(self, best: pd.Series[Any], among: pd.DataFrame) -> str:
        """``; sdpa cannot be told apart from it``, or empty; without softmax if :meth:`_speed` says so of it."""
        if (beside := self.beside.get(best.name)) and beside.said.word not in APART:
            among = among[among["variant"] != BASELINE]
        known = {best.name, *self._apart(best)}
        tied = [self._name(row) for at, row in among.iterrows() if at not in known]
        more = [f"{len(tied) - 3} more"] * (len(tied) > 3)
        return f"; {_listed(tied[:3] + more)} cannot be told apart from it" if tied else ""

    def _busy(self) -> Iterator[Sentence]:
        here = self.view.setting.by_length[self.n]
        without = int((here["status"] == Status.DISTURBED).sum())
        few = int(here["warnings"].str.contains(FEW_CLEAN, regex=False).sum())
        if without or few:
            lost = f", {without} of them without a time" if without else ""
            said = f"The machine was busy: {few + without} of {len(here)} rows here are of disturbed samples{lost}; "
            yield [(f"{said}their times may be wrong by a factor.", False)]

    def _near(self, near: pd.DataFrame, exact: pd.DataFrame, found: Contenders | None) -> Sentence:
        close = near[near["y"] <= CLOSE]
        inputs = found.agreed.inputs if found else ""
        on = f" on {inputs}" if inputs else ""
        within, what = _WITHIN[found.agreed.column if found else "rel_error"]
        best = near.iloc[int(near["y"].argmin())] if close.empty else close.iloc[0]
        error = plain(float(f"{best['y']:.2g}"))
        if close.empty:
            start, said = f"No approximation comes within {within}{on}; nearest is ", f" with {error}"
        else:
            start, said = f"Within {within}{on}, the fastest approximation is ", f", {what.format(error)}"
        end = self._tied(best, close)
        if len(close) and len(exact) and self._apart(exact.iloc[0]).get(best.name) == "slower":
            end = f", slower than {self._name(exact.iloc[0])}{end}"
        return [
            (start, False),
            (self._name(best), True),
            (said + _decoding(best), False),
            self._speed(best),
            (f"{end}.", False),
        ]

    def scores(self, problems: Sequence[Problem]) -> Iterator[Sentence]:
        speeds = {str(row["label"]): self.beside.get(index) for index, row in self.rows.iterrows()}
        seconds = dict(zip(self.rows["label"], self.rows["time_median_s"], strict=True))
        matched = [one for one in problems if one.task == self.view.setting.rows["task"].iloc[0]]
        yield from _scores(matched or problems, speeds, seconds)

    def longer(self) -> Iterator[Sentence]:
        longest = max(self.view.at)
        if longest == self.n:
            return
        rows = _ok(self.view.at[longest]()).sort_values("time_median_s", kind="stable")
        rows = rows[rows["family"] != "reference"]
        every = self.view.setting.rows
        ended = every[(every["variant"] == BASELINE) & (every["seq_len"] > self.n) & (every["status"] != "ok")]
        who = BASELINE if (every["variant"] == BASELINE).any() else "exact attention"
        why = f" ({ended['status'].iloc[0]} at n = {tokens(int(ended['seq_len'].min()))})" if len(ended) else ""
        if len(rows):
            seconds = format_seconds(rows["time_median_s"].iloc[0])
            start = f"At n = {tokens(longest)}, where {who} was not measured{why}, the fastest is "
            end = f" with {seconds}{self._tied(rows.iloc[0], rows)}."
            yield [(start, False), (self._name(rows.iloc[0]), True), (end, False)]

    def _name(self, row: pd.Series[Any]) -> str:
        return self.names[str(row["label"])]

    def _speed(self, row: pd.Series[Any]) -> Part:
        found = self.beside.get(row.name)
        if found is None:
            return ("", False)
        both = [row, *(one for _, one in self.rows[self.rows["variant"] == BASELINE].iterrows())]
        said = [by_host(self._name(one), one["launched"], one["host_share"]) for one in both]
        return ("; ".join(dict.fromkeys(filter(None, [f", {beside_softmax(found)}", *said]))), False)


def _decoding(row: pd.Series[Any]) -> str:
    seconds = {"first_token_s": "to the first token", "token_s": "per token"}
    said = [f"{format_seconds(row[name])} {words}" for name, words in seconds.items() if row[name] > 0]
    kept = row["pass"] in STEPS and row["state_bytes"] >= 0
    said += [f"{format_bytes(row['state_bytes'])} of cache or state"] if kept else []
    return f", {', '.join(said)}" if said else ""


def _ok(found: Contenders) -> pd.DataFrame:
    rows = found.rows
    return rows[(rows["status"] == "ok") & (rows["time_median_s"] > 0)]


def beside_softmax(one: Relation) -> str:
    """``3.6 times as fast as softmax (3.3 to 3.9), with 16 % of its peak memory``."""
    if one.low is None or one.high is None:
        why = f": too few rounds, {one.rounds}; --rounds {ENOUGH} gives one" if 0 < one.rounds < ENOUGH else ""
        said = f"{times(one.speed)} times as fast as softmax (without an interval{why})"
    elif one.said.word in APART:
        mark = f", {one.said.why}" if one.said.why else ""
        said = f"{times(one.speed)} times as fast as softmax ({times(one.low)} to {times(one.high)}{mark})"
    elif one.busy:
        said = f"not held against softmax: {one.said.why}"
    else:
        said = f"not told apart from softmax ({times(one.low)} to {times(one.high)} times as fast)"
    what = "cache or state" if one.decodes else "peak memory"
    return said + (f", with {share(one.memory)} its {what}" if one.memory else "")


def share(ratio: float) -> str:
    """``16 % of`` or ``1.3 times``."""
    return f"{times(100 * ratio)} % of" if ratio < 1.2 else f"{times(ratio)} times"


def _scores(
    problems: Sequence[Problem], speeds: Mapping[str, Relation | None], seconds: Mapping[Hashable, float]
) -> Iterator[Sentence]:
    if not problems:
        return
    one = problems[-1] if problems[-1].task == MEAN else max(problems, key=_above_floor)
    where = MEAN if one.task == MEAN else one.heading
    names, _ = short_names(pd.DataFrame([(p.label, p.variant) for p in one.parts], columns=["label", "variant"]))
    said: list[Part] = []
    start = "Best on" if any(learnt(part, one.floor) for part in one.parts) else "Nothing was seen to learn"
    for part in one.parts[:3]:
        said += [(", " if said else f"{start} {where}: ", False), (names[part.label], True)]
        speed = speeds.get(part.label)
        fast = f" at {times(speed.speed)} times softmax's speed" if speed else ""
        said.append((f" with {part.over_seeds.mean:.3f}{fast}", False))
    chance = f"; chance is {one.chance:.3f}" if not start.startswith("Best") and one.chance is not None else ""
    yield [*said, (f"{chance}.", False)]
    fair = [part for part in one.parts if part.label in seconds and part.family != "reference"]
    able = [part for part in fair if learnt(part, one.floor)]
    fastest = min(able, key=lambda part: seconds[part.label], default=None)
    if fastest is not None and fastest not in one.parts[:3]:
        found = speeds.get(fastest.label)
        beside = f", {beside_softmax(found)}" if found else ""
        score = f" with {fastest.over_seeds.mean:.3f}{beside}."
        yield [("The fastest that learnt it: ", False), (names[fastest.label], True), (score, False)]


def _replaced(frame: pd.DataFrame) -> Iterator[Sentence]:
    parts = by_model(frame[(frame["level"] == "pretrained") & frame["hidden_error"].notna()])
    for part in parts:
        of = f"{in_words('model', part['model'].iloc[0])}: " * (len(parts) > 1)
        yield from ([(of + start, strong), *rest] for (start, strong), *rest in _least_damage(part))


def _least_damage(rows: pd.DataFrame) -> Iterator[Sentence]:
    found = [line for line in lines(records(rows)) if line.label not in (EXACT, MEAN_VALUE, UNTOUCHED)]
    found = [line for line in found if not line.alone and not line.is_exact]
    for steps in sorted({line.steps for line in found}):
        there = [line for line in found if line.steps == steps]
        best = min(there, key=_damage)
        where = "all layers" if best.replaced == "all" else f"layers {best.replaced.replace('+', ', ')}"
        when = f"after {steps} steps of training" if steps else "without training"
        said = f" with an error of {_damage(best):.2g} in the last features."
        if best.loss is not None and (over := best.over_original):
            ends = f", {over.low:+.2f} to {over.high:+.2f}" * math.isfinite(over.high - over.low)
            others = [(line.label, line.over_original) for line in there if line is not best]
            tied = [label for label, other in others if other and other.low <= over.high]
            end = f"; {_listed(tied)} cannot be told apart from it." if tied else "."
            said = f" with a loss of {best.loss:.3f} nats ({over.median:+.2f} over the untouched model{ends}){end}"
        yield [(f"Least damage with {where} replaced, {when}: ", False), (best.label, True), (said, False)]


def _damage(line: SwapLine) -> float:
    return line.over_original.median if line.over_original else line.hidden_error or 0.0


def _above_floor(one: Problem) -> float:
    best = max((part.over_seeds.mean for part in one.parts), default=-math.inf)
    return best - (one.floor or 0.0)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
