"""Large inputs, strong decays and loud tokens in float32, beside the formula in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from attnbench.catalogue.attention.reference import oracle_lowrank
from attnbench.catalogue.attention.reference.oracle_lowrank import leading
from attnbench.catalogue.build import build
from attnbench.contract.problem.reference import relative_error
from attnbench.contract.problem.shape import Shape


def formula(module: nn.Module, *inputs: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """The dense form in float64 of the same float32 module and inputs."""
    wide = copy.deepcopy(module).double()
    out: Tensor = wide.dense(*(x.double() for x in inputs), key_mask=key_mask)  # type: ignore[operator]  # all have one
    return out.detach()


def decoded(module: nn.Module, *inputs: Tensor) -> Tensor:
    state, outputs = module.begin(*(x[..., :0, :] for x in inputs)), []  # type: ignore[operator]  # it can decode
    for t in range(inputs[0].shape[-2]):
        out, state = module.step(state, *(x[..., t : t + 1, :] for x in inputs))  # type: ignore[operator]
        outputs.append(out)
    return torch.cat(outputs, -2).detach()


@pytest.mark.parametrize("options", ["factors=0", "mode=local,window=9,factors=0", "mode=local,window=40,factors=0"])
@pytest.mark.parametrize("causal", [False, True])
def test_aft_loses_no_row_to_a_large_weight_of_a_key_that_is_not_there(options: str, causal: bool) -> None:
    module = build(f"aft:{options}", Shape(2, 2, 70, 4, causal=causal))
    with torch.no_grad():
        module.w.mul_(100)
    x = torch.randn(2, 70, 8) / 10
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[0, 50:] = mask[1, 30:40] = False
    assert relative_error(module(x), formula(module, x)) < 1e-5
    out, expected = module(x, key_mask=mask), formula(module, x, key_mask=mask)
    assert relative_error(out[mask], expected[mask]) < 1e-5


def test_aft_conv_loses_no_row_to_a_weight_that_points_beyond_the_sequence() -> None:
    module = build("aft:mode=conv,kernel=5", Shape(1, 2, 70, 4))
    with torch.no_grad():
        module.w.copy_(torch.tensor([150.0, 0.0, 0.0, 0.0, 150.0]))
    x = torch.randn(1, 70, 8) / 10
    assert relative_error(module(x)[:, [0, 1, 68, 69]], formula(module, x)[:, [0, 1, 68, 69]]) < 1e-5


@pytest.mark.parametrize("bias", [-30.0, -100.0, -3000.0])
@pytest.mark.parametrize("causal", [False, True])
def test_gla_forgets_a_loud_token_however_strong_the_decay(bias: float, causal: bool) -> None:
    module = build("gla:temperature=1.0", Shape(1, 2, 100, 8, causal=causal))
    with torch.no_grad():
        module.decay[1].bias.fill_(bias)
    x = torch.randn(1, 100, 16)
    x[:, 20] *= 1e5
    out, expected = module(x), formula(module, x)
    quiet = torch.arange(100) != 20
    assert relative_error(out[:, quiet], expected[:, quiet]) < 1e-4
    if causal:
        assert relative_error(decoded(module, x)[:, quiet], expected[:, quiet]) < 1e-4


@pytest.mark.parametrize("causal", [False, True])
def test_ssd_keeps_its_digits_after_a_strong_reset(causal: bool) -> None:
    module = build("ssd:state=4", Shape(1, 1, 64, 4, causal=causal))
    with torch.no_grad():
        module.step_size.weight.zero_()[0, 0] = 1.0
        module.log_A.fill_(2.7)
    x = torch.randn(1, 64, 4)
    x[..., 0] = -5.0
    x[0, [20, 40], 0] = 30.0
    expected = formula(module, x)
    after = slice(41, None)
    assert relative_error(module(x)[:, after], expected[:, after]) < 2e-6
    if causal:
        assert relative_error(decoded(module, x)[:, after], expected[:, after]) < 2e-6


@pytest.mark.parametrize("size", [1.0, 100.0, 1000.0])
def test_causal_efficient_attention_keeps_its_digits_whatever_the_keys_are(size: float) -> None:
    module = build("efficient", Shape(1, 1, 256, 8, causal=True))
    q, k, v = (torch.randn(1, 1, 256, 8) for _ in range(3))
    expected = formula(module, q, size * k, v)
    assert relative_error(module(q, size * k, v), expected) < 1e-6
    assert relative_error(decoded(module, q, size * k, v), expected) < 1e-6


@pytest.mark.parametrize("std", [32.0, 64.0, 256.0])
def test_favor_plus_plus_is_finite_and_right_for_logits_of_any_size(std: float) -> None:
    module = build("favor-plus-plus", Shape(1, 1, 512, 64))
    q, k, v = (torch.randn(1, 1, 512, 64) for _ in range(3))
    q, k = q * std**0.5, k * std**0.5
    wide = copy.deepcopy(module).double()
    expected = wide(*(x.double() for x in (q, k, v))).detach()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = module(*leaves)
    assert relative_error(out, expected) < 1e-4
    assert all(bool(grad.isfinite().all()) for grad in torch.autograd.grad(out.square().sum(), leaves))


def test_linear_attention_weighs_keys_for_queries_however_negative() -> None:
    module = build("linear", Shape(1, 2, 40, 4))
    q, k, v = (torch.randn(1, 2, 40, 4) for _ in range(3))
    for lower in (50.0, 200.0, 600.0):
        assert relative_error(module(q - lower, k, v), formula(module, q - lower, k, v)) < 1e-5
    out = module(q, k - 500, v)
    assert torch.allclose(out, v.mean(2, keepdim=True).expand_as(out), atol=1e-5)


@pytest.mark.parametrize("name", ["softmax", "sdpa", "clustered:clusters=3"])
def test_a_padded_key_is_hidden_in_float16_behind_any_logit(name: str) -> None:
    module = build(name, Shape(1, 1, 16, 4)).half()
    q, k, v = (torch.randn(1, 1, 16, 4).half() for _ in range(3))
    q, k = q / 8 + 120, k / 8 - 120
    k[:, :, 8:] = 120
    mask = (torch.arange(16) < 8)[None]
    out = module(q, k, v, key_mask=mask)[:, :, :8]
    other = module(q, k, torch.cat([v[:, :, :8], v[:, :, 8:] + 50], 2), key_mask=mask)[:, :, :8]
    assert torch.equal(out, other)
    assert bool((out.amax(2) <= v[:, :, :8].amax(2)).all())


@pytest.mark.parametrize("std", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("shape", [(400, 400), (300, 500)])
def test_the_leading_singular_vectors_leave_as_little_as_those_of_the_whole_decomposition(
    std: float, shape: tuple[int, int]
) -> None:
    q, k = (torch.randn(n, 32, dtype=torch.float64) * std**0.5 for n in shape)
    P = (q @ k.mT / 32**0.5).softmax(-1)
    U = leading(P, 16)
    singular = torch.linalg.svdvals(P)
    best = singular[16:].square().sum()
    left = (P - U @ (U.mT @ P)).square().sum()
    assert abs(float(left / best) - 1) < 1e-10
    assert torch.allclose(U.mT @ U, torch.eye(16, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("std", [0.5, 2.0])
def test_the_leading_singular_vectors_need_no_decomposition_of_the_whole(
    std: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = (torch.randn(800, 64, dtype=torch.float64) * std**0.5 for _ in range(2))
    P = (q @ k.mT / 8).softmax(-1)
    exact = oracle_lowrank._of_all(P, 16)
    monkeypatch.delattr(oracle_lowrank, "_of_all")
    U = leading(P, 16)
    assert torch.linalg.matrix_norm(U @ (U.mT @ P) - exact @ (exact.mT @ P)) < 1e-7 * torch.linalg.matrix_norm(P)


def test_the_largest_singular_values_may_be_equal() -> None:
    P = torch.eye(400, dtype=torch.float64)
    U = leading(P, 16)
    assert float((P - U @ (U.mT @ P)).square().sum()) == pytest.approx(400 - 16)
