"""The Typer application, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import FrameType
from typing import Annotated, Any, cast

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from attnbench import __version__
from attnbench.cli import console
from attnbench.errors import AttnbenchError, Exit

COMMANDS = {
    "run": "Measure every cell of a suite, or go on with a run.",
    "plot": "Draw the figures of a run.",
    "compare": "Time variants in turn; say from which length one wins.",
    "check": "Hold variants to their formula and to their claims.",
    "list": "List variants by family, suites, or inputs.",
    "show": "Show a variant's paper, formula, cost and options.",
}
"""In the order shown. The rest of a command is in a file of its own, which is read only where the command is meant."""

UsageProblem = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])
"""The base of everything that typer finds wrong with a command line; it has no public name."""


class _Command(TyperCommand):
    """Does not convert values while the shell completes: all that counts is which are given already.

    Converting them imports pydantic, which takes longer than everything else that completion does.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        given, ctx.args, _ = self.make_parser(ctx).parse_args(args=args)
        for parameter in self.get_params(ctx):
            ctx.params[parameter.name], source = parameter.consume_value(ctx, given)
            ctx.set_parameter_source(parameter.name, source)
        rest: list[str] = ctx.args
        return rest


def _command(name: str | None) -> Any:
    python_name = "list_" if name == "list" else name  # lest it hide the built-in one
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, cls=_Command)(getattr(import_module(f"attnbench.cli.{python_name}"), str(python_name)))
    return typer.main.get_command(app)


class _Group(TyperGroup):
    """The commands, of which one is imported once it is clear which: their options take as long as importing typer."""

    def __init__(self, **settings: Any) -> None:
        known = {name: TyperCommand(name, help=what) for name, what in COMMANDS.items()}
        super().__init__(**{**settings, "commands": known})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, known, rest = super().resolve_command(ctx, args)
        return name, known and _command(name), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _Terminated:  # which typer takes for Ctrl-C
            raise typer.Exit(Exit.TERMINATED) from None

    # As in a command: of typer's own flags it would otherwise convert that they are not given.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for flag in self.get_params(ctx):
            flag.default = flag.default or False
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Group,
    name="attnbench",
    help="Which attention variant is faster at my length, by how much, in how much memory, and at what error?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help by rich takes twice as long as all the rest: it brings a Markdown parser along
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        console.line(f"attnbench {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


class _Terminated(KeyboardInterrupt):
    """SIGTERM: the same orderly end as Ctrl-C, another exit code."""


def _stop(signum: int, frame: FrameType | None) -> None:
    """The first signal ends the command in order, one more at once, whatever that order is waiting for."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop_now)
    raise KeyboardInterrupt if signum == signal.SIGINT else _Terminated


def _stop_now(signum: int, frame: FrameType | None) -> None:
    os._exit(Exit.INTERRUPTED if signum == signal.SIGINT else Exit.TERMINATED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code (see :class:`attnbench.errors.Exit`)."""
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as it is behind nohup and &
        signal.signal(signal.SIGINT, _stop)
    atexit.register(gc.freeze)  # else Python ends by looking for garbage in all that was imported: 0.2 s after torch
    try:
        code = app(args=arguments, prog_name="attnbench", standalone_mode=False)
        return code if isinstance(code, int) else Exit.OK
    except AttnbenchError as error:
        console.error(str(error))
        return error.exit_code
    except UsageProblem as problem:
        if not problem.args[0]:  # no command at all: the help was printed
            return Exit.USAGE
        console.error(f"{' '.join(problem.format_message().split())}; attnbench --help shows what there is")
        return Exit.USAGE
    except _Terminated:
        return Exit.TERMINATED
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; writing more would only raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    except SystemExit as stop:
        return int(stop.code) if isinstance(stop.code, int) else Exit.OK if stop.code is None else Exit.FAILED
