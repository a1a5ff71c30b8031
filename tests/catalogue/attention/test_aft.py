from __future__ import annotations

import pytest
import torch

from attnbench.catalogue.attention.synthetic.aft.aft import AFT
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built, close, draw


def make(options: str, shape: Shape) -> AFT:
    return built(AFT, f"aft:{options}".rstrip(":"), shape).double()


def bare(options: str, n: int, width: int, *, causal: bool = False, heads: int = 1) -> AFT:
    """Keys and values are both x, nothing is gated and nothing projected."""
    module = make(options, Shape(1, heads, n, width // heads, causal=causal))
    with torch.no_grad():
        for projection in (module.k, module.v, module.out):
            projection.weight.copy_(torch.eye(width))
        module.q.weight.zero_()
        module.out.weight.mul_(2)  # σ(0) = 1/2
    return module


def same_projections(module: AFT, other: AFT) -> None:
    for name in ("q", "k", "v", "out"):
        getattr(module, name).load_state_dict(getattr(other, name).state_dict())


def test_one_channel_is_a_softmax_of_keys_plus_biases() -> None:
    module, x = bare("factors=0", 12, 1), draw(1, 12, 1)
    weights = (x[0, :, 0] + module.w).softmax(-1)
    close(module(x)[0], weights @ x[0])


@pytest.mark.parametrize("causal", [False, True])
def test_conv_is_full_with_biases_in_a_band(causal: bool) -> None:
    shape = Shape(2, 1, 70, 3, causal=causal)
    conv, x = make("mode=conv,kernel=5", shape), draw(2, 70, 3)
    full = make("factors=0", shape)
    same_projections(full, conv)
    with torch.no_grad():
        full.w.zero_()
        for tap, distance in enumerate(range(-4, 1) if causal else range(-2, 3)):
            full.w.diagonal(distance).copy_(conv.w[0, tap].expand(70 - abs(distance)))
    close(conv(x), full(x))


@pytest.mark.parametrize("causal", [False, True])
def test_local_is_full_with_zero_beyond_the_window(causal: bool) -> None:
    shape = Shape(2, 2, 70, 2, causal=causal)
    local, x = make("mode=local,window=6,factors=3", shape), draw(2, 70, 4)
    full = make("factors=0", shape)
    same_projections(full, local)
    position = torch.arange(70)
    with torch.no_grad():
        band = (position[:, None] - position).abs() <= 6
        full.w.copy_(torch.where(band, local.rows @ local.columns.T, 0.0))
    close(local(x), full(x))


def test_every_head_of_conv_has_biases_of_its_own() -> None:
    module, x = make("mode=conv,kernel=3", Shape(1, 2, 9, 2)), draw(1, 9, 4)
    with torch.no_grad():
        module.out.weight.copy_(torch.eye(4))
        before = module(x)
        module.w[1] += torch.tensor([0.0, 1.0, 2.0])
    changed = (module(x) - before).abs().amax((0, 1)) > 1e-6
    assert changed.tolist() == [False, False, True, True]


# Exponents


@pytest.mark.parametrize("options", ["mode=local,window=2,factors=0", "mode=conv,kernel=5"])
def test_the_largest_key_may_be_biased_away(options: str) -> None:
    """1 + (e^w - 1) would cancel: the far keys must be summed without the near ones."""
    module = bare(options, 9, 1).float()
    with torch.no_grad():
        module.w.fill_(-60.0)
    x = torch.randn(1, 9, 1)
    x[0, 4] = 40.0
    close(module(x).double(), module.double().dense(x.double()), 1e-5)


def test_a_later_key_that_is_very_large_leaves_earlier_rows_bit_for_bit() -> None:
    for options in ("factors=4", "mode=local,window=2,factors=4", "mode=simple", "mode=conv,kernel=3"):
        module = bare(options, 40, 2, causal=True).float()
        x = torch.randn(1, 40, 2)
        before = module(x)
        x[0, 30] = 1e4
        assert torch.equal(module(x)[:, :30], before[:, :30])


# Cost


# Refusals


@pytest.mark.parametrize("options", ["factors=64", "factors=0", "mode=conv,kernel=99"])
def test_biases_are_drawn_with_variance_one(options: str) -> None:
    module = make(options, Shape(1, 16, 200, 4))
    with torch.no_grad():
        biases = module.rows @ module.columns.mT if options == "factors=64" else module.w
    assert biases.var().item() == pytest.approx(1, rel=0.2)
