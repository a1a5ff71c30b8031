"""What ``import attnbench`` gives, from signatures and docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import attnbench
from attnbench.contract.traits import No, Traits
from attnbench.laws import check_variant
from generators.markdown import code, described, first_line, page, prose, table, text, words


def pages() -> Iterator[tuple[str, str]]:
    """Functions and classes, one section each."""
    public = [(f"attnbench.{name}", getattr(attnbench, name)) for name in attnbench.__all__]
    public.append(("attnbench.laws.check_variant", check_variant))
    parts = ["# The Python interface", "[From Python](../python.md) shows how they work together."]
    for name, found in public:
        parts += list(_section(name, found))
    parts += list(_traits())
    yield "reference/python.md", page(*parts)


def _section(name: str, found: Any) -> Iterator[str]:
    function = getattr(found, "__wrapped__", found)
    yield f"## {name}"
    if not (isinstance(found, type) and issubclass(found, str | Exception)):  # they have no signature
        yield f"```python\n{_signature(name, function)}\n```"
    first, rest = first_line(function.__doc__)
    yield text(first) if "``" not in first else words(first)
    yield prose(rest)


def _signature(name: str, function: Any) -> str:
    """One argument a line, as the source has it."""
    arguments = []
    keyword_only = False
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.KEYWORD_ONLY and not keyword_only:
            before = [other.kind for other in inspect.signature(function).parameters.values()]
            if one.VAR_POSITIONAL not in before:
                arguments.append("*")
            keyword_only = True
        star = "*" if one.kind is one.VAR_POSITIONAL else "**" if one.kind is one.VAR_KEYWORD else ""
        annotation = "" if one.annotation is one.empty else f": {_plain(one.annotation)}"
        value = "..." if callable(one.default) else repr(one.default)
        default = "" if one.default is one.empty else f" = {value}"
        arguments.append(f"{star}{one.name}{annotation}{default}")
    inside = "".join(f"    {argument},\n" for argument in arguments)
    return f"{name}(\n{inside})" if arguments else f"{name}()"


def _plain(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _traits() -> Iterator[str]:
    yield "## The claims of Traits"
    yield "What a variant may claim about itself. `attnbench check` holds it to each claim."
    meaning = described("attnbench/contract/traits.py", "Traits")
    defaults = {name: getattr(Traits, name) for name in meaning}
    rows = [[code(name), code(_claim(defaults[name])), words(said)] for name, said in meaning.items()]
    yield table(["claim", "default", "meaning"], rows)


def _claim(value: object) -> str:
    return f"No({str(value)!r})" if isinstance(value, No) else repr(value)
