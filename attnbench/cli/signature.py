"""One declaration of a command's options, from which the command line and the Python function both follow.

The options are a ``TypedDict``; each field is ``Annotated[type, typer.Option(...), Default(value)]``. Without
``Default`` it is None, or False for a flag. The help of an option is also its text in the docstring of the function.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from attnbench.errors import AttnbenchError, UsageError, any_of, did_you_mean

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

    def words(self, name: str) -> list[str]:
        """The option as it is typed: ``--n``, ``-k``."""
        given = [one for one in (self.option.default, *(self.option.param_decls or ())) if isinstance(one, str)]
        return [word for one in given for word in one.split("/")] or [f"--{name.replace('_', '-')}"]

    def hold(self, name: str, value: Any) -> None:
        """Raise UsageError for a value that the command line does not take: no such word, or a number out of bounds."""
        kinds = (self.type, *get_args(self.type))
        words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
        if words and value not in (*words, None):
            raise UsageError(f"{name} must be {any_of(words)}, not {value!r}")
        low, high = (-math.inf if self.option.min is None else self.option.min, self.option.max or math.inf)
        if isinstance(value, int | float) and not low <= value <= high:
            bounds = f"at least {low}" if high == math.inf else f"between {low} and {int(high)}"
            raise UsageError(f"{name} must be {bounds}, not {value!r}")


@cache
def _declared(options: type) -> dict[str, _Option]:
    found = {}
    for name, hint in get_type_hints(options, include_extras=True).items():
        type_, *metadata = get_args(hint)
        given = [one for one in metadata if isinstance(one, Default)]
        default = given[-1] if given else Default(False if type_ is bool else None)
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


def in_python(options: type, **others: str) -> Callable[[Function], Function]:
    """Give a function of ``**given`` the options as keyword arguments, and their help as a part of its docstring.

    Its errors name arguments in place of options, and values that the command line does not take are such errors.
    ``others``: an option of the command alone -> the argument like it.
    """

    def signed(function: Function) -> Function:
        declared = _declared(options)
        words = {word: name for name, one in declared.items() for word in one.words(name)}

        @naming_arguments(**{f"--{word.strip('_')}": name for word, name in others.items()}, **words)
        @wraps(function)
        def called(*arguments: Any, **given: Any) -> Any:
            for name in filter(declared.__contains__, given):
                declared[name].hold(name, given[name])
            return function(*arguments, **given)

        lines = "".join(f"        {name}: {' '.join(str(one.option.help).split())}\n" for name, one in declared.items())
        called.__doc__ = (function.__doc__ or "").replace("        **given: see below.\n", lines)
        types = {name: one.type for name, one in declared.items()}
        return _with(cast(Function, called), inspect.signature(function), types, options)

    return signed


def naming_arguments(**names: str) -> Callable[[Function], Function]:
    """Let the errors of a function name its arguments in place of the options of its command, given as ``names``."""

    def naming(function: Function) -> Function:
        @wraps(function)
        def called(*arguments: Any, **given: Any) -> Any:
            try:
                return function(*arguments, **given)
            except AttnbenchError as error:
                error.args = (_OPTION.sub(lambda found: names.get(found[0], found[0]), str(error)),)
                raise

        return cast(Function, called)

    return naming


_OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


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
