"""Measurements of a module: tokens that it reads, numbers that pass, its computations, and idle parameters.

Each question has a new module (:meth:`~attnbench.laws.modules.probed_module.ProbedModule.fresh`), since a call may
change it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from time import process_time
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from attnbench.contract.compiled import without_compiler
from attnbench.errors import Unsupported, said
from attnbench.laws.growth import one_thread
from attnbench.laws.laws import gradients_along
from attnbench.laws.modules.probed_module import ProbedModule, finite
from attnbench.measure.flops import count
from attnbench.measure.memory import peak_tensor_bytes

TOKENS = 1024
"""Most tokens of the sequence in which one after the other is exchanged."""
SEEDS = (1, 2, 3)
"""Seeds of what stands in a token's place."""
FEWEST = 8
"""Fewest tokens that are exchanged; a sequence for which that takes too long is halved."""
SECONDS = 5.0
"""CPU time that each question takes, about: a busy machine looks no less far than a quiet one. A cost that is not
settled by then takes four times as long."""
MOST_DIRECTIONS = 1024
"""Most directions of the output for the numbers that cross the cut."""
MOST_BYTES = 2**30
"""Peak memory above which no longer sequence is tried; the longest has :data:`LONGEST` tokens."""
LONGEST = 8192
PRIMES = (1, 2, 3, 5, 7, 11, 17, 29, 37, 67, 131, 263, 521, 1021)
"""Lengths that are hardly any other size of a model, as a number of what all lengths are multiples of; the two longest
that it takes are tried, where tiles are small beside them, or the longest and the longest that is no layer's width."""
SMALL_SHARE = 0.02
"""Share of the square part below which a cost counts as linear."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """The changes by an exchange of one token."""

    token: int
    own: bool
    """True if its own output changes, or the one output of the whole sequence."""
    before: int
    """Number of earlier outputs that change."""
    after: int
    first: int
    """The first output that changes, and the last one; ``token`` if none does."""
    last: int
    faint: bool
    """True if the farthest change is hardly above rounding: it fades, and no window ends there."""


@dataclass(frozen=True, slots=True)
class Reads:
    """The reads in a sequence of n tokens, of which some were exchanged."""

    n: int
    exchanged: tuple[Exchange, ...]
    in_training: Exchange | None = None
    """A token that changes an output before it in training mode alone."""

    @property
    def everything(self) -> bool:
        """True if each output depends on its own token and on all earlier ones."""
        return all(one.own and one.after == self.n - 1 - one.token for one in self.exchanged)

    @property
    def future(self) -> Exchange | None:
        """A token that changes an output before it."""
        return next((one for one in self.exchanged if one.before), None)

    @property
    def unread(self) -> Exchange | None:
        """A token that leaves half of the outputs that may read it unchanged."""
        last, causal = self.n - 1, self.future is None
        few = (e for e in self.exchanged if not e.faint and e.before + e.after < (last - e.token * causal) / 2)
        return next(few, None)

    @property
    def local(self) -> list[Exchange]:
        """The tokens that leave several outputs unchanged, unlike perhaps a first token in the midst of windows."""
        return [one for one in self.exchanged if one.before + one.after < (self.n - 1) * 0.9]

    @property
    def reach(self) -> tuple[int, int] | None:
        """Most tokens before and after it that an output depends on; None if no end of that was seen."""
        back = max((e.last - e.token for e in self.local), default=0)
        ahead = max((e.token - e.first for e in self.local), default=0)
        seen = any(e.token + back < self.n - 1 and e.token - ahead > 0 for e in self.local)
        few = len(self.exchanged) - len(self.local) <= len(self.exchanged) / 4
        return (back, ahead) if seen and few and 0 < back + ahead < self.n / 2 else None


@dataclass(frozen=True, slots=True)
class PairWork:
    """The computations over all pairs of n tokens in one call."""

    softmax: int = 0
    """Softmax of rows of n weights, for each of n tokens."""
    fused: int = 0
    """Calls of a fused kernel of softmax attention in which n tokens read n."""
    products: int = 0
    """Matrix products and tables of distances with a result n × n."""
    pooled: int = 0
    """Rows of n weights, of which softmax is taken: summaries of the sequence; one for all of it, say."""
    fixed: tuple[int, ...] = ()
    """Lengths of rows that do not grow with n, of which softmax is taken for each of n tokens."""

    @property
    def formed(self) -> bool:
        return bool(self.softmax or self.fused or self.products)


@dataclass(frozen=True, slots=True)
class CostGrowth:
    """A cost at three or more lengths, each twice the one before, as a + b·n + c·n² of the last three."""

    lengths: tuple[int, ...]
    values: tuple[int, ...]
    peak: bool = False
    """True for a peak, the largest of several parts of a call."""

    def _square(self, end: int) -> float:
        few, more, most = (self.values[end - back] for back in (2, 1, 0))
        return (most - 3 * more + 2 * few) * 8 / 3

    @property
    def square_share(self) -> float:
        """Share of c·n² at the longest length."""
        return self._square(len(self.values) - 1) / self.values[-1] if self.values[-1] else 0.0

    @property
    def power(self) -> float | None:
        """1 or 2, the part that decides for long sequences; between them if c shrinks, as that of n·log n does.

        None if c grows, or if a peak has no fourth length: another part of a call may just have begun to decide.
        """
        if self.square_share <= SMALL_SHARE:
            return 1
        few, more, most = self.values[-3:]
        before, local = math.log2(more / max(1, few)), math.log2(most / max(1, more))
        if len(self.values) > 3:
            square, expected = self._square(len(self.values) - 1), 4 * self._square(len(self.values) - 2)
            if expected > 0 and square < 0.75 * expected:
                return 1 if local < 1.05 else local
            grows = square > 1.5 * expected
        elif self.peak:
            return None
        else:
            grows = most - more > 4.5 * (more - few)
        if grows and (local < 1.9 or before < local - 0.3):
            return None
        return local if grows and local > 2.1 else 2


@dataclass(frozen=True, slots=True)
class ModuleAnswers:
    """Answers to all questions; None if one does not apply or could not be asked."""

    per_token: bool
    parameters: int = 0
    call: str = "x"
    """Its input: ``x`` or ``tokens``."""
    repeats: bool = True
    """True if two calls on the same input agree: it draws nothing, in eval mode."""
    stateful: bool = False
    """True if a call changes what the next one gives."""
    apart: bool = True
    """True if no example of a batch changes another."""
    noisy: tuple[str, ...] = ()
    """Parameters that are all zero as constructed, and that have small noise in place of it."""
    claims_past: bool = False
    """True if its options say ``causal=true``."""
    reads: Reads | None = None
    crossing: tuple[tuple[int, int, int], ...] | None = None
    """Tokens before a cut, numbers of them that reach the outputs behind it, and how many could."""
    pairs: PairWork | None = None
    products: CostGrowth | None = None
    """FLOPs of matrix products."""
    numbers: CostGrowth | None = None
    """Numbers that operations write."""
    memory: CostGrowth | None = None
    """Peak bytes of a forward pass."""
    trained_products: CostGrowth | None = None
    """FLOPs of matrix products in the backward pass."""
    trained_memory: CostGrowth | None = None
    """Peak bytes of a forward and a backward pass."""
    gradient: float | None = None
    """Gap of the gradient to the change of the output, relative to that."""
    idle: tuple[tuple[str, int], ...] | None = None
    """Parameters without any effect on the output, with their numbers."""
    unasked: dict[str, str] = field(default_factory=dict)
    """Questions (:data:`QUESTIONS`) that could not be asked, each with the reason."""

    @property
    def sees_future(self) -> bool:
        return self.per_token and self.reads is not None and (self.reads.future or self.reads.in_training) is not None

    @property
    def mixes(self) -> bool:
        """True if any output depends on another token than its own, as far as is known."""
        return not self.per_token or self.reads is None or any(e.before or e.after for e in self.reads.exchanged)

    @property
    def formed(self) -> bool:
        return self.pairs is not None and self.pairs.formed

    @property
    def squares(self) -> list[str]:
        """The costs that grow as n²."""
        names = ("products", "numbers", "memory", "trained_products", "trained_memory")
        return [name for name in names if (growth := getattr(self, name)) is not None and (growth.power or 0) >= 2]

    @property
    def state(self) -> int | None:
        """About the numbers that pass from earlier tokens to later ones, if that does not grow with their number."""
        if not self.crossing or len(self.crossing) < 2:
            return None
        *_, (_, before, _), (_, last, could) = self.crossing
        return max(rank for _, rank, _ in self.crossing) if last < could and last <= 1.25 * before else None


def basics(subject: ProbedModule) -> dict[str, Any]:
    """The facts of a subject as soon as it can be called."""
    options = subject.source.options
    return {
        "per_token": subject.per_token,
        "parameters": sum(1 for _ in subject.module.parameters()),
        "call": subject.wanted.call or "x",
        "repeats": subject.repeats,
        "stateful": subject.stateful,
        "apart": subject.apart,
        "noisy": subject.noisy,
        "claims_past": any(options.get(name) is True for name in ("causal", "is_causal")),
    }


def answer(subject: ProbedModule, question: str) -> dict[str, Any]:
    """Ask one of :data:`QUESTIONS`: parts of :class:`ModuleAnswers`, ``unasked`` among them if it could not be
    asked."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it fuses whole layers, which show nothing of their work
    try:
        with one_thread():
            return QUESTIONS[question](subject.fresh())
    except Exception as error:  # somebody else's code
        return {"unasked": str(error) if isinstance(error, Unsupported) else f"it raises {said(error)}"}
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def collected(known: dict[str, Any], answers: dict[str, dict[str, Any]]) -> ModuleAnswers:
    """All answers as one; raise pydantic's ValidationError for others."""
    unasked = {question: one["unasked"] for question, one in answers.items() if "unasked" in one}
    parts = {name: x for one in answers.values() for name, x in one.items() if name != "unasked"}
    return TypeAdapter(ModuleAnswers).validate_python({**known, **parts, "unasked": unasked})


@torch.no_grad()
def _reads(subject: ProbedModule) -> dict[str, Any]:
    if not subject.steady:
        raise Unsupported("two calls on the same input differ, by random numbers that are not torch's")
    n, few = subject.length(TOKENS), subject.length(24)
    while True:
        before = subject.draw(n)
        subject(before)  # a first call prepares more than later ones
        began = process_time()
        subject(before)
        calls = SECONDS / max(1e-9, process_time() - began)
        if calls >= len(SEEDS) * FEWEST or n <= few:
            break
        n = max(few, subject.length(n // 2))
    tokens = _some(n, int(calls / len(SEEDS)))
    others = {seed: subject.draw(n, seed=seed) for seed in SEEDS}
    expected = {seed: subject(before, seed=seed) for seed in others}
    exchanged = [_exchanged(subject, j, before, others, expected) for j in tokens]
    known = any(one["before"] for one in exchanged)
    return {"reads": {"n": n, "exchanged": exchanged, "in_training": None if known else _in_training(subject)}}


@torch.enable_grad()
def _in_training(subject: ProbedModule) -> dict[str, Any] | None:
    new = subject.fresh(training=True)
    n = new.length(24)
    before = new.draw(n)
    if not new.agree(lambda: new(before), lambda: new(before)):  # it raises, or draws without torch
        return None
    others = {seed: new.draw(n, seed=seed) for seed in SEEDS}
    one = _exchanged(new, n - 1, before, others, {seed: new(before, seed=seed) for seed in SEEDS})
    return one if one["before"] else None


def _some(n: int, most: int) -> list[int]:
    few = {0, 1, n // 4, n // 2, n // 2 + 1, 3 * n // 4, n - 2, n - 1}  # as many as FEWEST
    many = {*range(3), *range(n - 3, n), *range(n // 2, n // 2 + 8), *(n * i // 11 for i in range(11))}
    return sorted(j for j in (many if most >= len(many) else few) if 0 <= j < n)


def _exchanged(
    subject: ProbedModule, j: int, before: Tensor, others: dict[int, Tensor], expected: dict[int, Tensor]
) -> dict[str, Any]:
    moved = torch.zeros(expected[1].shape[1], dtype=torch.float64)
    for seed, other in others.items():
        after = before.clone()
        after[:, j] = other[:, j] if not torch.equal(other[:, j], before[:, j]) else _another(subject, other[:, j])
        if torch.equal(after, before):
            raise Unsupported("of its tokens only one stands for something; give --vocab")
        moved = moved.maximum(subject.moved(subject(after, seed=seed), expected[seed]).amax(0))
    changed = (moved > subject.least).nonzero()[:, 0].tolist()
    first, last = (min(changed), max(changed)) if changed and subject.per_token else (j, j)
    far = first if j - first > last - j else last
    return {
        "token": j,
        "own": j in changed if subject.per_token else bool(changed),
        "before": sum(i < j for i in changed) if subject.per_token else 0,
        "after": sum(i > j for i in changed) if subject.per_token else 0,
        "first": min(first, j),
        "last": max(last, j),
        "faint": subject.per_token
        and (bool(far != j and moved[far] < 1e3 * subject.least) or _faintly_read(subject, j, before, changed)),
    }


@torch.enable_grad()
def _faintly_read(subject: ProbedModule, j: int, given: Tensor, changed: list[int]) -> bool:
    """True if most outputs do not change, and a gradient of these reaches the token all the same: what they read is
    below rounding, as by a softmax of sharp logits. None reaches what a mask hides."""
    if 2 * len(changed) >= given.shape[1]:
        return False
    out, leaves = subject.fresh().from_vectors(given)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(out)
    direction[:, [*changed, j]] = 0
    return any(bool(x.reshape(given.shape[1], -1)[j].any()) for x in gradients_along(out, leaves, direction))


def _another(subject: ProbedModule, token: Tensor) -> Tensor:
    return subject.real(token + 1) if subject.wanted.call == "tokens" else token + 1


def _crossing(subject: ProbedModule) -> dict[str, Any]:
    """Independent numbers of the tokens before a cut that reach the outputs behind it: the rank of a Jacobian."""
    if not subject.per_token:
        return {}
    found: list[tuple[int, int, int]] = []
    began, n = process_time(), subject.shortest
    while n <= subject.longest:
        half = n // 2
        new = subject.fresh()
        new.module.requires_grad_(False)
        out, leaves = new.from_vectors(subject.draw(n))
        if len(leaves) != 1 or leaves[0].numel() % n:
            raise Unsupported("no single table of embeddings makes vectors of its tokens")
        _differentiable(out)
        leaf, width = leaves[0], leaves[0].numel() // n
        behind = out[0, half:].flatten()
        most = min(behind.numel(), half * width)
        could, rows = min(MOST_DIRECTIONS, most), list[Tensor]()
        generator = torch.Generator().manual_seed(4)
        for _ in range(could):
            direction = torch.randn(behind.shape, generator=generator, dtype=torch.float64).to(behind.dtype)
            (grad,) = gradients_along(behind, [leaf], direction)
            rows.append(grad.reshape(n, width)[:half])
            if process_time() - began > SECONDS or not rows[-1].any():
                break
        sizes = torch.linalg.svdvals(torch.stack(rows).flatten(1).double())
        least = max(1e-10, subject.least) * max(float(sizes[0]), 1e-300)
        rank = int((sizes > least).sum())
        if rank == len(rows) < most:  # as many as were looked for, which tells nothing of how many there are
            if not any(passed for _, passed, _ in found):
                raise Unsupported(f"more numbers pass from {half} tokens than were looked for, which is {rank:,}")
            break
        found.append((half, rank, most))
        if len(found) >= 3 and rank < most and rank <= 1.25 * found[-2][1] and any(passed for _, passed, _ in found):
            break
        n *= 2
    return {"crossing": found}


@without_compiler
class _PairCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    _SOFTMAX = ("_softmax", "_safe_softmax", "softmax")
    _PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "matmul", "_cdist_forward", "_euclidean_dist")
    _COPIES = ("_to_copy", "clone", "native_dropout", "convolution", "constant_pad_nd")

    def __init__(self, n: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.n = n
        self.seen: Counter[str] = Counter()
        self.weights: dict[int, tuple[str, Tensor]] = {}
        """Storage of a softmax over few numbers -> its kind if it is multiplied, and itself. An output is not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2].removesuffix("_")
        self._follow(name, args, result)
        if "scaled_dot_product" in name and not name.endswith("backward"):
            q, k = args[0], args[1]
            self.seen["fused" if self.is_n(q.shape[-2]) and self.is_n(k.shape[-2]) else "fused, few keys"] += 1
        elif isinstance(result, Tensor):
            shape = list(result.shape)
            square = self._square(result)
            if name not in self._SOFTMAX:
                self.seen["products"] += square and (name in self._PRODUCTS or self._paired(args))
            elif square:
                self.seen["softmax"] += 1
            elif any(map(self.is_n, shape)):
                over = shape[int(args[1])]
                if self.is_n(over):
                    self.seen["pooled"] += result.numel() // over
                else:
                    self.weights[_storage(result)] = (f"fixed {over}", result)
        return result

    def _square(self, x: Tensor) -> bool:
        return sum(map(self.is_n, x.shape)) >= 2

    def _paired(self, args: Any) -> bool:
        """True for tokens that stand along different axes of two tensors and are no positions alone."""
        given = [x for x in args if isinstance(x, Tensor)]
        return len(given) > 1 and not any(map(self._square, given)) and any(x.requires_grad for x in given)

    def is_n(self, size: int) -> bool:
        return self.n <= size <= self.n + self.n // 8 + 1

    def _follow(self, name: str, args: Any, result: Any) -> None:
        copied = name in self._COPIES
        if not (copied or name.startswith("mul") or name in self._PRODUCTS):
            return
        for x in args:
            if not isinstance(x, Tensor) or _storage(x) not in self.weights:
                continue
            kind, _ = self.weights.pop(_storage(x))
            if copied:
                copy = result[0] if isinstance(result, tuple) else result
                self.weights[_storage(copy)] = (kind, copy)
            else:
                self.seen[kind] += 1


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@without_compiler
class _Numbers(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [x for x in tree_iter(result) if isinstance(x, Tensor)]
        returned = [one.alias_info for one in func._schema.returns]
        if any(alias is not None and alias.is_write for alias in returned):
            name = func._schema.name
            given = [x.numel() for x in tree_iter(args) if isinstance(x, Tensor)]
            some = "index" in name or "scatter" in name  # of a tensor that may be large
            self.written += min(given) if some and given else sum(x.numel() for x in made)
        elif not any(returned) and "empty" not in func._schema.name:
            self.written += sum(x.numel() for x in made)
        return result


def _pairs(subject: ProbedModule) -> dict[str, Any]:
    found = []
    unit = max(1, subject.unit)
    lengths = [n * unit for n in PRIMES if subject.shortest <= n * unit <= subject.longest and (unit > 1 or n > 17)]
    *_, longest = lengths = lengths or [subject.shortest]
    clear = [n for n in lengths if not _coincides(subject, n)]
    if not clear:  # no length tells apart what only happens to be as large
        only = f"it takes {longest} tokens only, and" if len(lengths) == 1 else f"at each length up to {longest:,}"
        raise Unsupported(f"{only} one of its layers or heads is as wide")
    for n in lengths[-2:] if longest in clear else (clear[-1], longest):
        watch, new = _PairCounter(n), subject.fresh()
        with torch.enable_grad(), watch:
            new.run(new.draw(n))
        found.append(watch.seen)
    both = found[0] & found[-1]
    fixed = sorted(int(name.partition(" ")[2]) for name in both if name.startswith("fixed ") and name != "fixed 1")
    kinds = ("softmax", "fused", "products", "pooled")
    return {"pairs": {**{kind: both[kind] for kind in kinds}, "fixed": fixed}}


def _coincides(subject: ProbedModule, n: int) -> bool:
    """True if one of its layers or heads is about n wide."""
    layers = (one for one in subject.module.modules() if not isinstance(one, nn.Embedding))
    sizes = (x.shape[0] for one in layers for x in one.parameters(recurse=False) if x.ndim > 1)
    return any(map(_PairCounter(n).is_n, (size // part for size in sizes for part in (1, 2, 3, 4, 8, 12))))


def _series(
    subject: ProbedModule, names: tuple[str, ...], cost: Callable[[ProbedModule, Tensor], tuple[int, ...]]
) -> dict[str, Any]:
    """Costs by name, the last of them bytes, at longer and longer sequences while time and memory allow the next."""
    three, n = "growth needs three lengths, each twice the one before", subject.shortest
    if not subject.unit:
        raise Unsupported(f"{three}, and it takes {n} tokens only")
    while 2 * n <= min(128, subject.longest // 4):
        n *= 2
    lengths, values, began = list[int](), list[tuple[int, ...]](), process_time()
    while n <= LONGEST:
        try:
            values.append(cost(subject.fresh(), subject.draw(n)))
        except Exception as error:  # a table of positions ends
            if len(values) < 3:
                if isinstance(error, Unsupported):
                    raise
                raise Unsupported(f"{three}: with {n} tokens it raises {said(error)}") from error
            break
        lengths.append(n)
        bytes_now, bytes_before = values[-1][-1], values[-2][-1] if len(values) > 1 else values[-1][-1]
        if len(values) >= 3:
            powers = [CostGrowth(tuple(lengths), x).power for x in zip(*values, strict=True)]
            settled = None not in powers and (len(values) > 3 or set(powers) == {1})
            spent = (process_time() - began) * (3 if settled else 0.75)
            if spent > SECONDS or bytes_now**2 / max(1, bytes_before) > MOST_BYTES * (1 if settled else 4):
                break
        n *= 2
    if len(values) < 3:
        raise Unsupported(f"{three}, up to n = {LONGEST:,}")
    series = dict(zip(names, zip(*values, strict=True), strict=True))
    given = {name: list(x) for name, x in series.items() if x[-1]}
    return {name: {"lengths": lengths, "values": x, "peak": "memory" in name} for name, x in given.items()}


def _costs(subject: ProbedModule) -> dict[str, Any]:
    @torch.no_grad()
    def cost(new: ProbedModule, given: Tensor) -> tuple[int, ...]:
        with _Numbers() as numbers:
            flops = count(lambda: new.output(given)).matmul_flops or 0
        again = new.fresh()
        return flops, numbers.written, peak_tensor_bytes(lambda: again.output(given)) or 0

    return _series(subject, ("products", "numbers", "memory"), cost)


def _training(subject: ProbedModule) -> dict[str, Any]:
    def cost(new: ProbedModule, given: Tensor) -> tuple[int, ...]:
        out = _differentiable(new.output(_followed(given)))
        flops = count(lambda: torch.autograd.backward(out.sum())).matmul_flops or 0
        again, given = new.fresh(), _followed(given)
        return flops, peak_tensor_bytes(lambda: torch.autograd.backward(again.output(given).sum())) or 0

    return _series(subject, ("trained_products", "trained_memory"), cost)


def _followed(given: Tensor) -> Tensor:
    """The same, which gradients reach, as a re-entrant checkpoint needs, and into which a module may write."""
    return given.detach().clone().requires_grad_().clone() if given.is_floating_point() else given


def _differentiable(out: Tensor) -> Tensor:
    if not out.requires_grad:
        raise Unsupported("no gradient reaches x or a parameter")
    return out


def _gradient(subject: ProbedModule) -> dict[str, Any]:
    """The gradient along random directions against central differences of the output."""
    if not subject.steady:
        raise Unsupported("two calls on the same input differ, by random numbers that are not torch's")
    if subject.dtype != torch.float64:
        raise Unsupported(f"it takes {str(subject.dtype)[6:]} only, whose rounding hides small changes")
    if subject.stateful:
        raise Unsupported("a call changes what the next one gives")
    best, step, n = math.inf, 1e-6, subject.length(24)
    for seed in range(3):  # one of them may meet a jump, as of a choice of pairs
        new, given = subject.fresh(), subject.draw(n, seed=seed)
        given.requires_grad_(given.is_floating_point())
        leaves = [x for x in (given, *new.module.parameters()) if x.requires_grad]
        torch.manual_seed(seed)
        moves = [torch.randn_like(x) for x in leaves]
        out = _differentiable(new(given))
        direction = torch.randn_like(out)
        grads = gradients_along(out, leaves, direction)
        said_so = sum(float((grad * move).sum()) for grad, move in zip(grads, moves, strict=True))
        if not math.isfinite(said_so):
            raise Unsupported("its gradient is NaN or infinite")
        ends = []
        for sign in (step, -2 * step):
            with torch.no_grad():
                for x, move in zip(leaves, moves, strict=True):
                    x += sign * move
                ends.append(float((new(given) * direction).sum()))
        is_so = (ends[0] - ends[1]) / (2 * step)
        best = min(best, abs(said_so - is_so) / max(abs(is_so), abs(said_so), 1e-300))
    return {"gradient": best}


def _idle(subject: ProbedModule) -> dict[str, Any]:
    parameters = dict(subject.module.named_parameters())
    largest, idle = dict.fromkeys(parameters, 0.0), list(parameters)
    for n, seed in product(map(subject.length, (24, TOKENS)), range(3)):  # the first block may have no past to read
        if not idle:
            break
        new = subject.fresh()
        out = _differentiable(finite(new.output(_followed(new.draw(n, seed=seed)))))
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out)
        for name, grad in zip(parameters, gradients_along(out, list(new.module.parameters()), direction), strict=True):
            if grad.numel():
                largest[name] = max(largest[name], float(grad.abs().nan_to_num(math.inf).max()))
        most = max((x for x in largest.values() if x < math.inf), default=0.0)
        least = most * (1e-12 if subject.dtype == torch.float64 else 1e-6)
        idle = [name for name, x in largest.items() if x <= least]
    return {"idle": [(name, parameters[name].numel()) for name in idle]}


QUESTIONS: dict[str, Callable[[ProbedModule], dict[str, Any]]] = {
    "who reads whom": _reads,
    "how much passes between tokens": _crossing,
    "what it computes": _pairs,
    "what it costs": _costs,
    "what its backward pass costs": _training,
    "whether its gradient is that of its output": _gradient,
    "what does nothing": _idle,
}
"""Questions to a subject -> functions for parts of :class:`ModuleAnswers`."""
