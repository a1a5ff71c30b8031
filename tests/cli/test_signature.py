"""A command and its Python function take their options, with the same defaults, from one declaration."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any, TypedDict, Unpack, get_type_hints

import pandas as pd
import pytest
import typer

import attnbench
from attnbench.cli import options
from attnbench.cli.signature import Default, command, completed, in_python
from attnbench.errors import AttnbenchError, UsageError

COMMANDS = {
    "run": options.RunOptions,
    "compare": options.CompareOptions,
    "match": options.MatchOptions,
    "best": options.BestOptions,
    "history": options.HistoryOptions,
    "swap": options.SwapOptions,
    "plot": options.PlotOptions,
}


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", COMMANDS)
def test_both_take_every_declared_option_with_the_same_default(name: str) -> None:
    typed = parameters(getattr(import_module(f"attnbench.cli.{name}"), name))
    called = parameters(getattr(attnbench, name))
    declared = get_type_hints(COMMANDS[name], include_extras=True)
    assert declared
    for option in declared:
        assert typed[option].default == called[option].default, option


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_an_option_stands_in_the_docstring(name: str) -> None:
    said = inspect.getdoc(getattr(attnbench, name))
    assert said is not None
    assert "see below" not in said
    for option in get_type_hints(COMMANDS[name]):
        assert f"\n    {option}: " in said, option


def test_an_unknown_argument_is_one_line_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown argument 'head'; did you mean 'heads'"):
        attnbench.compare("sdpa", "softmax", head=2)  # type: ignore[call-arg]  # as a user may write it


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: attnbench.run("quick", memory_limit="lots"), r"^memory_limit: 'lots' is not a size"),
        (lambda: attnbench.run("quick", overrides={"seq_len": "x"}), "^overrides seq_len"),
        (lambda: attnbench.compare("sdpa", lengths="0"), "lengths 0: a length is at least 1; write lengths 1024"),
        (lambda: attnbench.compare("sdpa", new_tokens=3), "^new_tokens 3: .* add pass_ generate"),
        (lambda: attnbench.compare("sdpa", mask="document:300+212", lengths="512,1000"), "do not add up to 1000; give"),
        (lambda: attnbench.match("performer"), "give error 0.1, memory 64MiB, time 10ms or score 0.9"),
        (lambda: attnbench.swap("listops", "local", learning_rate=7.0), "^learning_rate must be above 0"),
        (lambda: attnbench.report(pd.DataFrame(), check="none.json"), "^check none.json"),
        (lambda: attnbench.run("quick", process="fast"), "^process must be tuned or as-shipped, not 'fast'"),
        (lambda: attnbench.run("quick", rounds=0), "^rounds must be between 1 and 20, not 0"),
        (lambda: attnbench.run("quick", cell_timeout=math.nan), "^cell_timeout must be between 1 and 1000000, not nan"),
        (lambda: attnbench.compare("sdpa", min_time=-1), "^min_time must be between 0.001 and 3600, not -1"),
        (
            lambda: attnbench.best(shape="gdn-2", max_error=math.nan),
            "^max_error must be between 0.0 and 1000000",
        ),
        (lambda: attnbench.match("performer", error=0.1, draws=0), "^draws must be between 1 and 1000, not 0"),
        (lambda: attnbench.history("results", metric="speed"), "^metric must be time, memory or error, not 'speed'"),
        (lambda: attnbench.swap("listops", "local", seeds=0), "^seeds must be between 1 and 100, not 0"),
        (lambda: attnbench.plot(pd.DataFrame(), style="dork"), "^style must be light or dark, not 'dork'"),
        (lambda: attnbench.compare("sdpa", heads=0), "^heads must be between 1 and 1048576, not 0"),
        (lambda: attnbench.compare("sdpa", seed=2**63), f"^seed must be between 0 and {2**63 - 1}, not {2**63}"),
    ],
)
def test_python_is_told_of_arguments_and_not_of_options(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(AttnbenchError, match=said):
        call()


class Two(TypedDict, total=False):
    a: Annotated[int, typer.Option("--a", help="First."), Default(1)]
    b: Annotated[str | int, typer.Option(help="Second."), Default("x", str)]


def plain() -> Any:
    def function(first: str, *, last: bool = False, **given: Unpack[Two]) -> None:
        """Nothing.

        Args:
            first: one.
            **given: see below.
        """

    return function


def test_options_stand_between_arguments_and_the_function_s_own_keywords() -> None:
    assert list(parameters(command(Two)(plain()))) == ["first", "a", "b", "last"]
    assert parameters(in_python(Two)(plain()))["b"].annotation == str | int
    assert completed(Two, {"b": "y"}) == {"a": 1, "b": "y"}
