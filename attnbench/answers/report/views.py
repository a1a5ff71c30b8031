"""The contents of a report's figures: rows measured alike, at each length and over lengths, and scores by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from attnbench.results.frame.agreement import of_trained
from attnbench.results.frame.contenders import Contenders, at_lengths, longest_of_most
from attnbench.results.frame.same_model import tasks_of_both
from attnbench.results.frame.scored import Problem, about, family_of, hidden_options, left_out, means, problems
from attnbench.results.frame.settings import Setting, settings, timed
from attnbench.results.frame.words import LEVELS, in_words
from attnbench.results.scores import difference, joint, learnt

_PREFER = {"level": ("model", "layer", "operator"), "pass": ("training", "forward")}
_OF_TRAINED = {"pass": ("forward", "training")}
"""The order for trained models alone: their attention makes way for a quicker prefill, and is not trained again."""
_APART = ("inputs", "layers", "ffn", "model")


@dataclass(frozen=True)
class View:
    """Rows that were measured alike."""

    setting: Setting
    at: Mapping[int, Contenders]
    n: int
    """The longest of the lengths with most labels."""

    @property
    def what(self) -> str:
        row = self.setting.rows.iloc[0]
        passes = {"forward": "a forward pass", "training": "a training step", "backward": "a backward pass"}
        level = LEVELS.get(row["level"], row["level"])
        return f"{passes.get(row['pass'], in_words('pass', row['pass']))} of the {level}"

    @property
    def name(self) -> str:
        row = self.setting.rows.iloc[0]
        return self.setting.name or f"{in_words('level', row['level'])}, {in_words('pass', row['pass'])}"


def views(frame: pd.DataFrame) -> list[View]:
    """One view for each way of timing, whole model and training step first; forward first for trained models alone."""
    rows = timed(frame)
    prefer = _OF_TRAINED if (rows["level"] == "pretrained").all() else _PREFER
    return [view for setting in settings(rows, prefer, also_same=_APART) if (view := _view(frame, setting))]


def _view(frame: pd.DataFrame, setting: Setting) -> View | None:
    column = of_trained(setting.rows) or ("score" if tasks_of_both(frame, setting.rows) else "rel_error")
    first = longest_of_most(setting, "examples_per_s")
    if first is None:
        return None
    at = at_lengths(frame, setting, sorted(setting.by_length), "examples_per_s", column, None)
    return View(setting, at, first)


def found_in(frame: pd.DataFrame) -> list[Problem]:
    """The tasks with a score, and the mean over those of one model last."""
    found = [one for one in problems(frame) if one.parts]
    return [*found, *means(found)]


def task_rows(one: Problem, family: int) -> list[tuple[str, str, str, str, str]]:
    """Label, score, its interval, difference from softmax, and its interval, of each variant; empty for none.

    ``family`` is the number of differences tested together.
    """
    rows = []
    for part in one.parts:
        less = ends = ""
        if one.reference is not None and part is not one.reference:
            found = difference(part, one.reference, family)
            if found.of is not None:
                less = _signed(found.of.mean) + f" {found.verdict}" * (found.verdict in ("better", "worse"))
                known = found.of.low is not None and found.of.high is not None
                ends = f"{_signed(found.of.low)} to {_signed(found.of.high)}" if known else ""
        interval = f"{part.ends[0]:.3f} to {part.ends[1]:.3f}" if part.ends else ""
        rows.append((part.label, f"{part.over_seeds.mean:.3f}", interval, less, ends))
    return rows


def _signed(value: float | None) -> str:
    return f"{value:+.3f}".replace("-", "−")


def task_notes(frame: pd.DataFrame, found: Sequence[Problem]) -> list[str]:
    """Notes on the trainings, the hollow marks and the labels without a score."""
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


def how_trained(frame: pd.DataFrame, found: Sequence[Problem]) -> str:
    """One line: the model and its training, as far as all tasks agree."""
    return " · ".join(about(frame, [one for one in found if one.choices])[:2])
