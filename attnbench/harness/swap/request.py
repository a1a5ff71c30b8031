"""A swap as requested by the command or from Python: its question, its run and its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from attnbench.contract.spec import Spec, parse_specs
from attnbench.contract.variant import VARIANTS
from attnbench.errors import BrokenContract, UsageError
from attnbench.harness.outside.isolation import Settings, Worker
from attnbench.harness.plan import Options, Plan, make_plan
from attnbench.harness.rows import rows_alike
from attnbench.harness.run_identity import identity
from attnbench.harness.swap.described import DescribeModel, ModelFacts, describe
from attnbench.harness.swap.swap_question import SwapQuestion, parse_layers, parse_steps
from attnbench.harness.trial import load_all
from attnbench.harness.wire.process import memory_limit
from attnbench.measure.machine import default_threads, resolve_device
from attnbench.measure.statistics import FEWEST
from attnbench.models.pretrained.bridge import MISSING
from attnbench.models.pretrained.evaluate import WINDOWS_OF_LAYERS
from attnbench.models.pretrained.loading import located
from attnbench.models.pretrained.models import default_length
from attnbench.models.pretrained.own_encoder import NAME
from attnbench.results.record import Record
from attnbench.results.swaps import EXACT
from attnbench.suite.cell import UNTOUCHED, Cell


def variants_of(texts: Sequence[str], plugins: Sequence[str]) -> tuple[Spec, ...]:
    """The variants that are named, each once, after loading the plug-ins. Raises UsageError: an unknown variant or
    option."""
    load_all(plugins)
    found = [VARIANTS.get(spec.name).normalise(spec) for text in texts for spec in parse_specs(text)]
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class SwapRequest:
    """A question, and how it is answered."""

    question: SwapQuestion
    options: Options

    @classmethod
    def of(cls, model: str, variants: Sequence[Spec], given: Mapping[str, Any]) -> Self:
        """Read the arguments of the command or the function (:class:`attnbench.cli.options.SwapOptions`). Raises
        UsageError for an impossible value."""
        rate, text = given["learning_rate"], given["text"]
        if model != NAME:
            located(model)
            if find_spec("transformers") is None:
                raise UsageError(MISSING)
        if not 0 < rate <= 1:
            raise UsageError(f"--lr must be above 0 and at most 1, got {rate:g}; write 0.0003, say")
        if given["windows"] < FEWEST:
            said = f"--windows {given['windows']}: below {FEWEST} no interval of the median exists"
            raise UsageError(f"{said}; take {FEWEST} or more")
        question = SwapQuestion(
            model=model,
            variants=tuple(variants),
            layers=parse_layers(given["layers"]),
            length=given["length"] or default_length(model),
            text="" if text is None else str(text),
            windows=given["windows"],
            steps=parse_steps(given["steps"]),
            **{name: given[name] for name in ("learning_rate", "batch", "train", "redraw", "seeds")},
        )
        options = Options(
            device=resolve_device(given["device"]),
            threads=given["threads"] or default_threads(),
            plugins=tuple(given["plugins"]),
            out=Path(given["out"]),
            process="as-shipped",
            retry_failed=True,
            joins=True,
            rounds=1,
            **{name: given[name] for name in ("fresh", "unchecked", "cell_timeout")},
        )
        return cls(question, options)

    def plan(self, worker: Worker, *, timed: bool = False) -> tuple[ModelFacts, Plan]:
        """The model, which reads a window if ``timed``, and its run ahead. Raises UsageError and Unsupported if the
        question does not fit the model."""
        asked = self.question
        request = DescribeModel(asked.model, asked.length, asked.text, self.options.device, timed)
        model = describe(worker, request)
        return model, make_plan(asked.suite(model), self.options, sized=True)

    def foresee(self) -> tuple[ModelFacts, Foreseen]:
        """Count the remaining work, and time one window. Nothing is written. Raises UsageError and Unsupported."""
        with self.worker() as worker:
            model, plan = self.plan(worker, timed=True)
            known = rows_alike(plan, identity(plan, worker.start()["machine_id"]))
        missing = [cell for cell in plan.cells if cell.cell_id not in known]
        return model, _foreseen(self.question, model, plan.cells, missing)

    def worker(self) -> Worker:
        """The process that opens the model and carries out the run."""
        options = self.options
        assert options.threads is not None
        return Worker(
            Settings(
                device=options.device,
                threads=options.threads,
                process=options.process,
                memory_limit=memory_limit(options.device, None),
                plugins=options.plugins,
                models=(self.question.model,),
                rates=False,
            )
        )


def refuse_inexact(records: Sequence[Record]) -> None:
    """Raise BrokenContract if softmax attention in the place of the model's own changed it."""
    for row in records:
        if row.sweep == EXACT and row.status != "ok":
            raise BrokenContract(f"softmax attention cannot take the place of the model's own: {row.reason}")


_STEP = 3
"""Training on one window takes about as long as reading this number of them: forward once, backward twice that."""
_OF_TRAINED = 4
"""Numbers in float32 for each that is trained: the copy itself, its gradient, and two moments of AdamW."""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The cost of a swap, by the time of the model's own attention: that of a variant is unknown before it runs."""

    rows: int
    resumed: int
    windows_read: int
    windows_trained: int
    window_s: float
    """Seconds for one window, read."""
    weight_bytes: int
    """Bytes of the model and, if it is trained, of its copy with gradients and moments, in float32."""

    @property
    def seconds(self) -> float:
        return self.window_s * (self.windows_read + _STEP * self.windows_trained)


def _foreseen(question: SwapQuestion, model: ModelFacts, cells: Sequence[Cell], missing: Sequence[Cell]) -> Foreseen:
    trainings: dict[tuple[Spec, int, str], int] = {}
    for cell in missing:
        training = cell.variant, cell.seed, cell.replaced
        trainings[training] = max(trainings.get(training, 0), cell.tuned)
    trained = 0
    if question.trains:
        trained = model.weights if question.train == "all" else model.of_attention
    copied = model.weights - trained if trained else 0
    return Foreseen(
        rows=len(cells),
        resumed=len(cells) - len(missing),
        # The untouched model reads them first, and then with softmax attention in its place.
        windows_read=sum(_windows_of(cell, question.windows) for cell in missing)
        + 2 * question.windows * bool(missing),
        windows_trained=sum(trainings.values()) * question.batch,
        window_s=model.window_s,
        weight_bytes=4 * (model.weights + copied + _OF_TRAINED * trained),
    )


def _windows_of(cell: Cell, windows: int) -> int:
    return windows if cell.variant.name == UNTOUCHED else windows + min(windows, WINDOWS_OF_LAYERS) + 1
