"""Reference lines that are no attention: convolutions, a state space, recurrences, a layer of equal FLOPs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnbench.catalogue.attention.reference.dense import DenseLayer
from attnbench.catalogue.build import build
from attnbench.catalogue.engines.fourier import long_convolution
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from attnbench.measure.flops import count
from attnbench.models.encoder import as_layer
from tests.catalogue.attention.small import close

LINES = ("conv", "long-conv", "s4d", "lstm", "gru", "dense")


def make(name: str, n: int = 23, *, causal: bool = False, **options: Any) -> Any:
    return build(name, Shape(2, 2, n, 3, causal=causal), **options).double()


def tokens(n: int = 23, B: int = 2) -> Tensor:
    return torch.randn(B, n, 6, dtype=torch.float64)


@pytest.mark.parametrize("name", LINES)
def test_no_token_decides_what_another_one_hears(name: str) -> None:
    """The output is a sum of what each token says alone, but for the recurrences and the dense layer's own token."""
    module, x = make(name, causal=True), tokens()
    with torch.no_grad():
        silent = module(0 * x)
        apart = sum(module(x * (torch.arange(23)[:, None] == t)) - silent for t in range(23))
        whole = module(x) - silent
    if name in ("lstm", "gru"):
        assert float((apart - whole).abs().max()) > 1e-3
    else:
        close(apart, whole)


# conv


@pytest.mark.parametrize("width", [1, 3, 7, 31])
def test_a_centred_convolution_is_that_of_torch(width: int) -> None:
    module, x = make("conv", width=width), tokens()
    theirs = nn.Conv1d(6, 6, width, padding=width // 2, groups=6).double()
    with torch.no_grad():
        theirs.weight.copy_(module.weight[:, None])
        theirs.bias.copy_(module.b)
    close(module(x), theirs(x.mT).mT)


@pytest.mark.parametrize("width", [1, 2, 5, 40])
def test_a_causal_convolution_weighs_the_last_tokens(width: int) -> None:
    module, x = make("conv", causal=True, width=width), tokens()
    expected = module.b + sum(
        module.weight[:, width - 1 - t] * nn.functional.pad(x, (0, 0, t, 0))[:, :23] for t in range(width)
    )
    close(module(x), expected)
    state = module.begin(x[:, :1])
    assert state.shape == (2, width - 1, 6)


# long-conv


@pytest.mark.parametrize("n", [1, 2, 23, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_transforms_give_the_sum_over_all_distances(n: int, causal: bool) -> None:
    x = torch.randn(2, n, 3, dtype=torch.float64)
    later, earlier = torch.randn(3, n, dtype=torch.float64), torch.randn(3, n - 1, dtype=torch.float64)
    out = long_convolution(x, later, None if causal else earlier)
    for i in range(n):
        expected = sum(later[:, i - j] * x[:, j] for j in range(i + 1))
        if not causal:
            expected = expected + sum(earlier[:, j - i - 1] * x[:, j] for j in range(i + 1, n))
        close(out[:, i], expected)


def test_a_loud_token_is_not_heard_before_it_comes() -> None:
    module = build("long-conv", Shape(1, 2, 512, 3, causal=True))
    x = torch.randn(1, 512, 6)
    loud = torch.cat([x[:, :-1], 1e6 * x[:, -1:]], 1)
    torch.testing.assert_close(module(loud)[:, :-1], module(x)[:, :-1], rtol=1e-6, atol=1e-6)


# s4d


@pytest.mark.parametrize("n", [1, 5, 64, 65, 200])
def test_the_kernel_is_the_response_of_the_recurrence_to_one_token(n: int) -> None:
    module = make("s4d", n, causal=True, state=6)
    impulse = torch.zeros(1, n, 6, dtype=torch.float64)
    impulse[:, 0] = 1
    with torch.no_grad():
        module.skip.zero_()
        close(module._kernels(n)[0].mT, module.dense(impulse)[0])


def test_the_recurrence_is_the_exact_solution_for_inputs_that_hold_for_a_step() -> None:
    module = make("s4d", 3, causal=True, state=2)
    with torch.no_grad():
        module.skip.zero_()
        module.frequency.zero_()  # one real state, h' = -h/2 + x
        step, read = module.log_step.exp(), 2 * module.read[0, :, 0, 0]
        x = torch.ones(1, 3, 6, dtype=torch.float64)
        time = step[:, None] * torch.arange(1, 4)
        close(module(x)[0].mT, read[:, None] * 2 * (1 - (-time / 2).exp()))


def test_the_start_is_that_of_the_paper() -> None:
    module = make("s4d", causal=True, state=8)
    close(module.log_decay.exp(), torch.full((6, 4), 0.5, dtype=torch.float64), 1e-6)
    close(module.frequency[0], torch.pi * torch.arange(4, dtype=torch.float64), 1e-6)
    assert bool(((module.log_step.exp() >= 0.00099) & (module.log_step.exp() <= 0.101)).all())


# lstm and gru


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_both_directions_are_those_of_torch(name: str) -> None:
    module, x = make(name), tokens()
    theirs = (nn.LSTM if name == "lstm" else nn.GRU)(6, 6, batch_first=True, bidirectional=True).double()
    with torch.no_grad():
        for d, suffix in enumerate(("", "_reverse")):
            getattr(theirs, f"weight_ih_l0{suffix}").copy_(module.W[d])
            getattr(theirs, f"weight_hh_l0{suffix}").copy_(module.U[d])
            getattr(theirs, f"bias_ih_l0{suffix}").copy_(module.b[d])
            second = module.b_state[d] if name == "gru" else torch.zeros_like(module.b[d])
            getattr(theirs, f"bias_hh_l0{suffix}").copy_(second)
    forwards, backwards = theirs(x)[0].chunk(2, -1)
    close(module(x), forwards + backwards)


# dense


@pytest.mark.parametrize(("heads", "n"), [(2, 64), (4, 128)])
def test_a_dense_layer_multiplies_as_often_as_a_layer_of_attention(heads: int, n: int) -> None:
    shape = Shape(1, heads, n, 16)
    x = torch.randn(1, n, shape.C)
    softmax, dense = as_layer("softmax", shape), as_layer("dense", shape)
    assert isinstance(dense, DenseLayer)
    assert count(lambda: dense(x)).matmul_flops == count(lambda: softmax(x)).matmul_flops


# rwwn


def test_row_wise_weight_normalisation_gives_rows_of_length_one() -> None:
    q, k = (torch.randn(1, 2, 9, 9, dtype=torch.float64) for _ in range(2))
    v = torch.eye(9, dtype=torch.float64).expand(1, 2, -1, -1)
    module = build("rwwn", Shape(1, 2, 9, 9))
    weights = module(q, k, v)
    close(weights.norm(dim=-1), torch.ones(1, 2, 9, dtype=torch.float64))
    close(weights / weights.sum(-1, keepdim=True), exact_attention(q, k, v))
    close(build("rwwn:norm=sum", Shape(1, 2, 9, 9))(q, k, v), exact_attention(q, k, v))
