"""``attnbench check``: is a variant the algorithm on its label?"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

import typer

from attnbench.cli import completion, options
from attnbench.cli.screen import console
from attnbench.cli.signature import command, completed
from attnbench.errors import Exit, Unsupported, UsageError
from attnbench.text import quantity
from attnbench.units import format_seconds

if TYPE_CHECKING:
    from attnbench.harness.outside.isolation import Settings, Worker
    from attnbench.laws import Finding, Report
    from attnbench.laws.bits import Answer
    from attnbench.laws.modules.probed_module import Probe
    from attnbench.laws.own_error import OwnError

_SHOWN_FAULTS = 3
"""Most faults shown for one law; the others usually say the same of further settings."""


@command(options.BitsOptions)
def check(
    variants: Annotated[
        list[str] | None,
        typer.Argument(
            help="Variants, with options as in local:window=3; 'all': every one; FILE.py:Class: any module.",
            autocompletion=completion.variants,
        ),
    ] = None,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PLUGIN", help="FILE.py, FILE.py:Class or module with more variants; checked if none is named."
        ),
    ] = None,
    law: Annotated[
        list[str] | None,
        typer.Option(metavar="LAW", help="Only this law; may be repeated.", autocompletion=completion.laws),
    ] = None,
    time: Annotated[bool, typer.Option("--time/--no-time", help="Also measure how time grows with n.")] = True,
    threads: options.Threads = None,
    timeout: Annotated[float, options.Limit(help="Time limit for each law.")] = 300.0,
    memory_limit: Annotated[str | None, options.MEMORY_LIMIT] = None,
    as_json: options.AsJson = False,
    call: Annotated[
        Literal["tokens", "x"] | None,
        typer.Option(
            help="Call FILE.py:Class with whole numbers (batch, n), or vectors (batch, n, width); default: what works."
        ),
    ] = None,
    label: Annotated[str | None, options.Variant("--as", help="The variant that FILE.py:Class is said to be.")] = None,
    vocab: Annotated[
        int | None, options.Count(min=2, help="Tokens are below it; default: its smallest embedding.")
    ] = None,
    width: Annotated[int | None, options.Count(min=1, help="Width of x; default: what its first layer takes.")] = None,
    **given: Unpack[options.BitsOptions],
) -> None:
    """Check that variants are what they say they are: hold them to their formulas and to every law that they claim.

    attnbench check FILE.py:Class asks any module what it really does: is there attention in it, does it see the future,
    does its cost grow with n or n², which parameters have no effect?

    With --bits it calls each variant, or FILE.py:Class, in two ways that mean the same numbers: alone and in a batch,
    whole and token by token, padded or not. A difference is a fact and no fault: the exit code is then 0.

    The exit code is 1 if a law does not hold, or if a module does not do what --as or its options claim.
    """
    from attnbench.contract.variant import VARIANTS
    from attnbench.harness.outside.isolation import Settings, Worker
    from attnbench.harness.outside.law_requests import examine
    from attnbench.harness.trial import load_all
    from attnbench.harness.wire.process import memory_limit as limit_for
    from attnbench.laws import Report, laws_named, variant_named
    from attnbench.measure.machine import available_cores, resolve_device

    cores, given = threads or available_cores(), completed(options.BitsOptions, given)
    modules = [one for one in variants or [] if ".py:" in one]
    of_module: dict[str, object] = {"--call": call, "--as": label, "--vocab": vocab, "--width": width}
    of_bits = {"--device": given["device"], "--dtype": given["dtype"]}
    for option, value in ({} if given["bits"] else of_bits).items():
        if value is not None:
            raise UsageError(f"{option} belongs to --bits: attnbench check NAME --bits {option} {value}")
    instead = "--bits" if given["bits"] else "FILE.py:Class" if modules else ""
    of_laws: dict[str, object] = {"--law": law, "--no-time": None if time else True}
    for option, one in (of_laws | (of_module if given["bits"] else {}) if instead else {}).items():
        if one is not None:
            raise UsageError(f"{option} does nothing with {instead}; leave one of them out")
    device = resolve_device(given["device"] or "cpu")
    limit = limit_for(device, options.bytes_of(memory_limit))
    # The process is the same as in a test that calls check_variant.
    settings = Settings(device, cores, "as-shipped", limit, tuple(plugin or ()), dtypes=(), rates=False)
    if given["bits"]:
        return check_bits(variants or [], settings, dtype=given["dtype"], timeout=timeout, as_json=as_json)
    if modules:
        from attnbench.laws.modules.probed_module import Probe

        if len(variants or []) > 1:
            raise UsageError("check looks at one FILE.py:Class at a time, without variants beside it")
        wanted = Probe(modules[0], call, vocab, width)
        return check_module(wanted, settings, label=label, timeout=timeout, as_json=as_json)
    for option, one in of_module.items():
        if one is not None:
            raise UsageError(f"{option} belongs to a module of a file: attnbench check FILE.py:Class {option} {one}")
    known = set(VARIANTS.names())
    load_all(plugin or [])
    asked = variants or [name for name in VARIANTS.names() if name not in known]
    everything, names = "all" in asked, _spelled_out(asked)
    if not names:
        raise UsageError(
            "check needs a variant, or 'all'; for example: attnbench check performer"
            if not plugin
            else "the plug-in registers no variant; put @register above its class"
        )
    for name in names:
        variant_named(name)
    laws = laws_named(law, time=time)
    reports, refused = list[Report](), dict[str, str]()
    own_errors: dict[str, OwnError] = {}
    found: list[Finding] = []
    shows = not (as_json and sys.stdout.isatty())  # a bar between the lines of a list
    stopped: KeyboardInterrupt | None = None
    with (
        console.progress(len(names), wanted=shows) as bar,
        Worker(settings) as worker,
        console.items(wanted=as_json) as tell,
    ):
        for name in names:
            found = []

            def begun(law: str, name: str = name) -> None:
                bar.update(bar.task_ids[0], description=f"{name}: {law}")

            try:
                reports.append(examine(worker, name, laws, timeout=timeout, begun=begun, found=found))
                if law is None and len(names) == 1 and reports[-1].held:
                    begun("error against its own formula")
                    own_errors = _own_errors(worker, name, timeout)
                tell(_as_data(reports[-1], own_errors))
            except KeyboardInterrupt as pressed:
                stopped = pressed
                if len(names) == 1 and reports:
                    tell(_as_data(reports[0], {}))
                break
            except Unsupported as reason:  # a package that runs only on a GPU or in whole buckets, say
                if not everything:
                    raise
                refused[name] = str(reason)
                tell({"variant": name, "unsupported": refused[name]})
            bar.advance(bar.task_ids[0])
    if not as_json:
        if len(names) == 1:
            for report in reports or [Report(names[0].partition(":")[0], tuple(found))] * bool(found):
                _one(report, own_errors, whole=bool(reports))
        elif reports:
            _several(reports)
        for name, why in refused.items():
            console.note(f"{name} is not checked: {why}")
    if stopped:
        console.note(
            f"stopped: {len(reports) + len(refused)} of {len(names)} variants were looked at" * (len(names) > 1)
        )
        raise stopped
    if not all(report.held for report in reports):
        raise typer.Exit(Exit.FAILED)
    return None


def _worst(findings: list[Finding]) -> Finding:
    def excess(finding: Finding) -> float:
        if not finding.held:
            return float("inf")
        if finding.number is None or finding.bound is None:  # skipped
            return float("-inf")
        return finding.number / finding.bound if finding.bound > 0 else finding.number

    return max(findings, key=excess)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2g}" if abs(value) < 0.01 else f"{value:.3g}"


def _own_errors(worker: Worker, name: str, timeout: float) -> dict[str, OwnError]:
    """Errors by data type; none where that cannot be asked, which no law is broken by."""
    from attnbench.harness.outside.isolation import CellFailed
    from attnbench.harness.outside.law_requests import AskOwnErrors

    try:
        return AskOwnErrors(name).ask(worker, timeout)
    except (CellFailed, Unsupported):
        return {}


def _one(report: Report, own_errors: Mapping[str, OwnError], *, whole: bool) -> None:
    from attnbench.laws import LAWS

    rows = []
    for name in dict.fromkeys(finding.law for finding in report.findings):
        found = report.of(name)
        worst = _worst(found)
        verdict = "BROKEN" if not worst.held else "not asked" if name in report.skipped else "held"
        says = report.skipped.get(name, LAWS[name].sentence)
        rows.append([name, verdict, _number(worst.number), _number(worst.bound), says])
    cases = len({finding.case for finding in report.findings})
    console.table(
        ["law", "", "worst", "bound", "what it says"],
        rows,
        right=["worst", "bound"],
        title=f"{report.variant}, in {quantity(cases, 'setting')}",
    )
    _faults([report])
    if own_errors:
        columns = ["data type", *console.OWN_ERRORS, "from softmax", "note"]
        errors = [
            [dtype, *map(console.own_error, (x.output, x.late, x.grad, x.distance)), x.note.removeprefix("own error: ")]
            for dtype, x in own_errors.items()
        ]
        title = "\nrelative error against its own formula in float64"
        console.table(columns, errors, right=columns[1:-1], title=title)
    console.line()
    if {"time", "memory"} & {finding.law for finding in report.findings}:
        console.line(_growth(report.variant))
    console.line(_verdict(report) if whole else "stopped: the laws after these were not tried")


def _growth(name: str) -> str:
    from attnbench.contract.cost import power_of_n
    from attnbench.contract.variant import VARIANTS

    entry = VARIANTS.get(name)
    time, memory = (
        "nothing" if power is None else f"n^{power:g}" for power in (entry.time_exponent, entry.memory_exponent)
    )
    read = entry.time_exponent is not None and entry.time_exponent == power_of_n(entry.cost)
    return f"claimed: time {time}{f', by its cost {entry.cost}' if read else ''}; memory {memory}"


def _several(reports: list[Report]) -> None:
    from attnbench.contract.variant import VARIANTS

    rows = []
    for report in reports:
        laws = {finding.law for finding in report.findings} - report.skipped.keys()
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


def _power(report: Report, law: str, claimed: float | None) -> str:
    numbers = [finding.number for finding in report.of(law) if finding.number is not None]
    return f"{max(numbers):.2f} ({claimed:g})" if numbers and claimed is not None else "-"


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
    from attnbench.contract.variant import VARIANTS

    laws = {finding.law for finding in report.findings} - report.skipped.keys()
    left = f"; {quantity(len(report.skipped), 'law')} could not be asked" if report.skipped else ""
    name, own = report.variant, hasattr(VARIANTS.get(report.variant).make, "source")  # which says nothing of itself
    if report.held:
        what = "keeps what any module keeps" if own else "is what it says it is"
        return f"{name} {what}: {quantity(len(laws), 'law')} hold{'s' * (len(laws) == 1)}{left}"
    broken = {finding.law for finding in report.faults}
    few = "is" if len(broken) == 1 else "are"
    what = "breaks what any module keeps" if own else "is not what it says it is"
    return f"{name} {what}: {len(broken)} of {quantity(len(laws), 'law')} {few} broken{left}"


def _as_data(report: Report, own_errors: Mapping[str, OwnError]) -> dict[str, Any]:
    found = {"variant": report.variant, "held": report.held, "findings": [asdict(one) for one in report.findings]}
    return found | ({"own_error": {dtype: asdict(one) for dtype, one in own_errors.items()}} if own_errors else {})


def check_module(wanted: Probe, settings: Settings, *, label: str | None, timeout: float, as_json: bool) -> None:
    """Probe and print; exit code 1 if the module breaks the claims of ``label`` or its options."""
    from attnbench.harness.outside.isolation import Worker
    from attnbench.harness.outside.law_requests import examine_module
    from attnbench.laws import variant_named
    from attnbench.laws.modules.summary import conclusion, contradictions, lines, named_after

    if label is not None:
        variant_named(label)
    name = wanted.name  # refused before a process is started
    with console.progress(1) as bar, Worker(settings) as worker:
        bar.update(bar.task_ids[0], description=f"{name}: how it is called")

        def begun(question: str) -> None:
            bar.update(bar.task_ids[0], description=f"{name}: {question}")

        found = examine_module(worker, wanted, timeout, begun)
    broken = contradictions(found, label)
    if as_json:
        answers = {line.question: line.answer for line in lines(found)} | {"cost": conclusion(found)}
        held = {"module": wanted.source, "held": not broken, "broken": broken}
        console.data(held | {"answers": answers, "found": asdict(found)})
    else:
        title = wanted.source if wanted.call else f"{wanted.source}, called with {found.call}"
        console.table(["question", "answer"], [list(line) for line in lines(found)], title=title)
        console.line()
        console.line(conclusion(found))
        if broken:
            console.line(f"{name} is not what it is said to be:")
        for sentence in broken:
            console.line(f"  {sentence}")
        if label and not broken:
            missing = f"; what could not be asked: {', '.join(found.unasked)}" if found.unasked else ""
            console.line(f"nothing that was found contradicts {label}{missing}")
        elif not label and (maybe := named_after(name)):
            console.note(f"a name claims nothing; --as {maybe.name} holds it to {maybe.name}, which costs {maybe.cost}")
    if broken:
        raise typer.Exit(Exit.FAILED)


def _spelled_out(names: Sequence[str]) -> list[str]:
    """Each name once, and every variant in the place of ``all``."""
    from attnbench.contract.variant import VARIANTS

    return list(dict.fromkeys(one for name in names for one in (VARIANTS.names() if name == "all" else [name])))


def check_bits(
    variants: Sequence[str], settings: Settings, *, dtype: str | None, timeout: float, as_json: bool
) -> None:
    """Ask each variant or ``FILE.py:Class`` which calls give the same numbers to the bit, and print the answers.

    Raises UsageError for an unknown variant, and Unsupported if the only one does not take the data type.
    """
    from attnbench.contract.plugins.discovery import with_modules
    from attnbench.harness.outside.isolation import Worker
    from attnbench.harness.outside.law_requests import bits
    from attnbench.harness.trial import load_all
    from attnbench.laws import variant_named
    from attnbench.laws.bits import QUESTIONS

    names, more = with_modules(variants, settings.plugins)
    load_all(more)
    names = _spelled_out(names)
    if not names:
        raise UsageError("check --bits needs a variant, or 'all'; for example: attnbench check gla --bits")
    for name in names:
        variant_named(name)
    shows = not (as_json and sys.stdout.isatty())
    with (
        console.progress(len(names) * len(QUESTIONS), wanted=shows) as bar,
        Worker(replace(settings, plugins=tuple(more))) as worker,
        console.items(wanted=as_json) as tell,
    ):
        for name in names:

            def begun(question: str, name: str = name) -> None:
                bar.update(bar.task_ids[0], advance=1, description=f"{name}: {question}")

            try:
                answers = bits(worker, name, dtype, timeout=timeout, begun=begun)
            except Unsupported as reason:
                if len(names) == 1:
                    raise
                tell({"variant": name, "unsupported": str(reason)})
                console.note(f"{name} is not asked: {reason}")
                continue
            tell({"variant": name, "bits": [asdict(one) for one in answers]})
            if not as_json:
                _print_bits(name, answers)


def _print_bits(name: str, answers: Sequence[Answer]) -> None:
    rows = []
    for one in answers:
        said = "equal to the bit" if one.equal else f"{one.ulps:.2g} ulp" if one.equal is False else "not asked"
        where = f"{one.case} at {list(one.where)}, {one.share:.2g} of the numbers" if one.equal is False else one.why
        price = [format_seconds(one.fast_s), format_seconds(one.deterministic_s)]
        rows.append([one.question, said, where, *price])
    columns = ["question", "answer", "where, or why not", "as it is", "deterministic"]
    title = f"\n{name}, {next((one.setting for one in answers if one.equal is not None), answers[0].setting)}"
    console.table(columns, rows, right=columns[3:], title=title)
    if any(one.equal is False for one in answers):
        console.note("ulp: units in the last place of the largest number of the same row; the largest difference")
