"""How many calls of torch a decoding step makes: at the size of one token they, and not arithmetic, take its time."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnbench.catalogue.build import build
from attnbench.contract.capabilities import Decoding
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS

MOST = {
    "linear": 21,
    "retnet": 24,
    "performer:features=16": 56,
    "rfa:features=16": 52,
    "hedgehog": 42,
    "cosformer": 34,
    "efficient": 26,
    "kernel": 26,
    "gla": 32,
    "ssd": 34,
    "mamba2": 57,
    "delta": 44,
    "gated-delta": 59,
    "kda": 65,
    "rwkv7": 75,
    "gated-delta-2": 71,
    "comba": 73,
    "gsa": 40,
    "log-linear": 59,
    "s4d": 12,
    "lstm": 30,
    "gru": 13,
    "rfa-gated": 56,
    "moba": 24,
    "softmax": 16,
}
"""With views, which are calls as well; a few more than there are with the oldest and the newest torch."""


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append(str(func))
        return func(*args, **(kwargs or {}))


def calls(variant: str, n: int) -> list[str]:
    """Those of the step after n tokens."""
    spec, shape = parse_spec(variant), Shape(1, 2, n + 1, 8, causal=True)
    module = cast(Decoding, build(spec, shape, seed=0).requires_grad_(False))
    mixer = VARIANTS.get(spec.name).kind == "mixer"
    inputs = [torch.randn(1, n + 1, 16)] if mixer else [torch.randn(1, 2, n + 1, 8) for _ in range(3)]
    with torch.inference_mode():
        state, token = module.begin(*(x[..., :n, :] for x in inputs)), [x[..., n:, :] for x in inputs]
        with Calls() as counted:
            module.step(state, *token)
    return counted.made


@pytest.mark.parametrize("variant", MOST)
def test_a_step_makes_few_calls_however_long_the_prompt_was(variant: str) -> None:
    made = calls(variant, 40)
    assert len(made) <= MOST[variant], made
    assert len(calls(variant, 17)) <= MOST[variant]
