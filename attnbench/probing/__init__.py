"""Questions to a module that is no registered variant, as it is: what ``attnbench check FILE.py:Class`` asks.

:mod:`~attnbench.probing.subject` makes and calls it, :mod:`~attnbench.probing.questions` measures, and
:mod:`~attnbench.probing.verdict` says in words what was found.
"""

from attnbench.probing.questions import QUESTIONS, Found, answer, basics, collected, probe
from attnbench.probing.subject import Subject, Wanted, subject_of
from attnbench.probing.verdict import Line, conclusion, contradictions, lines, named_after

__all__ = [
    "QUESTIONS",
    "Found",
    "Line",
    "Subject",
    "Wanted",
    "answer",
    "basics",
    "collected",
    "conclusion",
    "contradictions",
    "lines",
    "named_after",
    "probe",
    "subject_of",
]
