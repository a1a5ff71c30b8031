"""Probe a module that is no registered variant in the isolated process, since it is foreign code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from attnbench.errors import Unsupported, UsageError
from attnbench.harness.outside.isolation import CellFailed, Worker
from attnbench.harness.wire.protocol import Request
from attnbench.laws.modules.questions import QUESTIONS, Found, answer, basics, collected
from attnbench.laws.modules.subject import Wanted, subject_of


@dataclass(frozen=True, slots=True)
class AskModule(Request[dict[str, Any]]):
    """Ask a module one question (:data:`attnbench.laws.modules.questions.QUESTIONS`), or how it can be called."""

    do = "probe"
    refusals: ClassVar = (UsageError, Unsupported)
    wanted: Wanted
    question: str = ""
    """Empty: how it can be called."""

    def found(self, tell: object = None) -> dict[str, Any]:
        """The worker's side. Raises UsageError or Unsupported if the module cannot be made, called or examined."""
        subject = subject_of(self.wanted)
        return answer(subject, self.question) if self.question else basics(subject)


def examine_module(
    worker: Worker, wanted: Wanted, timeout: float, begun: Callable[[str], None] = lambda question: None
) -> Found:
    """Ask everything; a question that ends the process or takes too long leaves the others their answers.

    Args:
        timeout: seconds for one question.
        begun: called with each question before it is asked.

    Raises:
        UsageError: the module cannot be made or called.
        Unsupported: nothing can be asked of it.
        WorkerFailed: the process cannot be started.
    """
    try:
        known = AskModule(wanted).ask(worker, timeout)
    except CellFailed as failed:
        raise Unsupported(f"{wanted.source}: {failed.reason}") from None
    answers = {}
    for question in QUESTIONS:
        begun(question)
        try:
            answers[question] = AskModule(wanted, question).ask(worker, timeout)
        except CellFailed as failed:
            answers[question] = {"unasked": failed.reason}
    return collected(known, answers)
