"""The points of the bubble plot: one for each label at one length, and which of them are unbeaten."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import pandas as pd

from attnbench.results.frame.agreement import Agreement, agreement, kind_of
from attnbench.results.frame.settings import Setting, chosen_length, settings
from attnbench.results.frame.words import failures, named_as

TRIVIAL = "answering mean(V)"
_TIMES = ("time_median_s", "time_ci_low_s", "time_ci_high_s")


@dataclass(frozen=True)
class Contenders:
    """The contents of one panel."""

    setting: Setting
    n: int
    points: pd.DataFrame
    """Columns label, variant, family, x, x_low, x_high, memory, y, y_std, y_low, y_high, learnt, kind, row (index)."""
    agreed: Agreement
    fast_low: bool

    @property
    def log(self) -> bool:
        return self.agreed.column in ("rel_error", "max_abs_error", "hidden_error")

    @property
    def down(self) -> bool:
        return self.log or self.agreed.column == "loss_delta"

    @property
    def rows(self) -> pd.DataFrame:
        return self.setting.by_length[self.n]

    @cached_property
    def competing(self) -> pd.DataFrame:
        """Points with a speed and an error below mean(V)'s, or a score above no mixing; without references."""
        fair = self.points[self.points["kind"].isin(["exact", "measured"]) & (self.points["family"] != "reference")]
        if math.isfinite(self.agreed.trivial):
            fair = fair[(fair["kind"] == "exact") | (fair["y"] < self.agreed.trivial)]
        return fair[fair["learnt"] == True] if self.agreed.column == "score" else fair  # noqa: E712  # NaN if unscored

    @cached_property
    def front(self) -> pd.DataFrame:
        fair = self.competing
        # All exact methods are equally good.
        goodness = (-fair["y"] if self.down else fair["y"]).where(fair["kind"] != "exact", math.inf)
        return fair.iloc[pareto(list(-fair["x"] if self.fast_low else fair["x"]), list(goodness))]

    @cached_property
    def lines(self) -> dict[str, float]:
        """Name -> error of the oracles and mean(V), which have no speed; or score of chance and no mixing."""
        if self.agreed.column == "score":
            return dict(self.agreed.lines)
        lines = {TRIVIAL: self.agreed.trivial} if math.isfinite(self.agreed.trivial) else {}
        rows = self.agreed.rows
        rows = rows[(rows["family"] == "reference") & (rows["error_kind"] == "approximation")]
        for label, value in rows[["label", "y"]].itertuples(index=False):
            if label not in {"mean-value", *self.points["label"]} and value > 0 and math.isfinite(value):
                lines[label] = float(value)
        return lines

    @property
    def left_out(self) -> list[str]:
        here = self.rows[["label", "variant", "seq_len", "status", "reason"]]
        failed = failures(here[~here["label"].isin(self.points["label"])], at_n=False)
        known = set(here["label"])
        absent = [one for one in self.setting.labels if one not in known]
        failed += [f"not in the table at this n: {', '.join(absent)}"] if absent else []
        of = f" ({self.setting.name})" if self.setting.name else ""
        return [*(f"Left out at n = {self.n}{of} — {line}" for line in failed), *self.agreed.left_out]


def panels(rows: pd.DataFrame) -> list[Setting]:
    """Timed rows by what may share a panel: whole model and training step first, of trained models the forward pass.

    A trained model's attention makes way for a quicker prefill, and is not trained again.
    """
    passes = ("forward", "training") if (rows["level"] == "pretrained").all() else ("training", "forward")
    prefer = {"level": ("model", "layer", "operator"), "pass": passes}
    return settings(rows, prefer, also_same=("inputs", "layers", "ffn", "model"))


def contenders(
    frame: pd.DataFrame, setting: Setting, n: int | None, x: str, y: str, inputs: str | None
) -> Contenders | None:
    """The points at one length, by default the longest with most labels; None if nothing has a speed there."""
    n = longest_of_most(setting, x) if n is None else n
    make = None if n is None else at_lengths(frame, setting, x, y, inputs).get(n)
    return make and make()


def longest_of_most(setting: Setting, x: str) -> int | None:
    """The longest of the lengths at which most labels have a speed; None if none has."""
    measured = _with_speed(setting, x)
    return chosen_length(None, measured.groupby("seq_len")["label"].nunique(), "rows") if len(measured) else None


def _with_speed(setting: Setting, x: str) -> pd.DataFrame:
    columns = ["label", "variant", "family", "target", "seq_len", "peak_bytes", *_TIMES]
    rows = setting.ok[list(dict.fromkeys([*columns, x]))]
    measured: pd.DataFrame = rows[np.isfinite(rows[x]) & (rows[x] > 0)]
    return measured


def at_lengths(
    frame: pd.DataFrame, setting: Setting, x: str, y: str, inputs: str | None
) -> dict[int, Callable[[], Contenders]]:
    """Length -> a function for its points, for those with a speed; the whole table is searched once."""
    rows = _with_speed(setting, x)
    points = rows[["seq_len", "label", "variant", "family", "target"]]
    points = points.assign(x=rows[x], memory=rows["peak_bytes"], row=rows.index)
    for end, other in (("low", "high"), ("high", "low")):
        ratio = rows[f"time_ci_{end if x == 'time_median_s' else other}_s"] / rows["time_median_s"]
        points[f"x_{end}"] = rows[x] * ratio if x == "time_median_s" else rows[x] / ratio
    known, fast_low = agreement(frame, y, inputs, setting), x == "time_median_s"

    def at(n: int, part: pd.DataFrame) -> Contenders:
        return Contenders(setting, n, *_agreeing(_columns(part), known(n)), fast_low)

    return {
        n: cache(partial(at, n, part)) for n, part in ((int(str(n)), part) for n, part in points.groupby("seq_len"))
    }


def _columns(rows: pd.DataFrame) -> dict[str, list[Any]]:
    return {str(name): values for name, values in rows.to_dict("list").items()}


def _agreeing(points: Mapping[str, list[Any]], agreed: Agreement) -> tuple[pd.DataFrame, Agreement]:
    told = _columns(named_as(agreed.rows, points["label"]).drop(columns="family"))
    place = {label: at for at, label in reversed(list(enumerate(told.pop("label"))))}  # of several rows the first
    at = [place.get(label) for label in points["label"]]
    more = {name: [math.nan if one is None else values[one] for one in at] for name, values in told.items()}
    for name in {"y_low", "y_high", "learnt"} - more.keys():
        more[name] = [math.nan] * len(at)
    known = zip(more["error_kind"], points["target"], map(float, more["y"]), strict=True)
    kinds = [kind_of(kind, target, value, agreed.column) for kind, target, value in known]
    return pd.DataFrame({**points, **more, "kind": kinds}), agreed


def spread(found: list[Contenders]) -> Mapping[int, tuple[float, float]]:
    """Panel's place -> least and largest speed on its scale; all share one scale if that wastes little room."""
    ends = []
    for one in found:
        values = pd.concat([one.points["x"], one.points["x_low"], one.points["x_high"]])
        values = values[np.isfinite(values) & (values > 0)]
        ends.append((float(values.min()), float(values.max())))
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    widest = max(math.log(high / low) for low, high in ends)
    together = math.log(high / low) <= 2 * widest
    return {place: (low, high) if together else one for place, one in enumerate(ends)}


def pareto(x: Sequence[float], y: Sequence[float]) -> list[int]:
    """Indices of the points that no other equals or beats in both, from the best x on; larger is better."""
    order = sorted(range(len(x)), key=lambda i: (-x[i], -y[i]))
    front: list[int] = []
    for i in order:
        if not front or y[i] > y[front[-1]]:
            front.append(i)
    return front
