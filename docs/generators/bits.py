"""The calls that give the same numbers to the bit, of every shipped variant, in one table."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import cache

from attnbench.laws.bits import BATCHES, HIDDEN, QUESTIONS, SHAPE
from generators.markdown import ROOT, page, table, text

FILE = ROOT / "docs/data/bits.csv"
"""Written by ``python -m tests.docs.bits``, which names the columns."""
_NEVER = "deterministic form"
"""Asked on a GPU alone, and the table is of a CPU."""


@cache
def measured() -> list[dict[str, str]]:
    """The rows of the file."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def pages() -> Iterator[tuple[str, str]]:
    """One page for all variants."""
    rows, asked = measured(), [question for question in QUESTIONS if question != _NEVER]
    said = {(row["variant"], row["question"]): row for row in rows}
    names, first = list(dict.fromkeys(row["variant"] for row in rows)), rows[0]
    dates = " and ".join(sorted({row["date"] for row in rows}))

    def shown(column: str) -> list[str]:
        answers = {question: [said[name, question][column] for name in names] for question in asked}
        counts = [
            f"{question}: {few.count('equal')} of {len(few) - few.count('')}" for question, few in answers.items()
        ]
        return [
            f"Equal to the bit, of those that can be asked: {text('; '.join(counts))}.",
            table(
                ["variant", *asked],
                [
                    [f"[`{name}`](../catalogue/{name}.md)", *(_cell(one[place]) for one in answers.values())]
                    for place, name in enumerate(names)
                ],
            ),
        ]

    yield (
        "reference/bits.md",
        page(
            "# The same numbers, to the bit?",
            "`attnbench check NAME --bits` calls a variant in two ways that mean the same numbers. `=` says that the "
            "results are equal to the bit. A number is the largest difference, in units in the last place of the "
            "largest number of the same row. `–` says that the variant cannot be asked: it has no causal form, takes "
            "no steps or no padding. A difference is a fact and no fault: products of other sizes add in another "
            "order. [The laws](laws.md) hold every variant to rounding.",
            f"One example has {SHAPE.H} heads of {SHAPE.D} and {SHAPE.N} tokens, causal where the variant can be, in "
            f"float32 and bfloat16 at its default settings. Batches are of {', '.join(map(str, BATCHES))}. Padded: by "
            f"a mask that hides nothing, or {HIDDEN} padded tokens behind. Gradients, also of one thread and of two, "
            "are those of inputs and parameters. "
            f"Measured on {text(first['processor'])} with torch {text(first['torch'])}, float32 on {dates}; "
            "`docs/data/bits.csv` has where each difference in float32 is. `--device cuda` asks a GPU, and times the "
            "deterministic form beside the fast one.",
            "## In float32",
            *shown("answer"),
            "## In bfloat16",
            *shown("bfloat16"),
        ),
    )


def _cell(answer: str) -> str:
    return {"equal": "=", "": "–"}.get(answer, answer)
