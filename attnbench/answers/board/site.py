"""The pages of a board: an index with the crossover of each shape and machine, and a page for each shape.

A crossover is the length from which on a sub-quadratic variant beats the best exact kernel of its machine, in one run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from attnbench.answers.board.entries import LeftOut, read_runs
from attnbench.answers.report.answer import CLOSE, Sentence
from attnbench.answers.report.html_page import rendered, section
from attnbench.answers.report.provenance import MachineClass, title_of
from attnbench.answers.report.table_rows import marked
from attnbench.answers.report.views import View
from attnbench.errors import CannotCreate
from attnbench.figures.kit.inline import SharedStyles
from attnbench.files import make_folder, refuse_link, write_output
from attnbench.measure.crossover import crossover
from attnbench.measure.statistics import Ratio
from attnbench.results.frame.marks import error_text
from attnbench.results.frame.relative import Relation
from attnbench.results.frame.settings import records, timed
from attnbench.results.frame.words import follows, in_words, is_expected
from attnbench.results.manifest import digest
from attnbench.suite.axes import ALIKE

INDEX = "index.html"
_FIRST = ("batch", "heads", "head_dim", "causal", "dtype", "seed")
_BOARD = '<html lang="en" data-board>'
"""Words that all pages of a board have, and only these."""

_ROUNDS = 2
"""Fewest for a verdict; docs/report.md has how often such a one is wrong."""


def exact_labels(rows: pd.DataFrame) -> set[str]:
    """The labels of kernels that compute softmax attention itself, up to rounding."""
    exact = rows[(rows["family"] == "exact") & (rows["target"] == "softmax")]
    return {*exact["label"]} - {*rows.loc[rows["error_kind"] == "approximation", "label"]}


class BreakEven(NamedTuple):
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


def crossings(view: View, beside: Mapping[Hashable, Relation], exact: Collection[str]) -> list[BreakEven]:
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
        found.append((n, said == "no verdict", -speed, BreakEven(n, said, str(label), text, close, best)))
    return [one for *_, one in sorted(found)]


def _ratio(one: Relation) -> Ratio | None:
    """Time of the best exact kernel over that of the row; None without a verdict."""
    if one.low is None or one.high is None or one.rounds < _ROUNDS or one.said.word == "withheld":
        return None
    return Ratio(one.speed, one.low, one.high, 0, (one.low, one.high), one.noise, one.rounds)


def sentences(view: View, found: Sequence[BreakEven]) -> Iterator[Sentence]:
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


def shape_of(row: Mapping[str, Any]) -> str:
    """``Batch 1, 8 heads × 64, not causal, float32, forward pass, attention layer``, with all else that is unusual."""
    others = [one for one in ALIKE if one not in _FIRST and not follows(one, row) and not is_expected(one, row[one])]
    model = {"model": ("layers", "ffn"), "pretrained": ("model",)}.get(str(row["level"]), ())
    said = [in_words(one, row[one]) for one in ("causal", "dtype", *others, "pass", "level", *model)]
    return ", ".join([f"Batch {row['batch']}", f"{in_words('heads', row['heads'])} × {row['head_dim']}", *said])


def make_site(runs: Sequence[MachineClass], out: Sequence[LeftOut]) -> dict[str, str]:
    """The board's files, name -> text; the same runs give the same text."""
    parts: dict[str, list[MachineClass]] = {}
    for run in sorted(runs, key=lambda one: (title_of(one), *one.environments)):
        rows = run.rows.loc[timed(run.rows).index]
        errors = run.rows.drop(rows.index)
        errors = errors[errors["error_kind"] != ""]
        shapes = pd.Series([shape_of(row) for row in records(rows)], index=rows.index)
        for shape, part in rows.groupby(shapes, sort=False):
            if (part["time_median_s"] > 0).any():
                both = pd.concat([part, errors], ignore_index=True)
                parts.setdefault(str(shape), []).append(replace(run, rows=both))
    pages, shown = dict[str, str](), []
    for shape in sorted(parts, key=lambda one: [(len(word), word) for word in one.split(", ")]):
        slug = re.sub("[^a-z0-9]+", "-", shape.lower().replace("not causal", "full"))[:150].strip("-")
        name = f"{slug}-{digest(shape)[:4]}.html"
        pages[name], sections = _page(shape, parts[shape])
        crossed = any(strong for one in sections for sentence in one["answer"] for _, strong in sentence)
        shown.append((not crossed, name, shape, sections))
    index = {"shapes": sorted(shown, key=itemgetter(0)), "out": out, "home": INDEX}
    title = "Exact, linear and sparse attention, shape by shape"
    return {INDEX: rendered("board.html", SharedStyles(), title, **index), **pages}


def _page(shape: str, runs: Sequence[MachineClass]) -> tuple[str, list[dict[str, Any]]]:
    shared, sections = SharedStyles(), []
    for number, run in enumerate(runs, start=1):
        exact = exact_labels(marked(run.rows))
        content = section(number, run, shared, bases=exact)
        content["title"] = ", ".join([content["title"], *run.environments])
        found = [(view, crossings(view, content["beside"], exact)) for view in content["views"]]
        answer: list[Sentence] = [said for view, ones in found for said in sentences(view, ones)]
        content["answer"] = answer or [[("No sub-quadratic variant was measured beside an exact kernel.", False)]]
        for view, ones in found:
            every = [f"{one.label} {one.said}" for one in ones]
            content["marks"] += [f"{view.setting.name or 'All'}, faster from n: {'; '.join(every)}"] if every else []
        sections.append(content)
    about = {"against": None, "laws": (), "unchecked": (), "doubts": (), "home": INDEX}
    return rendered("report.html", shared, shape, sections=sections, **about), sections


def board(runs: str | Path | Sequence[str | Path], out: str | Path = "board") -> tuple[Path, list[LeftOut]]:
    """Write the site of a board, as ``attnbench board`` does; give its index, and who is left out, with the reason.

    Args:
        runs: runs, or folders that hold some.
        out: the folder for the pages.

    Raises:
        ResultsError: there is no such folder, or no run that can be shown.
        CannotCreate: another file has the name of a page, or the pages cannot be written.
    """
    taken, left = read_runs([Path(one) for one in ([runs] if isinstance(runs, str | Path) else runs)])
    write_site(Path(out), make_site(taken, left))
    return Path(out) / INDEX, left


def write_site(folder: Path, files: Mapping[str, str]) -> None:
    """Write the pages in place of those of an earlier board. Raises CannotCreate: another file has the name of one."""
    refuse_link(folder)
    make_folder(folder)
    old = {one.name for one in folder.glob("*.html") if one.is_file() and _BOARD in one.read_text(errors="replace")}
    if others := [name for name in files if (folder / name).exists() and name not in old]:
        raise CannotCreate(f"{folder / others[0]} is no page of a board; choose another folder with --out")
    for name in old | files.keys():
        if name in files:
            write_output(folder / name, files[name])
        else:
            (folder / name).unlink()
