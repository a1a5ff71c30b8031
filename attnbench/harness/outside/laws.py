"""Check laws in the isolated process: a variant that ends it, hangs or eats all memory breaks a law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from attnbench.contract.spec import parse_spec
from attnbench.errors import Unsupported
from attnbench.harness.outside.isolation import CellFailed, Worker
from attnbench.harness.wire.protocol import Request
from attnbench.laws import Finding, Report, check_variant


@dataclass(frozen=True, slots=True)
class HoldToLaw(Request[list[Finding]]):
    """Hold a variant to one law (:func:`attnbench.laws.check_variant`)."""

    do = "laws"
    refusals: ClassVar = (Unsupported,)
    variant: str
    law: str

    def found(self, tell: object = None) -> dict[str, Any]:
        """The worker's side. Raises Unsupported if no setting can be built."""
        report = check_variant(self.variant, laws=[self.law])
        return {"findings": [asdict(finding) for finding in report.findings]}

    def answered(self, answer: dict[str, Any]) -> list[Finding]:
        return [Finding(**finding) for finding in answer["findings"]]


def examine(
    worker: Worker,
    variant: str,
    laws: Sequence[str],
    *,
    timeout: float,
    begun: Callable[[str], None] = lambda law: None,
    found: list[Finding] | None = None,
) -> Report:
    """The report of :func:`attnbench.laws.check_variant`, whatever the variant does to the process.

    Args:
        timeout: seconds for one law.
        begun: called with the name of each law before it is tried.
        found: gets each law's findings at once, for a caller that stops this.

    Raises:
        Unsupported: no setting can be built for the small shapes of the laws.
        WorkerFailed: the process cannot be started.
    """
    findings: list[Finding] = [] if found is None else found
    for law in laws:
        begun(law)
        try:
            findings += HoldToLaw(variant, law).ask(worker, timeout)
        except CellFailed as failed:
            # What ends the process once may do so in every law, and each try costs a start or the whole timeout.
            given_up = "; the laws after it were not tried" * (law != laws[-1])
            findings.append(Finding(law, "every setting", False, fault=failed.reason + given_up))
            break
        if findings and findings[-1].final:
            break
    return Report(parse_spec(variant).name, tuple(findings))
