"""The error of a variant's output against exact attention, and that of a trivial answer."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import SystemRandom
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from attnbench.catalogue.build import build
from attnbench.catalogue.engines.decoding.drafts import NarrowState, behind, known, taken
from attnbench.catalogue.engines.decoding.unequal import ONE_LENGTH
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.capabilities import Budgeted, Decoding, Patterned, Selection, chooser, steps
from attnbench.contract.inputs import draw_gates, draw_qkv
from attnbench.contract.problem.padding import key_mask
from attnbench.contract.problem.position_bias import position_bias
from attnbench.contract.problem.reference import exact_attention, mean_of_visible, of_query_heads, relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.sink import sink_of
from attnbench.contract.problem.visible import Visible, masked
from attnbench.contract.spec import Spec
from attnbench.contract.variant import Variant, without_core
from attnbench.errors import AttnbenchError, BrokenContract, Unsupported
from attnbench.measure.coverage import Coverage, kept
from attnbench.measure.reuse import Recent
from attnbench.suite.cell import Cell

ErrorKind = Literal["exact", "approximation", "distance", "learned"]

_ORACLE_LOGITS = 2**24
"""Logits that the oracle holds at once (128 MiB in float64), whatever the length."""
_KEPT_ELEMENTS = 2**22
"""Draws with at most this many elements in q (32 MiB for the exact answer) are kept for the next variant."""
STRETCHES = 32
"""Most numbers for the course of the error over the steps of a generation."""
_LESSONS = 16
"""Most draws that a variant is fitted to; of large ones fewer."""
_LESSON_ELEMENTS = 2**22
"""Elements of q in all of these together."""


@dataclass(frozen=True, slots=True)
class ErrorResult:
    """Errors against exact attention in float64 on the same inputs, as rounded to the dtype that the variant got.

    A bias that the shape asks for is the same in both.
    """

    kind: ErrorKind
    """``exact`` (rounding only), ``approximation`` of softmax attention, ``distance`` (another operator), ``learned``
    (random initial weights mean nothing: no numbers; once fitted it is an approximation)."""
    rel_error: float | None = None
    """Median over the draws of ‖output - exact‖ / ‖exact‖ (Frobenius, over the whole tensor). NaN, and no other
    number, where any output held NaN or infinity."""
    rel_error_std: float | None = None
    """Standard deviation over the draws; None for a single one."""
    steps: tuple[float | None, ...] = ()
    """In pass ``generate`` the rel_error of each of :data:`STRETCHES` stretches of the steps, or of each step if there
    are fewer; the median over the draws, and None if the exact outputs of a stretch are 0. Else empty."""
    first: float | None = None
    """The same for the first quarter of the steps."""
    last: float | None = None
    """The same for the last quarter."""
    max_abs_error: float | None = None
    """Largest over all draws."""
    cosine: float | None = None
    """Mean over all rows and draws of the cosine between the output row and the exact row."""
    trivial_error: float | None = None
    """Median over the draws of the rel_error of answering with the mean of the values that a query may see."""
    kept_mass: float | None = None
    """Mean over the draws of the exact probability's share on the keys that are read, for a variant that chooses pairs,
    or has a budget and meets a prompt; else None."""
    kept_pairs: float | None = None
    """The same for the share of the visible pairs, for a variant that chooses them."""
    draws: int = 0
    """Number of different draws: a variant without random numbers on an input that repeats itself is measured once."""
    fit_steps: int | None = None
    """Steps of the fit; None without one."""
    doubt: str = ""
    bound: float = math.inf
    """Largest rel_error of an exact variant (:func:`roundings`); infinite for others."""


def measure_error(cell: Cell, *, adapt: Callable[[nn.Module], nn.Module] | None = None) -> ErrorResult:
    """Build the variant and draw its input ``error_draws`` times, with the cell's seed, the one after it and so on.

    In pass ``generate`` the outputs behind the prompt are compared, each of which is that of a step. Outputs of padded
    tokens are not compared. Memory is that of the variant plus O(B · H · (N + M) · D): the oracle works on blocks of
    queries.

    With ``fit`` the variant's parameters are fitted once, with the cell's seed, to the exact output on draws that are
    not measured: Adam on the squared relative error, in float32.

    Args:
        adapt: turns the variant into the form to measure, for example compiled code.

    Raises:
        UsageError: an unknown variant, input or option.
        Unsupported: the variant or the input does not allow the shape or the pass, or the variant is a mixer.
        ValueError: ``error_draws`` below 1.
    """
    if cell.error_draws < 1:
        raise ValueError(f"error_draws must be at least 1, got {cell.error_draws}")
    spec, variant = cell.variant, cell.entry
    if variant.kind == "mixer":
        raise Unsupported(without_core())
    prompt = _prompt(cell, variant)
    claims, kind = variant.claims(spec), error_kind(variant, spec)
    dtype: torch.dtype = getattr(torch, cell.dtype)
    fitted, doubt = _fitted(cell, dtype) if cell.fit and not claims.exact else (None, "")
    if kind == "learned":
        if fitted is None:
            # A shape that it does not allow is reported all the same.
            build(spec, cell.whole_shape, seed=cell.seed, level="operator")
            return ErrorResult(kind)
        kind = "approximation"
    measured: list[_Draw] = []
    shares: list[Coverage] = []
    bounds = [0.0 if claims.exact else math.inf]
    seen: set[bytes] = set()
    for seed in range(cell.seed, cell.seed + cell.error_draws):
        problem = _problem(cell.inputs, cell.whole_shape, seed, dtype, cell.device, cell.padding, prompt)
        drawn = draw_gates(cell.inputs, claims.reads, cell.whole_shape, seed)
        if fitted is not None or not claims.stochastic:
            digest = problem.digest + _digest(*drawn)
            if digest in seen:
                continue
            seen.add(digest)
        if not problem.exact.any():
            continue
        chooses = build(spec, cell.whole_shape, seed=seed, level="operator") if fitted is None else fitted
        chooses = chooses.to(device=cell.device, dtype=dtype)
        operator = chooses if adapt is None else adapt(chooses)
        q, k, v = (tensor.to(cell.device) for tensor in problem.qkv)
        gates = [x.to(cell.device, accumulator(dtype)) for x in drawn]
        bounds.append(roundings(q, k, biased=cell.shape.bias != "none") * torch.finfo(dtype).eps)
        masked = {} if problem.key_mask is None else {"key_mask": problem.key_mask.to(cell.device)}
        with torch.inference_mode():
            selection = None if prompt else _selection(chooses, q, k, **masked)
            if selection is not None:
                shares.append(_kept(selection, problem, cell.shape))
            given = q, k, v, *gates
            output = generated(cell, operator, given, prompt) if prompt else operator(*given, **masked)
            if not isinstance(output, torch.Tensor):
                what = type(output).__name__
                raise BrokenContract(f"it breaks the contract: it returns a {what}, not a torch.Tensor")
            output = _rows(output, problem.real_queries)
        if not output.isfinite().all():
            return ErrorResult(kind, rel_error=math.nan, fit_steps=None if fitted is None else cell.fit)
        measured.append(_compare(output, problem, _kept_mass(operator, problem, prompt), steps=bool(prompt)))
    if not measured:
        return ErrorResult(kind, doubt="no relative error: the exact output is 0")
    errors = [draw.rel_error for draw in measured]
    masses = [draw.kept_mass for draw in measured if draw.kept_mass is not None] + [one.mass for one in shares]
    return ErrorResult(
        kind=kind,
        rel_error=statistics.median(errors),
        rel_error_std=statistics.stdev(errors) if len(errors) > 1 else None,
        **_over_steps([draw.stretches for draw in measured]),
        max_abs_error=max(draw.max_abs_error for draw in measured),
        cosine=statistics.fmean(draw.cosine for draw in measured),
        trivial_error=statistics.median(draw.trivial_error for draw in measured),
        kept_mass=statistics.fmean(masses) if masses else None,
        draws=len(measured),
        fit_steps=None if fitted is None else cell.fit,
        doubt=doubt,
        kept_pairs=statistics.fmean(one.pairs for one in shares) if shares else None,
        bound=max(bounds),
    )


def roundings(q: Tensor, k: Tensor, *, biased: bool = False) -> float:
    """The largest error of exact attention in roundings of its dtype, to first order.

    A logit is at most S = max ‖q‖ max ‖k‖ / √D (Cauchy and Schwarz). It is rounded once, and its D terms, taken by
    halves, carry 1 + log₂ D roundings of random signs, so S · max(1, (1 + log₂ D) / √D) in all. An error of the logits
    moves a weight by twice its share, once through the weight and once through its divisor. Exponentials,
    the division and the output add a few. The sum over values without a common mean, one after the other, adds up to
    √M: its partial sums are as large as the output, which is small against the values. With a bias the keys that count
    lie within e⁻²⁰ of the largest weight, which adds 20 to S. What multiplies in bfloat16 or TF32 is off by thousands
    of roundings of float32.

    Args:
        q: ``(B, H, N, D)``; k: ``(B, K, M, D)``.
    """
    longest = [math.sqrt(float(x.double().square().sum(-1).max())) for x in (q, k)]
    D, M = q.shape[3], k.shape[2]
    logit = math.prod(longest) / math.sqrt(D) + 20 * biased
    return 2 * logit * max(1.0, (1 + math.log2(D)) / math.sqrt(D)) + math.sqrt(M) + 5


_ROWS = 8
"""Queries of one example, of all heads, that are held to the formula."""


def hold_rows(
    operator: nn.Module,
    qkv: Sequence[Tensor],
    shape: Shape,
    *,
    key_mask: Tensor | None = None,
    output: Tensor | None = None,
    backward: bool = False,
) -> None:
    """Hold random rows of an operator that claims to be exact to the formula, in its own shape and dtype.

    ``output`` is for the last queries, and computed if None. ``backward``: also hold the gradients from these rows
    alone, of their queries and of all keys and values. Raises AttnbenchError if they are off by more than rounding.
    """
    chance, dtype = SystemRandom(), qkv[0].dtype
    given = [x.detach().clone().requires_grad_(backward) for x in qkv] if output is None else []
    with torch.enable_grad():
        if output is None:
            output = operator(*given, **({} if key_mask is None else {"key_mask": key_mask}))
    example, first = chance.randrange(len(output)), shape.N - output.shape[2]
    there = "cpu" if output.device.type == "mps" else output.device
    mask = None if key_mask is None else key_mask[example : example + 1].to(there)
    real = range(first, shape.N)
    if mask is not None and not shape.cross:
        real = range(first, first + int(mask.sum()))
    rows = sorted(chance.sample(real, min(_ROWS, len(real))))
    q, k, v = wide = [x.detach()[example : example + 1].to(there).double().requires_grad_(backward) for x in qkv]
    bias, sink = position_bias(shape), sink_of(shape)
    if bias is not None:
        bias = bias.to(there, dtype).requires_grad_(False)

    def formula(row: int, values: Tensor) -> Tensor:
        seen = replace(Visible.of(shape), start=shape.q_start + row)
        logit = None if sink is None else sink.logit.detach().to(there, dtype)
        return exact_attention(q[:, :, row : row + 1], k, values, causal=seen, key_mask=mask, bias=bias, sink=logit)

    with torch.enable_grad():
        exact = torch.cat([formula(row, v) for row in rows], 2)
    found = output[example : example + 1][:, :, [row - first for row in rows]]
    bound = roundings(q.detach(), k.detach(), biased=bias is not None) * torch.finfo(dtype).eps
    if exact.any() and not (off := relative_error(found.to(there), exact)) <= bound:  # NaN is beyond it, too
        raise beyond_rounding(off, dtype)
    if not backward:
        return
    direction = torch.randn(exact.shape, device=there).to(dtype).double()
    own = torch.autograd.grad((found * direction.to(found)).sum(), given, allow_unused=True)
    wanted = torch.autograd.grad((exact * direction).sum(), wide)
    with torch.no_grad():
        sizes = _sizes_of_gradients(formula, rows, (q, k, v), direction)
    for got, right, size in zip(own, wanted, (*sizes, float(wanted[2].norm())), strict=True):
        difference = torch.zeros((len(output), *right.shape[1:]), device=there, dtype=torch.double)
        if got is not None:
            difference += got
        difference[example] -= right[0]
        off = float(difference.norm()) / max(size, 1e-300)
        if not off <= 4 * bound:
            raise beyond_rounding(off, dtype, "its gradients are ")


def _sizes_of_gradients(
    formula: Callable[[int, Tensor], Tensor], rows: Sequence[int], qkv: Sequence[Tensor], direction: Tensor
) -> tuple[float, float]:
    """The size of the gradients of queries and keys if nothing in them cancelled.

    With D = direction · v, a logit's is its weight times D - mean(D): small if one weight is nearly 1, though both are
    rounded.
    """
    q, k, v = qkv[0], *(of_query_heads(x, qkv[0].shape[1]) for x in qkv[1:])
    queries = keys = 0.0
    for place, row in enumerate(rows):
        each = (v @ direction[:, :, place, :, None]).abs()
        each = each + formula(row, each)
        sums = formula(row, torch.cat((each * k.norm(dim=-1, keepdim=True), each), -1))
        queries += float(sums[..., 0].square().sum())
        keys += float((sums[..., 1] * q[:, :, row : row + 1].norm(dim=-1)).square().sum())
    return math.sqrt(queries / q.shape[3]), math.sqrt(keys / q.shape[3])


def beyond_rounding(off: float, dtype: torch.dtype, what: str = "") -> AttnbenchError:
    """The error of a variant that claims to be exact and is off by so much, relatively."""
    count = off / torch.finfo(dtype).eps
    return AttnbenchError(
        f"exact, but {what}off by {off:.2g}, {count:.2g} roundings of {str(dtype)[6:]}: "
        "products lose precision, or it is not exact"
    )


def _prompt(cell: Cell, variant: Variant) -> int:
    if cell.pass_ != "generate":
        return 0
    if cell.padding:
        raise Unsupported(ONE_LENGTH)
    reason = variant.unsupported_reason(cell.shape, decode=True, spec=cell.variant)
    if reason:
        raise Unsupported(reason)
    return cell.shape.N


def generated(cell: Cell, operator: nn.Module, inputs: Sequence[Tensor], prompt: int) -> Tensor:
    """The outputs ``(B, H, n - prompt, E)`` of the tokens behind a prompt, by pass decode in one step, else in turn.

    With the cell's ``state_dtype``, whose lack of room raises Unsupported.
    """
    if cell.state_dtype != "auto":
        operator = NarrowState(operator, getattr(torch, cell.state_dtype))
    decoding = cast(Decoding, operator)
    if cell.kept_prefix:
        state = known(operator, cell.kept_prefix, *(x[:, :, :prompt] for x in inputs))
        _, state = behind(decoding, state, *(x[:, :, cell.kept_prefix : prompt] for x in inputs))
    else:
        state = decoding.begin(*(x[:, :, :prompt] for x in inputs))
    rest = [x[:, :, prompt:] for x in inputs]
    if cell.pass_ == "decode":
        return taken(decoding, state, *rest)[0]
    return torch.cat(list(steps(decoding, state, rest, 0)), 2)


def _kept_mass(operator: nn.Module, problem: _DrawnProblem, prompt: int) -> float | None:
    """Share of the exact probability on the keys that are read behind the prompt; None if all are."""
    if not prompt or not isinstance(operator, Budgeted):
        return None
    q, k, _ = (x.double() for x in problem.qkv)
    read = operator.keys_read(*problem.qkv, prompt)
    rows = torch.unflatten(q, 1, (k.shape[1], -1))
    mass = 0.0
    for t in range(prompt, q.shape[2]):
        logits = rows[:, :, :, t] @ k[:, :, : t + 1].mT * q.shape[3] ** -0.5
        mass += float((logits.softmax(-1) * read[:, :, None, t - prompt, : t + 1]).sum(-1).mean())
    return mass / (q.shape[2] - prompt)


def error_kind(variant: Variant, spec: Spec) -> ErrorKind:
    """The meaning of the error of a variant with the options of ``spec``."""
    claims = variant.claims(spec)
    if claims.exact:
        return "exact"
    kinds: dict[str, ErrorKind] = {"softmax": "approximation", "other": "distance", "learned": "learned"}
    return kinds[claims.target]


@dataclass(frozen=True, slots=True)
class _Draw:
    rel_error: float
    max_abs_error: float
    cosine: float
    trivial_error: float
    kept_mass: float | None = None
    stretches: tuple[float | None, ...] = ()
    """The rel_error of the first quarter of the steps, of the last, and of each stretch."""


@dataclass(frozen=True, slots=True)
class _DrawnProblem:
    qkv: tuple[Tensor, Tensor, Tensor]
    exact: Tensor
    trivial_error: float
    digest: bytes
    key_mask: Tensor | None = None
    real_queries: Tensor | None = None
    """``(B, N)`` bool: the real queries; None for all, as in cross-attention."""


def _fitted(cell: Cell, dtype: torch.dtype) -> tuple[nn.Module | None, str]:
    """The fitted operator, None if it learns nothing; and empty, or that fit and measurement share draws."""
    operator = build(cell.variant, cell.whole_shape, seed=cell.seed, level="operator").to(cell.device)
    if not learnt(operator):
        return None, ""
    lessons, doubt = _lessons(cell, dtype)

    def loss(step: int) -> Tensor:
        problem = lessons[step % len(lessons)]
        q, k, v = (tensor.to(cell.device, torch.float32) for tensor in problem.qkv)
        masked = {} if problem.key_mask is None else {"key_mask": problem.key_mask.to(cell.device)}
        output = _rows(operator(q, k, v, **masked), problem.real_queries)
        exact = problem.exact.to(output)
        return (output - exact).square().sum() / exact.square().sum().clamp(min=torch.finfo(exact.dtype).tiny)

    fit(operator, loss, cell.fit)
    return operator.requires_grad_(False), doubt


def _lessons(cell: Cell, dtype: torch.dtype) -> tuple[list[_DrawnProblem], str]:
    """The draws to fit a variant to, and a warning if an input has too few others, as a captured one may."""

    def problem(seed: int) -> _DrawnProblem:
        return _problem(cell.inputs, cell.whole_shape, seed, dtype, cell.device, cell.padding, 0)

    shape, first = cell.whole_shape, cell.seed + cell.error_draws
    count = max(1, min(_LESSONS, _LESSON_ELEMENTS // (shape.B * shape.H * shape.N * shape.D)))
    measured = {problem(seed).digest for seed in range(cell.seed, first)}
    found = {one.digest: one for one in map(problem, range(first, first + count))}
    others = [one for digest, one in found.items() if digest not in measured]
    if others:
        return others, ""
    return list(found.values()), f"fitted to the inputs that it is measured on: {cell.inputs} has no others"


def _problem(
    inputs: Spec, shape: Shape, seed: int, dtype: torch.dtype, device: str, padding: float, prompt: int
) -> _DrawnProblem:
    """One draw, cached if small: every variant of a suite meets the same draws, and the oracle costs most."""
    small = shape.B * shape.H * max(shape.N, shape.M) * shape.D <= _KEPT_ELEMENTS
    return (_kept_problem if small else _new_problem)(inputs, shape, seed, dtype, device, padding, prompt)


def _new_problem(
    inputs: Spec, shape: Shape, seed: int, dtype: torch.dtype, device: str, padding: float, prompt: int
) -> _DrawnProblem:
    q, k, v = (tensor.to(dtype) for tensor in draw_qkv(inputs, shape, seed))
    there = "cpu" if device == "mps" else device  # MPS has no float64
    asked = [tensor.to(there) for tensor in (q[:, :, prompt:], k, v)]
    block = max(1, min(512, _ORACLE_LOGITS // (shape.B * shape.H * shape.M)))
    bias = position_bias(shape)
    if bias is not None:
        bias = bias.to(there, dtype).requires_grad_(False)
    sink = sink_of(shape)
    of_heads = None if sink is None else sink.logit.detach().to(there, dtype)
    mask = key_mask(shape, padding)
    seen = None if mask is None else mask.to(there)
    causal = replace(Visible.of(shape), start=prompt) if prompt else masked(shape) or shape.causal
    exact = exact_attention(*asked, causal=causal, bias=bias, sink=of_heads, block=block, key_mask=seen)
    trivial = mean_of_visible(v, q.shape[2] - prompt, causal=causal, key_mask=mask)
    trivial = of_query_heads(trivial, shape.H).to(exact.device)
    real = None if shape.cross else mask
    exact, trivial = _rows(exact, real), _rows(trivial, real)
    return _DrawnProblem((q, k, v), exact, relative_error(trivial, exact), _digest(q, k, v), mask, real)


def _rows(output: Tensor, real: Tensor | None) -> Tensor:
    """Rows of the real queries ``(B, N)``: ``(rows, H, D)`` of ``(B, H, N, D)``, or all of it."""
    return output if real is None else output.transpose(1, 2)[real.to(output.device)]


def _selection(operator: nn.Module, q: Tensor, k: Tensor, **masked: Tensor) -> Selection | None:
    choosing = chooser(operator)
    if choosing is not None:
        chosen: Selection = choosing.select(q, k, **masked)
        return chosen
    return operator.pairs_by_place(k.shape[2], k.device) if isinstance(operator, Patterned) else None


def _kept(selection: Selection, problem: _DrawnProblem, shape: Shape) -> Coverage:
    device = problem.exact.device
    q, k, _ = (tensor.to(device) for tensor in problem.qkv)
    mask, queries = (None if x is None else x.to(device) for x in (problem.key_mask, problem.real_queries))
    return kept(selection, q, k, causal=Visible.of(shape), key_mask=mask, queries=queries)


_kept_problem = Recent(_new_problem, 16)


def _compare(output: Tensor, problem: _DrawnProblem, kept_mass: float | None, *, steps: bool) -> _Draw:
    exact = problem.exact
    output = output.to(exact.device).double()
    return _Draw(
        rel_error=relative_error(output, exact),
        max_abs_error=float((output - exact).abs().max()),
        cosine=float(torch.nn.functional.cosine_similarity(output, exact, dim=-1, eps=1e-300).mean()),
        trivial_error=problem.trivial_error,
        kept_mass=kept_mass,
        stretches=_of_stretches(output, exact) if steps else (),
    )


def stretches(steps: int) -> list[slice]:
    """Up to :data:`STRETCHES` neighbouring stretches of the steps, as equal as can be."""
    count = min(STRETCHES, steps)
    return [slice(i * steps // count, (i + 1) * steps // count) for i in range(count)]


def _of_stretches(output: Tensor, exact: Tensor) -> tuple[float | None, ...]:
    """The errors of the first and last quarter of the steps ``(B, H, r, E)``, and of each stretch; None for zeros."""
    r = exact.shape[2]
    quarter = -(-r // 4)
    parts = [slice(0, quarter), slice(r - quarter, r), *stretches(r)]
    pairs = [(output[:, :, part], exact[:, :, part]) for part in parts]
    return tuple(relative_error(*pair) if pair[1].any() else None for pair in pairs)


def _over_steps(draws: list[tuple[float | None, ...]]) -> dict[str, Any]:
    known = [[error for error in part if error is not None] for part in zip(*draws, strict=True)]
    medians = [statistics.median(errors) if errors else None for errors in known]
    return {"first": medians[0], "last": medians[1], "steps": tuple(medians[2:])} if medians else {}


def _digest(*tensors: Tensor) -> bytes:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.digest()


RATE = 1e-2
"""Learning rate at the first step; it falls to 0 along a cosine."""
_CLIPPED_TO = 1.0
_GIVEN = {"position_bias", "sink"}
"""Modules of the question: the exact output has the same bias and the same sink."""


def learnt(operator: nn.Module) -> list[nn.Parameter]:
    """The variant's parameters, except a bias or a sink that the shape asks for."""
    return [one for name, one in operator.named_parameters() if not _GIVEN & set(name.split("."))]


def fit(operator: nn.Module, loss: Callable[[int], Tensor], steps: int) -> None:
    """Minimise ``loss``, given a step's number from 0, by ``steps`` steps of Adam on the operator's own parameters.

    Raises Unsupported if no gradient reaches them.
    """
    parameters = learnt(operator)
    optimizer = torch.optim.Adam(parameters)
    with torch.enable_grad():
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * step / steps))
            value = loss(step)
            if not value.requires_grad:
                raise Unsupported("fit: no gradient reaches what it learns")
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]  # torch's annotation is missing
            nn.utils.clip_grad_norm_(parameters, _CLIPPED_TO)
            optimizer.step()
