"""``attnbench cite RUN``: the method of a run in one paragraph, and BibTeX of its variants."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnbench.cli.screen import console
from attnbench.errors import UsageError
from attnbench.text import quantity
from attnbench.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from attnbench.results.record import Record


def cite(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or of a suite for its newest run.")],
) -> None:
    """Write how a run was measured, and BibTeX of attnbench and of all variants and tasks in the run.

    Sources are those of attnbench show, which has no titles. BibTeX skips the text before the entries.
    """
    method, entries, doubts = cited(run)
    for doubt in doubts:
        console.warning(doubt)
    console.paragraph(method)
    for line in entries:
        console.line(line)


def cited(run: Path) -> tuple[str, list[str], list[str]]:
    """The method, the lines of BibTeX, and what makes the run doubtful. Raises ResultsError, UsageError: no row."""
    from attnbench.results.runs import newest_run

    folder = newest_run(run)
    records, facts = folder.in_order(), folder.environment
    if not records:
        raise UsageError(f"{folder.path}: no row yet; measure first with: attnbench run SUITE")
    entries = _bibliography(records, str(facts.get("attnbench", "")))
    return " ".join(_method(records, facts)), list(entries), [*folder.repairs, *folder.doubts()]


def _method(records: Sequence[Record], facts: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on how the rows were measured; what the run does not say of itself is left out."""
    rows = [record for record in records if record.status == "ok"] or records
    labels, levels, passes, dtypes, tasks = (
        list(dict.fromkeys(str(getattr(row, name)) for row in rows if getattr(row, name)))
        for name in ("label", "level", "pass_", "dtype", "task")
    )
    lengths = sorted({row.seq_len for row in rows})
    day = f" on {str(facts['started_at'])[:10]}" if "started_at" in facts else ""
    yield f"Measured{day} with attnbench {facts.get('attnbench', '')}, suite {rows[0].suite}: {', '.join(labels)};"
    yield f"level {', '.join(levels)}; pass {', '.join(passes)}; {', '.join(dtypes)};"
    yield f"{lengths[0]}{f' to {lengths[-1]}' * (len(lengths) > 1)} tokens."
    machine: dict[str, Any] = {**(facts.get("environment") or {}), **(facts.get("card") or {}), **facts}
    machine["gpu_memory"] = format_bytes(machine.get("gpu_memory_bytes"))
    said = [text.format(**machine) for name, text in _MACHINE.items() if machine.get(name)]
    if said:
        yield f"Machine: {', '.join(said)}."
    rules = facts.get("rules") or {}
    rounds = rules.get("rounds", 1)
    if rules.get("quick"):
        yield "A time is that of one call after the first."
    elif "warmup_time" in rules and any(row.time_median_s is not None for row in rows):
        yield f"A time is the median of all samples, without the first call and {format_seconds(rules['warmup_time'])}"
        yield f"of warm-up, from {quantity(rounds, 'round')} over the cells in a shuffled order" + (
            ", each in a fresh process" * (facts.get("fresh_process") == "round")
            + ("; its 95 % interval is Student's t of the medians of rounds, on the log scale." if rounds > 1 else ".")
        )
    if any(row.peak_bytes is not None for row in rows):
        yield "Memory is the peak of the bytes in tensors during a call, beyond those held before it."
    if any(row.rel_error is not None for row in rows):
        yield "An error is the norm of the difference from exact attention in float64, relative to its norm."
    if tasks:
        trained = {(row.steps, row.seed) for row in rows if row.steps is not None}
        steps, seeds = (sorted({one[place] for one in trained}) for place in (0, 1))
        yield f"Scores: {' or '.join(map(str, steps))} steps of training on {', '.join(tasks)}, seeds {seeds}."
    if measured := sum(record.status == "ok" for record in records):
        others = "; the rows of the others say why not" * (measured < len(records))
        yield f"{measured} of {len(records)} cells were measured{others}."


_MACHINE = {
    "gpu": "{gpu} ({gpu_memory})",
    "driver": "driver {driver}",
    "processor": "{processor} with {cores} cores",
    "threads": "threads: {threads}",
    "system": "{system}",
    "python": "Python {python}",
    "torch": "PyTorch {torch}",
    "cuda": "CUDA {cuda}",
    "cudnn": "cuDNN {cudnn}",
    "triton": "Triton {triton}",
    "process": "allocator and matmul library {process}",
}


def _bibliography(records: Iterable[Record], version: str) -> Iterator[str]:
    """The tool, a line for each source without author, year and number, and an entry for each other one."""
    from attnbench.cli.show import facts, registries

    yield "\n@software{attnbench,\n  author = {{The attnbench authors}},\n  title = {attnbench},"
    yield f"  version = {{{version}}}\n}}\n"
    variants, _, tasks = registries()
    used = [(registry, name) for one in records for registry, name in ((variants, one.variant), (tasks, one.task))]
    works: dict[tuple[str, ...], list[str]] = {}
    for registry, text in dict.fromkeys(used):
        name = (text or "").partition(":")[0]
        for part in str(facts(registry, name)["source"]).split("; ") if name in registry else ():
            fields, rest = _work(part)
            if fields:
                works.setdefault(tuple(fields), []).append(f"{name}: {rest}" if rest else name)
            else:
                yield f"Source of {name}: {part}"
    for known, notes in works.items():
        note = re.sub(r"([&%$#_])", r"\\\1", "; ".join(dict.fromkeys(notes)))
        yield "\n".join((f"\n@misc{{{_key(known)},", *(f"  {one}," for one in known), f"  note = {{{note}}}\n}}"))


_WHO = re.compile(
    r"((?:von )?[A-Z][\w'-]+(?: [A-Z][\w-]+| & [A-Z][\w-]+|, [A-Z][\w-]+| and [A-Z][\w-]+)*(?: et al\.)?) "
    r"((?:19|20)\d\d)(?![\d.])"
)
_NUMBER = re.compile(r"(?:arXiv:|doi:|doi\.org/)(\d[^,;\s]+)")


def _work(part: str) -> tuple[list[str], str]:
    """BibTeX fields of a source that names authors and year, or a number; and what else it says."""
    who, number = _WHO.search(part), _NUMBER.search(part)
    fields = []
    if who:
        names = re.sub(r" & |, ", " and ", who[1].replace(" et al.", " and others"))
        fields = [f"author = {{{names if ' and ' in names else f'{{{names}}}'}}}", f"year = {{{who[2]}}}"]
    if number:
        arxiv = number[0].startswith("arXiv")
        fields += [f"eprint = {{{number[1]}}}", "archiveprefix = {arXiv}"] if arxiv else [f"doi = {{{number[1]}}}"]
    for found in filter(None, (who, number)):
        part = part.replace(found[0], "")
    return fields, ", ".join(filter(None, (one.strip() for one in part.split(","))))


def _key(fields: Iterable[str]) -> str:
    """``choromanski2021:2009.14794``."""
    said = {name: text.strip("{}") for name, text in (one.split(" = ") for one in fields)}
    author = re.search(r"[A-Z]\w+", said.get("author", ""))
    words = (author[0].lower() + said["year"] if author else "", said.get("eprint", said.get("doi", "")))
    return ":".join(filter(None, words))
