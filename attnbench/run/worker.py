"""The process in which cells run: one JSON request per line in, one JSON answer per line out.

Answers go through a private copy of stdout; what a cell prints goes to stderr, of which the parent keeps the tail.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from json import dumps, loads
from os import write
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from attnbench.errors import AttnbenchError, said
from attnbench.run.descendants import guard
from attnbench.run.process import END_OF_REQUEST, Products, apply, limit_memory, return_freed_memory, window_library

if TYPE_CHECKING:
    from attnbench.cell import Cell
    from attnbench.measure.limits import Limits


def main() -> None:
    """Serve until stdin closes."""
    guard()
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    gc.disable()  # looking for garbage among all that torch makes takes a tenth of a second each time
    try:
        _import()
        settings = loads(requests.readline())
        state = _set_up(settings)
    except Exception as error:
        _answer(answers, {"failed": _said(error)})
        return
    gc.freeze()
    gc.enable()
    libraries = Products(*(state[name] for name in Products._fields))
    with window_library(state["process"], libraries):
        _serve(requests, answers, settings, state)


def _serve(requests: TextIO, answers: TextIO, settings: dict[str, Any], state: dict[str, Any]) -> None:
    """Answer one request after the other, and say what each left behind in this process."""
    from attnbench.run.traces import KEPT_BY_ALL, Snapshot

    first = before = Snapshot.take(settings["device"])
    _answer(answers, state)
    for line in requests:
        request = loads(line)
        if request.pop("tells", False):
            request["tell"] = lambda done, of: _answer(answers, {"progress": {"done": done, "of": of}})
        answer = _handle(settings, state, **request)
        gc.collect()
        return_freed_memory()
        now = Snapshot.take(settings["device"])
        if left := now.left_since(before):
            answer["traces"] = left
        elif kept := now.kept_since(first, KEPT_BY_ALL):
            answer["traces"] = f"and those before it left {kept} behind"
        before = now
        with suppress(Exception):  # closed by the cell, or no stream any more
            sys.stderr.flush()
            write(2, f"\n{END_OF_REQUEST}".encode())
        _answer(answers, answer)
        gc.freeze()  # what is left after a cell stays for good


def _handle(settings: dict[str, Any], state: dict[str, Any], *, do: str, **request: Any) -> dict[str, Any]:
    """The answer to one request; ``lost`` where this process cannot go on."""
    try:
        answer = _HANDLERS[do](settings, state, **request)
    except Exception as error:
        traceback.print_exc()
        answer = {"failed": _said(error)}
    lost = _why_lost(settings["device"])
    return {"failed": f"the device was lost: {lost}", "lost": True} if lost else answer


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, AttnbenchError) else said(error)


def _why_lost(device: str) -> str:
    """Why nothing more can run on the GPU in this process, such as an illegal access; empty where it can."""
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
    """Import whatever takes long, while the parent imports it too, to find out what to measure."""
    import attnbench.attention
    import attnbench.inputs
    import attnbench.run.execute
    import attnbench.run.pairs
    import attnbench.run.traces  # noqa: F401  # all of them for what comes later


def _set_up(settings: dict[str, Any]) -> dict[str, Any]:
    """Set the process up, measure the machine's limits."""
    import torch

    from attnbench.machine import describe, machine_id
    from attnbench.measure.standstill import notice_stops
    from attnbench.plugins import load
    from attnbench.run.switches import FINDERS
    from attnbench.run.traces import Snapshot

    notice_stops()
    before = Snapshot.take("cpu")
    for plugin in settings["plugins"]:
        load(plugin)
    now = Snapshot.take("cpu")
    replaced = now.replaced_since(before)
    changed = [words for words in now.changed_since(before) if words != FINDERS]  # a plug-in may have files of its own
    sys.setrecursionlimit(max(2000, sys.getrecursionlimit()))  # as torch.compile does when it is first used
    gc.freeze()  # what was imported is no garbage, and looking through it before measuring takes a tenth of a second
    device = settings["device"]
    known = settings["known"]
    libraries = Products(*(known[name] for name in Products._fields)) if known else None
    process, products, notes = apply(
        settings["process"], threads=settings["threads"], device=device, products=libraries
    )
    if replaced:
        notes.append(f"a plug-in replaced {', '.join(replaced)}: numbers may be wrong without a word; do not use it")
    if changed:
        notes.append(f"a plug-in changed {', '.join(changed)} when it was imported, which reaches all cells")
    limits = {name: known.get(name) for name in _LIMITS}
    if not known:
        limits, warning = _limits(settings)
        notes += [warning] if warning else []
    return_freed_memory()
    memory = settings["memory_limit"]
    if device == "cpu":
        memory = limit_memory(memory)
    elif device.startswith("cuda") and memory:
        total = torch.cuda.get_device_properties(torch.device(device)).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total), torch.device(device))
    return {
        "environment": describe(device),
        "machine_id": machine_id(device),
        "process": process,
        "process_notes": notes,
        "memory_limit_bytes": memory,
        **products._asdict(),
        **limits,
    }


_LIMITS = ("matmul_rate", "exp_rate", "copy_rates", "timer_cost_s", "noise_floor")


def _limits(settings: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """What this machine can do, by the names in _LIMITS, and a warning where it is noisy."""
    from attnbench.machine import OtherLoad, noise_warning
    from attnbench.run.execute import stopwatch
    from attnbench.run.pairs import measure_noise

    device, others = settings["device"], OtherLoad()
    noise = measure_noise(device)
    warning = noise_warning(noise, others.cores())
    return {**_rates(settings), "timer_cost_s": stopwatch(device).cost(), "noise_floor": noise}, warning


def _rates(settings: dict[str, Any]) -> dict[str, Any]:
    """The rates from which the limits of cells are made; none where none are wanted."""
    import torch

    from attnbench.measure.limits import copy_rates, exp_rate, matmul_rate

    device, dtypes = settings["device"], settings["dtypes"] if settings["rates"] else ()
    return {
        "matmul_rate": {dtype: matmul_rate(device, getattr(torch, dtype)) for dtype in dtypes},
        "exp_rate": {dtype: exp_rate(device, getattr(torch, dtype)) for dtype in dtypes},
        "copy_rates": copy_rates(device) if settings["rates"] else [],
    }


def _cell(
    settings: dict[str, Any],
    state: dict[str, Any],
    *,
    cell: dict[str, Any],
    rules: dict[str, Any],
    round: int,
    earlier: list[list[dict[str, Any]]],
    previous: dict[str, Any] | None,
) -> dict[str, Any]:
    from attnbench.cell import Cell
    from attnbench.measure.time import Sample, TimingRules
    from attnbench.record import Record
    from attnbench.run.execute import run_cell

    what = Cell.from_json(cell)
    record, samples = run_cell(
        what,
        TimingRules(**rules),
        round_=round,
        earlier=[[Sample(**sample) for sample in samples] for samples in earlier],
        previous=Record.from_json(previous) if previous else None,
        resident=state["process"] == "as-shipped",
        limits=_limits_of(state, what),
        memory_limit=state["memory_limit_bytes"],
    )
    return {"record": record.to_json(), "samples": samples}


def _score(
    settings: dict[str, Any],
    state: dict[str, Any],
    *,
    cell: dict[str, Any],
    folder: str,
    quick: bool,
    tell: Callable[[int, int], None],
) -> dict[str, Any]:
    from attnbench.cell import Cell
    from attnbench.run.scoring import score_cell

    limit = state["memory_limit_bytes"]
    what = Cell.from_json(cell)
    record, points = score_cell(
        what, folder=Path(folder), tell=tell, memory_limit=limit, quick=quick, alone=settings["alone"]
    )
    return {"record": record.to_json(), "points": points}


def _pairs(
    settings: dict[str, Any], state: dict[str, Any], *, cells: list[dict[str, Any]], rules: dict[str, Any], fewest: int
) -> dict[str, Any]:
    from attnbench.cell import Cell
    from attnbench.measure.time import TimingRules
    from attnbench.run.pairs import measure_pairs

    return asdict(measure_pairs([Cell.from_json(cell) for cell in cells], TimingRules(**rules), fewest))


def _laws(settings: dict[str, Any], state: dict[str, Any], *, variant: str, law: str) -> dict[str, Any]:
    from attnbench.errors import Unsupported
    from attnbench.testing import check_variant

    try:
        report = check_variant(variant, laws=[law])
    except Unsupported as reason:
        return {"unsupported": str(reason)}
    return {"findings": [asdict(finding) for finding in report.findings]}


def _limits_again(
    settings: dict[str, Any], state: dict[str, Any], *, cells: list[dict[str, Any]], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Measure the rates once more, keep the higher of both, and correct the rows of cells by them."""
    from attnbench.cell import Cell
    from attnbench.measure.limits import faster_of
    from attnbench.record import Record
    from attnbench.run.ceiling import corrected

    state.update(faster_of(state, _rates(settings)))
    what = [(Cell.from_json(cell), Record.from_json(row)) for cell, row in zip(cells, rows, strict=True)]
    records = [corrected(record, cell, _limits_of(state, cell)) for cell, record in what]
    limits = {name: state[name] for name in ("matmul_rate", "exp_rate", "copy_rates")}
    return {"limits": limits, "rows": [record.to_json() for record in records]}


def _limits_of(state: dict[str, Any], cell: Cell) -> Limits:
    from attnbench.measure.limits import Limits

    return Limits(state["matmul_rate"].get(cell.dtype), state["exp_rate"].get(cell.dtype), state["copy_rates"])


_HANDLERS: dict[str, Callable[..., dict[str, Any]]] = {
    "cell": _cell,
    "score": _score,
    "pairs": _pairs,
    "laws": _laws,
    "limits": _limits_again,
}


if __name__ == "__main__":
    # Little is imported above: torch comes in once it is sure that this process ends with its parent.
    main()
