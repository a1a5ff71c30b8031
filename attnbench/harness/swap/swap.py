"""Run a swap: visit each entry that has no row yet, and store each row at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor

from attnbench.errors import BrokenContract, CannotCreate, CorruptResults, StoreError
from attnbench.files import make_folder, refuse_link, refuse_other_than_file, replace_file, unpack
from attnbench.harness.identity import run_key
from attnbench.harness.rows import now, stamp
from attnbench.harness.swap.question import EXACT, Entry, Question, entries, refuse
from attnbench.harness.swap.row import Row, csv_of
from attnbench.harness.swap.tune import Pupil, tuned
from attnbench.harness.wire.outcome import status_of
from attnbench.harness.wire.process import environment_for
from attnbench.laws.implied import implied
from attnbench.measure.machine import machine_id, variables
from attnbench.measure.statistics import median, median_interval
from attnbench.measure.status import Status
from attnbench.models.pretrained.baseline import Baseline, baseline_of
from attnbench.models.pretrained.evaluate import Evaluated, LayerErrors, evaluate, layer_errors
from attnbench.models.pretrained.operators import Operators, build_operators
from attnbench.models.pretrained.subject import Exact, Subject
from attnbench.models.pretrained.windows import Text
from attnbench.results.journal import Journal
from attnbench.results.lock import held
from attnbench.results.manifest import OPENING, RUN_ID, read_manifest, write_manifest
from attnbench.results.runs import by_age, suite_folder
from attnbench.results.store import ENVIRONMENT
from attnbench.version import __version__

ROWS, TABLE = "swap.jsonl", "swap.csv"
METHOD = 1
"""Version of the method; rows of another one are not continued."""
_SAME = 1e-4
"""Nats by which softmax attention in the place of softmax attention may move the loss."""
_DONE = (Status.OK, Status.UNSUPPORTED)
"""Outcomes that another try would not change."""


class SwapFolder:
    """Rows of one model, one text and one way to train; further variants, layers and seeds may join them.

    Raises CannotCreate, also for a link in its place, StoreError, Locked and CorruptResults.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._journal = Journal(path / ROWS, str(read_manifest(path / ENVIRONMENT).get(OPENING, "")))

    @contextmanager
    def lock(self) -> Iterator[list[Row]]:
        refuse_link(self.path)
        refuse_other_than_file(self.path / ROWS)
        with held(self.path):
            for name in (ROWS, TABLE):
                unpack(self.path / name)
            try:
                yield self._rows(self._journal.open().rows)
            finally:
                self._journal.close()

    def rows(self) -> list[Row]:
        return self._rows(self._journal.read().rows)

    def _rows(self, lines: list[dict[str, Any]]) -> list[Row]:
        found = []
        for number, line in enumerate(lines, start=1):
            try:
                found.append(Row.from_json(line))
            except (TypeError, ValueError, KeyError) as error:
                raise CorruptResults(
                    f"{self.path / ROWS}:{number}: not a row of this version ({error}); restore it or use --fresh"
                ) from None
        return found

    def add(self, row: Row) -> None:
        self._journal.append([row.to_json()])

    def write_csv(self, rows: list[Row]) -> None:
        try:
            replace_file(self.path / TABLE, csv_of(rows))
        except OSError as error:
            raise StoreError(f"cannot write {self.path / TABLE}: {error.strerror}; {ROWS} is intact") from error


def known_folder(out: Path, identity: Mapping[str, Any], warn: Callable[[str], None]) -> SwapFolder | None:
    """The newest folder below ``out`` with rows of the same ``identity``; None if there is none.

    ``identity`` decides the numbers, apart from the choice of variants, layers and seeds.
    """
    for path in reversed(by_age(file.parent for file in suite_folder(out, "swap").glob(f"*/{ENVIRONMENT}"))):
        try:
            environment = read_manifest(path / ENVIRONMENT)
        except CorruptResults as error:
            warn(f"{error}; these rows are not continued")
            continue
        if environment.get("run_key") == run_key(dict(identity)) and environment.get("folder") == path.name:
            return SwapFolder(path)
    return None


def new_folder(out: Path, identity: Mapping[str, Any]) -> SwapFolder:
    """A folder below ``out``, named after the time and the device. Raises CannotCreate: it cannot be made."""
    root = suite_folder(out, "swap")
    make_folder(root)
    facts = {
        "attnbench": __version__,
        "run_key": run_key(dict(identity)),
        **identity,
        "started_at": now(),
        RUN_ID: token_hex(8),
    }
    name = f"{stamp()}-{str(identity['device']).replace(':', '')}"
    for attempt in range(100):
        path = root / (name if not attempt else f"{name}-{attempt}")
        try:
            path.mkdir()
            write_manifest(path / ENVIRONMENT, {**facts, "folder": path.name})
        except FileExistsError:
            continue
        except OSError as error:
            raise CannotCreate(f"cannot create {path}: {error.strerror}; choose another folder with --out") from error
        return SwapFolder(path)
    raise CannotCreate(f"cannot find a free name for a new folder in {root}")


class Watcher:
    """Gets the progress of a swap."""

    def begun(self, folder: Path, *, visits: int, resumed: int) -> None:
        """The folder is there; ``resumed`` of the visits have their rows already."""

    def visiting(self, entry: Entry) -> None:
        """A visit begins."""

    def trained(self, entry: Entry, step: int) -> None:
        """``step`` steps are done."""

    def visited(self, rows: Sequence[Row]) -> None:
        """A visit ended with these rows."""

    def warned(self, message: str) -> None:
        """Something weakens the rows."""


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of the rows, and further facts that decide them."""

    out: Path
    fresh: bool = False
    threads: int = 1
    plugins: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Swapped:
    """The outcome of a swap."""

    folder: Path
    rows: list[Row]
    """Rows in the order of the question. If a visit was repeated, its last row counts."""


def swap(question: Question, subject: Subject, text: Text, place: Place, watcher: Watcher | None = None) -> Swapped:
    """Visit every entry that has no row yet, in the order of :func:`~attnbench.harness.swap.question.entries`.

    Raises UsageError and Unsupported if the question does not fit this model, StoreError, and BrokenContract if softmax
    attention in place of the model's own changes its loss.
    """
    watcher = watcher or Watcher()
    refuse(question, subject.layers, text.most)
    visits = entries(question, subject.layers)
    subject.module.to(question.device)
    identity = identity_of(question, subject, text, place)
    known = None if place.fresh else known_folder(place.out, identity, watcher.warned)
    folder = known or new_folder(place.out, identity)
    with folder.lock() as stored:
        rows = {(row.key, row.steps): row for row in stored}
        missing = [entry for entry in visits if not answered_by(entry, rows)]
        _refuse_inexact([row for row in rows.values() if row.ok])
        watcher.begun(folder.path, visits=len(visits), resumed=len(visits) - len(missing))
        folder.write_csv(list(rows.values()))
        if missing:
            baseline = baseline_of(subject, text.held_out(question.windows), question.device)
            visit = _Visit(question, subject, text, baseline)
        for entry in missing:
            watcher.visiting(entry)
            found: list[Row] = []
            for row in visit.rows_of(entry, watcher):
                folder.add(row)
                rows[row.key, row.steps] = row
                found.append(row)
            folder.write_csv(list(rows.values()))
            watcher.visited(found)
            _refuse_inexact(found)
        wanted = [rows[entry.key, step] for entry in visits for step in entry.rules.steps]
    return Swapped(folder.path, wanted)


def answered_by(entry: Entry, rows: dict[tuple[tuple[str, str, int], int], Row]) -> bool:
    """True if all rows of a visit exist, and a retry would not change them."""
    return all((entry.key, step) in rows and rows[entry.key, step].status in _DONE for step in entry.rules.steps)


def identity_of(question: Question, subject: Subject, text: Text, place: Place) -> dict[str, Any]:
    """Facts that decide the numbers, apart from the choice of variants, layers, seeds and earlier steps."""
    rules = asdict(replace(question.rules, steps=question.rules.steps[-1:], seed=0))
    return {
        "method_version": METHOD,
        "model": subject.name,
        "model_digest": subject.digest,
        "text_digest": text.digest,
        "windows": question.windows,
        "length": text.length,
        "rules": rules,
        "device": question.device,
        "machine_id": machine_id(question.device),
        "threads": place.threads,
        "variables": variables(environment_for(place.threads)),
        "libraries": dict(subject.facts),
        "plugins": dict(place.plugins),
    }


def _refuse_inexact(rows: Sequence[Row]) -> None:
    for row in rows:
        if row.label != EXACT:
            continue
        if not row.ok:
            raise BrokenContract(f"softmax attention cannot take the place of the model's own: {row.reason}")
        moved = row.hidden_error if row.loss is None or row.loss_base is None else abs(row.loss - row.loss_base)
        if moved is None or not moved <= _SAME:
            raise BrokenContract(
                f"softmax attention in the place of the model's own moves it by {moved}: this model computes something "
                "else, and no row is believed"
            )


@dataclass(frozen=True, slots=True)
class _Visit:
    question: Question
    subject: Subject
    text: Text
    baseline: Baseline

    def rows_of(self, entry: Entry, watcher: Watcher) -> Iterator[Row]:
        started = time.perf_counter()
        left = list(entry.rules.steps)
        about = self._about(entry)
        try:
            pupil = self._pupil(entry)
            seen = self._pairs_seen(entry, pupil.operators)
            for step in tuned(
                pupil, self.text, entry.rules, self.question.device, lambda step: watcher.trained(entry, step)
            ):
                found = evaluate(pupil.model, pupil.operators, self.baseline, self.question.device)
                errors = layer_errors(self.subject, pupil.operators, self.baseline, self.question.device)
                own = pupil.parameters(entry.rules.what) if step else []
                yield replace(
                    self._measured(replace(about, steps=step), found, errors),
                    tokens_trained=step * entry.rules.batch * self.text.length,
                    trained_parameters=sum(one.numel() for one in own),
                    pairs_seen=seen,
                    seconds=time.perf_counter() - started,
                )
                left.remove(step)
        except Exception as error:  # somebody else's variant may raise anything, and the rows say so
            status, reason = status_of(error)
            for step in left:
                seconds = time.perf_counter() - started
                yield replace(about, steps=step, status=status, reason=reason, seconds=seconds)

    def _pupil(self, entry: Entry) -> Pupil:
        if entry.variant is None:
            operators: Operators = {}
        else:
            operators = build_operators(entry.variant, self.subject.layers, entry.layers, seed=entry.rules.seed)
        for one in operators.values():
            one.to(self.question.device)
        own_weights = entry.rules.steps[-1] > 0 and entry.rules.what != "variant"
        return Pupil(self.subject, self.subject.copy() if own_weights else self.subject, operators)

    def _pairs_seen(self, entry: Entry, operators: Operators) -> float | None:
        """Share of the visible pairs with a weight other than 0, on the first window, in the first replaced layer."""
        if not operators or entry.named.isdecimal():
            return None
        first = min(operators)
        taken: list[Tensor] = []

        def look(place: int, q: Tensor, k: Tensor, v: Tensor, exact: Exact) -> Tensor:
            if place == first:
                taken.extend((q, k))
            return exact()

        with torch.inference_mode(), suppress(Exception):  # the rows themselves name the fault
            self.subject.read(self.baseline.windows.tokens[:1].to(self.question.device), look)
            weights = implied(operators[first], *taken)
            shape = self.subject.layers[first].shape
            visible = torch.ones(shape.N, shape.N, dtype=torch.bool, device=weights.device)
            visible = visible.tril() if shape.causal else visible
            return float((weights[:, visible] != 0).double().mean())
        return None

    def _about(self, entry: Entry) -> Row:
        layers, question = self.subject.layers, self.question
        kept = {layer.kept: [i for i, one in enumerate(layers) if one.kept == layer.kept] for layer in layers}
        return Row(
            model=self.subject.name,
            model_digest=self.subject.digest,
            text=self.text.name,
            text_digest=self.text.digest,
            windows=question.windows,
            length=self.text.length,
            label=entry.label,
            layers=entry.named,
            layers_left="; ".join(f"{','.join(map(str, of))}: {why}" for why, of in kept.items() if why),
            causal=any(layer.shape.causal for layer in layers),
            train=entry.rules.what if entry.rules.steps[-1] else "",
            learning_rate=entry.rules.learning_rate,
            batch=entry.rules.batch,
            redraw=entry.rules.redraw,
            seed=entry.rules.seed,
            steps=0,
            status=Status.OK,
            machine_id=machine_id(question.device),
            torch_version=torch.__version__,
            transformers_version=self.subject.facts.get("transformers", ""),
            started_at=now(),
        )

    def _measured(self, row: Row, found: Evaluated, errors: LayerErrors | None) -> Row:
        numbers = {name: value for name, value in asdict(found).items() if name != "losses"}
        if errors is not None:
            numbers |= {"attention_error": errors.attention, "trivial_error": errors.trivial}
        before = self.baseline.losses
        if found.losses is not None and before is not None:
            deltas = [after - base for after, base in zip(found.losses, before, strict=True)]
            loss = math.fsum(found.losses) / len(found.losses)
            low, high = median_interval(deltas) or (None, None)
            numbers |= {
                "loss": loss,
                "loss_base": math.fsum(before) / len(before),
                "loss_delta": median(deltas),
                "loss_delta_low": low,
                "loss_delta_high": high,
                "perplexity": math.exp(min(loss, 700.0)),
                "accuracy_base": self._accuracy_base(),
                "window_losses": tuple(found.losses),
            }
        return replace(row, **{name: _finite(value) for name, value in numbers.items()})

    def _accuracy_base(self) -> float | None:
        right = [one.answered.right for one in self.baseline.originals if one.answered is not None]
        return sum(right) / self.baseline.asked if right and self.baseline.asked else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
