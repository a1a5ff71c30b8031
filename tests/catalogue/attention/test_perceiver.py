from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.low_rank import perceiver as of_perceiver
from attnbench.catalogue.attention.low_rank.perceiver import Perceiver
from attnbench.catalogue.build import build
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built, close, peak_of

F64 = torch.float64


def qkv(N: int = 23, M: int | None = None, D: int = 5) -> list[Tensor]:
    return [torch.randn(2, 3, length, D, dtype=F64) for length in (N, M or N, M or N)]


def perceiver(N: int = 23, M: int | None = None, *, causal: bool = False, latents: int = 4) -> Perceiver:
    return built(Perceiver, "perceiver", Shape(2, 3, N, 5, kv_len=M, causal=causal), latents=latents).double()


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


def test_training_keeps_of_earlier_tokens_their_inputs_and_outputs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_perceiver, "_SEGMENT", 128)

    def peak(n: int) -> int:
        module = build("perceiver", Shape(1, 1, n, 8, causal=True), latents=4)
        inputs = [torch.randn(1, 1, n, 8, requires_grad=True) for _ in range(3)]
        return peak_of(lambda: module(*inputs).sum().backward())

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
