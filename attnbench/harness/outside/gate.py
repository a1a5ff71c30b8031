"""Check a variant's laws before timing it, so that no row reports the time of a broken implementation.

The laws run in the worker: a variant that crashes or hangs fails a law instead of ending the run. The verdict on a
setting, a variant with its options, causal or not, holds for all its cells and, by its rows, for a resumed run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from attnbench.contract.variant import VARIANTS
from attnbench.harness.outside.isolation import CellFailed, Worker
from attnbench.harness.wire.process import choose_products
from attnbench.harness.wire.protocol import Request
from attnbench.measure.status import Status
from attnbench.results.record import HELD, NOT_TRIED, UNCHECKED, Record
from attnbench.suite.cell import UNTOUCHED, Cell
from attnbench.text import one_line

_ROUNDING = 1e-3
"""A smaller fault, of outputs of size 1 in float64, may be float32 arithmetic: float32 then decides about the timing,
though ``attnbench check`` reports the lost digits."""
_LONGEST = 110


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a setting, as its rows state it."""

    laws: str
    status: Status = Status.OK
    reason: str = ""
    stderr: Sequence[str] = ()

    def row(self, cell: Cell, *, quick: bool = False) -> Record:
        """The row of a cell that its verdict keeps from being measured."""
        return Record.of(cell, self.status, self.reason, quick=quick, laws=self.laws)


@dataclass(frozen=True, slots=True)
class HoldSetting(Request[Verdict]):
    """Hold the setting of a cell to its laws, up to the first broken one."""

    do = "setting"
    cell: Cell

    def found(self, tell: Callable[[int, int], None]) -> dict[str, Any]:
        """The answer, in the worker. ``tell`` is called before each law with its place and the number of gating
        laws."""
        from attnbench.laws import first_fault, setting_of  # the laws take a while to import

        case = setting_of(self.cell.variant, causal=self.cell.shape.causal, level=self.cell.level)
        choose_products(of_one_row=False)  # the library that will be timed
        if case.traits.compiled or (self.cell.device != "cpu" and not case.runs()):
            return {"tried": 0, "fault": None}
        tried, fault = first_fault(case, tell)
        if fault is not None and fault.number is not None and fault.number <= _ROUNDING:
            tried, fault = first_fault(replace(case, single=True), tell)
        return {"tried": tried, "fault": None if fault is None else asdict(fault)}

    def answered(self, answer: dict[str, Any]) -> Verdict:
        from attnbench.laws import Finding
        from attnbench.laws.influence import PADDED

        if answer["fault"] is None:
            return Verdict(HELD if int(answer["tried"]) else NOT_TRIED)
        fault = Finding(**answer["fault"])
        if fault.law == PADDED and fault.number is not None and not math.isfinite(fault.number):
            return Verdict(fault.law)  # no input that is measured holds NaN
        number = "" if fault.number is None else f" ({fault.number:.2g}, at most {fault.bound:.2g})"
        what = f"it breaks the law {fault.law!r}{number}: {one_line(fault.fault, _LONGEST)}"
        return Verdict(fault.law, Status.ERROR, _in_words(what))


class Gate:
    """Knows which settings may be measured, and tries unknown ones."""

    def __init__(self, timeout: float, *, unchecked: bool = False) -> None:
        self._timeout, self._unchecked = timeout, unchecked
        self._known: dict[tuple[str, bool, bool], Verdict] = {}
        self.doing: Callable[[Cell, str], None] = lambda cell, part: None
        """Called with the part of a visit that begins, such as a law."""

    def learn(self, records: Iterable[Record]) -> None:
        """Take over what rows say of their settings."""
        for one in records:
            if one.laws:
                broken = one.laws not in (HELD, UNCHECKED, NOT_TRIED)
                verdict = Verdict(one.laws, one.status, one.reason) if broken else Verdict(one.laws)
                self._known[one.label, one.causal, _of_core(one.variant, one.level)] = verdict

    def verdict(self, worker: Worker, cell: Cell) -> Verdict:
        """The verdict on the setting of a cell, known or found now."""
        if self._unchecked:
            return Verdict(UNCHECKED)
        if cell.variant.name == UNTOUCHED:  # a trained model as it is, which claims nothing
            return Verdict("")
        setting = cell.variant.label, cell.shape.causal, _of_core(cell.variant.name, cell.level)
        if setting not in self._known:
            used = worker.served > 0
            found = self._found(worker, cell)
            if used and found.status in (Status.ERROR, Status.CRASH):  # it may be the fault of cells before it
                worker.stop()
                found = self._found(worker, cell)
            self._known[setting] = found
        return self._known[setting]

    def _found(self, worker: Worker, cell: Cell) -> Verdict:
        at = 0

        def told(progress: dict[str, Any]) -> None:
            nonlocal at
            at = int(progress["done"])
            self.doing(cell, f"law {at + 1} of {progress['of']}")

        request = HoldSetting(cell)
        try:
            try:
                return request.ask(worker, self._timeout, told=told)
            except CellFailed as failed:
                if not failed.killed:
                    raise
                return request.ask(worker, self._timeout, told=told)  # a process may be killed by anybody
        except CellFailed as failed:
            from attnbench.laws import gating_laws

            law = gating_laws()[at]
            return Verdict(
                law, failed.status, _in_words(f"the law {law!r} could not be asked: {failed.reason}"), failed.stderr
            )


def _of_core(name: str, level: str) -> bool:
    return level == "operator" and name in VARIANTS and VARIANTS.get(name).core is not None


def _in_words(what: str) -> str:
    return one_line(f"{what}; --unchecked measures it all the same")
