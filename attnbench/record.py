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
"""Raised when what a reader must know of the files changes. 2 has a seal on each line; 1, the first, has none."""
READABLE = (1, 2)
"""Schema versions that this version reads."""
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
"""Columns that rows of this schema may lack, with what they stand for there."""


@dataclass(slots=True)
class Record:
    """One cell's result. Field order is column order; units stand in the names; None where not measured."""

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
    """Power of n in the time that the variant's paper claims."""
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
    """Added to the logits: ``none``, ``alibi`` or ``relative``."""
    compile: bool
    """Asked for ``torch.compile``; in ``compiled`` stands what came of it."""
    padding: float
    """Share of the batch's tokens that are padding."""
    dtype: str
    device: str
    inputs: str
    """With every option that has a value: ``gaussian:logit_std=1.0``; a model reads random ``bytes``."""
    seed: int
    status: Status
    reason: str = ""

    time_median_s: float | None = None
    time_ci_low_s: float | None = None
    time_ci_high_s: float | None = None
    time_iqr_s: float | None = None
    time_min_s: float | None = None
    time_samples: int | None = None
    """Samples in the statistic; contaminated ones are in samples.jsonl only."""
    time_rounds: int | None = None
    """Shuffled rounds over the whole suite in which samples were taken."""
    first_call_s: float | None = None
    examples_per_s: float | None = None
    tokens_per_s: float | None = None

    peak_bytes: int | None = None
    """Most memory that tensors held at once during one call, above what was there before it."""
    input_bytes: int | None = None
    param_bytes: int | None = None
    output_bytes: int | None = None
    peak_rss_bytes: int | None = None
    state_bytes: int | None = None
    """Of a decoding step: what is kept of the tokens before it, a cache or a state."""
    state_bytes_per_token: float | None = None
    """state_bytes over batch and tokens kept."""

    matmul_flops: int | None = None
    exponentials: int | None = None
    """Numbers of which the call takes an exponential, in whatever function: a softmax, a sigmoid."""
    floor_s: float | None = None
    """What the call must take on this machine, by the rates measured at the start of the run: matmul_flops over the
    matmul rate and exponentials over theirs, or the bytes of bytes_per_s over the copy rate if that is more."""
    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    """Inputs (in decoding: the state), parameters and output, each counted once, over the time: at least so many are
    moved."""
    peak_fraction: float | None = None
    """The larger of flops_per_s over the machine's own matmul rate and bytes_per_s over its rate of copying so many
    bytes, both measured at the start of the run; of FLOPs alone in older rows, which have no bytes_per_s."""

    error_kind: str | None = None
    """``exact`` | ``approximation`` | ``distance`` (another operator) | ``learned`` (no meaning before fitting)."""
    rel_error: float | None = None
    rel_error_std: float | None = None
    max_abs_error: float | None = None
    cosine: float | None = None
    trivial_error: float | None = None
    """rel_error of answering mean(V) on the same inputs."""
    error_draws: int | None = None

    task: str | None = None
    """With every option that has a value; None for a model that reads random bytes."""
    layers: int | None = None
    """Of the model, at level model."""
    ffn: int | None = None
    positions: str = ""
    score_kind: str | None = None
    """``accuracy`` of sequences, or ``token accuracy`` of the tokens that are asked for."""
    score: float | None = None
    """On the test examples, by the weights after the last step."""
    score_std: float | None = None
    """Of rows that summarise several; ``run`` writes none."""
    score_low: float | None = None
    """To score_high the 95 % interval of this one training over test examples."""
    score_high: float | None = None
    chance_score: float | None = None
    """Of the best constant answer, on the test labels."""
    val_score: float | None = None
    train_loss: float | None = None
    """Mean over the last tenth of the steps."""
    test_loss: float | None = None
    train_examples: int | None = None
    """Different ones that were seen."""
    test_examples: int | None = None
    steps: int | None = None
    best_step: int | None = None
    """Whose weights were scored."""
    learning_rate: float | None = None
    protocol: str | None = None
    """``fixed``, or ``sweep``: one of several rates."""
    pretrain_steps: int | None = None
    trainable_params: int | None = None
    params_ratio: float | None = None
    """trainable_params over those of softmax in the same encoder."""
    train_s: float | None = None
    """Processor time of the training, device time on a GPU; without what was lost before a resume."""
    target_s: float | None = None
    """Of it, until the validation score was nine tenths of the way from chance to 1; None where it never was."""
    energy_j: float | None = None
    """What the processor's packages, or the GPU's board, took from the first step to the last without evaluations, by a
    counter of the machine. It counts all that runs there: None where several trainings ran at once, as they do on a
    CPU of several cores, and where there is no counter that can be read. What was lost before a resume is not in it."""
    data_digest: str | None = None

    kernel: str | None = None
    """Fused kernel that really ran, where there is a choice."""
    compiled: bool = False
    """What was measured is compiled code from end to end, by ``torch.compile`` or because the variant always is."""
    process: str = ""
    """``tuned`` or ``as-shipped``."""
    quick: bool = False
    """True for rows of ``--quick``: one sample, no interval."""
    warnings: str = ""
    own_form: str = ""
    """Where the variant is not the method that its source describes, in one sentence; empty where it is."""
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
        """A record for ``cell`` with the identity columns filled in; ``columns`` overrides and adds."""
        from attnbench.variant import VARIANTS

        # A record can also be made where a plug-in is missing: in the parent of a worker that has it, say.
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
        """Column name -> value, ``pass`` instead of ``pass_``; without the seal, which a stored line adds."""
        return {_column(one.name): getattr(self, one.name) for one in fields(self) if one.name != SEAL}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        """Inverse of :meth:`to_json`.

        Raises:
            TypeError: columns missing or unknown.
            ValueError: a status that does not exist.
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
    """The record of a cell that is not tried, because the same at the shorter length ``n`` ended with ``status``."""
    return Record.of(cell, status, f"inferred: {status} at n={n} already, so not run", quick=quick)


_LEFT = "the cell"
"""How a warning begins that says what a cell left behind in its process."""


def with_traces(record: Record, traces: str, previous: Record | None = None) -> Record:
    """The row with a word on what its cell left behind, now or in an earlier round."""
    earlier = [said for said in previous.warnings.split("; ") if said.startswith(_LEFT)] if previous else []
    now = [f"{_LEFT} {one_line(traces.replace(';', ','))}, so the next one starts in a fresh process"] if traces else []
    return replace(record, warnings="; ".join(dict.fromkeys(filter(None, [record.warnings, *earlier, *now]))))


_LOST_ROUND = re.compile(r"(; |^)round \d+ failed: [^;]*")


def with_lost_round(record: Record, lost: str) -> Record:
    """The row of the rounds before, which keeps its numbers and says how a later one failed."""
    return replace(record, warnings="; ".join(filter(None, [record.warnings, one_line(lost.replace(";", ","))])))


def has_lost_round(record: Record) -> bool:
    """Whether a later round failed, after which a cell is not visited again."""
    return bool(_LOST_ROUND.search(record.warnings))


def without_lost_rounds(record: Record) -> Record:
    """The row as it was before a later round failed."""
    return replace(record, warnings=_LOST_ROUND.sub("", record.warnings))


def one_line(text: str, limit: int = 200) -> str:
    """Printable, single-line, at most ``limit`` characters: fit for a CSV cell and a terminal."""
    flat = printable(" ".join(text.split()))
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def _column(field_name: str) -> str:
    return "pass" if field_name == "pass_" else field_name


COLUMNS: tuple[str, ...] = tuple(_column(f.name) for f in fields(Record))
"""The columns of ``results.csv``, in order."""
