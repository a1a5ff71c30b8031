"""``--on ENGINE[:ADDRESS]``: which engine, and where; what it may not be combined with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

from attnbench.errors import UsageError, did_you_mean
from attnbench.record import one_line
from attnbench.run.many.engine import Engine

ENGINES = ("ray",)
_DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Where:
    """An engine and the address of its cluster; empty where none is given."""

    engine: str
    address: str = ""


def parse_on(text: str) -> Where:
    """``ray``, or ``ray:10.0.0.1:6379``.

    Raises:
        UsageError: an unknown engine, one that is not installed, or an address that is none.
    """
    name, colon, address = text.strip().partition(":")
    if name not in ENGINES:
        nearest = did_you_mean(name.lower(), ENGINES) or "; write --on ray, or --on ray:ADDRESS"
        raise UsageError(f"--on {one_line(text, 60)!r}: no engine {one_line(name, 40)!r}{nearest}")
    if address.startswith(("//", "ray://")):
        raise UsageError(
            f"--on {one_line(text, 60)}: Ray's client cannot be used; run the command on a machine of the cluster, "
            "with --on ray:auto"
        )
    host, _, port = address.rpartition(":")
    if (colon and not address) or (address not in ("", "auto", "local") and not (host and port.isdecimal())):
        raise UsageError(
            f"--on {one_line(text, 60)}: no address; write --on ray:HOST:PORT, ray:auto (the cluster of this machine) "
            "or ray:local (this machine alone)"
        )
    spec = find_spec(name)
    if spec is None or spec.origin is None:  # a folder of that name, with no file to import, has a spec too
        raise UsageError(f"--on {name} needs Ray; install it with: pip install 'attnbench[ray]'")
    return Where(name, address)


def refuse_senseless(*, device: str, shard: str | None, dry_run: bool) -> None:
    """Refuse options that mean nothing where an engine shares the cells out.

    Raises:
        UsageError: one is given.
    """
    if shard is not None:
        raise UsageError("--shard with --on: the engine shares all cells out by itself; leave one of them out")
    if dry_run:
        raise UsageError("--dry-run with --on: a prediction needs no machines; leave --on out")
    if device not in _DEVICES:
        raise UsageError(
            f"--device {one_line(device, 40)} with --on: each machine has one device of its own; write cpu or cuda"
        )


@contextmanager
def opened(where: Where, device: str) -> Iterator[tuple[Engine, str]]:
    """The engine, and the device that its machines measure on; it is closed at the end.

    Args:
        device: ``auto`` for a GPU where all machines have one.

    Raises:
        UsageError: no such cluster, or none that can be used.
    """
    from attnbench.run.many.ray import RayEngine

    engine = RayEngine(where.address, device)
    try:
        yield engine, engine.device
    finally:
        engine.close()
