"""One row of a swap: one variant, in some layers, after some steps of training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from attnbench.measure.status import Status
from attnbench.results.table import text_of


@dataclass(frozen=True, slots=True)
class Row:
    """Losses are in nats, mean cross-entropy over the answers; None for a number that does not exist."""

    model: str
    model_digest: str
    text: str
    text_digest: str
    windows: int
    length: int
    label: str
    """The variant with its options; ``none``, ``exact`` and ``mean-value`` are the controls."""
    layers: str
    """``all``, ``none``, ``0,5`` for these two together, ``3`` for one of ``each``, ``only 3`` where that was asked."""
    layers_left: str
    """Layers that no variant could replace, with the reason."""
    causal: bool
    train: str
    learning_rate: float
    batch: int
    redraw: int
    seed: int
    steps: int
    status: Status
    reason: str = ""
    tokens_trained: int = 0
    trained_parameters: int = 0
    loss: float | None = None
    loss_base: float | None = None
    """Loss of the untouched model on the same windows."""
    loss_delta: float | None = None
    """Median increase of the loss over the original model's, across windows."""
    loss_delta_low: float | None = None
    loss_delta_high: float | None = None
    """Ends of the exact 95 % interval of that median."""
    perplexity: float | None = None
    accuracy: float | None = None
    accuracy_base: float | None = None
    top1_agreement: float | None = None
    kl: float | None = None
    hidden_error: float | None = None
    cosine: float | None = None
    neighbours: float | None = None
    attention_error: float | None = None
    """Relative error of a replaced layer on the untouched model's own q, k, v, mean over layers: not propagated."""
    trivial_error: float | None = None
    pairs_seen: float | None = None
    """Share of the visible pairs with a weight other than 0 in the first replaced layer."""
    seconds: float | None = None
    """Seconds of the visit up to this row."""
    machine_id: str = ""
    torch_version: str = ""
    transformers_version: str = ""
    started_at: str = ""
    window_losses: tuple[float, ...] = ()
    """The loss of each window, for differences to other rows."""

    @property
    def ok(self) -> bool:
        return self.status is Status.OK

    @property
    def key(self) -> tuple[str, str, int]:
        return self.label, self.layers, self.seed

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_plain(self) -> dict[str, Any]:
        """The row without the losses of single windows, as a table has it."""
        return {name: value for name, value in asdict(self).items() if name in COLUMNS}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Row:
        """The row of such a line. Raises TypeError, ValueError, KeyError: it is not one."""
        known = {field.name: row[field.name] for field in fields(cls)}
        losses = tuple(float(loss) for loss in known.pop("window_losses"))
        return cls(**{**known, "status": Status(known["status"])}, window_losses=losses)


COLUMNS = tuple(field.name for field in fields(Row) if field.name != "window_losses")
"""Columns of the table; the losses of single windows are in the journal alone."""


def csv_of(rows: Iterable[Row]) -> str:
    """A header and one line for each row, safe to open in a spreadsheet."""
    return text_of(COLUMNS, (row.to_json() for row in rows))
