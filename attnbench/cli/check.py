"""``attnbench check``: is a variant the algorithm on its label?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnbench.cli import completion, console
from attnbench.errors import Exit, Unsupported, UsageError

if TYPE_CHECKING:
    from attnbench.testing import Finding, Report

_SHOWN_FAULTS = 3
"""Of one law; the others usually say the same of further settings."""


def check(
    variants: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names, options in the text: local:window=3. 'all': every variant.", autocompletion=completion.variants
        ),
    ] = None,
    plugin: Annotated[
        list[str] | None, typer.Option(help="FILE.py or module with further variants, checked if none is named.")
    ] = None,
    law: Annotated[list[str] | None, typer.Option(help="Only this law; may be repeated.")] = None,
    time: Annotated[bool, typer.Option("--time/--no-time", help="Measure how time grows, too.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Check that variants are what they say they are: their formula, and every law that they claim.

    Exit code 1 where a law does not hold.
    """
    import gc

    from attnbench.plugins import load
    from attnbench.testing import LAWS, check_variant
    from attnbench.variant import VARIANTS

    known = set(VARIANTS.names())
    for source in plugin or []:
        load(source)
    names = variants or [name for name in VARIANTS.names() if name not in known]
    if "all" in names:
        names = VARIANTS.names()
    if not names:
        raise UsageError(
            "name a variant, or 'all'"
            if not plugin
            else "the plug-in registers no variant; put @register above its class"
        )
    if law:
        wanted: list[str] | None = law
    else:
        wanted = [name for name in LAWS if time or not LAWS[name].needs_time]
    gc.freeze()  # measuring memory collects garbage first, and nothing of what is loaded now will ever be any
    reports, refused = [], {}
    with console.progress(len(names)) as bar:
        for name in names:
            bar.update(bar.task_ids[0], description=name)
            try:
                reports.append(check_variant(name, laws=wanted, time=time))
            except Unsupported as reason:  # a package that runs on a GPU or in whole buckets only, say
                if "all" not in (variants or []):
                    raise
                refused[name] = str(reason)
            bar.advance(bar.task_ids[0])
    if as_json:
        unchecked = [{"variant": name, "unsupported": why} for name, why in refused.items()]
        console.data([*map(_as_data, reports), *unchecked])
    elif len(reports) == 1:
        _one(reports[0])
    else:
        _several(reports)
    if not as_json:
        for name, why in refused.items():
            console.note(f"{name} is not checked: {why}")
    if not all(report.held for report in reports):
        raise typer.Exit(Exit.FAILED)


def _worst(findings: list[Finding]) -> Finding:
    """What did not hold, else what came nearest to its bound."""

    def excess(finding: Finding) -> float:
        if not finding.held:
            return float("inf")
        assert finding.number is not None
        assert finding.bound is not None
        return finding.number / finding.bound if finding.bound > 0 else finding.number

    return max(findings, key=excess)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2g}" if abs(value) < 0.01 else f"{value:.3g}"


def _one(report: Report) -> None:
    from attnbench.testing import LAWS

    rows = []
    for name in dict.fromkeys(finding.law for finding in report.findings):
        found = report.of(name)
        worst = _worst(found)
        verdict = "held" if all(one.held for one in found) else "BROKEN"
        rows.append([name, verdict, _number(worst.number), _number(worst.bound), LAWS[name].sentence])
    cases = len({finding.case for finding in report.findings})
    console.table(
        ["law", "", "worst", "bound", "what it says"],
        rows,
        right=["worst", "bound"],
        title=f"{report.variant}, in {cases} setting{'s' * (cases != 1)}",
    )
    _faults([report])
    console.line()
    console.line(_verdict(report))


def _several(reports: list[Report]) -> None:
    from attnbench.variant import VARIANTS

    rows = []
    for report in reports:
        laws = dict.fromkeys(finding.law for finding in report.findings)
        broken = dict.fromkeys(finding.law for finding in report.faults)
        held = f"{len(laws) - len(broken)} of {len(laws)}"
        entry = VARIANTS.get(report.variant)
        claimed = {"time": entry.time_exponent, "memory": entry.memory_exponent}
        powers = [_power(report, law, power) for law, power in claimed.items()]
        rows.append([report.variant, held, *powers, ", ".join(broken)])
    columns = ["variant", "laws held", "time n^", "memory n^", "broken"]
    console.table(columns, rows, right=["laws held", "time n^", "memory n^"])
    _faults(reports)
    console.line()
    good = sum(report.held for report in reports)
    console.line(f"{good} of {len(reports)} variants are what they say they are")
    console.note("n^: the measured power of n, and the claimed one")


def _power(report: Report, law: str, claimed: float) -> str:
    numbers = [finding.number for finding in report.of(law) if finding.number is not None]
    return f"{max(numbers):.2f} ({claimed:g})" if numbers else "-"


def _faults(reports: list[Report]) -> None:
    for report in reports:
        for name in dict.fromkeys(finding.law for finding in report.faults):
            faults = [finding for finding in report.faults if finding.law == name]
            console.line()
            console.heading(f"{report.variant} breaks '{name}'")
            for finding in faults[:_SHOWN_FAULTS]:
                console.line(f"  {finding.case}: {finding.fault}")
            if len(faults) > _SHOWN_FAULTS:
                console.line(f"  and {len(faults) - _SHOWN_FAULTS} more")


def _verdict(report: Report) -> str:
    laws = {finding.law for finding in report.findings}
    if report.held:
        return f"{report.variant} is what it says it is: {len(laws)} laws hold"
    broken = {finding.law for finding in report.faults}
    return f"{report.variant} is not what it says it is: {len(broken)} of {len(laws)} laws are broken"


def _as_data(report: Report) -> dict[str, Any]:
    from dataclasses import asdict
    from math import isfinite

    def plain(finding: Finding) -> dict[str, Any]:
        row = asdict(finding)
        return {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in row.items()}

    return {"variant": report.variant, "held": report.held, "findings": [plain(one) for one in report.findings]}
