"""The circumstances in words: measurements, inputs, differences between settings, failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from attnbench.measure.status import Status
from attnbench.results.frame.marks import OWN_FORM, notes
from attnbench.results.record import UNCHECKED
from attnbench.suite.axes import ALIKE, AXES, FOLLOWING, exists

LEVELS = {
    "operator": "attention operator",
    "layer": "attention layer",
    "model": "whole model",
    "pretrained": "trained model",
}
_PASSES = {
    "forward": "forward pass",
    "backward": "backward pass",
    "training": "training step",
    "decode": "one decoding step",
    "stepwise": "token by token",
    "generate": "prompt and new tokens",
}
_MOST = 20


def _several(count: float, thing: str) -> str:
    return f"{count:.0f} {thing}{'' if count == 1 else 's'}"


_WORDS: dict[str, Callable[[Any], str]] = {
    "level": lambda value: LEVELS.get(value, value),
    "pass": lambda value: _PASSES.get(value, value),
    **{name: axis.in_words for name, axis in AXES.items()},
    "layers": lambda value: _several(value, "layer") if pd.notna(value) else "layers not known",
    "ffn": lambda value: f"FFN {value:.0f}" if pd.notna(value) else "FFN not known",
    "steps": lambda value: _several(value, "step") if pd.notna(value) else "steps not known",
    "pretrain_steps": lambda value: f"pretrained {value:.0f} steps" if value else "not pretrained",
    "guide": lambda value: f"guided by {value:g}" if pd.notna(value) else "not guided",
    "protocol": lambda value: {"sweep": "rate by validation", "fixed": "fixed rate"}.get(value, "rate not known"),
    "model": lambda value: str(value).rpartition("/")[2],
    "process": lambda value: f"process {value}",
    "threads": lambda value: _several(value, "thread") if pd.notna(value) else "threads not known",
    "quick": lambda value: "QUICK: one sample each" if value else "not quick",
    "machine_id": lambda value: f"machine {value or 'not known'}",
    "torch_version": lambda value: f"torch {value or 'not known'}",
    "method_version": lambda value: f"method {value}",
}
"""Column -> a function that puts its value in words, unless the value speaks for itself."""


def in_words(column: str, value: object) -> str:
    """``causal``, ``4 heads``, ``bfloat16``."""
    return _WORDS.get(column, str)(value)


def as_typed(value: object) -> str:
    """A value as one would type it: ``true``, ``float32``."""
    return str(value).lower() if isinstance(value, bool) or str(value) in ("True", "False") else str(value)


def difference(table: pd.DataFrame) -> list[tuple[str, str]]:
    """Few words that distinguish each row of ``table`` (preferred columns first), and all; empty for a single row."""
    if len(table) == 1:
        return [("", "")]
    cells = {str(name): [None if pd.isna(cell) else cell for cell in table[name].tolist()] for name in table}
    rows = [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
    varying = [name for name, column in cells.items() if len(set(column)) > 1]
    needed: list[str] = []
    told = 1
    for column in varying:
        apart = len({tuple(row[name] for name in (*needed, column)) for row in rows})
        if apart > told:
            needed, told = [*needed, column], apart
    return [
        (
            ", ".join(in_words(c, row[c]) for c in needed if _exists(c, row)),
            " · ".join(in_words(c, row[c]) for c in varying if _exists(c, row) and not _usual(c, row)),
        )
        for row in rows
    ]


def _exists(column: str, row: Mapping[str, Any]) -> bool:
    level = row.get("level", "model")
    if column == "model":
        return bool(level == "pretrained")
    if column in ("layers", "ffn"):
        return bool(level == "model")
    return column == "inputs" or exists(column, level)  # a model has its task there


def _usual(column: str, row: Mapping[str, Any]) -> bool:
    usual = AXES[column].usual if column in AXES else None
    return usual is not None and row[column] in (usual, None, "")


def where(rows: pd.DataFrame, n: int | None = None) -> list[str]:
    """Two lines for a subtitle: the measurement and its circumstances, as far as all rows agree."""
    if rows.empty:
        return []
    row = rows.iloc[0]

    def same(name: str) -> bool:
        return name in rows and rows[name].nunique(dropna=False) == 1

    def said(columns: Sequence[str]) -> list[str]:
        return [in_words(name, row[name]) for name in columns if same(name) and _worth_saying(name, row)]

    rest = [
        axis for axis in ALIKE if axis not in ("heads", "kv_heads", "head_dim", "v_dim", "batch", "compile", "seed")
    ]
    heads = f"{in_words('heads', row['heads'])} × {row['head_dim']}" if same("heads") and same("head_dim") else ""
    first = [*said(["suite"]), f"n = {n}" if n is not None else "", *said(["kv_len", "batch"])]
    first += [heads] if heads else said(["heads", "head_dim"])
    first += said(["kv_heads", "v_dim"])
    days = sorted({str(at)[:10] for at in rows["started_at"] if at})
    on = said(["device", "machine_id", "threads", "process", "torch_version", "compile", "quick"])
    on += [launched(rows), _large(rows), unheld(rows)]
    on.append(days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else "")
    return [" · ".join(part for part in line if part) for line in ([*first, *said([*rest, "level", "pass"])], on)]


def configuration(row: pd.Series[Any]) -> str:
    """Settings of a row apart from its length: ``float32, 8 heads × 64, batch 8, 2 threads``."""
    rest = [axis for axis in ALIKE if axis not in ("dtype", "heads", "head_dim", "batch", "seed", "inputs")]
    said = [
        str(row["dtype"]),
        f"{in_words('heads', row['heads'])} × {row['head_dim']}",
        in_words("batch", row["batch"]),
    ]
    said += [in_words(name, row[name]) for name in (*rest, "threads", "process") if _worth_saying(name, row)]
    return ", ".join(said)


def _large(rows: pd.DataFrame) -> str:
    found = rows[rows["large"].astype(bool)] if "large" in rows else rows[:0]
    names = [_named(str(variant), part, True) for variant, part in found.groupby("variant", sort=False)]
    return f"allocator as shipped for large cells: {', '.join(names)}" if names else ""


def launched(rows: pd.DataFrame) -> str:
    """Launch of a GPU's calls in words, with exceptions; empty if no row says."""
    if "launched" not in rows:
        return ""
    ways = {str(how): part for how, part in rows[rows["launched"] != ""].groupby("launched", sort=False)}
    if len(ways) < 2:
        return "".join(_LAUNCHED[how] for how in ways)
    names = [_named(str(variant), part, True) for variant, part in ways["eager"].groupby("variant", sort=False)]
    return f"{_LAUNCHED['graph']}, but by the host: {', '.join(names)}"


_LAUNCHED = {"graph": "as CUDA graphs", "eager": "launched by the host"}


def unheld(rows: pd.DataFrame) -> str:
    """Note on the rows with numbers that were measured without checking the laws."""
    if "laws" not in rows:
        return ""
    every = rows[rows["status"] == Status.OK]
    names = list(dict.fromkeys(every.loc[every["laws"] == UNCHECKED, "label"]))
    if not names:
        return ""
    some = len(names) < every["label"].nunique()
    return f"not held to {'its' if len(names) == 1 else 'their'} laws: {', '.join(names) if some else 'all'}"


def _worth_saying(name: str, row: pd.Series[Any]) -> bool:
    value = row[name]
    if name in FOLLOWING:
        return not follows(name, row)
    if name == "threads":
        return bool(pd.notna(value) and row["device"] == "cpu")
    return not is_expected(name, value)


def follows(name: str, row: Mapping[str, Any] | pd.Series[Any]) -> bool:
    """True if an axis equals the one that it follows by default: as many keys as queries."""
    return name in FOLLOWING and bool(row.get(name) == row.get(FOLLOWING[name]))


def is_expected(name: str, value: Any) -> bool:
    """True for a value that means none, or for the only one before there was a choice."""
    axis, is_off = AXES.get(name), bool(pd.isna(value)) or not value
    if axis is not None and axis.usual is not None:  # none of it is news
        return is_off or axis.unsaid(value)
    return is_off or value == "none" or (axis is not None and axis.added and axis.unsaid(value))


def failures(rows: pd.DataFrame, *, at_n: bool = True) -> list[str]:
    """One line for each status but ok: the labels (and lengths), and the first reason."""
    lines = []
    for status in () if (rows["status"] == Status.OK).all() else Status:
        failed = rows[rows["status"] == status]
        if status is Status.OK or failed.empty:
            continue
        names = [_named(str(variant), part, at_n) for variant, part in failed.groupby("variant", sort=False)]
        names = [*names[:_MOST], f"and {len(names) - _MOST} more"] if len(names) > _MOST else names
        lines.append(f"{status}: {', '.join(names)}{reason_of(failed)}")
    return lines


def reason_of(failed: pd.DataFrame) -> str:
    """The reason of failed rows behind a dash, or one of several as an example; empty without one."""
    reasons = list(dict.fromkeys(reason for reason in failed["reason"] if reason))
    return f" — {'' if len(reasons) == 1 else 'e.g. '}{reasons[0]}" if reasons else ""


def _named(variant: str, rows: pd.DataFrame, at_n: bool) -> str:
    labels = list(dict.fromkeys(rows["label"]))
    name = ", ".join(labels) if len(labels) < 3 else f"{bare(variant, labels[0])} with {len(labels)} settings"
    return f"{name} (n = {', '.join(str(n) for n in sorted(set(rows['seq_len'])))})" if at_n else name


def named_as(rows: pd.DataFrame, labels: Iterable[str]) -> pd.DataFrame:
    """The rows with the labels of others: a variant may be an own form without causality and none with it."""
    known = {label.removesuffix(OWN_FORM): label for label in labels}
    return rows.assign(label=[known.get(label.removesuffix(OWN_FORM), label) for label in rows["label"]])


def bare(variant: str, label: str) -> str:
    """The variant's name without options, but with the mark of an own form if its label has one."""
    return variant + OWN_FORM * label.endswith(OWN_FORM)


def short_names(rows: pd.DataFrame) -> tuple[dict[str, str], str]:
    """Label -> name, just the variant's name if it has one setting only; and a line with the settings this hides.

    A stack keeps its layers, without which the name says nothing.
    """
    pairs = rows[["label", "variant"]].drop_duplicates()
    single = (pairs.groupby("variant")["label"].transform("nunique") == 1) & (pairs["variant"] != "stack")
    names = {str(r): bare(str(v), str(r)) if s else str(r) for (r, v), s in zip(pairs.to_numpy(), single, strict=True)}
    hidden = [label for label, name in names.items() if label != name]
    return names, f"Settings: {'; '.join(hidden)}." if hidden else ""


def own_form_note(labels: Iterable[str]) -> str:
    """The meaning of the mark of an own form; empty if no label has the mark."""
    return " ".join(notes(label[-1:] for label in labels))
