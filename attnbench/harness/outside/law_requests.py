"""Ask variants and foreign modules in the isolated process: one that ends it, hangs or eats all memory fails there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported, UsageError
from attnbench.harness.outside.isolation import CellFailed, Worker
from attnbench.harness.wire.protocol import Request
from attnbench.laws import Finding, Report, check_variant
from attnbench.laws.bits import QUESTIONS, Answer, BitsSubject, ask
from attnbench.laws.laws import Case
from attnbench.laws.modules.probed_module import Probe, subject_of
from attnbench.laws.modules.questions import QUESTIONS as OF_MODULES
from attnbench.laws.modules.questions import ModuleAnswers, answer, basics, collected
from attnbench.laws.own_error import OwnError, own_error


@dataclass(frozen=True, slots=True)
class HoldToLaw(Request[list[Finding]]):
    """Hold a variant to one law (:func:`attnbench.laws.check_variant`)."""

    refusals: ClassVar = (Unsupported,)
    variant: str
    law: str

    def found(self, tell: object = None) -> list[Finding]:
        """The worker's side. Raises Unsupported if no setting can be built."""
        return list(check_variant(self.variant, laws=[self.law]).findings)


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
            why = failed.reason + "; the laws after it were not tried" * (law != laws[-1])
            fault, skipped = ("", why) if failed.starved else (why, "")
            findings.append(Finding(law, "every setting", failed.starved, fault=fault, skipped=skipped))
            break
        if findings and findings[-1].final:
            break
    return Report(parse_spec(variant).name, tuple(findings))


def _case(variant: str) -> Case:
    """The variant with its defaults or the options of the text, causal if it can be."""
    spec = parse_spec(variant)
    entry = VARIANTS.get(spec.name)
    return Case(entry, spec, bool(entry.traits.causal)).fitted()


@dataclass(frozen=True, slots=True)
class AskOwnErrors(Request[dict[str, OwnError]]):
    """Measure a variant against its own formula in each data type that a model may have; ``{}`` in none."""

    refusals: ClassVar = (Unsupported,)
    variant: str

    def found(self, tell: object = None) -> dict[str, OwnError]:
        import torch

        case = _case(self.variant)
        dtypes = [one for one in ("float32", "bfloat16", "float16") if one in case.dtypes]
        return {one: own_error(case, getattr(torch, one)) for one in dtypes}


@dataclass(frozen=True, slots=True)
class AskBits(Request[Answer]):
    """Ask one of :data:`attnbench.laws.bits.QUESTIONS` of a variant on a device."""

    refusals: ClassVar = (Unsupported,)
    variant: str
    question: str
    device: str
    dtype: str | None
    """None: float32, or what the variant takes instead."""

    def found(self, tell: object = None) -> Answer:
        import torch

        case = _case(self.variant)
        if self.dtype is not None and self.dtype not in case.dtypes:
            raise Unsupported(f"{case.variant.name}: dtype: it takes {', '.join(case.dtypes)}")
        dtype = case.common_dtype if self.dtype is None else getattr(torch, self.dtype)
        return ask(self.question, BitsSubject.of(case, dtype, self.device))


def bits(
    worker: Worker,
    variant: str,
    dtype: str | None,
    *,
    timeout: float,
    begun: Callable[[str], None] = lambda question: None,
) -> list[Answer]:
    """The answers to all questions; one that ends the process or takes too long leaves the others theirs.

    Args:
        timeout: seconds for one question.

    Raises:
        Unsupported: the variant does not take the data type.
        WorkerFailed: the process cannot be started.
    """
    answers = []
    for question in QUESTIONS:
        begun(question)
        try:
            answers.append(AskBits(variant, question, worker.settings.device, dtype).ask(worker, timeout))
        except CellFailed as failed:
            answers.append(Answer(question, dtype or "", why=failed.reason))
    return answers


@dataclass(frozen=True, slots=True)
class AskModule(Request[dict[str, Any]]):
    """Ask a module one question (:data:`attnbench.laws.modules.questions.QUESTIONS`), or how it can be called."""

    refusals: ClassVar = (UsageError, Unsupported)
    wanted: Probe
    question: str = ""
    """Empty: how it can be called."""

    def found(self, tell: object = None) -> dict[str, Any]:
        """The worker's side. Raises UsageError or Unsupported if the module cannot be made, called or examined."""
        subject = subject_of(self.wanted)
        return answer(subject, self.question) if self.question else basics(subject)


def examine_module(
    worker: Worker, wanted: Probe, timeout: float, begun: Callable[[str], None] = lambda question: None
) -> ModuleAnswers:
    """Ask everything; a question that ends the process or takes too long leaves the others their answers.

    ``timeout``: seconds for one question. ``begun``: called with each question before it is asked. Raises UsageError if
    the module cannot be made or called, Unsupported if nothing can be asked of it, and WorkerFailed.
    """
    try:
        known = AskModule(wanted).ask(worker, timeout)
    except CellFailed as failed:
        raise Unsupported(f"{wanted.source}: {failed.reason}") from None
    answers = {}
    for question in OF_MODULES:
        begun(question)
        try:
            answers[question] = AskModule(wanted, question).ask(worker, timeout)
        except CellFailed as failed:
            answers[question] = {"unasked": failed.reason}
    return collected(known, answers)
