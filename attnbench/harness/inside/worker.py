"""The process in which cells run: one JSON request per line in, one JSON answer per line out.

Answers go through a private copy of stdout; a cell's prints go to stderr, with the parent keeping the tail.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import entry_points
from json import dumps, loads
from os import write
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from attnbench.errors import AttnbenchError, said
from attnbench.harness.wire.descendants import guard
from attnbench.harness.wire.process import END_OF_REQUEST, Products, apply, limit_memory, window_library
from attnbench.measure.allocator import freed_memory_returned, keep_freed_memory, return_freed_memory
from attnbench.results.sources import Changed, Watch
from attnbench.version import __version__

if TYPE_CHECKING:
    from attnbench.harness.wire.protocol import MeasureLimits, TakeTurns, Train, VisitCell
    from attnbench.measure.limits import Limits
    from attnbench.results.record import Record
    from attnbench.suite.cell import Cell


_FIRST = -20
"""The value of nice that gives the largest share of a core."""


def ask_for_cores() -> None:
    """Rank this process, and all that it starts, before other programs, if the system allows it: to root, mostly.

    Linux shares cores between sessions first, and then between the processes of each: a session of its own is told too.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _FIRST)
        if os.getsid(0) == os.getpid():
            Path("/proc/self/autogroup").write_text(str(_FIRST), encoding="ascii")


def main() -> None:
    """Serve until stdin closes."""
    ask_for_cores()
    guard()
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    gc.disable()  # looking for garbage among all that torch makes takes a tenth of a second each time
    try:
        _import()
        from attnbench.harness.inside.traces import threads_of_torch

        of_torch = threads_of_torch()  # before a plug-in starts others
        settings = loads(requests.readline())
        served = Served(settings, *_set_up(settings, of_torch))
    except Changed as error:
        _answer(answers, {"changed": str(error)})
        return
    except Exception as error:
        _answer(answers, {"failed": _said(error)})
        return
    gc.freeze()
    gc.enable()
    with window_library(served.state["process"], Products.of(served.state)):
        _serve(requests, answers, served, of_torch)


def _serve(requests: TextIO, answers: TextIO, served: Served, of_torch: Collection[str]) -> None:
    from attnbench.harness.inside.canary import Canary
    from attnbench.harness.inside.traces import Snapshot
    from attnbench.measure.card import Board, look

    def tell(
        done: int, of: int, at: str = "", *, first: bool = False, turn: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        if turn is not None:
            _answer(answers, {"turn": turn})
            return dict(loads(requests.readline()))
        if at:  # laws, which have no name, try what the visit behind them builds again
            served.watch.notice()
        more = {**({"at": at} if at else {}), **({"first": True} if first else {})}
        _answer(answers, {"progress": {"done": done, "of": of, **more}})
        return {}

    device = served.settings["device"]
    board = Board.of(device)
    first, canary = Snapshot.take(device, of_torch), Canary()
    before = first
    _answer(answers, served.state)
    for line in requests:
        answer = served.answer(loads(line), tell)
        if board is not None:
            answer["card"] = look(board)
        try:
            answer["sources"] = served.watch.news()
        except Changed as error:
            answer = {"changed": str(error)}
        gc.collect()
        return_freed_memory()
        now = Snapshot.take(device, of_torch, since=before)
        if left := " and ".join(filter(None, (now.left_since(before), canary.slowed()))):
            answer["traces"] = left
        elif kept := now.kept_by_all_since(first):
            answer["traces"] = f"and those before it left {kept} behind"
        before = now
        with suppress(Exception):  # closed by the cell, or no stream any more
            sys.stderr.flush()
            write(2, f"\n{END_OF_REQUEST}".encode())
        _answer(answers, answer)
        gc.freeze()  # the remains of a cell stay for good


class Served:
    """Setup of this process, and its facts about the machine."""

    def __init__(self, settings: dict[str, Any], state: dict[str, Any], notes: Sequence[str], watch: Watch) -> None:
        self.settings, self.state, self.notes, self.watch = settings, state, notes, watch

    def answer(self, request: dict[str, Any], tell: Callable[..., Any]) -> dict[str, Any]:
        """The answer to one request; ``lost`` if this process cannot go on.

        ``tell`` is called with the steps done and all steps of a training, or with the part of a visit that begins
        (``at``) and ``first`` if its first call may compile. Told a ``turn`` it gives the next message about it.
        """
        try:
            answer = self._done(request.pop("do"), request, tell)
        except Exception as error:
            traceback.print_exc()
            answer = {"failed": _said(error)}
        lost = _why_lost(self.settings["device"])
        return {"failed": f"the device was lost: {lost}", "lost": True} if lost else answer

    def _done(self, do: str, data: dict[str, Any], tell: Callable[..., Any]) -> dict[str, Any]:
        from pydantic_core import to_jsonable_python

        module, _, name = do.rpartition(".")
        kind = getattr(import_module(module), name)
        measure: dict[str, Callable[[Any, Callable[..., Any]], dict[str, Any]]] = {
            "VisitCell": self._visit,
            "Train": self._train,
            "TakeTurns": _take_turns,
            "MeasureLimits": self._limits_again,
        }
        request = kind.from_json(data)
        if name in measure:
            return measure[name](request, tell)
        try:
            return {"found": to_jsonable_python(request.found(tell), inf_nan_mode="constants")}
        except kind.refusals as reason:
            known = next(one for one in kind.refusals if isinstance(reason, one))
            return {"refused": known.__name__, "why": str(reason)}

    def _visit(self, request: VisitCell, tell: Callable[..., Any]) -> dict[str, Any]:
        from attnbench.harness.inside.execute import run_cell

        record, samples = run_cell(
            request,
            resident=self.state["process"] == "as-shipped",
            limits=self._limits_of(request.cell),
            memory_limit=self.state["memory_limit_bytes"],
            begins=lambda part, first=False: tell(0, 0, part, first=first),
        )
        return {"record": self._told(record).to_json(), "samples": samples}

    def _train(self, request: Train, tell: Callable[..., Any]) -> dict[str, Any]:
        from attnbench.harness.inside.call import may_compile
        from attnbench.harness.inside.execute import failed
        from attnbench.harness.score.score import score  # needs scipy, which a run of times need not load
        from attnbench.measure.status import Status
        from attnbench.results.record import Record
        from attnbench.text import one_line

        def told(done: int, of: int) -> None:
            self.watch.notice()
            first = slow and not done
            tell(done, of, "its first step" * first, first=first)

        cell, points = request.cell, list[dict[str, Any]]()
        slow = may_compile(cell)
        if slow and cell.training is not None:
            told(0, cell.training.pretrain_steps + cell.training.steps)
        if cell.device == "cpu":
            keep_freed_memory()  # page faults cost time, and no digit depends on them
        try:
            scored = score(cell, folder=request.folder, tell=told, keep=request.keep, alone=self.settings["alone"])
        except Exception as error:
            record = failed(cell, error, quick=request.quick, memory_limit=self.state["memory_limit_bytes"])
        else:
            warnings = "; ".join(one_line(one.replace(";", ",")) for one in scored.warnings)
            record = Record.of(cell, Status.OK, quick=request.quick, warnings=warnings, **scored.columns)
            points = scored.points
        finally:
            gc.collect()
        return {"record": self._told(record).to_json(), "points": points}

    def _told(self, record: Record) -> Record:
        from attnbench.harness.inside.execute import add_warning

        for note in self.notes:
            add_warning(record, note)
        return record

    def _limits_again(self, request: MeasureLimits, _: Callable[..., Any]) -> dict[str, Any]:
        from attnbench.harness.inside.execute import corrected
        from attnbench.measure.limits import faster_of

        limits = faster_of(self.state, _rates(self.settings))
        self.state.update(limits)
        rows = zip(request.cells, request.records, strict=True)
        records = [corrected(record, cell, self._limits_of(cell)) for cell, record in rows]
        return {"limits": limits, "rows": [record.to_json() for record in records]}

    def _limits_of(self, cell: Cell) -> Limits:
        from attnbench.measure.limits import Limits

        matmul, exp = (self.state[name].get(cell.dtype) for name in ("matmul_rate", "exp_rate"))
        return Limits(matmul, exp, self.state["copy_rates"])


def _take_turns(request: TakeTurns, tell: Callable[..., Any]) -> dict[str, Any]:
    from attnbench.harness.inside.pairs import measure_pairs

    pairs = measure_pairs(
        request.cells,
        request.rules,
        request.fewest,
        request.process,
        unchecked=request.unchecked,
        begins=lambda part, first=False: tell(0, 0, part, first=first),
        hear=(lambda turn: tell(0, 0, turn=turn)) if request.led else None,
    )
    return asdict(pairs)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, AttnbenchError) else said(error)


def _why_lost(device: str) -> str:
    """The reason why the GPU is lost to this process, such as an illegal access; empty if it is not."""
    if not device.startswith("cuda"):
        return ""
    import torch

    try:
        torch.cuda.synchronize(torch.device(device))
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def _answer(stream: TextIO, message: dict[str, Any]) -> None:
    stream.write(dumps(message) + "\n")
    stream.flush()


def _import() -> None:
    import attnbench.harness.inside.canary
    import attnbench.harness.inside.execute
    import attnbench.harness.inside.pairs
    import attnbench.harness.inside.traces
    import attnbench.harness.wire.protocol  # noqa: F401  # all of them for later use


def _set_up(settings: dict[str, Any], of_torch: Collection[str]) -> tuple[dict[str, Any], list[str], Watch]:
    """Set the process up and measure the machine's limits; return its facts, and notes for each of its rows.

    ``of_torch``: numbers of torch's threads.
    """
    import torch

    from attnbench.contract.plugins.discovery import GROUP, libraries
    from attnbench.harness.wire.protocol import digest
    from attnbench.measure import card
    from attnbench.measure.machine import describe, machine_class, machine_id, refuse_binding
    from attnbench.measure.standstill import notice_stops

    refuse_binding(settings["threads"], of_torch)
    notice_stops()
    known, device = settings["known"], settings["device"]
    # Before anything is on the card: whatever is there now is of others.
    of_the_card, told = (known.get("card", {}), None) if known else (card.facts(device), card.warning(device))
    # Before the process listens: these files are read here, but not all of them decide a number.
    imported = libraries(settings["plugins"], trained=bool(settings["models"]))
    watch = Watch(
        known.get("sources", {}), settings["files"], listens=bool(settings["plugins"] or entry_points(group=GROUP))
    )
    # torch's compiler makes a progress bar, whose thread would be left behind.
    torch.hub.tqdm.monitor_interval = 0  # type: ignore[attr-defined]  # where torch keeps the class, or a stand-in
    replaced, changed = _load_plugins(settings["plugins"], undo=settings["process"] == "tuned")
    if settings["models"]:
        from attnbench.models.pretrained.pretrained_cell import make_ready

        make_ready(settings["models"])
    sys.setrecursionlimit(max(2000, sys.getrecursionlimit()))  # as torch.compile does when it is first used
    gc.freeze()  # modules are no garbage, and looking through them before measuring takes a tenth of a second
    chosen = Products.of(known) if known else settings["products"] and Products(*settings["products"])
    process, products, notes = apply(settings["process"], threads=settings["threads"], device=device, products=chosen)
    of_rows = notes if chosen not in (None, products) else []
    notes, of_rows = [*notes, *changed], [*of_rows, *changed]
    if replaced:
        notes.append(f"a plug-in replaced {', '.join(replaced)}: numbers may silently be wrong; do not use it")
    limits = {name: known.get(name) for name in _LIMITS}
    if not known:
        limits, warning = _limits(settings)
        notes += [one for one in (told, warning) if one]
    return_freed_memory()
    memory = settings["memory_limit"]
    if device == "cpu":
        memory = limit_memory(memory)
    elif device.startswith("cuda") and memory:
        total = torch.cuda.get_device_properties(torch.device(device)).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total), torch.device(device).index)
    facts = {"environment": describe(device), "process": process, **products._asdict()}
    state = {
        **facts,
        "protocol": digest(),
        "attnbench": __version__,
        "machine_id": machine_id(device),
        "machine_class": machine_class({**facts, "threads": settings["threads"]}),
        "process_notes": notes,
        "memory_limit_bytes": memory,
        **limits,
        **({"card": of_the_card} if of_the_card else {}),
        "sources": watch.seen,
        "libraries": imported,
    }
    watch.news()
    return state, of_rows, watch


def _load_plugins(names: Sequence[str], *, undo: bool) -> tuple[list[str], list[str]]:
    """Load plug-ins; return the names that they replaced, and notes on other changes; ``undo`` restores torch's
    switches."""
    if not names:
        return [], []
    import torch

    from attnbench.contract.plugins.discovery import load
    from attnbench.harness.inside.canary import Canary
    from attnbench.harness.inside.switches import read_switches, set_back
    from attnbench.harness.inside.traces import Snapshot

    before, canary, switches, threads = Snapshot.take("cpu"), Canary(), read_switches(), torch.get_num_threads()
    for name in names:
        load(name)
    torch.set_num_threads(threads)
    if undo:
        set_back(switches)
    now = Snapshot.take("cpu")
    changed = now.changed_since(before)
    left = now.threads_since(before)
    slowed = [
        f"a plug-in {words} when it was imported, which reaches all cells"
        for words in (canary.slowed(), f"left {left} behind" if left else "")
        if words
    ]
    if not changed:
        return now.replaced_since(before), slowed
    to = [f"{name} = {value}" for name, value in read_switches().items() if value != switches[name]]
    to = [one for one in to if "Error(" not in one]  # older names of switches, which raise where newer ones are used
    details = f" ({', '.join(to[:2])})" if to else ""
    said = f"a plug-in changed {', '.join(changed)}{details} when it was imported, which reaches all cells"
    return now.replaced_since(before), [said, *slowed]


_LIMITS = ("matmul_rate", "exp_rate", "copy_rates", "timer_cost_s", "noise_floor")


def _limits(settings: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    from attnbench.harness.inside.execute import stopwatch
    from attnbench.harness.inside.pairs import measure_noise
    from attnbench.measure.machine import OtherLoad, noise_warning

    device, others = settings["device"], OtherLoad()
    noise = measure_noise(device)
    warning = noise_warning(noise, others.cores())
    return {**_rates(settings), "timer_cost_s": stopwatch(device).cost(), "noise_floor": noise}, warning


def _rates(settings: dict[str, Any]) -> dict[str, Any]:
    import torch

    from attnbench.measure.limits import copy_rates, exp_rate, matmul_rate

    device, dtypes = settings["device"], settings["dtypes"] if settings["rates"] else ()
    # Else small objects behind the large tensors may hold their place in the heap, and no cell would get that memory.
    with freed_memory_returned(device == "cpu" and settings["process"] == "tuned"):
        copies = copy_rates(device) if settings["rates"] else []
    return {
        "matmul_rate": {one: rate for one in dtypes if (rate := matmul_rate(device, getattr(torch, one)))},
        "exp_rate": {one: rate for one in dtypes if (rate := exp_rate(device, getattr(torch, one)))},
        "copy_rates": [one for one in copies if one[1]],
    }


if __name__ == "__main__":
    # Little is imported above: torch comes in once it is sure that this process ends with its parent.
    main()
