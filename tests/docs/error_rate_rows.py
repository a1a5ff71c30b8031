"""What docs/ say of how often intervals and verdicts are wrong, and of what they find: docs/data/error-rates.csv."""

from __future__ import annotations

import re

from tests.benchmarks import error_rates, live_beside
from tests.docs.making import rows, table


def shown(*start: str) -> str:
    """A table of the rates whose name starts with one of these."""
    lines = [
        [one.what, one.setting, one.promised.replace("<=", "≤").replace(">=", "≥"), f"{one.share:.1%}"]
        for one in error_rates.read()
        if one.what.startswith(start)
    ]
    counts = sorted({one.of for one in error_rates.read() if one.what.startswith(start)})
    return table(["what", "where", "promised", f"measured, of {' or '.join(map(str, counts))}"], lines)


@rows
def error_rates_of_times() -> str:
    """Rows, and powers of n."""
    return shown("interval", "linear", "variant")


@rows
def error_rates_of_gate() -> str:
    """False alarms, and power."""
    return shown("gate")


@rows
def error_rates_of_reports() -> str:
    """Reports: false verdicts, and power; a column for each number of rounds."""
    found = [one for one in error_rates.read() if one.what.startswith("report")]
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for one in found:
        setting, rounds = re.sub(r", \d rounds", "", one.setting), re.findall(r"\d rounds", one.setting)[0]
        lines.setdefault((one.what, setting, one.promised.replace("<=", "≤")), {})[rounds] = f"{one.share:.1%}"
    columns = sorted({name for line in lines.values() for name in line})
    return table(
        ["what", "setting", "promised", *columns], [[*key, *map(line.get, columns)] for key, line in lines.items()]
    )


@rows
def error_rates_of_scores() -> str:
    """Tables and suites of equals."""
    return shown("scores", "the same")


@rows
def rates_of_equal_environments() -> str:
    """Two sides in one environment: docs/data/beside-rates.csv."""
    lines = [
        [f"`{one.command}`", f"{one.wrong_tables} of {one.tables}", f"{one.alarms} of {one.ratios}"]
        for one in live_beside.read()
    ]
    return table(["command", "tables with a false alarm", "false alarms"], lines or [["not measured yet", "-", "-"]])
