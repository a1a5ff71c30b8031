"""``--on ray[:ADDRESS]``: the nodes of a Ray cluster that were started with ``--resources '{"machine": 1}'``.

Ray places one actor on each and reports a dead one. It retries nothing: the driver does.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from typing import TYPE_CHECKING, Any

from attnbench.errors import UsageError, did_you_mean, said
from attnbench.text import one_line

if TYPE_CHECKING:
    from attnbench.harness.many.actor import Event

_DEVICES = ("auto", "cpu", "cuda")
_RESOURCE = "machine"
_START = f"""ray start --resources '{{"{_RESOURCE}": 1}}'"""
_REACHED_WITHIN = 5.0
"""Seconds for the cluster's head to take a connection; Ray itself would try for a minute."""


def parse_on(text: str) -> str:
    """The address in ``ray:10.0.0.1:6379``; empty for ``ray``.

    Raises UsageError for an engine that is unknown or not installed, or a malformed address.
    """
    name, colon, address = text.strip().partition(":")
    if name != "ray":
        nearest = did_you_mean(name.lower(), ["ray"]) or "; write --on ray, or --on ray:ADDRESS"
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
    spec = find_spec("ray")
    if spec is None or spec.origin is None:  # a folder of that name, with no file to import, has a spec too
        raise UsageError("--on ray needs Ray; install it with: pip install 'attnbench[ray]'")
    return address


def refuse_senseless(*, device: str, shard: str | None, dry_run: bool) -> None:
    """Raise UsageError for options without a meaning on an engine."""
    if shard is not None:
        raise UsageError("--shard with --on: the engine shares all cells out by itself; leave one of them out")
    if dry_run:
        raise UsageError("--dry-run with --on: a prediction needs no machines; leave --on out")
    if device not in _DEVICES:
        raise UsageError(
            f"--device {one_line(device, 40)} with --on: each machine has one device of its own; write cpu or cuda"
        )


class RayEngine:
    """A Ray cluster, whose machines it owns, each as a whole. Only one can be open in a process."""

    def __init__(self, address: str, device: str = "auto") -> None:
        """Join a cluster.

        Args:
            address: ``HOST:PORT``, ``auto`` for this machine's own, ``local`` for a new one of this machine alone.
                Empty: ``RAY_ADDRESS``, else ``local``.
            device: ``auto`` (a GPU if all machines have one), ``cpu`` or ``cuda``.

        Raises:
            UsageError: it cannot be reached, is of another version, or has no machines for this device.
        """
        # Never without an address: Ray would join whatever cluster it finds traces of on this machine.
        self._address = address or os.environ.get("RAY_ADDRESS", "") or "local"
        if self._address != "local":  # Ray reads it as it is imported; it tries 20 times, each for 40 seconds
            os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")
        self._ray: Any = import_module("ray")
        self._actors: dict[int, Any] = {}
        self._at_work: dict[Any, int] = {}
        """Stream of events -> its machine."""
        self._numbers = count()
        self._join()
        try:
            self.device = self._device_of(device)
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        _refuse_unreachable(self._address)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"address": self._address, "log_to_driver": False, "logging_level": logging.ERROR}
        if self._address == "local":
            # Else all that Ray starts goes behind everything else.
            os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # as Ray spells it
            options |= {"resources": {_RESOURCE: 1}, "include_dashboard": False}
        stop = signal.getsignal(signal.SIGTERM)
        try:
            with hushed(2):  # gRPC repeats at length the one line of the exception
                self._ray.init(**options)
        except Exception as error:
            raise UsageError(
                f"--on ray: cannot join the cluster at {self._address}: {_first_line(error)}; it must run, with "
                "the same versions of Ray and Python, and this command on one of its machines"
            ) from None
        finally:
            if stop is not None:
                signal.signal(signal.SIGTERM, stop)  # Ray puts its own there

    def _nodes(self, *resources: str) -> list[dict[str, float]]:
        nodes = [node.get("Resources", {}) for node in self._ray.nodes() if node.get("Alive")]
        return [node for node in nodes if all(node.get(name, 0) >= 1 for name in (_RESOURCE, *resources))]

    def _usable(self) -> list[dict[str, float]]:
        return self._nodes("GPU") if self.device == "cuda" else self._nodes()

    def _device_of(self, wanted: str) -> str:
        nodes, with_gpu = len(self._nodes()), len(self._nodes("GPU"))
        if not nodes:
            raise UsageError(
                f"--on ray: the cluster at {self._address} has no machine for attnbench; start its nodes with {_START}"
            )
        if wanted == "auto" and 0 < with_gpu < nodes:
            raise UsageError(f"--on ray: {with_gpu} of {nodes} machines have a GPU; say --device cuda or --device cpu")
        if wanted == "cuda" and not with_gpu:
            raise UsageError(f"--device cuda: no machine of the cluster at {self._address} has a GPU")
        return wanted if wanted != "auto" else "cuda" if with_gpu else "cpu"

    def places(self) -> int:
        """The number of machines with the device, busy or free. A death may be noticed late here."""
        return sum(int(resources[_RESOURCE]) for resources in self._usable())

    def start(self) -> int:
        """Own one more machine and return its number at once; its calls wait until one is free."""
        from attnbench.harness.many.actor import Machine  # here, since --on is parsed before torch is imported

        machine = next(self._numbers)
        cores = min((one.get("CPU", 0.0) // one[_RESOURCE] for one in self._usable()), default=0.0)
        gpus = 1 if self.device == "cuda" else 0
        # Ray repeats nothing: the driver knows which cells of one host are left.
        actor = self._ray.remote(Machine).options(num_cpus=cores, num_gpus=gpus, resources={_RESOURCE: 1})
        self._actors[machine] = actor.remote()
        return machine

    def ask(self, machine: int, method: str, *arguments: Any) -> None:
        """Let a machine run a method of :class:`~attnbench.harness.many.actor.Machine` and return at once."""
        self._at_work[self._actors[machine].work.remote(method, *arguments)] = machine

    def wait(self, seconds: float) -> Sequence[tuple[int, Event | str]]:
        """Events of machines since, or why they died; waits no longer than ``seconds`` for one."""
        if not self._at_work:
            time.sleep(seconds)
            return []
        ready, _ = self._ray.wait(list(self._at_work), num_returns=1, timeout=seconds, fetch_local=False)
        events: list[tuple[int, Event | str]] = []
        for stream in ready:
            machine = self._at_work.pop(stream)
            try:
                events.append((machine, self._ray.get(next(stream))))
            except StopIteration:
                continue
            except self._ray.exceptions.RayError as error:
                events.append((machine, _first_line(error)))
            else:
                self._at_work[stream] = machine  # behind the others
        return events

    def end(self, machine: int) -> None:
        """Give a machine back and end its work. No news of it follows."""
        self._at_work = {stream: one for stream, one in self._at_work.items() if one != machine}
        self._ray.kill(self._actors.pop(machine))

    def close(self) -> None:
        """Leave the cluster, which ends all actors."""
        self._ray.shutdown()


@contextmanager
def hushed(stream: int) -> Iterator[None]:
    """Drop all that anybody writes to stdout (1) or stderr (2) in this block."""
    sys.stdout.flush()
    kept, nowhere = os.dup(stream), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, stream)
        os.close(kept)
        os.close(nowhere)


def _refuse_unreachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host, int(port)), timeout=_REACHED_WITHIN).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or said(error)
        where = one_line(address, 80)
        raise UsageError(f"--on ray: nothing answers at {where} ({why}); is the cluster's head up?") from None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in said(error).splitlines() if line.strip()]
    return one_line(" ".join(lines[:2]), 160)
