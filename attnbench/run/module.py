"""Probe a module that is no registered variant in the isolated process, since it is foreign code."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from attnbench.errors import Unsupported, UsageError
from attnbench.probing import Found, Wanted, probe, subject_of
from attnbench.probing.questions import Growth, Pairs
from attnbench.run.protocol import Request


@dataclass(frozen=True, slots=True)
class ProbeModule(Request[Found]):
    """Ask a module everything (:func:`attnbench.probing.probe`)."""

    do = "probe"
    wanted: Wanted

    def to_json(self) -> dict[str, Any]:
        return asdict(self.wanted)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(Wanted(**data))

    def answer(self) -> dict[str, Any]:
        """The worker's side."""
        try:
            return {"found": asdict(probe(subject_of(self.wanted)))}
        except Unsupported as reason:
            return {"unsupported": str(reason)}
        except UsageError as problem:
            return {"usage": str(problem)}

    def answered(self, answer: dict[str, Any]) -> Found:
        """Raises UsageError or Unsupported where the module cannot be made, called or looked at."""
        if "usage" in answer:
            raise UsageError(answer["usage"])
        if "unsupported" in answer:
            raise Unsupported(answer["unsupported"])
        found = dict(answer["found"])
        for name in ("products", "memory"):
            found[name] = found[name] and Growth(*(tuple(found[name][part]) for part in ("lengths", "values")))
        found["pairs"] = Pairs(**{**found["pairs"], "fixed": tuple(found["pairs"]["fixed"])})
        for name in ("crossing", "idle"):
            found[name] = found[name] and [tuple(one) for one in found[name]]
        return Found(**{**found, "crossing": found["crossing"], "idle": found["idle"] or []})
