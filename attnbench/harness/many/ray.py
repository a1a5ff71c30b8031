"""``--on ray[:ADDRESS]``: the nodes of a Ray cluster that were started with ``--resources '{"machine": 1}'``.

Ray places one actor on each and reports a dead one. It retries nothing: the driver does.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from typing import Any

from attnbench.errors import UsageError, did_you_mean, said
from attnbench.text import one_line

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
    """A Ray cluster, as :class:`~attnbench.harness.many.driver.Engine` says. Only one can be open in a process."""

    name = "ray"

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
        self._pending: dict[Any, int] = {}
        """Reference to each call's answer -> the machine."""
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
            with _hushed():
                self._ray.init(**options)
        except Exception as error:
            raise UsageError(
                f"--on ray: cannot join the cluster at {self._address}: {_first_line(error)}; it must run, with "
                "the same versions of Ray and Python, and this command on one of its machines"
            ) from None
        finally:
            if stop is not None:
                signal.signal(signal.SIGTERM, stop)  # Ray puts its own there

    def _nodes(self) -> list[dict[str, float]]:
        nodes = [node.get("Resources", {}) for node in self._ray.nodes() if node.get("Alive")]
        return [resources for resources in nodes if resources.get(_RESOURCE, 0) >= 1]

    def _device_of(self, wanted: str) -> str:
        nodes = self._nodes()
        if not nodes:
            raise UsageError(
                f"--on ray: the cluster at {self._address} has no machine for attnbench; start its nodes with {_START}"
            )
        with_gpu = sum(resources.get("GPU", 0) >= 1 for resources in nodes)
        if wanted == "auto" and 0 < with_gpu < len(nodes):
            raise UsageError(
                f"--on ray: {with_gpu} of {len(nodes)} machines have a GPU; say --device cuda or --device cpu"
            )
        device = wanted if wanted != "auto" else "cuda" if with_gpu else "cpu"
        if device == "cuda" and not with_gpu:
            raise UsageError(f"--device cuda: no machine of the cluster at {self._address} has a GPU")
        return device

    def _usable(self) -> list[dict[str, float]]:
        nodes = self._nodes()
        return [one for one in nodes if one.get("GPU", 0) >= 1] if self.device == "cuda" else nodes

    def places(self) -> int:
        """The cluster's number of machines with the device."""
        return sum(int(resources[_RESOURCE]) for resources in self._usable())

    def start(self) -> int:
        """Own one more machine."""
        from attnbench.harness.many.machine import Machine  # here, since --on is parsed before torch is imported

        machine = next(self._numbers)
        cores = min((one.get("CPU", 0.0) // one[_RESOURCE] for one in self._usable()), default=0.0)
        actor = self._ray.remote(Machine).options(
            num_cpus=cores,
            num_gpus=1 if self.device == "cuda" else 0,
            resources={_RESOURCE: 1},
            max_restarts=0,
            max_task_retries=0,
        )
        self._actors[machine] = actor.remote()
        return machine

    def call(self, machine: int, method: str, message: Mapping[str, Any]) -> None:
        """Call a machine."""
        self._pending[self._actors[machine].call.remote(method, message)] = machine

    def wait(self, seconds: float) -> Sequence[tuple[int, dict[str, Any] | str]]:
        """Machines that have answered, or why they died."""
        if not self._pending:
            time.sleep(seconds)
            return []
        ready, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=seconds)
        return [(self._pending.pop(reference), self._answer(reference)) for reference in ready]

    def _answer(self, reference: Any) -> dict[str, Any] | str:
        try:
            answer: dict[str, Any] = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return _first_line(error)
        return answer

    def end(self, machine: int) -> None:
        """Give a machine back."""
        self._pending = {reference: one for reference, one in self._pending.items() if one != machine}
        self._ray.kill(self._actors.pop(machine), no_restart=True)

    def close(self) -> None:
        """Leave the cluster, which ends all actors."""
        self._ray.shutdown()


@contextmanager
def _hushed() -> Iterator[None]:
    """Drop stderr in this block: gRPC repeats there at length the one line of the exception."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
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
