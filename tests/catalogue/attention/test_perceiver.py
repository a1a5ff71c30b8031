from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.low_rank import perceiver as of_perceiver
from attnbench.catalogue.attention.low_rank.perceiver import Perceiver
from attnbench.catalogue.build import build
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from attnbench.measure.memory import peak_tensor_bytes

F64 = torch.float64


def qkv(N: int = 23, M: int | None = None, D: int = 5) -> list[Tensor]:
    return [torch.randn(2, 3, length, D, dtype=F64) for length in (N, M or N, M or N)]


def perceiver(N: int = 23, M: int | None = None, *, causal: bool = False, latents: int = 4) -> Perceiver:
    module = build("perceiver", Shape(2, 3, N, 5, kv_len=M, causal=causal), latents=latents)
    assert isinstance(module, Perceiver)
    return module.double()


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_the_formula() -> None:
    q, k, v = qkv(9, 23)
    module = perceiver(9, 23)
    W = (module.latents @ k.mT / 5**0.5).softmax(-1)
    close(module(q, k, v), (q @ (W @ k).mT / 5**0.5).softmax(-1) @ (W @ v))


@pytest.mark.parametrize("N", [150, 23])
def test_causal_means_that_latents_pack_the_prefix(N: int) -> None:
    inputs = qkv(N)
    whole, causal = perceiver(N), perceiver(N, causal=True)
    out = causal(*inputs)
    for i in (0, 1, 17, N - 1):
        close(out[:, :, i : i + 1], whole(*(x[:, :, : i + 1] for x in inputs))[:, :, i:])


def test_latents_that_each_point_at_one_key_give_exact_attention() -> None:
    q, k, v = qkv(9)
    k = k / k.norm(dim=-1, keepdim=True)
    for causal in (False, True):
        module = perceiver(9, latents=9, causal=causal)
        with torch.no_grad():
            module.latents.copy_(1e5 * k[0])
        out = module(q[:1], k[:1], v[:1])
        if causal:
            out = out[:, :, -1:]  # before, a latent whose key has not come points at another
        close(out, exact_attention(q[:1], k[:1], v[:1])[:, :, -out.shape[2] :])


def test_each_head_has_latents_of_its_own_drawn_from_the_normal_distribution() -> None:
    (latents,) = build("perceiver:latents=64", Shape(1, 8, 16, 64)).parameters()
    assert latents.shape == (8, 64, 64)
    assert latents.std().item() == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("scale", [30.0, 1000.0])
def test_large_keys_at_the_end_of_a_chunk_leave_earlier_rows_as_they_were(scale: float) -> None:
    module = perceiver(70, causal=True)
    inputs = qkv(70)
    later = [x.clone() for x in inputs]
    for x in later:
        x[:, :, [60, 69]] *= scale
    out = module(*later)
    assert out.isfinite().all()
    if scale < 100:
        close(out[:, :, :60], module(*inputs)[:, :, :60], 1e-9)
        close(out, module.dense(*later), 1e-9)


def test_decoding_holds_one_average_for_each_latent_however_long_the_prompt() -> None:
    module = perceiver(64, causal=True)
    for n in (0, 5, 64):
        q, k, v = qkv(64)
        state = module.begin(q[:, :, :n], k[:, :, :n], v[:, :, :n])
        assert [tuple(x.shape) for x in state] == [(2, 3, 4, 1), (2, 3, 4, 1), (2, 3, 4, 5), (2, 3, 4, 5)]


def test_gradients_of_a_long_sequence_are_taken_segment_by_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_perceiver, "_SEGMENT", 64)
    inputs, module = [x.requires_grad_() for x in qkv(200)], perceiver(200, causal=True)
    mask = torch.rand(2, 200) < 0.7
    for key_mask in (None, mask):
        ours, theirs = (
            torch.autograd.grad(f(*inputs, key_mask=key_mask).square().sum(), (*inputs, module.latents))
            for f in (module, module.dense)
        )
        for mine, expected in zip(ours, theirs, strict=True):
            close(mine, expected)


def test_training_keeps_of_earlier_tokens_their_inputs_and_outputs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_perceiver, "_SEGMENT", 128)

    def peak(n: int) -> int:
        module = build("perceiver", Shape(1, 1, n, 8, causal=True), latents=4)
        inputs = [torch.randn(1, 1, n, 8, requires_grad=True) for _ in range(3)]
        bytes_ = peak_tensor_bytes(lambda: module(*inputs).sum().backward())
        assert bytes_ is not None
        return bytes_

    of_a_query = 8 * 4
    assert (peak(1024) - peak(512)) / 512 <= 8 * of_a_query


@pytest.mark.parametrize("rise", [50.0, 120.0, 1e5])
def test_a_latent_whose_logits_rise_is_not_lost_to_the_tokens_before_the_rise(rise: float) -> None:
    module = build("perceiver:latents=1", Shape(1, 1, 200, 1, causal=True))
    with torch.no_grad():
        module.latents.fill_(1.0)
    k = torch.zeros(1, 1, 200, 1)
    k[:, :, 130:] = rise
    v = torch.arange(200.0).view(1, 1, -1, 1)
    out = module(k, k, v)
    assert torch.allclose(out[:, :, :130, 0], torch.arange(130) / 2)
    assert torch.allclose(out[:, :, 130:, 0], 130 + torch.arange(70) / 2)
