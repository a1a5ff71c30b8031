from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from attnbench.catalogue.attention.pairwise.path import PaTH, Reflections
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built, close, tokens

SHAPE = Shape(batch=2, heads=2, seq_len=19, head_dim=4)
CAUSAL = Shape(batch=2, heads=2, seq_len=19, head_dim=4, causal=True)
both = pytest.mark.parametrize("shape", [SHAPE, CAUSAL], ids=["all", "causal"])
HOLES = torch.arange(19) % 5 != torch.tensor([[1], [3]])


def make(shape: Shape, chunk: int = 5) -> PaTH:
    module = built(PaTH, "path", shape, rank=3, chunk=chunk).double()
    with torch.no_grad():
        module.beta.weight.normal_()
        module.kernel.normal_()
    return module


def by_hand(module: PaTH, x: Tensor, causal: bool, real: Tensor) -> Tensor:
    """For each pair the product of the matrices between its tokens, written out."""
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}
    N, eye = x.shape[1], torch.eye(4, dtype=torch.float64)
    rows = torch.zeros(2, N, 8, dtype=torch.float64)
    for b in range(2):
        q, k, v = (x[b] @ weight.T for weight in weights["qkv.weight"].split(8))
        low = x[b] @ weights["direction.0.weight"].T @ weights["direction.1.weight"].T
        beta = 2 * torch.sigmoid(x[b] @ weights["beta.weight"].T + weights["beta.bias"])
        for h in range(2):
            own = slice(4 * h, 4 * h + 4)
            matrices = []
            for t in range(N):
                w = torch.zeros(4, dtype=torch.float64)
                for place in range(3):
                    at = t - 2 + place if causal else t - 1 + place
                    if 0 <= at < N:
                        w += low[at, own] * weights["kernel"][own, place]
                w = w / w.norm() if w.norm() > 0 else w
                matrices.append(eye - beta[t, h] * torch.outer(w, w) if real[b, t] else eye)
            for i in range(N):
                seen = [j for j in range(i + 1 if causal else N) if real[b, j]]
                logits = []
                for j in seen:
                    key = k[j, own]
                    for between in range(j + 1, i + 1) if j <= i else range(j - 1, i - 1, -1):
                        key = matrices[between] @ key
                    logits.append(q[i, own] @ key / 2)
                if seen:
                    rows[b, i, own] = torch.stack(logits).softmax(0) @ v[seen, own]
    return rows @ weights["out.weight"].T


@both
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 5, 19, 64])
def test_a_key_is_reflected_by_every_token_after_it_up_to_the_query(shape: Shape, padded: bool, chunk: int) -> None:
    module, x = make(shape, chunk), tokens(shape)
    real = HOLES if padded else torch.ones(2, 19, dtype=torch.bool)
    x = x.masked_fill(~real[..., None], 0.0)
    out = module(x, key_mask=real if padded else None).detach()
    close(out[real], by_hand(module, x, shape.causal, real)[real])


def test_every_prompt_leaves_the_keys_that_its_tokens_leave_one_by_one() -> None:
    module, x = make(CAUSAL), tokens(CAUSAL)
    state = module.begin(x[:, :0])
    for t in range(19):
        _, state = module.step(state, x[:, t : t + 1])
        at_once = module.begin(x[:, : t + 1])
        close(at_once.cache.keys, state.cache.keys)
        close(at_once.cache.values, state.cache.values)
        close(at_once.recent, state.recent)


class Written(TorchDispatchMode):
    """Adds up the numbers that operations give."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.total += sum(x.numel() for x in (out if isinstance(out, tuple | list) else [out]) if torch.is_tensor(x))
        return out


@pytest.mark.parametrize("causal", [False, True])
def test_twice_the_tokens_write_four_times_as_many_numbers_in_training(causal: bool) -> None:
    found = []
    for n in (256, 512):
        shape = replace(SHAPE, batch=1, heads=1, seq_len=n, causal=causal)
        module, x = make(shape, chunk=4), tokens(shape)
        with Written() as written:
            module(x.requires_grad_()).sum().backward()
        found.append(written.total)
    assert found[1] / found[0] < 4.3  # with whole tensors of all chunks for each pair of two, more than 6


def test_a_query_takes_few_steps_over_the_chunks_before_it() -> None:
    """128 chunks: 8 runs of 8, and the work of softmax attention is two products of each pair."""
    shape = replace(CAUSAL, batch=1, heads=1, seq_len=512)
    q, k, v, w = (torch.randn(1, 1, 512, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4))
    core = Reflections(shape, chunk=4)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        core(q, k, v, w, torch.ones(1, 1, 512, 1))
    assert counter.get_total_flops() < 1.4 * (2 * 2 * 512 * 512 / 2 * 4)
