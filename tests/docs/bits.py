"""The calls of each variant that give the same numbers to the bit, as a page of the documentation shows them.

``python -m tests.docs.bits`` asks the variants that the file lacks, with names these anew, and with ``all`` every one.
The answers are those of ``attnbench check NAME --bits --json``, with two threads, in float32 and in bfloat16.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from attnbench.laws.bits import QUESTIONS
from tests.docs.laws import AT_ONCE, shipped
from tests.docs.making import HERE, Row, here, store, stored

FILE = HERE / "docs/data/bits.csv"
OF_ROW = ("variant", "question", "setting", "answer", "case", "share", "why")
COLUMNS = (*OF_ROW, "bfloat16", "torch", "processor", "date")
"""``bfloat16`` has the answer there; all others are of float32."""
EQUAL = "equal"


def read() -> list[Row]:
    """The rows of the file; none where there is no file."""
    return stored(FILE)


def rows_of(report: Mapping[str, Any]) -> list[Row]:
    """A row for each question: ``equal``, the difference in units in the last place, or why it was not asked."""
    name = str(report["variant"])
    return [
        {
            "variant": name,
            "question": one["question"],
            "setting": one["setting"],
            "answer": EQUAL if one["equal"] else f"{one['ulps']:.2g}" if one["equal"] is False else "",
            "case": one["case"],
            "share": f"{one['share']:.2g}" if one["equal"] is False else "",
            "why": one["why"] if one["equal"] is None else "",
        }
        for one in report.get("bits", ())
    ]


def ask(names: Iterable[str]) -> list[Row]:
    """The answers here and now."""
    names = list(names)
    narrow = [{"bfloat16": row["answer"]} for row in _asked(names, "bfloat16")]
    return [row | also | here() for row, also in zip(_asked(names, "float32"), narrow, strict=True)]


def _asked(names: Iterable[str], dtype: str) -> list[Row]:
    command = [sys.executable, "-m", "attnbench", "check", *names, "--bits", "--json", "--threads", "2"]
    done = subprocess.run([*command, "--dtype", dtype], stdout=subprocess.PIPE, text=True, check=True)
    return [row for report in json.loads(done.stdout) for row in rows_of(report)]


def write(rows: Iterable[Row]) -> None:
    """The rows, variants and questions in the order shown to users."""
    names, questions = ({one: place for place, one in enumerate(every)} for every in (shipped(), QUESTIONS))
    known = [row for row in rows if row["variant"] in names and row["question"] in questions]
    store(FILE, COLUMNS, sorted(known, key=lambda row: (names[row["variant"]], questions[row["question"]])))


def main(names: list[str]) -> None:
    """Ask and write a few variants at a time, so that a stop loses little."""
    known = {row["variant"] for row in read()}
    wanted = shipped() if names == ["all"] else names or [name for name in shipped() if name not in known]
    for start in range(0, len(wanted), AT_ONCE):
        few = wanted[start : start + AT_ONCE]
        rows = ask(few)
        write([*(row for row in read() if row["variant"] not in few), *rows])
        print(*(f"{row['variant']}: {row['question']}: {row['answer']}" for row in rows), sep="\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
