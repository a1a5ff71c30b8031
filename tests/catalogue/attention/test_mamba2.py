from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.recurrence.mamba2 import Mamba2
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import both, close, tokens


def make(shape: Shape, *, chunk: int = 7, expand: int = 2, width: int = 4, groups: int = 1) -> Mamba2:
    module = Mamba2(shape, state=5, chunk=chunk, expand=expand, width=width, groups=groups).double()
    with torch.no_grad():
        module.step_bias.add_(3)  # decays that matter over some tokens
        module.skip.add_(torch.randn_like(module.skip))
        torch.nn.init.uniform_(module.norm.weight)
    return module


def one_way(module: Mamba2, u: Tensor) -> Tensor:
    """y of the paper's recurrence, token by token and head by head, ``(B, N, H·D)``."""
    p = {name: parameter.detach() for name, parameter in module.named_parameters()}
    inner, H, G, width = module.sizes[0], module.heads, module.groups, p["short.weight"].shape[1]
    driving = u @ p["project.weight"][inner:].T
    h, rows = torch.zeros(len(u), H, 5, inner // H, dtype=u.dtype), []
    for t in range(u.shape[1]):
        now = p["short.b"]
        for s in range(min(width, t + 1)):
            now = now + driving[:, t - s, : inner + 10 * G] * p["short.weight"][:, width - 1 - s]
        now = now / (1 + torch.exp(-now))
        x, ours = now[:, :inner].view(len(u), H, -1), now[:, inner:].view(len(u), 2, G, 5)
        y = torch.zeros_like(x)
        for head in range(H):
            size = torch.log1p(torch.exp(driving[:, t, inner + 10 * G + head] + p["step_bias"][head]))[:, None, None]
            decay = torch.exp(-size * p["log_A"][head].exp())
            B, C = ours[:, 0, head // (H // G)], ours[:, 1, head // (H // G)]
            h[:, head] = decay * h[:, head] + B[:, :, None] * (size * x[:, None, head])
            y[:, head] = torch.einsum("bs,bsd->bd", C, h[:, head]) + p["skip"][head] * x[:, head]
        rows.append(y.flatten(1))
    return torch.stack(rows, 1)


def by_hand(module: Mamba2, u: Tensor) -> Tensor:
    y = one_way(module, u)
    if not module.causal:
        y = y + one_way(module, u.flip(1)).flip(1)
    z = u @ module.project.weight.detach()[: module.sizes[0]].T
    y = y * z / (1 + torch.exp(-z))
    y = y.unflatten(2, (module.groups, -1))
    y = (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(2) * module.norm.weight.detach()
    return y @ module.out.weight.detach().T


@both
@pytest.mark.parametrize("chunk", [1, 7, 23, 64])
@pytest.mark.parametrize(("expand", "width"), [(2, 4), (1, 1)])
def test_equals_the_recurrence_of_the_paper(shape: Shape, chunk: int, expand: int, width: int) -> None:
    module, u = make(shape, chunk=chunk, expand=expand, width=width), tokens(shape)
    close(module(u), by_hand(module, u))


@both
@pytest.mark.parametrize("groups", [2, 3, 6])
def test_groups_have_a_b_a_c_and_a_norm_of_their_own(shape: Shape, groups: int) -> None:
    module, u = make(shape, groups=groups), tokens(shape).requires_grad_()
    close(module(u), by_hand(module, u.detach()))
    wanted = [u, *module.parameters()]
    for one, other in zip(
        torch.autograd.grad(module(u).square().sum(), wanted),
        torch.autograd.grad(module.dense(u).square().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_it_starts_with_its_input_beside_what_it_reads() -> None:
    assert bool((Mamba2(Shape(heads=128, head_dim=2, seq_len=4)).skip == 1).all())
