"""One row of the results: its cell, the outcome and the numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

from attnbench.measure.status import Status
from attnbench.results.manifest import SEAL
from attnbench.results.renamed import named_as_today
from attnbench.suite.axes import AXES, FOLLOWING, before, filled
from attnbench.suite.cell import METHOD_VERSION, OF_TOKENS, UNTOUCHED, Cell
from attnbench.text import one_line

if TYPE_CHECKING:  # torch takes seconds to import
    from attnbench.contract.variant import Variant

SCHEMA_VERSION = 3
"""Incremented when the files change in a way that readers must know. Lines of 1 have no checksum; in 2 a line's is also
of the lines before it; in 3 it is of the line alone, and a complete run has a digest of each file."""
READABLE = (1, 2, 3)
"""Schema versions that this version can read."""
HELD, UNCHECKED, NOT_TRIED = "held", "unchecked", "not tried"
"""Values of the column ``laws`` beside the name of a law."""


@dataclass(frozen=True, slots=True)
class Column:
    """Facts of a column that a field's annotation carries; its docstring is the meaning."""

    kind: type = str
    """Type of its values, from the annotation."""
    empty: bool = False
    """True if a value may be None, from the annotation."""
    unit: str = ""
    """Unit of its numbers; the end of the name says it for seconds and bytes."""
    negative: bool = False
    """True if a number may be below 0."""
    one_call: bool = True
    """True if one call is enough to measure it."""
    schema: int | None = None
    """Schema since which all rows have it; None for a column that was added later, which rows may lack."""

    @classmethod
    def of(cls, name: str, hint: Any) -> Column:
        """The column of a field with this annotation."""
        hint, given = get_args(hint) if hasattr(hint, "__metadata__") else (hint, cls())
        kind, *none = get_args(hint) or (hint,)
        ends = {"_s": "seconds", "_bytes": "bytes"}
        unit = given.unit or next((unit for end, unit in ends.items() if name.endswith(end)), "")
        return cls(kind, bool(none), unit, given.negative, given.one_call, given.schema)


@dataclass(slots=True)
class Record:
    """One cell's result. Field order is column order; None where not measured."""

    suite: str
    """Name of the suite."""
    sweep: str
    """Name of the sweep in it."""
    cell_id: str
    """Sixteen hex digits, the same for the same cell on every machine."""
    variant: str
    """Its registered name; ``none`` for a trained model as it is."""
    options: str
    """JSON object of all options that have a value, by default or given."""
    label: str
    """Variant and options as one would type them: ``performer:features=64``."""
    family: str
    """Its family in the catalogue."""
    target: str
    """``softmax``, ``learned`` or ``other``: the meaning of the error number (see ``Traits.target``)."""
    cost: str
    """The cost that the variant's paper claims, in n and d."""
    claimed_time_exponent: float | None
    """Power of n in the time, as the variant's paper claims it."""
    claimed_memory_exponent: float | None
    """Power of n in the memory, as the variant's paper claims it."""
    level: str
    """``operator`` (attention alone), ``layer`` (with its projections), ``model`` (a whole one) or ``pretrained`` (a
    trained one whose attention gave way to the variant)."""
    pass_: str
    """``forward``, ``backward``, ``training`` (both), ``decode`` (one step), ``stepwise`` (all, one by one) or
    ``generate`` (a prompt of seq_len tokens, then new_tokens one by one)."""
    batch: int
    """B, examples in one call."""
    heads: int
    """H, heads."""
    kv_heads: int
    """K, heads of keys and values; H unless several heads of queries share one."""
    qk_heads: int
    """Q, heads of queries and keys; H unless several heads of values share one."""
    head_dim: int
    """D, width of a head."""
    v_dim: int
    """E, width of a value and of an output; D unless it says otherwise."""
    seq_len: int
    """N, queries in one example."""
    kv_len: int
    """M, keys in one example."""
    q_start: int
    """Place of the first query among the keys; 0 but for the last tokens of a longer sequence."""
    causal: bool
    """Query i sees the keys j <= i only, and those of a prefix."""
    mask: str
    """Pairs hidden beside those that causality hides: ``none``, ``prefix:64``, ``document:300+200``,
    ``document:ragged`` or ``sliding:128``. ``padded:...``: the pairs of ``document:...``, each document a padded row of
    a batch."""
    bias: str
    """Term added to the logits: ``none``, ``alibi`` or ``relative``."""
    sink: str
    """A logit without a key beside those of the keys: ``none`` or ``learned``."""
    compile: bool
    """True if ``torch.compile`` was asked for; ``compiled`` tells the outcome."""
    launch: str
    """Way in which calls were to reach a GPU: ``auto``, ``eager`` or ``graph``; ``launched`` tells the outcome."""
    padding: Annotated[float, Column(unit="share")]
    """Share of the batch's tokens that are padding."""
    new_tokens: int
    """Tokens generated behind the prompt, in pass ``generate``. In pass ``decode`` the last tokens of seq_len that are
    taken in one step, if several are. 0 in others."""
    kept_prefix: int
    """First tokens of the prompt whose state is made once, before all calls of pass ``generate``; 0: none."""
    state_dtype: str
    """In decoding: dtype of a recurrent state between two steps; ``auto``: that of the variant's sums."""
    test_len: int
    """Length of the test's sequences where a score was measured; seq_len unless it says otherwise."""
    added_tokens: int
    """Learned tokens that each layer reads in front of its input."""
    query_stride: int
    """Tokens for which each layer has one query; above 1 its output is shorter than its input."""
    architecture: str
    """At level model: ``encoder``, ``decoder`` or ``encoder-decoder``, whose keys are the tokens that it reads."""
    replaced: str
    """At level pretrained, layers whose attention gave way to the variant: ``all`` that could, ``3``, or ``0+5``."""
    tuned: int
    """At level pretrained, steps of training after the swap and before the loss was measured."""
    train: str
    """Parameters that this training changed: ``all``, ``attention`` or ``variant``."""
    dtype: str
    """Element type of q, k and v, or of the model."""
    device: str
    """``cpu``, ``cuda``, ``cuda:1`` or ``mps``."""
    inputs: str
    """The input with every option that has a value: ``gaussian:logit_std=1.0``; a model reads random ``bytes``, and a
    trained one its own ``text`` or that of a file."""
    seed: int
    """Seed of inputs, random projections and initial weights."""
    status: Status
    """Outcome of the cell; only ``ok`` rows have numbers to compare."""
    reason: Annotated[str, Column(schema=1)] = ""
    """Why it ended so, in one line; empty where it is ``ok``."""

    time_median_s: Annotated[float | None, Column(one_call=False, schema=1)] = None
    """Median time of one call."""
    time_ci_low_s: Annotated[float | None, Column(schema=1)] = None
    """Lower end of the 95 % interval of the median: Student's t over the medians of visits, on the log scale. One visit
    has none."""
    time_ci_high_s: Annotated[float | None, Column(schema=1)] = None
    """The upper end of that interval."""
    time_iqr_s: Annotated[float | None, Column(schema=1)] = None
    """Distance between the quartiles of the samples."""
    time_min_s: Annotated[float | None, Column(one_call=False, schema=1)] = None
    """The shortest sample."""
    time_samples: Annotated[int | None, Column(one_call=False, schema=1)] = None
    """Number of samples in the statistic; contaminated ones are in samples.jsonl only."""
    time_rounds: Annotated[int | None, Column(one_call=False, schema=1)] = None
    """Number of shuffled rounds over the whole suite that took samples."""
    first_call_s: Annotated[float | None, Column(one_call=False, schema=1)] = None
    """Time of the first call, with everything that is prepared once, such as compiling."""
    launched: str = ""
    """Way in which the timed calls reached a GPU: ``eager``, kernel after kernel, or ``graph``, as a CUDA graph that
    was captured once and replayed. Empty on other devices, and in older rows, which were all ``eager``."""
    launch_note: str = ""
    """Why the calls were not captured; empty where they were, or where the launch was to be ``eager``."""
    device_s: float | None = None
    """Sum of the times of all kernels, copies and fills of one timed call on a GPU, by torch's profiler."""
    kernels: int | None = None
    """Number of these kernels, copies and fills."""
    host_share: Annotated[float | None, Column(one_call=False)] = None
    """Share of time_median_s in which no kernel ran, since the GPU waited for the host: 1 - device_s / time_median_s,
    not below 0."""
    select_s: float | None = None
    """Median time of the choice alone, for a variant that chooses which pairs count before it attends to them; it is a
    part of time_median_s. None for the others, and where attention stands in a layer."""
    rollback_s: float | None = None
    """In pass ``decode`` with several new_tokens: median time of the way back to the first half of them, as if the rest
    were rejected: a cache is cut, and any other state made again from the one before. No part of time_median_s."""
    examples_per_s: Annotated[float | None, Column(unit="1/s", one_call=False, schema=1)] = None
    """batch over time_median_s."""
    tokens_per_s: Annotated[float | None, Column(unit="1/s", one_call=False, schema=1)] = None
    """Tokens of the batch over time_median_s. In pass ``generate`` the new ones count."""
    first_token_s: Annotated[float | None, Column(one_call=False)] = None
    """In pass ``generate``: from the prompt, or what follows kept_prefix, to its last output and the state behind it,
    of which the first token is chosen. The prompt's share of a call, the mean of each round's median, of
    time_median_s."""
    token_s: Annotated[float | None, Column(one_call=False)] = None
    """In pass ``generate``: time of one step: the rest of time_median_s over new_tokens."""

    peak_bytes: Annotated[int | None, Column(schema=1)] = None
    """Most memory that tensors held at once during one call, beyond their memory before it."""
    input_bytes: Annotated[int | None, Column(schema=1)] = None
    """The input of one call: q, k and v, or the tokens of a model."""
    param_bytes: Annotated[int | None, Column(schema=1)] = None
    """Parameters and buffers of the measured variant, layer or model."""
    output_bytes: Annotated[int | None, Column(schema=1)] = None
    """The output of one call."""
    moved_bytes: int | None = None
    """The memory from before one call that its operations touch, as far as they tell, and the output's own memory, each
    byte once. A key that is not read does not count, nor does one row in the place of many."""
    peak_rss_bytes: Annotated[int | None, Column(schema=1)] = None
    """Rise of the resident memory of the process during one call, on Linux; only in the process as shipped."""
    state_bytes: int | None = None
    """The cache or state that a decoding step keeps of the tokens before it. In pass ``generate`` the one behind the
    prompt, with the room that is there for new tokens."""
    state_bytes_per_token: Annotated[float | None, Column(unit="bytes")] = None
    """state_bytes divided by batch and tokens; in pass ``generate`` by those of the prompt and the new ones."""
    tokens_kept: int | None = None
    """Tokens of the prompt that a step reads, in a variant that reads a part of them; None in others."""
    kv_bytes_per_token: Annotated[int | None, Column(unit="bytes")] = None
    """One token's part in one layer of a cache of all tokens: a key and a value, K·(D + E) numbers, unless the variant
    keeps something else. None for a variant that keeps none."""
    density: Annotated[float | None, Column(unit="share")] = None
    """Share of the pairs of query and key that causality and mask leave visible, of N·M in all. A pattern that the
    variant has itself, and padding, do not count."""

    matmul_flops: Annotated[int | None, Column(unit="FLOPs", schema=1)] = None
    """Floating-point operations of matrix products in one call, counted as it runs."""
    exponentials: int | None = None
    """Number of exponentials that the call takes, in whatever function: a softmax, a sigmoid."""
    floor_s: float | None = None
    """Least time that the call can take on this machine, by the rates measured at the start of the run: matmul_flops
    over the matmul rate plus exponentials over theirs, or, if more, moved_bytes over their rate."""
    flops_per_s: Annotated[float | None, Column(unit="FLOP/s", one_call=False, schema=1)] = None
    """matmul_flops over time_median_s."""
    bytes_per_s: Annotated[float | None, Column(unit="bytes/s", one_call=False)] = None
    """moved_bytes over time_median_s; in older rows, all of the inputs (in decoding: of the state), parameters and
    output."""
    peak_fraction: Annotated[float | None, Column(unit="share", one_call=False, schema=1)] = None
    """The larger of two shares: flops_per_s over the machine's own matmul rate, and bytes_per_s over its rate of
    copying or, if faster, reading that many bytes. Both rates are measured at the start of the run. Older rows have no
    bytes_per_s and give the first share alone."""

    error_kind: Annotated[str | None, Column(schema=1)] = None
    """``exact`` | ``approximation`` | ``distance`` (another operator) | ``learned`` (no meaning before fitting)."""
    rel_error: Annotated[float | None, Column(schema=1)] = None
    """‖output - exact‖ / ‖exact‖ against exact attention in float64 on the same inputs; the median over the draws."""
    rel_error_std: Annotated[float | None, Column(schema=1)] = None
    """Standard deviation of rel_error over the draws."""
    rel_error_first: float | None = None
    """In pass ``generate``: rel_error of the first quarter of the new tokens alone."""
    rel_error_last: float | None = None
    """In pass ``generate``: rel_error of the last quarter of the new tokens alone."""
    rel_error_steps: str = ""
    """In pass ``generate``: JSON list of the rel_error of 32 neighbouring stretches of the new tokens, as equal as can
    be, or of each token where there are fewer; null for a stretch whose exact outputs are 0. Empty in other passes."""
    max_abs_error: Annotated[float | None, Column(schema=1)] = None
    """The largest difference of one number of the output, over all draws."""
    cosine: Annotated[float | None, Column(negative=True, schema=1)] = None
    """Cosine between an output row and the exact row, the mean over rows and draws."""
    trivial_error: Annotated[float | None, Column(schema=1)] = None
    """The rel_error of answering mean(V) on the same inputs."""
    kept_mass: Annotated[float | None, Column(unit="share")] = None
    """Share of the probability of exact attention that falls on the keys that are read; the mean over heads, queries
    and draws. In pass ``generate`` the queries behind the prompt. None in a variant that neither chooses keys nor has a
    window. A row is off by at most twice the rest times the longest value."""
    kept_pairs: Annotated[float | None, Column(unit="share")] = None
    """Share of the visible pairs of query and key, those that ``density`` counts, that are kept by a variant that
    chooses them before it attends, or by its window; the mean over the draws."""
    own_error: float | None = None
    """‖output - formula‖ / ‖formula‖ of one example without padding against the variant's own formula in float64, on
    the same rounded inputs and weights. Inputs and weights are those of the first draw."""
    own_error_late: float | None = None
    """own_error of the last half of the tokens alone, which a carry that gets lost spoils more."""
    own_error_grad: float | None = None
    """The same for the gradients of the inputs along a random direction of the output: the largest of q, k, v and
    further ones, whose gradients are not 0 but for rounding."""
    own_error_note: str = ""
    """Why an own error is missing that was asked for; empty if none is."""
    error_draws: Annotated[int | None, Column(schema=1)] = None
    """Draws of inputs and random projections that differ."""
    fit_steps: int | None = None
    """Steps by which the variant's parameters were fitted to the exact output first; None where none were."""

    task: str | None = None
    """The task with every option that has a value; None for a model that reads random bytes."""
    layers: int | None = None
    """Number of the model's layers, at level model; an encoder-decoder has this number in each half."""
    ffn: int | None = None
    """Width of the model's feed-forward layer."""
    positions: str = ""
    """``sinusoid``, ``rotary`` or ``none``; or the start of a position embedding that learns: ``learned``, from noise,
    or ``trained-sinusoid``, which was once called ``sinusoid``. Empty for attention alone, and for a layer that is not
    ``rotary``."""
    score_kind: str | None = None
    """``accuracy`` over sequences, or ``token accuracy`` over the tokens that have a label."""
    score: Annotated[float | None, Column(schema=1)] = None
    """Score on the test examples with the weights after the last step."""
    score_std: Annotated[float | None, Column(schema=1)] = None
    """Only in rows that summarise several; ``run`` writes none."""
    score_low: float | None = None
    """score_low to score_high is this one training's 95 % interval over test examples."""
    score_high: float | None = None
    """The upper end of that interval."""
    chance_score: float | None = None
    """Score of the best constant answer on the test labels."""
    val_score: float | None = None
    """Score on the validation examples with the weights after the last step."""
    train_loss: float | None = None
    """Mean training loss over the last tenth of the steps."""
    test_loss: float | None = None
    """Cross entropy on the test examples."""
    train_examples: int | None = None
    """Number of different examples seen in training."""
    test_examples: int | None = None
    """Number of test examples."""
    steps: int | None = None
    """Steps of training."""
    best_step: int | None = None
    """The step whose weights were scored."""
    learning_rate: float | None = None
    """The largest rate of the training."""
    protocol: str | None = None
    """``fixed``, or ``sweep``: one of several rates."""
    pretrain_steps: int | None = None
    """Steps of training on masked tokens before the training on labels."""
    guide: float | None = None
    """Weight of the loss that keeps attention near the diagonal; None where nothing guides it."""
    trainable_params: int | None = None
    """Number of trained parameters."""
    params_ratio: float | None = None
    """trainable_params divided by those of softmax in the same encoder."""
    train_s: float | None = None
    """Processor time of the training, or device time on a GPU; work lost before a resume is not counted."""
    target_s: float | None = None
    """Part of train_s until the validation score was nine tenths of the way from chance to 1; None if it never was."""
    energy_j: Annotated[float | None, Column(unit="joules", one_call=False)] = None
    """Joules of a call on an NVIDIA GPU, whose board has a counter: the mean of calls that followed one another for a
    fifth of a second or more, before the samples of the first round. Of a training: the energy that the processor's
    packages, or the GPU's board, took from the first step to the last, without evaluations, by a counter of the
    machine. The counter includes all that runs there, so this is None where several trainings ran at once, as they do
    on a CPU of several cores, and where no counter can be read. Work lost before a resume is not counted."""
    data_digest: str | None = None
    """Digest of the task's data, or of its generator; the same digest means the same examples."""

    model: str = ""
    """At level pretrained the trained model as the suite names it; empty at others."""
    model_digest: str = ""
    """Digest of all its weights."""
    text: str = ""
    """The text that it reads: the file, or the name of the model's own text."""
    text_digest: str = ""
    """Digest of the text as it was cut into windows."""
    windows: int | None = None
    """Windows that were held out to measure the loss."""
    loss: float | None = None
    """Mean cross-entropy in nats with the variant in the layers ``replaced``; None where the model predicts nothing."""
    loss_base: float | None = None
    """That of the untouched model on the same windows."""
    loss_delta: Annotated[float | None, Column(negative=True)] = None
    """Median over windows of the loss less the untouched model's."""
    loss_delta_low: Annotated[float | None, Column(negative=True)] = None
    """loss_delta_low to loss_delta_high is the exact 95 % interval of that median."""
    loss_delta_high: Annotated[float | None, Column(negative=True)] = None
    """The upper end of that interval."""
    top1_agreement: float | None = None
    """Share of the answers that are the untouched model's."""
    kl: Annotated[float | None, Column(negative=True)] = None
    """Mean of KL(untouched ‖ this) over the answers, in nats."""
    hidden_error: float | None = None
    """Relative error of the last features against the untouched model's, the mean over windows."""
    accuracy: float | None = None
    """Share of the answers that are right."""
    accuracy_base: float | None = None
    """That of the untouched model on the same windows."""
    feature_cosine: Annotated[float | None, Column(negative=True)] = None
    """Cosine of the mean of a window's last features with the untouched model's, the mean over windows."""
    neighbours: float | None = None
    """Share of the windows whose nearest other window, by that cosine, is the untouched model's."""
    attention_error: float | None = None
    """Relative error of a replaced layer's output on the untouched model's q, k and v, the mean over layers and up to
    four windows: not propagated. ``trivial_error`` is that of answering mean(V)."""
    pairs_seen: float | None = None
    """Share of the visible pairs with a weight other than 0, in the first replaced layer of several."""
    window_losses: str = ""
    """JSON list of the loss of each window, for differences between rows; empty where the model predicts nothing."""

    kernel: Annotated[str | None, Column(schema=1)] = None
    """The fused attention kernel that really ran, where there is a choice or ``torch.compile`` made one."""
    compiled: Annotated[bool, Column(schema=1)] = False
    """True if the measured code is compiled from end to end, by ``torch.compile`` or because the variant always is."""
    process: Annotated[str, Column(schema=1)] = ""
    """``tuned`` or ``as-shipped``."""
    quick: Annotated[bool, Column(schema=1)] = False
    """True for rows of ``--quick``: one sample, no interval."""
    warnings: Annotated[str, Column(schema=1)] = ""
    """Circumstances that weaken the numbers, separated by semicolons; empty where there are none."""
    own_form: str = ""
    """Difference of the variant from the method that its source describes, in one sentence; empty if there is none."""
    laws: str = ""
    """Outcome of the laws of ``attnbench check`` for the variant, with these options, on small shapes, tried before it
    is measured or trained: ``held``; the name of the law that is broken, in a row without numbers unless only NaN in
    padded tokens breaks it; ``unchecked`` after ``--unchecked``; ``not tried`` where it compiles itself for each shape,
    cannot be built so small or computes on no CPU. Empty in older rows, and in those of a trained model as it is."""
    machine_id: Annotated[str, Column(schema=1)] = ""
    """Digest of the processor, the memory, the system and torch: rows of different ones are never compared silently."""
    torch_version: Annotated[str, Column(schema=1)] = ""
    """Version of torch that measured it."""
    threads: Annotated[int | None, Column(schema=1)] = None
    """CPU threads of the process."""
    method_version: Annotated[int, Column(schema=1)] = METHOD_VERSION
    """Version of the way of measuring; numbers of two versions are not comparable."""
    schema_version: Annotated[int, Column(schema=1)] = SCHEMA_VERSION
    """Version of the file format."""
    started_at: Annotated[str, Column(schema=1)] = ""
    """Time of the first visit to this cell, UTC."""
    host: str = ""
    """Digest of the host that measured it, where an engine shared the run out among several; empty for other runs."""
    seal: str = ""
    """Checksum of this row's line in records.jsonl; empty before the row is stored."""

    @classmethod
    def of(cls, cell: Cell, status: Status, reason: str = "", **columns: Any) -> Record:
        """A record for ``cell`` with the identity columns filled in; ``columns`` overrides and adds columns."""
        from attnbench.contract.variant import VARIANTS

        # A record may be made where a plug-in is missing: in the parent of a worker that has it, say.
        known = cell.entry if cell.variant.name in VARIANTS else None
        identity = {
            "suite": cell.suite,
            "sweep": cell.sweep,
            "cell_id": cell.cell_id,
            "options": json.dumps(dict((known.complete(cell.variant) if known else cell.variant).options)),
            "label": cell.variant.label,
            "family": known.family if known else "",
            "target": known.target(cell.variant) if known else "",
            "own_form": known.claims(cell.variant, causal=cell.shape.causal).own_form if known else "",
            "cost": known.cost if known else "",
            "claimed_time_exponent": known.time_exponent if known else None,
            "claimed_memory_exponent": known.memory_exponent if known else None,
            "level": cell.level,
            "pass_": cell.pass_,
            "device": cell.device,
            **filled({axis: cell.at(axis) for axis in AXES}),
            "positions": cell.at("positions") or "",
            "variant": cell.variant.name,
            "inputs": _inputs(cell),
            "task": _task(cell),
            "status": status,
            "reason": one_line(reason),
            **(_of_pairs(cell, known) if known else {}),
            **({"layers": cell.model.layers, "ffn": cell.model.ffn} if cell.model else {}),
            **_of_pretrained(cell),
            **_of_training(cell),
        }
        return cls(**{**identity, **columns})

    def to_json(self) -> dict[str, Any]:
        """Column name -> value, with ``pass`` for ``pass_``; without the checksum, which a stored line gets."""
        return {name: getattr(self, field) for name, field in _STORED}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        """Inverse of :meth:`to_json`. Raises TypeError for other columns, and ValueError for an unknown status."""
        data = named_as_today(data)
        if "pass" in data:
            data["pass_"] = data.pop("pass")
        older = {axis: data[other] for axis, other in FOLLOWING.items() if other in data}
        return cls(**{**ADDED, **older, **data, "status": Status(data["status"])})


def _task(cell: Cell) -> str | None:
    from attnbench.contract.task import TASKS

    if cell.task is None:
        return None
    known = TASKS.get(cell.task.name) if cell.task.name in TASKS else None
    return (known.complete(cell.task) if known else cell.task).label


def _inputs(cell: Cell) -> str:
    from attnbench.contract.inputs import INPUTS

    if cell.level in OF_TOKENS:
        return _task(cell) or ("bytes" if cell.pretrained is None else cell.pretrained.text or "text")
    known = INPUTS.get(cell.inputs.name) if cell.inputs.name in INPUTS else None
    return (known.complete(cell.inputs) if known else cell.inputs).label


def _of_pairs(cell: Cell, variant: Variant) -> dict[str, Any]:
    """Facts of keys, values and pairs that are known before anything is measured."""
    width = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}[cell.dtype]
    return {
        "kv_bytes_per_token": variant.cached_bytes(cell.variant, cell.shape, width),
        "density": cell.shape.density if variant.kind == "operator" else None,
    }


def _of_pretrained(cell: Cell) -> dict[str, Any]:
    if cell.pretrained is None:
        return {}
    exact = {"family": "exact", "target": "softmax"} if cell.variant.name == UNTOUCHED else {}
    rate = {"learning_rate": cell.pretrained.rate} if cell.pretrained.last else {}
    return {"model": cell.pretrained.name, "windows": cell.pretrained.windows or None, **rate, **exact}


def _of_training(cell: Cell) -> dict[str, Any]:
    names = ("steps", "protocol", "pretrain_steps")
    rules = cell.training
    return {**{name: getattr(rules, name) for name in names}, "guide": rules.guide or None} if rules else {}


def inferred(cell: Cell, n: int, status: Status, *, quick: bool = False) -> Record:
    """The record of a cell that is not tried, because it ended with ``status`` at the shorter length ``n``."""
    return Record.of(cell, status, f"inferred: {status} at n={n} already, so not run", quick=quick)


REPLACED = "torch.compile put PyTorch's attention"
"""Start of a warning that the row is not of the algorithm on its label."""


def with_traces(record: Record, traces: str) -> Record:
    """The row with a warning about what its cell left behind in its process."""
    left = f"the cell {one_line(traces.replace(';', ','))}, so the next one starts in a fresh process"
    known = not traces or left in record.warnings
    return record if known else replace(record, warnings="; ".join(filter(None, [record.warnings, left])))


_LOST_ROUND = re.compile(r"(; |^)round \d+ failed: [^;]*")


def with_lost_round(record: Record, lost: str) -> Record:
    """The row of the earlier rounds with its numbers, and a warning that says how a later round failed."""
    return replace(record, warnings="; ".join(filter(None, [record.warnings, one_line(lost.replace(";", ","))])))


def has_lost_round(record: Record) -> bool:
    """True if a later round failed; the cell is then not visited again."""
    return bool(_LOST_ROUND.search(record.warnings))


def without_lost_rounds(record: Record) -> Record:
    """The row as it was before a later round failed."""
    return replace(record, warnings=_LOST_ROUND.sub("", record.warnings))


def _column(field_name: str) -> str:
    return "pass" if field_name == "pass_" else field_name


FIELDS: Mapping[str, Column] = {
    name: Column.of(name, hint) for name, hint in get_type_hints(Record, include_extras=True).items()
}
"""Field of a record -> its column, in order."""
COLUMNS: tuple[str, ...] = tuple(map(_column, FIELDS))
"""The columns of ``results.csv``, in order."""
_STORED = [(_column(name), name) for name in FIELDS if name != SEAL]

ADDED: dict[str, Any] = {
    **before("shape"),
    **before("cell"),
    **{one.name: one.default for one in fields(Record) if one.default is not MISSING and not FIELDS[one.name].schema},
}
"""Columns that older rows may lack -> the values that they then have."""
