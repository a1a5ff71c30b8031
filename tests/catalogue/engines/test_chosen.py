from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnbench.catalogue.engines import tiling
from attnbench.catalogue.engines.gathered import chosen as chosen_keys
from attnbench.catalogue.engines.gathered.chosen import answer_from_chosen, attend_to_chosen, best
from attnbench.contract.problem.reference import masked_attention, of_query_heads

F64 = torch.float64


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
def test_the_largest_are_found_whatever_their_sign(dtype: torch.dtype) -> None:
    scores = torch.randn(3, 2, 57).to(dtype)
    found = best(scores, 9)
    assert found.dtype == torch.int32
    assert found.shape == (3, 2, 9)
    # bfloat16 has equal numbers, of which any may be taken here: compare what was found, not where.
    taken = scores.gather(-1, found.long()).sort(-1).values
    assert torch.equal(taken, scores.sort(-1).values[..., -9:])


def test_of_equal_scores_the_later_is_taken() -> None:
    scores = torch.tensor([[0.0, -0.0, 3.0, 0.0, -1.0, -0.0]])
    assert best(scores, 3).sort(-1).values.tolist() == [[2, 3, 5]]
    assert best(torch.zeros(1, 40), 2).sort(-1).values.tolist() == [[38, 39]]


def test_what_is_minus_infinity_is_never_taken() -> None:
    scores = torch.tensor([[torch.inf, -torch.inf, torch.finfo(torch.float32).min, -torch.inf]])
    assert sorted(best(scores, 4)[0].tolist()) == [-1, -1, 0, 2]
    assert best(torch.full((1, 3), -torch.inf), 7).tolist() == [[-1, -1, -1]]


def draw(N: int = 13, M: int = 13, E: int = 3) -> list[Tensor]:
    """q of four heads, k and v of two."""
    return [torch.randn(2, H, n, d, dtype=F64, requires_grad=True) for H, n, d in ((4, N, 5), (2, M, 5), (2, M, E))]


def listed(N: int, M: int, shares: int, size: int) -> Tensor:
    """Three different blocks or fewer for each query."""
    blocks = -(-M // size)
    order = torch.rand(2, shares, N, blocks).argsort(-1)[..., :3].to(torch.int32)
    return order.masked_fill(torch.rand(order.shape) < 0.3, -1)


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("numbers", [1, 1 << 18])
@pytest.mark.parametrize("large", [1, 16])
def test_equals_a_mask_forward_and_backward(
    size: int, shares: int, causal: bool, numbers: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen_keys, "_LARGE", large)
    monkeypatch.setitem(tiling.TUNED, "gathered.listed", tiling.Tuned(numbers, 1))
    inputs, chosen = draw(), listed(13, 13, shares, size)
    q, k, v = inputs
    for key_mask in (None, torch.rand(2, 13) < 0.7):
        of_blocks = (chosen[..., None] == torch.arange(13) // size).any(-2)
        allowed = of_query_heads(of_blocks, 4)
        allowed = allowed.tril() if causal else allowed
        allowed = allowed if key_mask is None else allowed & key_mask[:, None, None]
        expected = masked_attention(q, of_query_heads(k, 4), of_query_heads(v, 4), allowed)
        out = attend_to_chosen(q, k, v, chosen, size=size, causal=causal, key_mask=key_mask)
        close(out, expected)
        direction = torch.randn_like(out)
        for mine, theirs in zip(
            torch.autograd.grad(out, inputs, direction), torch.autograd.grad(expected, inputs, direction), strict=True
        ):
            close(mine, theirs)


def test_a_large_block_is_not_copied_for_each_query() -> None:
    q, k, v = (torch.randn(1, 1, 256, 32) for _ in "qkv")
    chosen = torch.arange(4).expand(1, 1, 256, 4)
    with Written() as written:
        attend_to_chosen(q, k, v, chosen, size=64)
    assert written.numbers < 256 * 256 * 32  # half of a copy of its keys and values for each query


class Written(TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numbers += out.numel()
        return out


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("shares", [1, 2])
def test_the_last_query_alone_gets_the_same(size: int, shares: int) -> None:
    q, k, v = (x.detach() for x in draw())
    chosen = listed(13, 13, shares, size)
    chosen[..., -1, 0] = 12 // size
    chosen[..., -1, 1:] = torch.tensor([-1, 0])
    expected = attend_to_chosen(q, k, v, chosen, size=size)[:, :, -1:]
    close(answer_from_chosen(q[:, :, -1:], k, v, chosen[:, :, -1:], size), expected)
