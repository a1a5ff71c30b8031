"""Repeat a run from its folder: the command, beside the suite and the source of plug-ins."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from attnbench.contract.plugins.discovery import file_of
from attnbench.contract.plugins.foreign import home_of
from attnbench.errors import ResultsError
from attnbench.files import replace_file, stored
from attnbench.harness.plan import Options, Plan
from attnbench.results.sources import SOURCES
from attnbench.results.store import RECORDS, SUITE, RunFolder

COMMAND = "command"
"""Fact of a run: the command to type in its folder."""
_TIME_LIMITS = ("cell_timeout", "first_call_timeout")
_TOLD = ("select", "shard", *_TIME_LIMITS, "memory_limit", "min_time", "rounds", "process")
"""Fields of :class:`Options` that a command states if they are not the usual ones."""
_MOST_BYTES = 2**26
"""A larger file is not kept, only its digest."""


def command_of(plan: Plan) -> str:
    """The command that measures the same again in the run's folder; its suite has the overridden axes."""
    options, usual, settings = plan.options, Options(), plan.settings
    words = ["attnbench", "run", SUITE, "--device", settings.device, "--threads", str(settings.threads)]
    for name in _TOLD:
        if (value := getattr(options, name)) != getattr(usual, name):
            words += ["-k" if name == "select" else f"--{name.replace('_', '-')}", str(value)]
    words += ["--beside", options.beside.path] if options.beside else []
    words += [f"--{name}" for name in ("quick", "unchecked") if getattr(options, name)]
    for source, kept in zip(options.plugins, _kept(options.plugins), strict=True):
        words += ["--plugin", source if kept is None else source.replace(file_of(source), f"{SOURCES}/{kept}", 1)]
    return shlex.join(words)


def time_limits_of(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of :class:`Options` for time limits, as far as the command of a run sets them."""
    words = shlex.split(str(environment.get(COMMAND, "")))
    options = ((name, f"--{name.replace('_', '-')}") for name in _TIME_LIMITS)
    return {name: float(words[words.index(option) + 1]) for name, option in options if option in words}


def _kept(plugins: Iterable[str]) -> Iterator[Path | None]:
    for number, source in enumerate(plugins):
        path = Path(file_of(source))
        yield Path(str(number), path.resolve().relative_to(home_of(path)[0])) if path.suffix == ".py" else None


def keep(folder: Path, plugins: Iterable[str], names: Iterable[str]) -> None:
    """Copy the plug-ins, and the used files next to or below them, into the folder of a run."""
    used = [Path(name).expanduser().resolve() for name in names]
    for number, source in enumerate(plugins):
        path = Path(file_of(source))
        home = home_of(path)[0]
        for file in dict.fromkeys([path.resolve(), *used]):
            with suppress(OSError):  # without it the run is as good, but cannot be repeated from here alone
                if path.suffix == ".py" and file.is_relative_to(home) and file.stat().st_size <= _MOST_BYTES:
                    copy = folder / SOURCES / str(number) / file.relative_to(home)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    if not copy.exists():
                        replace_file(copy, file.read_bytes())


def arguments_of(run: Path) -> list[str]:
    """The arguments of ``attnbench run`` that repeat this folder's run from anywhere; else none.

    Raises ResultsError for a run older than these facts.
    """
    if not stored(run / RECORDS).is_file():
        return []
    text = RunFolder(run).environment.get(COMMAND)
    if not isinstance(text, str):
        raise ResultsError(f"{run}: an older attnbench did not keep its command; give {run / SUITE} and its options")
    words = shlex.split(text)[2:]
    return [str(run / word) if word == SUITE or word.startswith(f"{SOURCES}/") else word for word in words]
