"""What is measured of a module: who reads whom, how much passes between tokens, what it computes, what does nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnbench.compiled import without_compiler
from attnbench.measure.flops import count
from attnbench.measure.memory import peak_tensor_bytes
from attnbench.probing.subject import Subject

TOKENS = 24
"""Tokens of a sequence in which one after the other is exchanged."""
HALVES = (4, 8, 16)
"""Tokens before the cut, and as many after it."""
MOST_DIRECTIONS = 512
"""Directions of the output in which is asked what crosses the cut."""
PRIMES = (23, 29, 47, 61, 127, 251, 509)
"""Lengths that are hardly any other size of a model; the two longest that it takes are tried, where tiles are small
beside them."""
SMALL_SHARE = 1e-3
"""Share of the square part below which a cost counts as linear."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Computations over all pairs of n tokens that one call runs."""

    softmax: int = 0
    """Softmax of rows of n weights, for each of n tokens."""
    fused: int = 0
    """Calls of a fused kernel of softmax attention in which n tokens read n."""
    products: int = 0
    """Matrix products with a result n × n."""
    pooled: int = 0
    """Softmax of one row of n weights: one answer for the whole sequence."""
    fixed: tuple[int, ...] = ()
    """Lengths of rows that do not grow with n, of which softmax is taken for each of n tokens."""

    @property
    def formed(self) -> bool:
        return bool(self.softmax or self.fused or self.products)


@dataclass(frozen=True, slots=True)
class Growth:
    """A cost as a + b·n + c·n²."""

    lengths: tuple[int, int, int]
    values: tuple[int, int, int]

    @property
    def square_share(self) -> float:
        """Share of c·n² at the longest length."""
        n, (few, more, most) = self.lengths[0], self.values
        square = (most - 2 * (more - few) - more) / (6 * n * n)
        return square * self.lengths[2] ** 2 / most if most else 0.0

    @property
    def power(self) -> int:
        """1 or 2: which part decides for long sequences."""
        return 2 if self.square_share > SMALL_SHARE else 1


@dataclass(frozen=True, slots=True)
class Found:
    """Answers to all questions; None where one does not apply."""

    per_token: bool
    reads: list[list[bool]]
    """Whether exchanging token j changes output i, ``[i][j]``."""
    crossing: list[tuple[int, int, int]] | None
    """Tokens before a cut, numbers of them that reach the outputs behind it, and how many could."""
    pairs: Pairs
    products: Growth | None
    """Multiplications of matrix products; None where it has none that can be counted."""
    memory: Growth | None
    idle: list[tuple[str, int]]
    """Parameters without any effect on the output, with how many numbers they have."""
    parameters: int
    """How many parameters it has."""
    call: str = "x"
    """What it is called with: ``x`` or ``tokens``."""
    repeats: bool = True
    """Whether two calls on the same input agree: it draws nothing, in eval mode."""

    @property
    def sees_future(self) -> bool:
        return self.per_token and any(seen for i, row in enumerate(self.reads) for seen in row[i + 1 :])

    @property
    def reads_all(self) -> bool:
        """Whether each output depends on its own token and on all earlier ones."""
        return all(all(row[: i + 1]) for i, row in enumerate(self.reads))

    @property
    def mixes(self) -> bool:
        """Whether any output depends on another token than its own."""
        return not self.per_token or any(
            seen for i, row in enumerate(self.reads) for j, seen in enumerate(row) if i != j
        )

    @property
    def state(self) -> int | None:
        """About how many numbers pass from earlier tokens to later ones, where that does not grow with their number."""
        if not self.crossing:
            return None
        *_, (_, before, _), (_, last, could) = self.crossing
        return last if last < could and last <= 1.25 * before else None


def probe(subject: Subject, begun: Callable[[str], None] = lambda question: None) -> Found:
    """Ask everything; ``begun`` is called with each question before it is asked."""
    begun("who reads whom")
    reads = _reads(subject)
    begun("how much passes between tokens")
    crossing = list(_crossing(subject)) if subject.per_token and _leaf_can_be_had(subject) else None
    begun("what it computes")
    pairs = _pairs(subject)
    begun("what it costs")
    products, memory = _costs(subject)
    begun("what does nothing")
    return Found(
        per_token=subject.per_token,
        reads=reads,
        crossing=crossing,
        pairs=pairs,
        products=products,
        memory=memory,
        idle=_idle(subject),
        parameters=sum(1 for _ in subject.module.parameters()),
        call=subject.wanted.call or "x",
        repeats=subject.repeats,
    )


@torch.no_grad()
def _reads(subject: Subject) -> list[list[bool]]:
    n = min(TOKENS, subject.longest)
    before = subject.draw(n)
    others = {seed: subject.draw(n, seed=seed) for seed in (1, 2, 3)}
    expected = {seed: subject(before, seed=seed) for seed in others}
    columns = []
    for j in range(n):
        changed = torch.zeros(expected[1].shape[1], dtype=torch.bool)
        for seed, other in others.items():
            after = before.clone()
            after[:, j] = other[:, j] if not torch.equal(other[:, j], before[:, j]) else _another(subject, other[:, j])
            moved = (subject(after, seed=seed) - expected[seed]).abs().amax((0, 2))
            changed |= moved > (1e-12 if subject.dtype == torch.float64 else 1e-5) * expected[seed].abs().max()
        columns.append(changed)
    answer: list[list[bool]] = torch.stack(columns, 1).tolist()
    return answer


def _another(subject: Subject, token: Tensor) -> Tensor:
    return (token + 1) % subject.vocab if subject.vocab else token + 1


def _leaf_can_be_had(subject: Subject) -> bool:
    _, leaves = subject.from_vectors(subject.draw(min(8, subject.longest)))
    return len(leaves) == 1 and leaves[0].ndim == 3


def _crossing(subject: Subject) -> Iterator[tuple[int, int, int]]:
    """How many independent numbers of the tokens before a cut reach the outputs behind it: the rank of a Jacobian."""
    for half in HALVES:
        if 2 * half > subject.longest:
            return
        out, (leaf,) = subject.from_vectors(subject.draw(2 * half))
        behind = out[0, half:].flatten()
        could = min(MOST_DIRECTIONS, behind.numel(), half * leaf.shape[-1])
        generator = torch.Generator().manual_seed(4)
        rows = []
        for _ in range(could):
            direction = torch.randn(behind.shape, generator=generator, dtype=torch.float64).to(behind.dtype)
            (grad,) = torch.autograd.grad(behind, leaf, direction, retain_graph=True, allow_unused=True)
            rows.append(leaf.new_zeros(half, leaf.shape[-1]) if grad is None else grad[0, :half])
        sizes = torch.linalg.svdvals(torch.stack(rows).flatten(1).double())
        least = (1e-10 if subject.dtype == torch.float64 else 1e-5) * max(float(sizes[0]), 1e-300)
        yield half, int((sizes > least).sum()), could


@without_compiler
class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Notes the shapes of what goes into and out of the operations that tell attention."""

    _SOFTMAX = ("_softmax", "_safe_softmax", "softmax")
    _PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "matmul")
    _COPIES = ("_to_copy", "clone", "native_dropout")

    def __init__(self, n: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.n = n
        self.seen: Counter[str] = Counter()
        self.weights: dict[int, tuple[str, Tensor]] = {}
        """Storage of a softmax over few numbers -> what it is if it is multiplied, and itself. An output is not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2].partition(".")[0]
        self._follow(name, args, result)
        if "scaled_dot_product" in name and not name.endswith("backward"):
            q, k = args[0], args[1]
            self.seen["fused" if (q.shape[-2], k.shape[-2]) == (self.n, self.n) else "fused, few keys"] += 1
        elif isinstance(result, Tensor) and name in (*self._SOFTMAX, *self._PRODUCTS):
            shape = list(result.shape)
            square = shape.count(self.n) >= 2
            if name in self._PRODUCTS:
                self.seen["products"] += square
            elif square:
                self.seen["softmax"] += 1
            elif self.n in shape:
                over = shape[int(args[1])]
                if over == self.n:
                    self.seen["pooled"] += 1
                else:
                    self.weights[_storage(result)] = (f"fixed {over}", result)
        return result

    def _follow(self, name: str, args: Any, result: Any) -> None:
        """Count the weights that an operation multiplies, or follow them into a copy."""
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


def _pairs(subject: Subject) -> Pairs:
    found = []
    for n in [n for n in PRIMES if n <= subject.longest][-2:]:
        watch = _Watch(n)
        # With gradients: without them torch has fused layers, which show nothing of what they do.
        with torch.enable_grad(), watch:
            subject.run(subject.draw(n))
        found.append(watch.seen)
    if not found:
        return Pairs()
    both = found[0] if len(found) == 1 else found[0] & found[-1]
    fixed = sorted(int(name.partition(" ")[2]) for name in both if name.startswith("fixed ") and name != "fixed 1")
    return Pairs(both["softmax"], both["fused"], both["products"], both["pooled"], tuple(fixed))


def _costs(subject: Subject) -> tuple[Growth | None, Growth | None]:
    longest = min(512, subject.longest)
    lengths = (longest // 4, longest // 2, longest)
    calls = [partial(subject.run, subject.draw(n)) for n in lengths]
    with torch.enable_grad():  # as in _pairs
        flops = [count(call).matmul_flops for call in calls]
    with torch.no_grad():
        peaks = [peak_tensor_bytes(call) for call in calls]
    few, more, most = flops
    products = Growth(lengths, (few, more, most)) if most else None
    known = [peak for peak in peaks if peak is not None]
    return products, Growth(lengths, (known[0], known[1], known[2])) if len(known) == 3 else None


def _idle(subject: Subject) -> list[tuple[str, int]]:
    parameters = {name: x for name, x in subject.module.named_parameters() if x.requires_grad}
    largest = dict.fromkeys(parameters, 0.0)
    n = min(TOKENS, subject.longest)
    for seed in range(3):
        out = subject(subject.draw(n, batch=2, seed=seed))
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        grads = torch.autograd.grad((out * direction.to(out)).sum(), list(parameters.values()), allow_unused=True)
        for name, grad in zip(parameters, grads, strict=True):
            if grad is not None and grad.numel():
                largest[name] = max(largest[name], float(grad.abs().max()))
    most = max(largest.values(), default=0.0)
    least = most * (1e-12 if subject.dtype == torch.float64 else 1e-6)
    return [(name, parameters[name].numel()) for name, size in largest.items() if not size > least or math.isnan(size)]
