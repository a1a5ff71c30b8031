"""One declaration of a command's options, from which the command line and the Python function both follow.

The options are a ``TypedDict``; each field is ``Annotated[type, typer.Option(...), Default(value)]``. The help of an
option is also its text in the docstring of the function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, cast, get_args, get_type_hints

from attnbench.errors import UsageError, did_you_mean

Function = TypeVar("Function", bound=Callable[..., Any])
Options = TypeVar("Options", bound=Mapping[str, Any])


@dataclass(frozen=True)
class Default:
    """Value of an option that is not given."""

    value: Any
    typed_as: Any = None
    """Type of the option on the command line if it has another than the argument in Python."""


@dataclass(frozen=True)
class _Option:
    type: Any
    option: Any
    default: Default

    @property
    def on_the_command_line(self) -> Any:
        return Annotated[self.default.typed_as or self.type, self.option]


@cache
def _declared(options: type) -> dict[str, _Option]:
    found = {}
    for name, hint in get_type_hints(options, include_extras=True).items():
        type_, *metadata = get_args(hint)
        default = [one for one in metadata if isinstance(one, Default)][-1]
        option = next(one for one in metadata if not isinstance(one, Default))
        found[name] = _Option(type_, option, default)
    return found


def completed(options: type[Options], given: Options) -> Options:
    """All options of the declaration, with defaults for the others; UsageError for an unknown name."""
    declared = _declared(options)
    for name in given.keys() - declared.keys():
        raise UsageError(f"unknown argument {name!r}{did_you_mean(name, declared)}")
    return cast(Options, {name: given.get(name, one.default.value) for name, one in declared.items()})


def command(options: type) -> Callable[[Function], Function]:
    """Give a function of ``**given`` the options as typer reads them."""

    def signed(function: Function) -> Function:
        own = inspect.signature(function, eval_str=True)
        return _with(
            function, own, {name: one.on_the_command_line for name, one in _declared(options).items()}, options
        )

    return signed


def in_python(options: type) -> Callable[[Function], Function]:
    """Give a function of ``**given`` the options as keyword arguments, and their help as a part of its docstring."""

    def signed(function: Function) -> Function:
        declared = _declared(options)
        lines = "".join(f"        {name}: {' '.join(str(one.option.help).split())}\n" for name, one in declared.items())
        function.__doc__ = (function.__doc__ or "").replace("        **given: see below.\n", lines)
        return _with(function, inspect.signature(function), {name: one.type for name, one in declared.items()}, options)

    return signed


def _with(function: Function, own: inspect.Signature, types: Mapping[str, Any], options: type) -> Function:
    defaults = {name: one.default.value for name, one in _declared(options).items()}
    keyword = inspect.Parameter.KEYWORD_ONLY
    declared = [inspect.Parameter(name, keyword, default=defaults[name], annotation=one) for name, one in types.items()]
    *mine, _ = own.parameters.values()
    first, last = [one for one in mine if one.kind != keyword], [one for one in mine if one.kind == keyword]
    signature = own.replace(parameters=[*first, *declared, *last])
    function.__signature__ = signature  # type: ignore[attr-defined]  # inspect reads it, and so typer does
    function.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()}
    return function
