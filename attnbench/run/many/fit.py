"""Whether a machine may take part in a run: versions, niceness, files and plug-ins as the driver has them."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from attnbench import __version__
from attnbench.record import one_line
from attnbench.run.many.engine import Message


def ours(base: Mapping[str, Any]) -> dict[str, Any]:
    """What every machine must have.

    Args:
        base: the run's identity, as :func:`attnbench.run.identity.identity` gives it.
    """
    return {
        "attnbench": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "input_files": base["input_files"],
        "plugins": base["plugins"],
    }


def misfit(facts: Message, wanted: Mapping[str, Any]) -> str:
    """Why a machine cannot take part, in one line with the remedy; empty where it can.

    Args:
        facts: what the machine says when it is asked first.
        wanted: as :func:`ours` gives it.
    """
    for name, parts in (("attnbench", 3), ("torch", 3), ("python", 2)):
        theirs, here = (_release(one[name], parts) for one in (facts, wanted))
        if theirs != here:
            return f"it has {name} {one_line(theirs, 40)}, the driver {here}; install the same version on all machines"
    if facts["niceness"] > facts["niceness_of_parent"]:
        levels = facts["niceness"] - facts["niceness_of_parent"]
        return (
            f"the engine runs its processes {levels} levels nicer, so anything else there goes first; set "
            "RAY_worker_niceness=0 before ray start"
        )
    for name in sorted(facts["input_files"].keys() | wanted["input_files"].keys()):
        theirs, here = facts["input_files"].get(name), wanted["input_files"].get(name)
        if theirs != here:
            how = "is missing there" if theirs is None else "has other contents there"
            return f"{one_line(name, 80)} {how}; put the same file at the same place on all machines"
    if sorted(facts["plugins"].values()) != sorted(wanted["plugins"].values()):
        return "its plug-ins are not those of the driver; install the same on all machines"
    return ""


def _release(text: str, parts: int) -> str:
    """``2.13.0+cpu`` -> ``2.13.0``: the build for a GPU and the one without are one version."""
    return ".".join(str(text).partition("+")[0].split(".")[:parts])
