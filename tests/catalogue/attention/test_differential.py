from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.pairwise.differential import Differential
from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from attnbench.measure.flops import count
from tests.catalogue.attention.small import built, close, qkv

SHAPE = Shape(batch=2, heads=3, seq_len=23, head_dim=6)
CAUSAL = Shape(batch=2, heads=3, seq_len=23, head_dim=6, causal=True)
both = pytest.mark.parametrize("shape", [SHAPE, CAUSAL], ids=["all", "causal"])


def make(shape: Shape, **options: float | bool) -> Differential:
    module = built(Differential, "differential", shape, **options).double()
    with torch.no_grad():
        module.of_lambda.normal_()
        if module.scale is not None:
            module.scale.normal_()
    return module


def by_hand(module: Differential, q: Tensor, k: Tensor, v: Tensor, causal: bool, start: float) -> Tensor:
    """One query after the other, with the weights of both maps in plain sums."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    a, b, c, d = module.of_lambda.detach()
    weight = float(torch.exp((a * b).sum()) - torch.exp((c * d).sum())) + start
    for at in ((b, h, i) for b in range(2) for h in range(3) for i in range(23)):
        rows = []
        for channels in (slice(0, 3), slice(3, 6)):
            seen = range(at[2] + 1 if causal else 23)
            e = torch.stack([(q[at][channels] @ k[at[0], at[1], j, channels] / 3**0.5).exp() for j in seen])
            rows.append(e / e.sum())
        y = (rows[0] - weight * rows[1]) @ v[at[0], at[1], : len(rows[0])]
        if module.scale is not None:
            y = y / (y @ y / 6 + 1e-5).sqrt() * module.scale.detach() * (1 - start)
        out[at] = y
    return out


@both
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("start", [0.0, 0.8])
def test_the_second_map_is_taken_off_the_first(shape: Shape, norm: bool, start: float) -> None:
    module, inputs = make(shape, norm=norm, lambda_init=start), qkv(shape)
    close(module(*inputs).detach(), by_hand(module, *inputs, shape.causal, start))


def test_lambda_starts_near_the_option() -> None:
    module = built(Differential, "differential", Shape(2, 2, 9, 64), lambda_init=0.2)
    a, b, c, d = module.of_lambda.detach()
    assert abs(float((a @ b).exp() - (c @ d).exp())) < 0.5
    assert 0.05 < float(module.of_lambda.detach().std()) < 0.15


def test_products_are_those_of_two_fused_calls() -> None:
    def products(name: str, n: int) -> int:
        module, shape = build(name, Shape(1, 1, n, 64)), (1, 1, n, 64)
        inputs = [torch.randn(shape) for _ in range(3)]
        with torch.inference_mode():
            found = count(lambda: module(*inputs)).matmul_flops
        assert found
        return found

    assert products("differential", 256) == 2 * products("sdpa", 256)
