from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.kernel.kernel import Kernel
from attnbench.catalogue.build import build
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.measure.flops import count
from tests.catalogue.attention.small import CAUSAL, SHAPE, both, built, close, qkv


def make(options: str, shape: Shape) -> Kernel:
    return built(Kernel, f"kernel:{options}", shape)


def sim(name: str, q: Tensor, k: Tensor) -> float:
    """By its definition, one pair at a time."""
    s = float(q @ k) / 2
    match name:
        case "poly":
            return (1 + s) ** 2
        case "cosine":
            return 1 + float(q @ k / (q @ q).sqrt() / (k @ k).sqrt())
        case "exp":
            return math.exp(s)
        case "gaussian":
            return math.exp(-float((q - k) @ (q - k)) / 4)

    def phi(x: float) -> float:
        return {"elu+1": math.exp(min(x, 0)) + max(x, 0), "relu": max(x, 0), "relu2": max(x, 0) ** 2}[name]

    return sum(phi(float(x)) * phi(float(y)) for x, y in zip(q, k, strict=True))


@both
@pytest.mark.parametrize("name", ["elu+1", "relu", "relu2", "poly", "cosine", "exp", "gaussian"])
def test_a_weight_is_the_share_of_the_kernel_of_its_pair(name: str, shape: Shape) -> None:
    order = "dense" if name in ("exp", "gaussian") else "associated"
    q, k, v = qkv(shape)
    out = make(f"sim={name},order={order}", shape)(q, k, v)
    for b, h, i in ((0, 0, 0), (1, 2, 11), (0, 1, 22)):
        seen = range(i + 1 if shape.causal else 23)
        weights = torch.tensor([sim(name, q[b, h, i], k[b, h, j]) for j in seen], dtype=torch.float64)
        total = weights.sum()
        close(out[b, h, i], weights @ v[b, h, : len(seen)] / (total if total else 1.0))


def test_the_map_of_the_keys_may_be_another() -> None:
    q, k, v = qkv(SHAPE)
    weights = q.relu() @ (torch.nn.functional.elu(k) + 1).mT
    total = weights.sum(-1, keepdim=True)
    expected = weights @ v / torch.where(total == 0, 1.0, total)
    close(make("sim=relu,key_map=elu+1", SHAPE)(q, k, v), expected)


def test_elu_plus_one_is_linear_attention_and_exp_is_softmax() -> None:
    q, k, v = qkv(CAUSAL)
    close(make("chunk=64", CAUSAL)(q, k, v), build("linear", CAUSAL)(q, k, v))
    close(make("sim=exp,order=dense", CAUSAL)(q, k, v), exact_attention(q, k, v, causal=True))
    assert VARIANTS.get("kernel").claims(parse_spec("kernel:sim=exp,order=dense")).exact


def test_rebased_squares_the_product_of_normed_tokens() -> None:
    q, k, v = qkv(SHAPE)
    module = make("sim=rebased", SHAPE).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    b, h, i = 1, 2, 11
    (gamma_q, beta_q), (gamma_k, beta_k) = ((n.weight, n.bias) for n in (module.norm_q, module.norm_k))

    def unit(x: Tensor) -> Tensor:
        return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt()

    x = gamma_q * unit(q[b, h, i]) + beta_q
    weights = torch.stack([(x @ (gamma_k * unit(y) + beta_k)) ** 2 for y in k[b, h]])
    close(module(q, k, v)[b, h, i], weights @ v[b, h] / weights.sum())


def test_a_row_without_a_positive_weight_is_zero() -> None:
    q, k, v = qkv(SHAPE)
    for order in ("associated", "dense"):
        assert not make(f"sim=relu,order={order}", SHAPE)(-q.abs(), k, v).any()


@pytest.mark.parametrize(("n", "cheaper"), [(16, "dense"), (64, None), (256, "associated")])
def test_by_multiplications_the_orders_cross_where_n_is_the_width_of_a_head(n: int, cheaper: str | None) -> None:
    shape = Shape(batch=1, heads=1, seq_len=n, head_dim=64)
    q, k, v = (torch.randn(1, 1, n, 64) for _ in range(3))
    flops = {}
    for order in ("associated", "dense"):
        module = make(f"order={order}", shape)
        flops[order] = count(lambda module=module: module(q, k, v)).matmul_flops
    assert flops["associated"] == 2 * 2 * n * 64 * 65  # 65 columns: that of ones is the denominator
    assert flops["dense"] == 2 * n * n * (64 + 65)
    if cheaper:
        assert min(flops, key=flops.__getitem__) == cheaper
    else:
        assert flops["dense"] / flops["associated"] == pytest.approx(1, rel=0.01)
