"""Load a :class:`~attnbench.suite.schema.Suite` from a path or the name of a shipped suite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attnbench.errors import SuiteError, did_you_mean
from attnbench.suite.axis_values import DEVICES
from attnbench.suite.document import NotASuite, read_document
from attnbench.suite.expand import apply_overrides, check_names, check_size
from attnbench.suite.messages import Origin
from attnbench.suite.schema import Suite
from attnbench.suite.shipped import shipped_folder, shipped_suites
from attnbench.text import one_line

MAX_BYTES = 2**18
_SUFFIXES = (".yaml", ".yml")


def load_suite(path_or_name: str | Path) -> Suite:
    """Read and check a suite: a file, or the name of a shipped suite such as ``lra``.

    Raises SuiteError: ``path: fault; remedy`` for the file, ``path:line: fault; remedy`` for a line of it.
    """
    suite = read_suite(path_or_name)
    check_names(suite)
    return suite


def read_suite(path_or_name: str | Path) -> Suite:
    """As :func:`load_suite`, but without a look at the names of variants, inputs and tasks.

    Their registries import torch, which takes more time and memory than reading any suite may take.
    """
    path = suite_path(path_or_name)
    text = _read_text(path)
    try:
        data, lines = read_document(text)
    except NotASuite as error:
        raise Origin(str(path)).error_on(error.line, str(error)) from None
    return Suite.of(data, Origin(str(path), lines))


def refuse_early(
    suite: Suite, *, device: str = "auto", overrides: Mapping[str, str], options: Mapping[str, str]
) -> None:
    """Find mistakes in overrides, apart from names, before importing torch.

    ``overrides`` and ``options`` are those of :func:`attnbench.suite.expand.apply_overrides`. Raises UsageError for
    them, and SuiteError for more cells than a run may have, whatever type of device ``device`` is.
    """
    suite = apply_overrides(suite, overrides, options=options, names=False)
    kind = device.partition(":")[0]
    kinds = [kind] if kind in DEVICES else DEVICES
    problems = []
    for kind in kinds:
        try:
            check_size(suite, kind)
        except SuiteError as problem:
            problems.append(problem)
    if len(problems) == len(kinds):
        raise problems[0]


def shipped_descriptions() -> dict[str, str]:
    """Name -> description of each shipped suite, without checking the rest of it."""
    heads = {name: _read_text(suite_path(name)).partition("\nsweeps:")[0] for name in shipped_suites()}
    return {name: str(read_document(head)[0]["description"]) for name, head in heads.items()}


def suite_path(path_or_name: str | Path) -> Path:
    """The file of a suite; a bare word is a shipped suite. Raises SuiteError with the nearest name."""
    path = Path(path_or_name)
    text = str(path_or_name)
    if path.suffix.lower() in _SUFFIXES or len(path.parts) != 1:
        return path
    shipped = shipped_suites()
    if text in shipped:
        return shipped_folder() / f"{text}.yaml"
    hint = did_you_mean(text[:100], shipped) or f"; there are {', '.join(shipped)}, and files that end in .yaml"
    raise SuiteError(f"unknown suite {one_line(text, 100)!r}{hint}")


def _read_text(path: Path) -> str:
    shown = one_line(str(path), 4096)
    try:
        if not path.exists():
            name = path.stem
            hint = f"did you mean the shipped suite {name!r}?" if name in shipped_suites() else "check the path"
            raise SuiteError(f"{shown}: no such file; {hint}")
        if not path.is_file():
            raise SuiteError(f"{shown}: not a file; give the path of a YAML file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SuiteError(f"{shown}: cannot be read ({one_line(reason)}); check the path and its permissions") from None
    if len(content) > MAX_BYTES:
        raise SuiteError(f"{shown}: larger than 256 KiB; a suite is a page of text")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SuiteError(f"{shown}:{line}: not UTF-8; save the file as UTF-8") from None
