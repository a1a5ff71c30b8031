"""The process in which cells run: one JSON request a line in, one JSON answer a line out.

Answers go through a private copy of stdout; what a cell prints goes to stderr, of which the parent keeps the tail.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TextIO

from attnbench.run.descendants import guard
from attnbench.run.process import END_OF_REQUEST, Products, apply, limit_memory, return_freed_memory


def main() -> None:
    """Serve until stdin closes."""
    guard()
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    gc.disable()  # to look for garbage among all that torch makes takes a tenth of a second each time
    try:
        _import()
        settings = json.loads(requests.readline())
        state = _set_up(settings)
    except Exception as error:
        _answer(answers, {"failed": f"{type(error).__name__}: {error}"})
        return
    gc.freeze()
    gc.enable()
    _answer(answers, state)
    for line in requests:
        answer = _handle(settings, state, **json.loads(line))
        with suppress(OSError, ValueError):  # closed by the cell
            sys.stderr.flush()
            os.write(2, f"\n{END_OF_REQUEST}".encode())
        _answer(answers, answer)
        return_freed_memory()
        gc.freeze()  # what is left after a cell stays for good


def _handle(settings: dict[str, Any], state: dict[str, Any], *, do: str, **request: Any) -> dict[str, Any]:
    """The answer to one request; ``lost`` where this process cannot go on."""
    try:
        answer = _HANDLERS[do](settings, state, **request)
    except Exception as error:
        traceback.print_exc()
        answer = {"failed": f"{type(error).__name__}: {error}"}
    lost = _why_lost(settings["device"])
    return {"failed": f"the device was lost: {lost}", "lost": True} if lost else answer


def _why_lost(device: str) -> str:
    """Why nothing more can run on the GPU in this process: after an illegal access, say. Empty where it can."""
    if not device.startswith("cuda"):
        return ""
    import torch

    try:
        torch.cuda.synchronize(torch.device(device))
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def _answer(stream: TextIO, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def _import() -> None:
    """Whatever takes long to import, while the parent imports it as well to find out what to measure."""
    import attnbench.attention
    import attnbench.inputs
    import attnbench.run.execute
    import attnbench.run.pairs  # noqa: F401  # all of them for what comes later


def _set_up(settings: dict[str, Any]) -> dict[str, Any]:
    """Set the process up, measure the machine's limits."""
    import torch

    from attnbench.machine import describe, machine_id
    from attnbench.plugins import load

    for plugin in settings["plugins"]:
        load(plugin)
    gc.freeze()  # what was imported is no garbage, and to look through it before measuring takes a tenth of a second
    device = settings["device"]
    known = settings["known"]
    libraries = Products(*(known[name] for name in Products._fields)) if known else None
    process, products, notes = apply(
        settings["process"], threads=settings["threads"], device=device, products=libraries
    )
    limits = {name: known.get(name) for name in _LIMITS}
    if not known:
        limits, warning = _limits(settings)
        notes += [warning] if warning else []
    return_freed_memory()
    if device == "cpu":
        limit_memory(settings["memory_limit"])
    elif device.startswith("cuda") and settings["memory_limit"]:
        total = torch.cuda.get_device_properties(torch.device(device)).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, settings["memory_limit"] / total), torch.device(device))
    return {
        "environment": describe(device),
        "machine_id": machine_id(device),
        "process": process,
        "process_notes": notes,
        **products._asdict(),
        **limits,
    }


_LIMITS = ("matmul_rate", "exp_rate", "copy_rates", "timer_cost_s", "noise_floor")


def _limits(settings: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """What this machine can do, by name of _LIMITS, and a warning where it is restless."""
    import torch

    from attnbench.machine import OtherLoad, noise_warning
    from attnbench.measure.limits import copy_rates, exp_rate, matmul_rate
    from attnbench.run.execute import stopwatch
    from attnbench.run.pairs import measure_noise

    device, wanted, others = settings["device"], settings["rates"], OtherLoad()
    noise = measure_noise(device)
    warning = noise_warning(noise, others.cores())
    dtypes = settings["dtypes"] if wanted else ()
    products, exps = (
        {dtype: rate(device, getattr(torch, dtype)) for dtype in dtypes} for rate in (matmul_rate, exp_rate)
    )
    copies = copy_rates(device) if wanted else []
    return dict(zip(_LIMITS, (products, exps, copies, stopwatch(device).cost(), noise), strict=True)), warning


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
    from attnbench.measure.limits import Limits
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
        limits=Limits(state["matmul_rate"].get(what.dtype), state["exp_rate"].get(what.dtype), state["copy_rates"]),
        tuned_limit=settings["memory_limit"] if state["process"] == "tuned" else None,
    )
    return {"record": record.to_json(), "samples": samples}


def _pairs(
    settings: dict[str, Any], state: dict[str, Any], *, cells: list[dict[str, Any]], rules: dict[str, Any]
) -> dict[str, Any]:
    from attnbench.cell import Cell
    from attnbench.measure.time import TimingRules
    from attnbench.run.pairs import measure_pairs

    return asdict(measure_pairs([Cell.from_json(cell) for cell in cells], TimingRules(**rules)))


_HANDLERS: dict[str, Callable[..., dict[str, Any]]] = {"cell": _cell, "pairs": _pairs}


if __name__ == "__main__":
    # Little is imported above: torch comes in once it is sure that this process ends with its parent.
    main()
