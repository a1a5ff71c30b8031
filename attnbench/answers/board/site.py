"""The pages of a board: an index with the crossover of each shape and machine, and a page for each shape."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd

from attnbench.answers.board.crossings import crossings, exact_labels, sentences
from attnbench.answers.board.runs import LeftOut, read_runs
from attnbench.answers.report.answer import Sentence
from attnbench.answers.report.page import rendered, section
from attnbench.answers.report.rows import marked
from attnbench.answers.report.sources import Machine, title_of
from attnbench.errors import CannotCreate
from attnbench.figures.kit.inline import Shared
from attnbench.files import make_folder, refuse_link, write_output
from attnbench.results.frame.settings import records, timed
from attnbench.results.frame.words import follows, in_words, is_expected
from attnbench.results.manifest import digest
from attnbench.suite.axes import ALIKE

INDEX = "index.html"
_FIRST = ("batch", "heads", "head_dim", "causal", "dtype", "seed")
_BOARD = '<html lang="en" data-board>'
"""Words that all pages of a board have, and only these."""


def shape_of(row: Mapping[str, Any]) -> str:
    """``Batch 1, 8 heads × 64, not causal, float32, forward pass, attention layer``, with all else that is unusual."""
    others = [one for one in ALIKE if one not in _FIRST and not follows(one, row) and not is_expected(one, row[one])]
    model = {"model": ("layers", "ffn"), "pretrained": ("model",)}.get(str(row["level"]), ())
    said = [in_words(one, row[one]) for one in ("causal", "dtype", *others, "pass", "level", *model)]
    return ", ".join([f"Batch {row['batch']}", f"{in_words('heads', row['heads'])} × {row['head_dim']}", *said])


def make_site(runs: Sequence[Machine], out: Sequence[LeftOut]) -> dict[str, str]:
    """The board's files, name -> text; the same runs give the same text."""
    parts: dict[str, list[Machine]] = {}
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
    return {INDEX: rendered("board.html", Shared(), title, **index), **pages}


def _page(shape: str, runs: Sequence[Machine]) -> tuple[str, list[dict[str, Any]]]:
    """The page of a shape, and its sections."""
    shared, sections = Shared(), []
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
