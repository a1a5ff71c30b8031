"""The contents of a report's figures: rows measured alike, at each length and over lengths, and scores by task."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from attnbench.answers.report.rows import compact
from attnbench.figures.kit.style import DASHES, MARKERS, looks
from attnbench.figures.series import Series, series_of
from attnbench.results.frame.agreement import KINDS, Y_AXES, of_trained
from attnbench.results.frame.contenders import TRIVIAL, Contenders, at_lengths, longest_of_most
from attnbench.results.frame.same_model import tasks_of_both
from attnbench.results.frame.scored import Problem, about, family_of, hidden_options, left_out, means, problems
from attnbench.results.frame.settings import Setting, settings, timed
from attnbench.results.frame.words import LEVELS, in_words, short_names
from attnbench.results.scores import Summary, difference, joint, learnt

_PREFER = {"level": ("model", "layer", "operator"), "pass": ("training", "forward")}
_OF_TRAINED = {"pass": ("forward", "training")}
"""The order for trained models alone: their attention makes way for a quicker prefill, and is not trained again."""
_APART = ("inputs", "layers", "ffn", "model")
_VALUES = {"score": "score", "rel_error": "error", "loss_delta": "loss_delta", "hidden_error": "features"}
_WORDS = {"loss_delta": "loss", "features": "error"}


@dataclass(frozen=True)
class View:
    """Rows that were measured alike."""

    setting: Setting
    at: Mapping[int, Contenders]
    n: int
    lines: Sequence[Series]

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
    return View(setting, at, first, _lines(setting) if len(at) > 1 else [])


def _lines(setting: Setting) -> list[Series]:
    rows = setting.rows
    short, _ = short_names(rows)
    look = looks(zip(rows["label"], rows["family"], strict=True))
    return [line for line in series_of(setting, short, look) if (line.rows["time_median_s"] > 0).any()]


def as_data(view: View) -> dict[str, Any]:
    """The view for the scripts, with rows as their numbers in the table."""
    one = view.at[view.n]
    value = _VALUES[one.agreed.column]
    return {
        "name": view.name,
        "n": view.n,
        "value": value,
        "y": _WORDS.get(value, value),
        "log": one.log,
        "down": one.down,
        "axis": Y_AXES[one.agreed.column].partition("\n")[0],
        "at": {str(n): _points(found) for n, found in view.at.items()},
        "lines": [_line(line) for line in view.lines],
    }


def _points(found: Contenders) -> dict[str, Any]:
    rows = found.rows[["label", "status"]]
    index = {label: number for number, label, status in rows.itertuples() if status == "ok"}
    points = [
        [_number(index[one["label"]]), KINDS.index(one["kind"]), compact(one["y"]), *map(compact, _ends(one))]
        for one in found.points.to_dict("records")
    ]
    return {
        "points": points,
        "front": [_number(index[label]) for label in found.front["label"]] if len(found.front) > 1 else [],
        "lines": [[name, compact(value)] for name, value in found.lines.items() if compact(value) is not None],
        "trivial": compact(found.lines.get(TRIVIAL)),
        "band": [compact(end) for end in found.agreed.band] if found.agreed.band else None,
        "said": found.agreed.said,
        "left": found.left_out,
    }


def _ends(one: Mapping[Hashable, Any]) -> tuple[float, float]:
    if math.isfinite(one["y_low"]) and math.isfinite(one["y_high"]):
        return one["y_low"], one["y_high"]
    return one["y"] - one["y_std"], one["y"] + one["y_std"]


def _line(line: Series) -> dict[str, Any]:
    timed = line.rows[line.rows["time_median_s"] > 0]
    has_claim = timed["family"].iloc[0] != "reference"  # a reference line has no paper that claims anything
    return {
        "name": line.name,
        "rows": [_number(index) for index in timed.index],
        "power": compact(line.power("time_median_s")),
        "half": compact(line.half("time_median_s")),
        "above": line.is_above("time_median_s"),
        "claim": compact(line.claimed("time_median_s")) if has_claim else None,
        "stopped": list(line.stopped) if line.stopped else None,
        "marker": MARKERS.index(line.look.marker),
        "dash": DASHES.index(line.look.dashes),
    }


def _number(index: Hashable) -> int:
    assert isinstance(index, int)
    return index


def found_in(frame: pd.DataFrame) -> list[Problem]:
    """The tasks with a score, and the mean over those of one model last."""
    found = [one for one in problems(frame) if one.parts]
    return [*found, *means(found)]


def task_data(one: Problem, families: list[str], family: int) -> dict[str, Any]:
    """A task for the scripts.

    ``family`` is the number of differences tested together; ``families`` gets new names, and a part holds the place of
    its own.
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
