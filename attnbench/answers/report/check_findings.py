"""Findings of ``attnbench check --json`` for the variants of a report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnbench.errors import UsageError
from attnbench.text import one_line

_MOST = 3


@dataclass(frozen=True)
class Broken:
    """A law that does not hold for a variant."""

    law: str
    faults: tuple[str, ...]
    more: int


@dataclass(frozen=True)
class CheckedVariant:
    """The laws of one variant."""

    variant: str
    laws: int
    broken: tuple[Broken, ...]
    unsupported: str = ""


def read_laws(file: Path) -> list[CheckedVariant]:
    """The variants in a file of ``attnbench check --json``; UsageError if it is no such file."""
    remedy = f"write it with: attnbench check all --json > {file}"
    if file.exists() and not file.is_file():  # reading a pipe may take for ever
        raise UsageError(f"--check {file}: not a file; {remedy}")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return [_checked(one) for one in (data if isinstance(data, list) else [data])]
    except OSError as error:
        raise UsageError(f"--check {file}: {error.strerror}; {remedy}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UsageError(f"--check {file}: not what attnbench check --json prints; {remedy}") from None


def _checked(one: Mapping[str, Any]) -> CheckedVariant:
    name = one_line(_text(one["variant"]))
    if "unsupported" in one:
        return CheckedVariant(name, 0, (), one_line(_text(one["unsupported"])))
    laws: dict[str, list[Mapping[str, Any]]] = {}
    for finding in one["findings"]:
        if not finding.get("skipped"):
            laws.setdefault(one_line(_text(finding["law"])), []).append(finding)
    broken = []
    for law, findings in laws.items():
        faults = [f"{_text(bad['case'])}: {_text(bad['fault'])}" for bad in findings if bad["held"] is not True]
        if faults:
            broken.append(
                Broken(law, tuple(one_line(said, 300) for said in faults[:_MOST]), max(0, len(faults) - _MOST))
            )
    return CheckedVariant(name, len(laws), tuple(broken))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def unchecked(checked: Iterable[CheckedVariant], variants: Iterable[str]) -> list[str]:
    """Variants of a report that the file lacks."""
    known = {one.variant.partition(":")[0] for one in checked}
    return [name for name in dict.fromkeys(variants) if name not in known]
