from __future__ import annotations

import pytest
import torch

from attnbench.catalogue.attention.low_rank.linformer import Linformer
from attnbench.catalogue.build import build
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from attnbench.models.encoder import Encoder
from attnbench.suite.cell import ModelSize
from tests.catalogue.attention.small import built


def qkv(
    B: int = 2, H: int = 3, N: int = 12, M: int = 12, D: int = 5, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.randn(B, H, N, D, dtype=dtype),
        torch.randn(B, H, M, D, dtype=dtype),
        torch.randn(B, H, M, D, dtype=dtype),
    )


def linformer(M: int = 12, H: int = 3, *, N: int | None = None, **options: object) -> Linformer:
    return built(Linformer, "linformer", Shape(2, H, N or M, 5, kv_len=M), **{"rank": 4, **options}).double()


@pytest.mark.parametrize("sharing", ["unshared", "headwise", "key-value", "layerwise"])
def test_equals_the_dense_formula(sharing: str) -> None:
    q, k, v = qkv(N=7)
    module = linformer(N=7, sharing=sharing)
    E = module.E
    F = E if module.F is None else module.F
    assert E is not None
    weights = torch.softmax(q @ (E @ k).transpose(-1, -2) / 5**0.5, -1)
    torch.testing.assert_close(module(q, k, v), weights @ (F @ v), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("sharing", "e_size", "f_size"),
    [("unshared", (3, 4, 12), (3, 4, 12)), ("headwise", (4, 12), (4, 12)), ("key-value", (4, 12), None)],
)
def test_sharing_decides_how_many_projections_there_are(sharing: str, e_size: object, f_size: object) -> None:
    module = linformer(sharing=sharing)
    assert module.E is not None
    assert tuple(module.E.shape) == e_size
    assert (None if module.F is None else tuple(module.F.shape)) == f_size


def test_one_projection_may_serve_all_layers_of_a_model() -> None:
    def model(sharing: str) -> Encoder:
        spec = f"linformer:rank=4,sharing={sharing}"
        return Encoder(spec, Shape(1, 2, 12, 4), ModelSize(layers=3, ffn=8, vocab=5))

    tied, untied = model("layerwise"), model("key-value")
    count, more = (sum(p.numel() for p in m.parameters()) for m in (tied, untied))
    assert more - count == 2 * 4 * 12
    tied(torch.arange(12)[None] % 5).sum().backward()
    projections = {name for name, _ in tied.named_parameters() if name.endswith(".E")}
    assert projections == {"blocks.0.layer.operator.E"}
    with torch.no_grad():
        for block, other in zip(tied.blocks, untied.blocks, strict=True):
            assert block.layer.operator.E is tied.blocks[0].layer.operator.E
            other.layer.operator.E.copy_(tied.blocks[0].layer.operator.E)
    assert torch.equal(tied(torch.arange(12)[None] % 5), untied(torch.arange(12)[None] % 5))


def test_projections_are_drawn_with_variance_one_over_rank() -> None:
    module = build("linformer:rank=64", Shape(1, 1, 4096, 8))
    (E,) = module.parameters()
    assert E.var().item() == pytest.approx(1 / 64, rel=0.02)
    assert abs(E.mean().item()) < 0.001


@pytest.mark.parametrize("M", [12, 13, 14, 15])
def test_mean_pooling_is_exact_for_keys_constant_within_runs(M: int) -> None:
    runs = torch.arange(4).repeat_interleave(torch.tensor([M // 4 + (r < M % 4) for r in range(4)]))
    q, k, v = qkv(M=M)
    pooled = torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :4], v[:, :, :4])
    # Every run counts once however long it is, so that exactness for equal runs needs equal lengths.
    out = linformer(M, N=12, projection="mean-pool")(q, k[:, :, runs], v[:, :, runs])
    torch.testing.assert_close(out, pooled, rtol=1e-12, atol=1e-12)
    if M % 4 == 0:
        exact = exact_attention(q, k[:, :, runs], v[:, :, runs])
        torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("projection", ["mean-pool", "max-pool"])
def test_pooling_with_one_key_per_run_is_exact_attention(projection: str) -> None:
    q, k, v = qkv()
    out = linformer(rank=12, projection=projection)(q, k, v)
    torch.testing.assert_close(out, exact_attention(q, k, v), rtol=1e-12, atol=1e-12)


def test_mean_pooling_of_long_runs_keeps_its_precision_in_bfloat16() -> None:
    q, k, v = qkv(N=3, M=1200, dtype=torch.bfloat16)
    module = linformer(1200, N=3, rank=2, projection="mean-pool").bfloat16()
    v = v + 3
    exact = module.double()(q.double(), k.double(), v.double())
    mask = torch.ones(2, 1200, dtype=torch.bool)
    for out in (module(q, k, v), module(q, k, v, key_mask=mask)):
        torch.testing.assert_close(out.double(), exact, rtol=2**-6, atol=0)


@pytest.mark.parametrize("M", [13, 15, 16])
def test_convolution_is_that_of_torch_with_stride_equal_to_its_length(M: int) -> None:
    q, k, v = qkv(M=M)
    module = linformer(M, N=12, projection="conv", sharing="headwise")
    assert module.E is not None
    assert module.F is not None
    rows = []
    for x, kernel in ((k, module.E), (v, module.F)):
        channels = torch.nn.functional.pad(x.flatten(0, 1).mT, (0, -M % 4))
        rows.append(torch.nn.functional.conv1d(channels, kernel.permute(2, 1, 0), stride=4).mT.unflatten(0, (2, 3)))
    torch.testing.assert_close(module(q, k, v), exact_attention(q, *rows), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("M", "length"), [(12, 3), (13, 4), (16, 4), (17, 5)])
def test_a_convolution_is_as_long_as_gives_at_most_rank_rows(M: int, length: int) -> None:
    module = linformer(M, projection="conv", sharing="unshared")
    assert [tuple(p.shape) for p in module.parameters()] == [(3, length, 5, 5)] * 2


def test_the_random_projection_is_the_construction_of_theorem_two() -> None:
    q, k, v = qkv()
    module = linformer(projection="jl", delta=0.3)
    G = module.G
    assert not list(module.parameters())
    expected = (q @ (0.3 * G @ k).mT / 5**0.5).softmax(-1) @ (2.718281828459045**-0.3 * G @ v)
    torch.testing.assert_close(module(q, k, v), expected, rtol=1e-12, atol=1e-12)
    assert linformer(projection="jl").projection.scales[0] == 1e-6
    drawn = build("linformer:rank=64,projection=jl", Shape(1, 1, 4096, 8)).get_buffer("G")
    assert drawn.var().item() == pytest.approx(1 / 64, rel=0.02)


def test_the_random_projection_weighs_all_rows_nearly_alike_at_ordinary_inputs() -> None:
    q, k, v = qkv()
    module = linformer(projection="jl")
    rows = (module.G @ v).mean(2, keepdim=True)
    torch.testing.assert_close(module(q, k, v), rows.expand_as(q), rtol=1e-4, atol=1e-4)


def test_the_convolution_is_drawn_with_variance_one_over_fan_in() -> None:
    (weight, *others) = build("linformer:rank=4,projection=conv,sharing=key-value", Shape(1, 2, 16, 32)).parameters()
    assert not others
    assert weight.var().item() == pytest.approx(1 / (4 * 32), rel=0.05)
