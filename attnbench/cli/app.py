"""The Typer application, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import re
import signal
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from shutil import get_terminal_size
from tempfile import NamedTemporaryFile
from types import FrameType
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from attnbench.cli.completion import join_words
from attnbench.cli.screen import console
from attnbench.cli.screen.console import lasting_streams
from attnbench.cli.usage import COMMANDS, OVERVIEW, UsageProblem, explain
from attnbench.errors import AttnbenchError, Exit, UsageError, did_you_mean, said
from attnbench.text import without_secrets
from attnbench.version import __version__


class _Help(typer.Context.formatter_class):  # type: ignore[valid-type,misc]  # typer's own, or click's
    """Help for any screen: of itself it takes 50 columns or more, and 30 of them for names."""

    def __init__(self, **_: Any) -> None:
        super().__init__(width=max(console.NARROWEST, min(get_terminal_size().columns, 80) - 2))

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        if self.width < 50:
            rows = [
                (name if len(name) < self.width else re.sub(r"(?<=\|)| ", "\n    ", name), said) for name, said in rows
            ]
        super().write_dl(rows, col_max if self.width >= 50 else 2, col_spacing)


class _HelpContext(typer.Context):
    formatter_class = _Help


class _GuardedCommand(typer.core.TyperCommand):
    """A command that refuses to start if loading libraries would end Python without a word."""

    context_class = _HelpContext

    def invoke(self, ctx: Any) -> Any:
        from attnbench.harness.wire.process import allowed_address_space

        if ctx.info_name != "env" and (allowed_address_space() or _LEAST_TO_LOAD) < _LEAST_TO_LOAD:
            raise MemoryError  # before loading a library that ends Python if it gets no memory
        if not ctx.params.get("plugin", ctx.params.get("plugins", ["none is asked for"])):
            _refuse_unknown(ctx.params.get("variants") or ())
        return super().invoke(ctx)

    # Completion by the shell needs only names: converting values would import pydantic.
    def _unconverted(self, ctx: Any, args: list[str]) -> list[str]:
        given, ctx.args, _ = self.make_parser(ctx).parse_args(args=args)
        for parameter in self.get_params(ctx):
            ctx.params[parameter.name], source = parameter.consume_value(ctx, given)
            ctx.set_parameter_source(parameter.name, source)
        rest: list[str] = ctx.args
        return rest

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return self._unconverted(ctx, args) if ctx.resilient_parsing else super().parse_args(ctx, args)
        except UsageProblem as problem:
            problem.ctx = problem.ctx or ctx  # typer does not always name the command
            raise


def _refuse_unknown(variants: Sequence[str]) -> None:
    """Refuse a mistyped variant before torch is imported; all else that is wrong is for the command to say."""
    for text in variants:
        name = text.partition(":")[0]
        if re.fullmatch(r"[\w-]+", name) and name not in ("all", "exact"):
            from attnbench.contract.variant import VARIANTS

            if VARIANTS.indexed():
                VARIANTS.refuse_unknown(name)


_LEAST_TO_LOAD = 512 * 2**20
"""Least bytes of address space with which loading is tried; torch needs more."""
_ENOUGH_TO_LOAD = 2 * 2**30
"""Bytes of address space with which it succeeds."""


def _command(name: str | None) -> Any:
    python_name = "list_" if name == "list" else name  # so that it does not hide the built-in one
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    epilog = f"Example: attnbench {COMMANDS[name].example}" if name else ""
    app.command(name, cls=_GuardedCommand, epilog=epilog)(
        getattr(import_module(f"attnbench.cli.{python_name}"), str(python_name))
    )
    return typer.main.get_command(app)


class _Group(typer.core.TyperGroup):
    """Commands, each imported once it is chosen; until then a line of help stands for it."""

    context_class = _HelpContext

    def __init__(self, **settings: Any) -> None:
        known = {name: typer.core.TyperCommand(name, short_help=one.what) for name, one in COMMANDS.items()}
        super().__init__(**{**settings, "commands": known})

    # As in a command: else a value would be converted for each of typer's own flags that is not given.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for flag in self.get_params(ctx):
            flag.default = flag.default or False
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not ctx.resilient_parsing and args[0] not in COMMANDS and not args[0].startswith("-"):
            nearest = did_you_mean(args[0], COMMANDS) or f"; there are {', '.join(COMMANDS)}"
            raise UsageError(f"unknown command {args[0]!r}{nearest}")
        name, known, rest = super().resolve_command(ctx, args)
        return name, known and _command(name), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _Terminated:  # typer would take it for Ctrl-C
            raise typer.Exit(Exit.TERMINATED) from None


app = typer.Typer(
    cls=_Group,
    name="attnbench",
    help="Which attention variant is faster at my length, by how much, in how much memory, and at what error?",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help by rich takes twice as long as all the rest: it loads a Markdown parser
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        console.line(f"attnbench {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        console.line(OVERVIEW)


class _Interrupted(KeyboardInterrupt):
    """SIGINT, as opposed to a KeyboardInterrupt that a plug-in raises itself."""


class _Terminated(KeyboardInterrupt):
    """SIGTERM: the same orderly end as Ctrl-C, with another exit code."""


def _stop(signum: int, frame: FrameType | None) -> None:
    """End the command in good order at the first signal, at once at the second."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop_now)
    raise _Interrupted if signum == signal.SIGINT else _Terminated


def _stop_now(signum: int, frame: FrameType | None) -> None:
    os._exit(Exit.INTERRUPTED if signum == signal.SIGINT else Exit.TERMINATED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code (see :class:`attnbench.errors.Exit`)."""
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # it is ignored after nohup and &
        signal.signal(signal.SIGINT, _stop)
    if os.environ.get("_ATTNBENCH_COMPLETE") == "complete_bash":
        join_words()
    # Else Python searches all that torch brings for garbage: 0.2 s while it is imported, and 0.2 s at the end.
    gc.set_threshold(1_000_000)
    atexit.register(gc.freeze)
    os.environ.pop("MPLBACKEND", None)  # matplotlib refuses to be imported with a name that it does not know
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns if a home cannot be written
    with lasting_streams() as output:
        code = _run(arguments)
        if not output.lost or code != Exit.OK:
            return code
        if output.only_repeats:
            console.warning(f"cannot write to stdout: {output.lost}; what is on disk is whole")
            return Exit.OK
        console.error(f"cannot write to stdout: {output.lost}")
        return Exit.IO


def _run(arguments: Sequence[str] | None) -> int:
    try:
        code = app(args=arguments, prog_name="attnbench", standalone_mode=False)
        return code if isinstance(code, int) else Exit.OK
    except AttnbenchError as error:
        console.error(str(error))
        return error.exit_code
    except UsageProblem as problem:
        console.error(explain(problem))
        return Exit.USAGE
    except _Terminated:
        return Exit.TERMINATED
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except SystemExit as stop:
        return int(stop.code) if isinstance(stop.code, int) else Exit.OK if stop.code is None else Exit.FAILED
    except Exception as error:
        return _unforeseen(error)


def _unforeseen(error: Exception) -> int:
    """Print one line on an unforeseen error, write its traceback to a file, and return the exit code."""
    from attnbench.harness.outside.isolation import CellFailed
    from attnbench.harness.wire.process import allowed_address_space
    from attnbench.units import format_bytes

    allowed = allowed_address_space() if isinstance(error, ImportError | MemoryError) else None
    if allowed is not None and allowed < _ENOUGH_TO_LOAD:
        console.error(f"ulimit -v of {format_bytes(allowed)} is too little to load torch; raise it to 2 GiB or more")
        return Exit.USAGE
    where = "no file could be written for its traceback"
    with suppress(OSError), NamedTemporaryFile("w", prefix="attnbench-", suffix=".txt", delete=False) as file:
        there = error.stderr if isinstance(error, CellFailed) else traceback.format_exception(error)
        file.write(without_secrets("\n".join(there)))
        where = f"please send {file.name}, its traceback, to who maintains attnbench, with what 'attnbench env' prints"
    console.error(f"unforeseen error: {error.reason if isinstance(error, CellFailed) else said(error)}; {where}")
    return Exit.FAILED
