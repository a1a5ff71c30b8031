"""Let cells in several processes take turns: while one takes its sample, the others wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from attnbench.harness.inside.pairs import Turns, take_turns
from attnbench.harness.outside.isolation import Worker
from attnbench.harness.wire.protocol import Answer, Pairs, TakeTurns
from attnbench.measure.machine import OtherLoad
from attnbench.measure.time import Sample
from attnbench.results.validation import are_samples


def lead(workers: Sequence[Worker], request: TakeTurns, limit: float) -> Pairs:
    """The pairs of a request whose cells are in ``workers``, one for each; the answer takes ``limit`` seconds at most.

    Raises CellFailed if a process fails, which is then the one that was thrown away.
    """
    if len(sides := dict.fromkeys(workers)) == 1:
        return request.ask(workers[0], limit)
    end, ready = time.monotonic() + limit, dict[Worker, int]()
    places = {worker: [i for i, one in enumerate(workers) if one is worker] for worker in sides}
    parts = {worker: replace(request, cells=[request.cells[i] for i in of], led=True) for worker, of in places.items()}

    def left() -> float:
        return max(1.0, end - time.monotonic())

    def take(worker: Worker, column: int) -> Sample:
        told = worker.ask({"take": column}, left(), further=True)
        if not are_samples([told]) or not told["seconds"]:
            raise worker.garbage()
        return Sample(**told)

    def read(worker: Worker, told: dict[str, Any], how: Callable[[dict[str, Any]], Answer]) -> Answer:
        try:
            return how(told)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise worker.garbage() from None

    for worker in list(sides)[:: -1 if request.process % 2 else 1]:
        told = worker.ask({"do": request.do, **parts[worker].to_json()}, left())
        ready[worker] = read(worker, told, lambda told: int(told["ready"]))
    load = OtherLoad(lambda: sum(worker.seconds_used() for worker in sides))
    whose = [(worker, column) for worker in sides for column in range(ready[worker])]
    turns = Turns([], 0, 0, 0)
    if whose:
        seed = request.cells[0].seed + request.process
        turns = take_turns([partial(take, *one) for one in whose], request.rules, seed=seed, fewest=request.fewest)
    found = Pairs([], [[] for _ in turns.blocks], [], turns.disturbed, turns.taken, turns.stopped, load.cores())
    for worker, of in places.items():
        own = [[row[i] for i, (one, _) in enumerate(whose) if one is worker] for row in turns.blocks]
        pairs = read(worker, worker.ask({"blocks": own}, left(), further=True), parts[worker].answered)
        found.ran.extend(of[i] for i in pairs.ran)
        found.left_out.extend((of[i], status, reason) for i, status, reason in pairs.left_out)
        found.warnings.extend((of[i], warning) for i, warning in pairs.warnings)
        found.prompts.extend((of[i], share) for i, share in pairs.prompts)
        for row, more in zip(found.blocks, pairs.blocks, strict=False):  # none if all its cells are left out
            row.extend(more)
    return replace(found, blocks=found.blocks if found.ran else [])
