"""The pages of a board: an index with the crossover of each shape and machine, and a page for each shape."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd

from attnbench.answers.board.crossings import crossings, exact_labels, sentences
from attnbench.answers.board.runs import LeftOut
from attnbench.answers.report.answer import Sentence
from attnbench.answers.report.page import rendered, section
from attnbench.answers.report.rows import marked
from attnbench.answers.report.sources import Machine, heading, title_of
from attnbench.errors import CannotCreate
from attnbench.figures.kit.inline import Shared
from attnbench.files import make_folder, refuse_link, write_output
from attnbench.results.frame.settings import timed
from attnbench.results.frame.words import follows, in_words, is_expected
from attnbench.suite.axes import ALIKE

INDEX = "index.html"
_FIRST = ("batch", "heads", "head_dim", "causal", "dtype", "seed")
_BOARD = '<html lang="en" data-board>'
"""Words that all pages of a board have, and only these."""


def shape_of(row: Mapping[Hashable, Any]) -> str:
    """``Batch 1, 8 heads × 64, not causal, float32, forward pass, attention layer``, with all else that is unusual."""
    others = [one for one in ALIKE if one not in _FIRST and not follows(one, row) and not is_expected(one, row[one])]
    model = {"model": ("layers", "ffn"), "pretrained": ("model",)}.get(str(row["level"]), ())
    said = [in_words(one, row[one]) for one in ("causal", "dtype", *others, "pass", "level", *model)]
    return ", ".join([f"Batch {row['batch']}", f"{in_words('heads', row['heads'])} × {row['head_dim']}", *said])


def make_site(runs: Sequence[Machine], out: Sequence[LeftOut]) -> dict[str, str]:
    """The board's files, name -> text; the same runs give the same text."""
    parts: dict[str, list[Machine]] = {}
    known = []
    for run in sorted(runs, key=lambda one: (title_of(one), *one.environments)):
        rows = run.rows.loc[timed(run.rows).index]
        errors = run.rows.drop(rows.index)
        errors = errors[errors["error_kind"] != ""]
        shapes = pd.Series([shape_of(row) for row in rows.to_dict("records")], index=rows.index)
        for shape, part in rows.groupby(shapes, sort=False):
            if (part["time_median_s"] > 0).any():
                both = pd.concat([part, errors], ignore_index=True)
                parts.setdefault(str(shape), []).append(replace(run, rows=both))
        facts, ((name, environment),) = dict(heading(run)), run.environments.items()
        facts["attnbench"] = str(environment.get("attnbench", ""))
        known.append([name, title_of(run), *(facts.get(one, "") for one in ("Measured", "torch", "attnbench", "Rows"))])
    pages, lines = dict[str, str](), list[tuple[int, str, str, list[Any]]]()
    for shape in sorted(parts, key=lambda one: [(len(word), word) for word in one.split(", ")]):
        name = re.sub("[^a-z0-9]+", "-", shape.lower().replace("not causal", "full"))[:150].strip("-") + ".html"
        pages[name], told = _page(shape, parts[shape])
        lines.append((min(place for *_, place in told), name, shape, told))
    lines.sort(key=itemgetter(0))
    index = {"shapes": lines, "runs": known, "out": out, "home": INDEX}
    return {
        INDEX: rendered("board.html", Shared(), "Exact, linear and sparse attention, shape by shape", **index),
        **pages,
    }


def _page(shape: str, runs: Sequence[Machine]) -> tuple[str, list[tuple[str, list[Sentence], int]]]:
    """The page of a shape; and for each run its title, its headlines, and 0 if something crossed."""
    shared, sections, told = Shared(), [], []
    for number, run in enumerate(runs, start=1):
        exact = exact_labels(marked(run.rows))
        content = section(number, run, shared, bases=exact)
        content["title"] = ", ".join([content["title"], *run.environments])
        found = [(view, crossings(view, content["beside"], exact)) for view in content["views"]]
        content["answer"] = [said for view, ones in found for said in sentences(view, ones)]
        if not content["answer"]:
            content["answer"] = [[("No sub-quadratic variant was measured beside an exact kernel.", False)]]
        for view, ones in found:
            labels: dict[str, list[str]] = {}
            for one in ones:
                labels.setdefault(one.said, []).append(one.label)
            said = "; ".join(f"{n}: {', '.join(names)}" for n, names in labels.items())
            content["marks"] += [f"{view.setting.name or 'All'}, faster from n = {said}"] if said else []
        every = [one for _, ones in found for one in ones]
        place = 0 if any(one.n < inf for one in every) else 1 if every else 2
        told.append((content["title"], content["answer"], place))
        sections.append(content)
    about = {"against": None, "laws": (), "unchecked": (), "doubts": (), "home": INDEX}
    return rendered("report.html", shared, shape, sections=sections, **about), told


def write_site(folder: Path, files: Mapping[str, str]) -> None:
    """Write the pages, and remove those of an earlier board there that are no more.

    Raises:
        CannotCreate: the folder cannot be made, or has another file in the place of a page.
    """
    refuse_link(folder)
    make_folder(folder)
    old = {file.name for file in folder.glob("*.html") if file.is_file() and _BOARD in file.read_text(errors="replace")}
    for name in files:
        if (folder / name).exists() and name not in old:
            raise CannotCreate(f"{folder / name} is no page of a board; choose another folder with --out")
    for name, text in files.items():
        write_output(folder / name, text)
    for name in old - files.keys():
        (folder / name).unlink()
