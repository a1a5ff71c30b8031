"""One row of the results: what was measured, how it ended, and the numbers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields, replace
from typing import Any

from attnbench.cell import METHOD_VERSION, Cell
from attnbench.printable import printable
from attnbench.status import Status

SCHEMA_VERSION = 2
"""Incremented when the files change in a way that readers must know. 1, the first, has no seals; 2 seals each line."""
READABLE = (1, 2)
"""Schema versions that this version can read."""
SEAL = "seal"

ADDED: dict[str, Any] = {
    "bias": "none",
    "padding": 0.0,
    "compile": False,
    "state_bytes": None,
    "state_bytes_per_token": None,
    "bytes_per_s": None,
    "exponentials": None,
    "floor_s": None,
    "layers": None,
    "ffn": None,
    "positions": "",
    "score_kind": None,
    "score_low": None,
    "score_high": None,
    "chance_score": None,
    "val_score": None,
    "train_loss": None,
    "test_loss": None,
    "train_examples": None,
    "test_examples": None,
    "steps": None,
    "best_step": None,
    "learning_rate": None,
    "protocol": None,
    "pretrain_steps": None,
    "trainable_params": None,
    "params_ratio": None,
    "train_s": None,
    "target_s": None,
    "energy_j": None,
    "data_digest": None,
    "own_form": "",
    "seal": "",
}
"""Columns that rows of this schema may lack -> the values that they then have."""


@dataclass(slots=True)
class Record:
    """One cell's result. Field order is column order; units are in the names; None where not measured."""

    suite: str
    sweep: str
    cell_id: str
    variant: str
    options: str
    """JSON object of all options that have a value, by default or given."""
    label: str
    """Variant and options as one would type them: ``performer:features=64``."""
    family: str
    target: str
    """``softmax``, ``learned`` or ``other``: what the error number means (see ``Traits.target``)."""
    cost: str
    claimed_time_exponent: float | None
    """Power of n in the time, as the variant's paper claims it."""
    claimed_memory_exponent: float | None
    level: str
    pass_: str
    batch: int
    heads: int
    head_dim: int
    seq_len: int
    kv_len: int
    causal: bool
    bias: str
    """What is added to the logits: ``none``, ``alibi`` or ``relative``."""
    compile: bool
    """Whether ``torch.compile`` was asked for; ``compiled`` says what came of it."""
    padding: float
    """Share of the batch's tokens that are padding."""
    dtype: str
    device: str
    inputs: str
    """The input with every option that has a value: ``gaussian:logit_std=1.0``; a model reads random ``bytes``."""
    seed: int
    status: Status
    reason: str = ""

    time_median_s: float | None = None
    time_ci_low_s: float | None = None
    time_ci_high_s: float | None = None
    time_iqr_s: float | None = None
    time_min_s: float | None = None
    time_samples: int | None = None
    """Number of samples in the statistic; contaminated ones are in samples.jsonl only."""
    time_rounds: int | None = None
    """Number of shuffled rounds over the whole suite that took samples."""
    first_call_s: float | None = None
    examples_per_s: float | None = None
    tokens_per_s: float | None = None

    peak_bytes: int | None = None
    """Most memory that tensors held at once during one call, beyond what they held before it."""
    input_bytes: int | None = None
    param_bytes: int | None = None
    output_bytes: int | None = None
    peak_rss_bytes: int | None = None
    state_bytes: int | None = None
    """What a decoding step keeps of the tokens before it: a cache or a state."""
    state_bytes_per_token: float | None = None
    """state_bytes divided by batch and tokens kept."""

    matmul_flops: int | None = None
    exponentials: int | None = None
    """How many numbers the call takes an exponential of, in whatever function: a softmax, a sigmoid."""
    floor_s: float | None = None
    """Least time that the call can take on this machine, by the rates measured at the start of the run: matmul_flops
    over the matmul rate plus exponentials over theirs, or, if more, the bytes of bytes_per_s over the copy rate."""
    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    """Bytes of inputs (in decoding: of the state), parameters and output, each counted once, divided by the time: the
    call moves at least these."""
    peak_fraction: float | None = None
    """The larger of two shares: flops_per_s over the machine's own matmul rate, and bytes_per_s over its rate of
    copying that many bytes. Both rates are measured at the start of the run. Older rows have no bytes_per_s and give
    the first share alone."""

    error_kind: str | None = None
    """``exact`` | ``approximation`` | ``distance`` (another operator) | ``learned`` (no meaning before fitting)."""
    rel_error: float | None = None
    rel_error_std: float | None = None
    max_abs_error: float | None = None
    cosine: float | None = None
    trivial_error: float | None = None
    """The rel_error of answering mean(V) on the same inputs."""
    error_draws: int | None = None

    task: str | None = None
    """The task with every option that has a value; None for a model that reads random bytes."""
    layers: int | None = None
    """Number of the model's layers, at level model."""
    ffn: int | None = None
    positions: str = ""
    score_kind: str | None = None
    """``accuracy`` over sequences, or ``token accuracy`` over the tokens that have a label."""
    score: float | None = None
    """Score on the test examples with the weights after the last step."""
    score_std: float | None = None
    """Only in rows that summarise several; ``run`` writes none."""
    score_low: float | None = None
    """score_low to score_high is this one training's 95 % interval over test examples."""
    score_high: float | None = None
    chance_score: float | None = None
    """Score of the best constant answer on the test labels."""
    val_score: float | None = None
    train_loss: float | None = None
    """Mean over the last tenth of the steps."""
    test_loss: float | None = None
    train_examples: int | None = None
    """Number of different examples seen in training."""
    test_examples: int | None = None
    steps: int | None = None
    best_step: int | None = None
    """The step whose weights were scored."""
    learning_rate: float | None = None
    protocol: str | None = None
    """``fixed``, or ``sweep``: one of several rates."""
    pretrain_steps: int | None = None
    trainable_params: int | None = None
    params_ratio: float | None = None
    """trainable_params divided by those of softmax in the same encoder."""
    train_s: float | None = None
    """Processor time of the training, or device time on a GPU; work lost before a resume is not counted."""
    target_s: float | None = None
    """Part of train_s until the validation score was nine tenths of the way from chance to 1; None if it never was."""
    energy_j: float | None = None
    """Energy that the processor's packages, or the GPU's board, took from the first step to the last, without
    evaluations, by a counter of the machine. The counter includes all that runs there, so this is None where several
    trainings ran at once, as they do on a CPU of several cores, and where no counter can be read. Work lost before a
    resume is not counted."""
    data_digest: str | None = None

    kernel: str | None = None
    """The fused kernel that really ran, where there is a choice."""
    compiled: bool = False
    """Whether the measured code is compiled from end to end, by ``torch.compile`` or because the variant always is."""
    process: str = ""
    """``tuned`` or ``as-shipped``."""
    quick: bool = False
    """True for rows of ``--quick``: one sample, no interval."""
    warnings: str = ""
    own_form: str = ""
    """One sentence on where the variant is not the method that its source describes; empty where it is."""
    machine_id: str = ""
    torch_version: str = ""
    threads: int | None = None
    method_version: int = METHOD_VERSION
    schema_version: int = SCHEMA_VERSION
    started_at: str = ""
    seal: str = ""
    """Digest of this row's line in records.jsonl and of all lines before it; empty before the row is stored."""

    @classmethod
    def of(cls, cell: Cell, status: Status, reason: str = "", **columns: Any) -> Record:
        """A record for ``cell`` with the identity columns filled in; ``columns`` overrides and adds columns."""
        from attnbench.variant import VARIANTS

        # A record may be made where a plug-in is missing: in the parent of a worker that has it, say.
        known = VARIANTS.get(cell.variant.name) if cell.variant.name in VARIANTS else None
        shape = cell.shape
        identity = {
            "suite": cell.suite,
            "sweep": cell.sweep,
            "cell_id": cell.cell_id,
            "variant": cell.variant.name,
            "options": json.dumps(dict((known.complete(cell.variant) if known else cell.variant).options)),
            "label": cell.variant.label,
            "family": known.family if known else "",
            "target": known.target(cell.variant) if known else "",
            "own_form": known.claims(cell.variant, causal=shape.causal).own_form if known else "",
            "cost": known.cost if known else "",
            "claimed_time_exponent": known.time_exponent if known else None,
            "claimed_memory_exponent": known.memory_exponent if known else None,
            "level": cell.level,
            "pass_": cell.pass_,
            "batch": shape.B,
            "heads": shape.H,
            "head_dim": shape.D,
            "seq_len": shape.N,
            "kv_len": shape.M,
            "causal": shape.causal,
            "bias": shape.bias,
            "compile": cell.compile,
            "padding": cell.padding,
            "dtype": cell.dtype,
            "device": cell.device,
            "inputs": _inputs(cell),
            "seed": cell.seed,
            "status": status,
            "reason": one_line(reason),
            "task": _task(cell),
            **_of_model(cell),
            **_of_training(cell),
        }
        return cls(**{**identity, **columns})

    def to_json(self) -> dict[str, Any]:
        """Column name -> value, with ``pass`` for ``pass_``; without the seal, which is added to a stored line."""
        return {_column(one.name): getattr(self, one.name) for one in fields(self) if one.name != SEAL}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        """Inverse of :meth:`to_json`.

        Raises:
            TypeError: columns are missing or unknown.
            ValueError: the status does not exist.
        """
        data = {("pass_" if key == "pass" else key): value for key, value in data.items()}
        return cls(**{**ADDED, **data, "status": Status(data["status"])})


def _task(cell: Cell) -> str | None:
    """The task with every option that has a value."""
    from attnbench.task import TASKS

    if cell.task is None:
        return None
    known = TASKS.get(cell.task.name) if cell.task.name in TASKS else None
    return (known.complete(cell.task) if known else cell.task).label


def _inputs(cell: Cell) -> str:
    from attnbench.qkv import INPUTS

    if cell.level == "model":
        return _task(cell) or "bytes"
    known = INPUTS.get(cell.inputs.name) if cell.inputs.name in INPUTS else None
    return (known.complete(cell.inputs) if known else cell.inputs).label


def _of_model(cell: Cell) -> dict[str, Any]:
    size = cell.model
    return {"layers": size.layers, "ffn": size.ffn, "positions": size.positions} if size else {}


def _of_training(cell: Cell) -> dict[str, Any]:
    names = ("steps", "learning_rate", "protocol", "pretrain_steps")
    return {name: getattr(cell.training, name) for name in names} if cell.training else {}


def inferred(cell: Cell, n: int, status: Status, *, quick: bool = False) -> Record:
    """The record of a cell that is not tried, because it ended with ``status`` at the shorter length ``n``."""
    return Record.of(cell, status, f"inferred: {status} at n={n} already, so not run", quick=quick)


_LEFT = "the cell"
"""Start of a warning that says what a cell left behind in its process."""


def with_traces(record: Record, traces: str, previous: Record | None = None) -> Record:
    """The row with a warning about what its cell left behind, now or in an earlier round."""
    earlier = [said for said in previous.warnings.split("; ") if said.startswith(_LEFT)] if previous else []
    now = [f"{_LEFT} {one_line(traces.replace(';', ','))}, so the next one starts in a fresh process"] if traces else []
    return replace(record, warnings="; ".join(dict.fromkeys(filter(None, [record.warnings, *earlier, *now]))))


_LOST_ROUND = re.compile(r"(; |^)round \d+ failed: [^;]*")


def with_lost_round(record: Record, lost: str) -> Record:
    """The row of the earlier rounds with its numbers, and a warning that says how a later round failed."""
    return replace(record, warnings="; ".join(filter(None, [record.warnings, one_line(lost.replace(";", ","))])))


def has_lost_round(record: Record) -> bool:
    """Whether a later round failed; the cell is then not visited again."""
    return bool(_LOST_ROUND.search(record.warnings))


def without_lost_rounds(record: Record) -> Record:
    """The row as it was before a later round failed."""
    return replace(record, warnings=_LOST_ROUND.sub("", record.warnings))


def one_line(text: str, limit: int = 200) -> str:
    """``text`` on one line, printable, at most ``limit`` characters: fit for a CSV cell and a terminal."""
    flat = printable(" ".join(text.split()))
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def _column(field_name: str) -> str:
    return "pass" if field_name == "pass_" else field_name


COLUMNS: tuple[str, ...] = tuple(_column(f.name) for f in fields(Record))
"""The columns of ``results.csv``, in order."""
