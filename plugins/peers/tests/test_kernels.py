"""Adapters of kernels that need a GPU, around modules of the same signature that compute the formula on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

pytest.importorskip("attnbench_peers", reason="make peers installs it")

import attnbench_peers  # noqa: F401  # fills the table of variants, whatever ATTNBENCH_PLUGINS says

from attnbench import Shape, Unsupported, build

Fake = Callable[[str, Callable[..., Any]], None]
SHAPE = Shape(heads=4, kv_heads=2, seq_len=23, head_dim=64, causal=True)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Puts a function where a package would have it, on a machine that seems to have an H100."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))

    def put(path: str, called: Callable[..., Any]) -> None:
        name, _, attribute = path.rpartition(".")
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:end]))
            module.__path__ = []
            monkeypatch.setitem(sys.modules, module.__name__, module)
        setattr(sys.modules[name], attribute, called)

    return put


def flash3(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False, **_: Any
) -> Tensor:
    """``(B, N, H, D)``, with a scale of 1/√D by default; heads of keys are shared."""
    assert q.ndim == 4
    out = sdpa(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2)


def flash4(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False) -> Any:
    """With the log-sum-exp beside it."""
    return flash3(q, k, v, softmax_scale, causal), None


def flashinfer(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, kv_layout: str = "HND") -> Tensor:
    """One sequence, ``(N, H, D)``."""
    assert kv_layout == "NHD"
    assert q.ndim == 3
    return flash3(q[None], k[None], v[None], causal=causal)[0]


def sage(q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "NHD", is_causal: bool = False) -> Tensor:
    assert tensor_layout == "HND"
    return sdpa(q, k, v, is_causal=is_causal, enable_gqa=True)


KERNELS = {
    "peer.sdpa.flash3": ("flash_attn_interface.flash_attn_func", flash3),
    "peer.sdpa.flash4": ("flash_attn.cute.flash_attn_func", flash4),
    "peer.sdpa.flashinfer": ("flashinfer.single_prefill_with_kv_cache", flashinfer),
    "peer.sdpa.sage": ("sageattention.sageattn", sage),
}


def drawn(dtype: torch.dtype = torch.bfloat16, *, gradients: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((1, heads, SHAPE.N, SHAPE.D) for heads in (SHAPE.H, SHAPE.K, SHAPE.K))
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_(gradients) for size in sizes]


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_gets_its_layout_and_its_shared_heads(name: str, fake: Fake) -> None:
    fake(*KERNELS[name])
    inputs = drawn()
    expected = build("sdpa", SHAPE)(*inputs)
    torch.testing.assert_close(build(name, SHAPE)(*inputs), expected, rtol=2e-2, atol=2e-2)
    whole = Shape(heads=4, kv_heads=2, seq_len=23, head_dim=64)
    assert not torch.allclose(build(name, whole)(*inputs), expected, rtol=2e-2, atol=2e-2)  # causal reaches it


@pytest.mark.parametrize("name", ["peer.sdpa.flash3", "peer.sdpa.flash4", "peer.sdpa.flashinfer", "peer.sdpa"])
def test_values_may_be_narrower_than_keys(name: str, fake: Fake) -> None:
    if name in KERNELS:
        fake(*KERNELS[name])
    shape = Shape(heads=4, seq_len=23, head_dim=192, v_dim=128, causal=True)
    draws = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 23, width, generator=draws).bfloat16() for width in (192, 192, 128))
    module: Any = build(name, shape)
    expected = module.dense(*(x.float() for x in (q, k, v)))
    torch.testing.assert_close(module(q, k, v).float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_takes_half_precision_alone(name: str, fake: Fake) -> None:
    fake(*KERNELS[name])
    with pytest.raises(Unsupported, match="takes float16 and bfloat16, not float32"):
        build(name, SHAPE)(*drawn(torch.float32))


@pytest.mark.parametrize("name", ["peer.sdpa.flashinfer", "peer.sdpa.sage"])
def test_a_kernel_without_a_backward_pass_is_refused_a_training_step(name: str, fake: Fake) -> None:
    fake(*KERNELS[name])
    module = build(name, SHAPE)
    with pytest.raises(Unsupported, match="has no backward pass"):
        module(*drawn(gradients=True))
    with torch.no_grad():
        module(*drawn(gradients=True))


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_not_installed_says_how_to_get_it(name: str, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    path, called = KERNELS[name]
    fake(path, called)
    monkeypatch.setitem(sys.modules, path.rpartition(".")[0], None)
    with pytest.raises(Unsupported, match=r"pip install --no-deps \S+==\d|build it from the folder"):
        build(name, SHAPE)


@pytest.mark.parametrize("name", [*KERNELS, "peer.gla.fla", "peer.delta.fla", "peer.kda.fla", "peer.gated-delta.fla"])
def test_without_a_gpu_there_is_a_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unsupported, match="run on an NVIDIA GPU, and there is none"):
        build(name, SHAPE if name in KERNELS else Shape(causal=True))


def test_an_older_gpu_is_refused_by_its_capability(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(*KERNELS["peer.sdpa.flash3"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    with pytest.raises(Unsupported, match=r"compute capability 9\.x; this GPU has 8\.6"):
        build("peer.sdpa.flash3", SHAPE)


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("peer.sdpa.flash3", Shape(head_dim=12), "head_dim 8 to 256 in steps of 8, not 12"),
        ("peer.sdpa.flash3", Shape(head_dim=128, v_dim=64), "no kernel for head_dim 128 and v_dim 64"),
        ("peer.sdpa.flashinfer", Shape(head_dim=128, v_dim=64), "no kernel for head_dim 128 and v_dim 64"),
        ("peer.sdpa.sage", Shape(head_dim=128, v_dim=64), "v_dim: its kernel gives values the width of keys"),
        ("peer.sdpa.flash4", Shape(head_dim=192), "head_dim 8 to 128 in steps of 8, not 192"),
        ("peer.sdpa.flashinfer", Shape(head_dim=64, batch=2), "takes one sequence: set batch to 1, not 2"),
        ("peer.sdpa.sage", Shape(head_dim=96), "head_dim 64, 128, not 96"),
        ("peer.gla.fla", Shape(), "causal"),
    ],
)
def test_a_shape_that_it_does_not_take_is_refused(name: str, shape: Shape, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        build(name, shape)


def gated(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> Tensor:
    """Σ_j Σ_c q_ic k_jc exp(G_ic - G_jc) v_j over j <= i, in ``(B, N, H, D)``."""
    total = g.cumsum(1)
    weights = torch.einsum("bihd,bjhd,bijhd->bhij", q, k, (total[:, :, None] - total[:, None]).exp().float())
    return scale * torch.einsum("bhij,bjhe->bihe", weights.tril(), v)


def erased(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float) -> Tensor:
    """S' = Diag(e^g) S, S = S' + β k (v - S'ᵀ k)ᵀ, o = scale·Sᵀq, token by token."""
    g = g if g.ndim == 4 else g[..., None]
    state, out = torch.zeros(*k.shape[:1], *k.shape[2:], v.shape[-1]), []
    for t in range(k.shape[1]):
        state = state * g[:, t, :, :, None].exp()
        change = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhde,bhd->bhe", state, k[:, t]))
        state = state + k[:, t, :, :, None] * change[:, :, None]
        out.append(scale * torch.einsum("bhde,bhd->bhe", state, q[:, t]))
    return torch.stack(out, 1)


def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None) -> Any:
    return gated(q, k, v, g, q.shape[-1] ** -0.5 if scale is None else scale), None


def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None) -> Any:
    return erased(q, k, v, g, beta, q.shape[-1] ** -0.5 if scale is None else scale), None


def chunk_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None = None) -> Any:
    return chunk_gated_delta_rule(q, k, v, torch.zeros_like(beta), beta, scale)


def chunk_retention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Any:
    h = torch.arange(q.shape[2])
    return chunk_gla(q, k, v, torch.log1p(-(2.0 ** (-5 - h)))[:, None].expand_as(q), scale)


RECURRENCES = {
    "peer.gla.fla": ("gla", "fla.ops.gla.chunk_gla", chunk_gla),
    "peer.delta.fla": ("delta", "fla.ops.delta_rule.chunk_delta_rule", chunk_delta_rule),
    "peer.gated-delta.fla": (
        "gated-delta",
        "fla.ops.gated_delta_rule.chunk_gated_delta_rule",
        chunk_gated_delta_rule,
    ),
    "peer.kda.fla": ("kda", "fla.ops.kda.chunk_kda", chunk_gated_delta_rule),
    "peer.retnet.fla": ("retnet:rotation=false", "fla.ops.retention.chunk_retention", chunk_retention),
}


def alike(ours: str, name: str) -> None:
    """Outputs and gradients of both in float32; the layer's weights are the peer's."""
    shape = Shape(batch=2, heads=2, seq_len=70, head_dim=8, causal=True)
    mine, peer = build(ours, shape), build(name, shape)
    peer.load_state_dict(mine.state_dict())
    torch.manual_seed(0)
    sizes = [(2, 2, 70, 8)] * 3 if ours.startswith("retnet") else [(2, 70, shape.C)]
    inputs = [torch.randn(size, requires_grad=True) for size in sizes]
    for a, b in zip(*([module(*inputs), *gradients(module, inputs)] for module in (mine, peer)), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


def gradients(module: torch.nn.Module, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(module(*inputs).square().sum(), inputs)


@pytest.mark.parametrize("name", RECURRENCES)
def test_a_recurrence_of_the_package_stands_in_our_layer(name: str, fake: Fake) -> None:
    ours, path, called = RECURRENCES[name]
    fake(path, called)
    alike(ours, name)


@pytest.mark.parametrize("name", [name for name in RECURRENCES if name != "peer.delta.fla"])
def test_the_naive_form_of_the_package_gives_what_our_layer_gives(name: str) -> None:
    try:
        build(f"{name}:form=naive", Shape(causal=True))
    except Unsupported as reason:
        pytest.skip(str(reason))
    alike(RECURRENCES[name][0], f"{name}:form=naive")
