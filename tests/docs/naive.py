"""The time of each variant beside that of its formula, written out.

``python -m tests.docs.naive`` measures the variants that the file lacks, with names these anew, and with ``all`` every
one. The formula is the one that the laws compare with, in float32: all pairs at once, or one token after another, in
plain torch. Both are called in turns in one process. Needs a machine with nothing else to do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported
from attnbench.harness.wire.process import apply, window_library
from attnbench.laws.laws import Case
from attnbench.measure.statistics import Ratio
from tests.benchmarks.old_and_new import in_turns
from tests.docs.laws import shipped
from tests.docs.making import HERE, Row, here, store, stored

FILE = HERE / "docs/data/naive.csv"
SIZES = ("n", "heads", "head_dim", "causal", "threads")
COLUMNS = ("variant", *SIZES, "ratio", "low", "high", "turns", "torch", "processor", "date")
N, HEADS, HEAD_DIM = 1024, 4, 64
SECONDS = 1.5


def read() -> list[Row]:
    """The rows of the file; none where there is no file."""
    return stored(FILE)


def name_of(row: Row) -> str:
    """The variant of a row, without the options that its rule of that day has today."""
    return row["variant"].partition(":")[0]


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The formula of what is exact, q, k and v ``(B, H, N, D)``; the laws compare with one in float64."""
    logits = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    return logits.softmax(-1) @ v


def both(name: str, n: int = N) -> tuple[Callable[[], object], Callable[[], object], bool] | None:
    """The call of a variant, that of its formula, and whether they are causal; None where it has no formula.

    What has both forms is measured as the encoders of the Long Range Arena use it, without a mask.
    """
    for causal in (False, True):
        case, shape = Case(VARIANTS.get(name), Spec(name), causal), Shape(1, HEADS, n, HEAD_DIM, causal=causal)
        try:
            module = case.module(shape, dtype=case.common_dtype)
        except Unsupported:
            continue
        inputs = case.draw(shape, dtype=case.common_dtype)
        formula = partial(softmax_attention, causal=causal) if case.traits.exact else case.oracle(module)
        return None if formula is None else (partial(module, *inputs), partial(formula, *inputs), causal)
    return None


def measure(name: str) -> Row | None:
    """Its row but for the machine; None where it has no formula of its own."""
    with torch.inference_mode():
        calls = both(name)
        if calls is None:
            return None
        ratio: Ratio = in_turns(calls[0], calls[1], SECONDS)
    ends = {end: "" if value is None else f"{value:.4g}" for end, value in (("low", ratio.low), ("high", ratio.high))}
    return {
        "variant": name,
        "n": str(N),
        "causal": str(calls[2]).lower(),
        "ratio": f"{ratio.estimate:.4g}",
        **ends,
        "turns": str(ratio.pairs),
    }


def write(rows: Iterable[Row]) -> None:
    """The rows, variants in the order shown to users."""
    order = {name: place for place, name in enumerate(shipped())}
    known = [row for row in rows if name_of(row) in order]
    store(FILE, COLUMNS, sorted(known, key=lambda row: order[name_of(row)]))


def main(names: list[str]) -> None:
    """Measure and write one variant at a time, so that a stop loses little."""
    VARIANTS.names()
    known = {name_of(row) for row in read()}
    wanted = shipped() if names == ["all"] else names or [name for name in shipped() if name not in known]
    where = {**here(), "threads": str(torch.get_num_threads()), "heads": str(HEADS), "head_dim": str(HEAD_DIM)}
    _, products, _ = apply("tuned", threads=torch.get_num_threads(), device="cpu")
    with window_library("tuned", products):
        for name in wanted:
            row = measure(name)
            print(name, *(row or {"no": "formula"}).values(), flush=True)
            if row is not None:
                write([*(one for one in read() if name_of(one) != name), row | where])


if __name__ == "__main__":
    main(sys.argv[1:])
