"""A mistake in a suite, in plain words with a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from attnbench.errors import SuiteError, UsageError, any_of, did_you_mean, plain_words
from attnbench.text import one_line

Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Origin:
    """The place of a suite, for error messages."""

    path: str = "suite"
    lines: Mapping[Place, int] = field(default_factory=dict)

    def line(self, place: Place) -> int:
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 1)

    def error(self, place: Place, message: str) -> SuiteError | UsageError:
        return self.error_on(self.line(place), message)

    def error_on(self, line: int, message: str) -> SuiteError:
        return SuiteError(f"{one_line(self.path, 4096)}:{line}: {one_line(message, 400)}")


@dataclass(frozen=True)
class CommandLine(Origin):
    """Origin of a suite that a command made from its options, which have no lines."""

    options: Mapping[str, str] = field(default_factory=dict)
    """Key of the suite -> the option on the command line: ``seq_len`` -> ``--n``."""

    def error(self, place: Place, message: str) -> UsageError:
        said = one_line(message, 400)
        for key in reversed(place):
            if isinstance(key, str) and (option := self.options.get(key)):
                return UsageError(said.replace(repr(key), option, 1) if repr(key) in said else f"{option}: {said}")
        return UsageError(said)


def wrong(message: str, *place: str | int) -> NoReturn:
    """Raise ``message`` as a validation error at ``place``, which pydantic collects with its own."""
    problem = PydanticCustomError("suite", "{message}", {"message": message})
    raise ValidationError.from_exception_data("suite", [InitErrorDetails(type=problem, loc=place, input=None)])


def shown(value: object) -> str:
    """``value`` in an error message, short and as YAML would have it."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:59] + "…")
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "nothing"
    if isinstance(value, list):
        return "a list"
    return "a mapping" if isinstance(value, dict) else repr(value)


def pick(word: object, known: Iterable[str]) -> str:
    """``; did you mean 'speed'?``, or the choices."""
    known = list(known)
    return did_you_mean(str(word)[:100], known) or f"; write {any_of(known)}"


def explain(details: dict[str, Any]) -> str:
    """The meaning of a pydantic error for the file's author; unknown keys are left to the caller."""
    place: Place = details["loc"]
    key = next((repr(part) for part in reversed(place) if isinstance(part, str)), "the suite")
    got, limits = shown(details["input"]), details.get("ctx", {})
    match details["type"]:
        case "suite":
            return str(details["msg"])
        case "missing":
            return f"{key} is missing; add it"
        case "literal_error":
            words = [word.strip("'") for word in str(limits["expected"]).replace(" or ", ", ").split(", ")]
            return f"{key} cannot be {got}{pick(details['input'], words)}"
        case "int_type":
            return f"{key} must be a whole number, got {got}; write digits without quotes"
        case "greater_than_equal" | "less_than_equal":
            bound = f"at least {limits['ge']}" if "ge" in limits else f"at most {limits['le']}"
            return f"{key} must be {bound}, got {got}; change the number"
        case "string_type":
            return f"{key} must be text, got {got}; put it in quotes"
        case "string_pattern_mismatch":
            return f"{key}: {got} is not a name; use letters, digits, '.', '_' and '-', at most 64"
        case "list_type":
            return f"{key} must be a list, got {got}; write [..] or lines that start with '- '"
        case "too_short":
            return f"{key} is an empty list; give at least one"
        case "too_long":
            return f"{key} has {limits['actual_length']} entries, at most {limits['max_length']}; use fewer"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{key} must be a mapping, got {got}; write lines of 'key: value'"
    return f"{key} {plain_words(details['msg'])}, got {got}; change it"
