"""A decoding step of a recurrent variant beside its bare arithmetic, in turns. See `make selfcheck`.

`pytest -s tests/benchmarks/live_steps.py` prints the ratios. What is bare: ``bare_steps.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, cast

import pytest
import torch

from attnbench.catalogue.build import build
from attnbench.contract.capabilities import Decoding
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from tests.benchmarks.bare_steps import BARE, D, H

N = 64


def beside_its_arithmetic(name: str, pairs: int = 200) -> float:
    """Least time of a step over that of its arithmetic alone, which gives the same, out of so many pairs of 20."""
    module = build(parse_spec(name), Shape(1, H, N, D, causal=True), seed=0).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    mixer = VARIANTS.get(name).kind == "mixer"
    sizes = [(1, N, H * D)] if mixer else [(1, H, N, D)] * 3
    inputs = [torch.randn(size, generator=generator) for size in sizes]
    prompt, token = ([x[..., part, :] for x in inputs] for part in (slice(0, N - 1), slice(N - 1, N)))
    decoding = cast(Decoding, module)
    with torch.inference_mode():
        state = decoding.begin(*prompt)
        alone = BARE[name](module, state)
        torch.testing.assert_close(decoding.step(state, *token)[0], alone(*token), atol=1e-4, rtol=1e-4)

        def seconds(run: Callable[..., Any], *given: Any) -> float:
            start = perf_counter()
            for _ in range(20):
                run(*given)
            return (perf_counter() - start) / 20

        taken = [(seconds(decoding.step, state, *token), seconds(alone, *token)) for _ in range(pairs)]
    ours, theirs = (min(side) for side in zip(*taken, strict=True))
    print(f"\n{name}: a step takes {ours * 1e6:.0f} µs, {ours / theirs:.2f} times its arithmetic alone")
    return ours / theirs


@pytest.mark.parametrize("name", BARE)
def test_a_step_takes_at_most_twice_its_arithmetic(name: str) -> None:
    assert beside_its_arithmetic(name) <= 2
