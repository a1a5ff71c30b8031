"""Hold a variant to its laws in the isolated process: a variant that ends it, hangs or eats all memory breaks a law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attnbench.errors import Unsupported
from attnbench.run.isolation import CellFailed, Worker
from attnbench.spec import parse_spec
from attnbench.testing import Finding, Report


def examine(
    worker: Worker,
    variant: str,
    laws: Sequence[str],
    *,
    timeout: float,
    begun: Callable[[str], None] = lambda law: None,
) -> Report:
    """What :func:`attnbench.testing.check_variant` finds, whatever the variant does to the process.

    Args:
        variant: a name with or without options.
        timeout: seconds for one law.
        begun: called with the name of each law before it is tried.

    Raises:
        Unsupported: no setting can be built for the small shapes of the laws.
        WorkerFailed: the process cannot be started.
    """
    findings: list[Finding] = []
    for law in laws:
        begun(law)
        try:
            findings += _ask(worker, variant, law, timeout)
        except CellFailed as failed:
            # What ends the process once may do so in every law, and each try costs a start or the whole timeout.
            given_up = "; the laws after it were not tried" * (law != laws[-1])
            findings.append(Finding(law, "every setting", False, fault=failed.reason + given_up))
            break
        if findings and findings[-1].final:
            break
    return Report(parse_spec(variant).name, tuple(findings))


def _ask(worker: Worker, variant: str, law: str, timeout: float) -> list[Finding]:
    answer: dict[str, Any] = worker.ask({"do": "laws", "variant": variant, "law": law}, timeout)
    if "unsupported" in answer:
        raise Unsupported(answer["unsupported"])
    try:
        return [Finding(**finding) for finding in answer["findings"]]
    except (KeyError, TypeError):
        raise worker.garbage() from None
