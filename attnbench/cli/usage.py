"""The commands, each with an example; and one line on a faulty command line, with the remedy."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, cast

import typer

from attnbench.errors import any_of, did_you_mean, plain_words


class Command(NamedTuple):
    """One line of the overview."""

    what: str
    example: str
    needs: str = ""


COMMANDS = {
    "run": Command("Measure a suite, or resume a run.", "run quick", "a suite"),
    "plot": Command("Draw the figures of a run.", "plot results"),
    "report": Command("Write a run as one HTML page.", "report results"),
    "compare": Command("Time variants in turn; find crossovers.", "compare softmax performer", "a variant or more"),
    "best": Command("Find the fastest form at your shapes.", "best --shape llama3-8b", "shapes"),
    "match": Command("Compare variants at equal cost.", "match topk --error 0.1", "a variant"),
    "score": Command("Train variants on a task.", "score performer linear", "a variant"),
    "swap": Command("Replace a trained model's attention.", "swap listops -v performer", "a model, and --variant"),
    "capture": Command("Write q, k, v of a trained model.", "capture listops", "a model"),
    "diff": Command("Say what changed between two runs.", "diff OLD NEW", "two runs"),
    "history": Command("Follow the cells through many runs.", "history results", "runs"),
    "gate": Command("Fail if a run got worse.", "gate NEW --against OLD", "a run, and --against an older one"),
    "merge": Command("Join runs of several machines.", "merge a b --out all", "runs"),
    "verify": Command("Find rows that were edited or lost.", "verify results", "a run"),
    "board": Command("Make a site from runs of many people.", "board runs", "folders of runs"),
    "submit": Command("Hand a run in to a board.", "submit results/quick", "a run"),
    "export": Command("Hand rows to other programs.", "export RUN --format latex", "a run"),
    "cite": Command("Write method and BibTeX of a run.", "cite results/quick", "a run"),
    "check": Command("Hold variants to formula and claims.", "check performer"),
    "claims": Command("Compare published claims with your rows.", "claims results"),
    "list": Command("List variants, suites or inputs.", "list suites"),
    "show": Command("Show paper, formula, cost and options.", "show performer", "a variant or an input"),
    "init": Command("Write a first suite of your own.", "init mine.yaml"),
    "schema": Command("Print the JSON Schema of a suite.", "schema"),
    "env": Command("Print what a bug report needs.", "env"),
}

OVERVIEW = "\n".join(
    [
        "Which attention variant is faster? attnbench COMMAND --help lists the options.",
        *(f"  attnbench {command.example:<27}{command.what}" for command in COMMANDS.values()),
    ]
)

UsageProblem = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])
"""The base class of all errors that typer finds in a command line; it has no public name."""

_CHOICE = re.compile(r"('.*') is not one of (.*)")
_IN_OUR_WORDS = (
    (re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)"), r"too many arguments: \1"),
    (re.compile(r"Option '(.*)' requires an argument"), r"\1 needs a value"),
)


def explain(problem: typer.BadParameter) -> str:
    """One line: the fault, and what to type instead."""
    name = str(problem.ctx.info_name) if problem.ctx else ""
    command = COMMANDS.get(name)
    parameter = getattr(problem, "param", None)
    if parameter and command and not problem.message:  # all other problems have a message
        return f"{name} needs {command.needs}; for example: attnbench {command.example}"
    remedy = f"attnbench {name} --help lists the options" if command else "attnbench --help lists what there is"
    if parameter:
        is_option = parameter.param_type_name == "option"
        subject = parameter.opts[0] if is_option else f"the argument of {name}"
        return f"{subject} {_wanted(problem.message)}; {remedy}"
    if hasattr(problem, "possibilities"):
        unknown = str(getattr(problem, "option_name", ""))
        context: Any = problem.ctx
        flags = [flag for one in context.command.params for flag in one.opts if flag.startswith("--")]
        return f"unknown option {unknown}{did_you_mean(unknown, flags)}; {remedy}"
    said = problem.message.rstrip(".")
    for theirs, ours in _IN_OUR_WORDS:
        said = theirs.sub(ours, said)
    return f"{said[:1].lower()}{said[1:]}; {remedy}"


def _wanted(said: str) -> str:
    said = plain_words(said)
    choice = _CHOICE.fullmatch(said)
    if not choice:
        return said
    words = [word.strip("'") for word in choice[2].split(", ")]
    return f"must be {any_of(words)}, not {choice[1]}"
