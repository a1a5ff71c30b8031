"""The Typer application, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, cast

import typer

from attnbench import __version__
from attnbench.cli import check, compare, console, list_, plot, run, show
from attnbench.errors import AttnbenchError, Exit

UsageProblem = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])
"""The base of everything that typer finds wrong with a command line; it has no public name."""

app = typer.Typer(
    name="attnbench",
    help="Which attention variant is faster at my length, by how much, in how much memory, and at what error?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.run)
app.command("plot")(plot.plot)
app.command("compare")(compare.compare)
app.command("check")(check.check)
app.command("list")(list_.list_)
app.command("show")(show.show)


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


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise _Terminated


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code (see :class:`attnbench.errors.Exit`)."""
    signal.signal(signal.SIGTERM, _terminate)
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
