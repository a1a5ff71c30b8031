"""What every fixed-pattern variant owes to the arithmetic they share; each pattern has a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.pattern import bigbird, etc, local, longformer
from attnbench.catalogue.attention.pattern.sparse import sparse as sparse
from attnbench.catalogue.build import build
from attnbench.catalogue.engines import products, tiling
from attnbench.catalogue.engines.patterns import bands, keys, pattern_softmax
from attnbench.catalogue.engines.patterns.tiles import Blocks, Tile
from attnbench.contract.problem.shape import Shape
from attnbench.measure.memory import peak_tensor_bytes
from tests.catalogue.attention.small import peak_of

SPECS = (
    "local:window=9",
    "local:block=10,look_around=1",
    "sparse:length=7",
    "sparse:pattern=fixed,length=7,summary=2",
    "local:window=3,dilation=4",
    "sparse:pattern=stride,length=7",
    "sparse:pattern=summary,length=7,summary=2",
    "longformer:window=5,global_tokens=3",
    "longformer:window=4,global_tokens=2,dilation=3,projections=own",
    "bigbird:block=4,random_blocks=2",
    "etc:window=5,global_tokens=3,max_distance=4",
)
CASES = [(spec, False) for spec in SPECS] + [(spec, True) for spec in SPECS[:7]]
WINDOWS = ("local:window=16", "local:block=16", "longformer:window=16,global_tokens=2", "bigbird:block=16")


def draw(B: int, H: int, n: int, D: int, dtype: torch.dtype = torch.float64, grad: bool = False) -> list[Tensor]:
    return [torch.randn(B, H, n, D, dtype=dtype, requires_grad=grad) for _ in "qkv"]


def made(spec: str, B: int, H: int, n: int, D: int, causal: bool = False, seed: int = 0) -> torch.nn.Module:
    return build(spec, Shape(B, H, n, D, causal=causal), seed=seed).double()


def gradients(f: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(f(q, k, v), (q, k, v), weight))


def out_and_gradients(f: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    weight = (torch.arange(q.numel()) % 7 - 3).to(q).view(q.shape)  # exact in every dtype
    return [f(q, k, v), *gradients(f, q, k, v, weight)]


@pytest.mark.parametrize(("spec", "causal"), CASES)
def test_large_steps_as_on_a_gpu_give_the_same_output_and_gradients(
    spec: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = draw(2, 2, 90, 3, grad=True)
    f = made(spec, 2, 2, 90, 3, causal)
    expected = out_and_gradients(f, q, k, v)
    for module in (tiling, pattern_softmax, bands, keys):
        monkeypatch.setattr(module, "large_steps", lambda q: True)
    for got, wanted in zip(out_and_gradients(f, q, k, v), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("spec", "causal"), CASES)
def test_keys_copied_for_faster_products_give_the_same_output_and_gradients(
    spec: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = draw(2, 2, 90, 3, grad=True)
    f = made(spec, 2, 2, 90, 3, causal)
    expected = out_and_gradients(f, q, k, v)
    for module in (products, bands):
        monkeypatch.setattr(module, "copies", lambda q: True)
    for got, wanted in zip(out_and_gradients(f, q, k, v), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", [*WINDOWS, "etc:window=16,global_tokens=2", "longformer:window=3,dilation=4"])
@pytest.mark.parametrize("n", [400, 407])
def test_a_single_head_in_tiles_of_many_blocks_is_the_formula(spec: str, n: int) -> None:
    q, k, v = draw(1, 1, n, 4, grad=True)
    f = made(spec, 1, 1, n, 4)
    some = torch.rand(1, n) < 0.7
    for mask in (None, some):
        got = out_and_gradients(partial(f, key_mask=mask), q, k, v)
        for each, wanted in zip(got, out_and_gradients(partial(f.dense, key_mask=mask), q, k, v), strict=True):
            torch.testing.assert_close(each, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", WINDOWS[:3])
def test_strided_inputs_are_not_copied_and_the_output_is_laid_out_like_them(spec: str) -> None:
    q, k, v = torch.randn(1, 1024, 3, 4, 64).permute(2, 0, 3, 1, 4)
    f = build(spec, Shape(1, 4, 1024, 64))
    assert f(q, k, v).transpose(1, 2).is_contiguous()
    peak = peak_of(partial(f, q, k, v))
    assert peak <= 4 * q.numel() + 2 * 4 * tiling.TUNED["patterns.scores"].cpu


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("spec", "causal"), CASES)
def test_a_gpu_gives_the_same_output_and_gradients(spec: str, causal: bool, dtype: torch.dtype) -> None:
    q, k, v = draw(2, 2, 150, 8, dtype, grad=True)
    f = build(spec, Shape(2, 2, 150, 8, causal=causal)).to(dtype)
    expected = out_and_gradients(f, q, k, v)
    there = [x.detach().cuda().requires_grad_() for x in (q, k, v)]
    for got, wanted in zip(out_and_gradients(f.cuda(), *there), expected, strict=True):
        torch.testing.assert_close(got.cpu(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize(("spec", "causal"), [case for case in CASES if case[1]])
def test_what_comes_later_changes_no_bit_of_what_came_before(spec: str, causal: bool) -> None:
    q, k, v = draw(1, 2, 50, 4, torch.float32)
    f = made(spec, 1, 2, 50, 4, causal)
    before = f(q, k, v)
    for t in (0, 6, 7, 20, 48):
        q2, k2, v2 = (torch.cat([x[:, :, : t + 1], torch.randn_like(x[:, :, t + 1 :])], 2) for x in (q, k, v))
        k2[:, :, -1] *= 3
        assert torch.equal(f(q2, k2, v2)[:, :, : t + 1], before[:, :, : t + 1])


@pytest.mark.parametrize(
    ("spec", "causal", "dtype"), [(*case, (torch.bfloat16, torch.float16)[i % 2]) for i, case in enumerate(CASES)]
)
def test_half_precision_is_rounded_once_at_the_end(spec: str, causal: bool, dtype: torch.dtype) -> None:
    q, k, v = draw(1, 2, 40, 8, dtype, grad=True)
    f = build(spec.replace(",projections=own", ""), Shape(1, 2, 40, 8, causal=causal))
    low = out_and_gradients(f, q, k, v)
    exact = out_and_gradients(f, *(x.detach().double().requires_grad_() for x in (q, k, v)))
    for got, wanted in zip(low, exact, strict=True):
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("spec", [*WINDOWS, "sparse", "sparse:pattern=fixed"])
def test_memory_grows_at_most_linearly_forward_and_backward(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        tiling.TUNED, "patterns.scores", tiling.Tuned(2**14)
    )  # else a tile outweighs these small tensors
    peaks = []
    for n in (512, 2048):
        f = build(spec, Shape(1, 1, n, 32))
        q, k, v = draw(1, 1, n, 32, torch.float32, grad=True)
        with torch.inference_mode():
            forward = peak_tensor_bytes(partial(f, q, k, v))
        peaks += [forward, peak_tensor_bytes(partial(gradients, f, q, k, v, torch.ones_like(q)))]
    assert peaks[2] <= 4.2 * peaks[0]
    assert peaks[3] <= 4.2 * peaks[1]


@pytest.mark.parametrize("spec", ["local", "longformer:window=128", "sparse:pattern=fixed"])
def test_only_the_output_and_a_tile_are_held_forward_and_the_gradients_backward(spec: str) -> None:
    n, tile = 2048, 4 * tiling.TUNED["patterns.scores"].cpu
    q, k, v = draw(1, 4, n, 32, torch.float32, grad=True)
    tensor = 4 * q.numel()
    f = build(spec, Shape(1, 4, n, 32))
    with torch.inference_mode():
        forward = peak_tensor_bytes(partial(f, q, k, v))
    assert forward <= tensor + 3 * tile  # scores of each key set, joined, and their rows
    weight = torch.ones_like(q)
    backward = peak_tensor_bytes(partial(gradients, f, q, k, v, weight))
    assert backward <= 4 * tensor + 4 * tile


def test_a_window_that_sees_everything_holds_no_square_of_scores_or_masks() -> None:
    n = 2048
    q, k, v = draw(1, 1, n, 4, torch.float32)
    whole = (f"local:window={n}", f"local:block={n}", f"sparse:length={n}", f"longformer:window={n // 2}")
    for spec in (*whole, "sparse:pattern=stride,length=1", f"etc:window={n},global_tokens=8"):
        f = build(spec, Shape(1, 1, n, 4))
        assert peak_tensor_bytes(partial(f, q, k, v)) < 4 * n * n / 4


def pairs(spec: str, n: int, causal: bool = False) -> int:
    """Scores that the variant computes for one head, masked ones included."""
    counted = []

    def count(q: Tensor, k: Tensor, v: Tensor, tiles: Iterable[Tile], **rest: object) -> Tensor:
        counted.extend(tile.scores for tile in tiles)
        return q

    f = build(spec, Shape(1, 1, n, 1, causal=causal))
    with pytest.MonkeyPatch.context() as patch:
        for module in (bigbird, etc, local, longformer, sparse):
            patch.setattr(module, "attend", count)
        f(*draw(1, 1, n, 1))
    return sum(counted)


@pytest.mark.parametrize(
    "spec", [*WINDOWS, "longformer:window=16,dilation=4", "local:window=16,dilation=4", "local:block=100"]
)
def test_work_grows_linearly(spec: str) -> None:
    assert pairs(spec, 32768) <= 4.05 * pairs(spec, 8192)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", ["strided", "fixed", "stride", "summary"])
def test_work_of_the_sparse_transformer_grows_with_the_power_three_halves(pattern: str, causal: bool) -> None:
    growth = pairs(f"sparse:pattern={pattern}", 32768, causal) / pairs(f"sparse:pattern={pattern}", 8192, causal)
    assert 6 < growth < 8.2


@pytest.mark.parametrize(("copied", "rows"), [(False, 32), (True, 64)])
def test_the_work_that_the_docstrings_state_is_done(copied: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 8192
    monkeypatch.setattr(bands, "copies", lambda q: copied)
    assert pairs("local:window=128", n) == pytest.approx(n * (2 * 128 + rows), rel=0.02)
    assert pairs("local:window=300", 4 * n) == pytest.approx(4 * n * (2 * 300 + 64), rel=0.02)
    assert pairs("local:window=128", n, causal=True) == pytest.approx(n * (128 + rows), rel=0.02)
    assert pairs("local:block=64", n) == n * 64
    assert pairs("longformer:window=128,global_tokens=0", n) == pytest.approx(n * (2 * 128 + rows), rel=0.02)
    assert pairs("longformer:window=128,global_tokens=8", n) == pytest.approx(n * (2 * 128 + 64 + 2 * 8), rel=0.02)
    assert pairs("etc", n) == pytest.approx(n * (2 * 84 + 64 + 2 * 64), rel=0.02)
    assert pairs("sparse:pattern=stride,length=64", n) == n * n // 64
    assert pairs("bigbird", n) == pytest.approx(n * (7 + 3) * 64, rel=0.02)


def test_blocks_overlap_and_stride_without_a_copy() -> None:
    x = torch.arange(40.0).view(1, 1, 40, 1)
    blocks = Blocks(start=3, size=4, count=3, step=10, stride=5).of(x, (0, slice(0, 1)))
    assert blocks[0, :, :, 0].tolist() == [[3, 8, 13, 18], [13, 18, 23, 28], [23, 28, 33, 38]]
    assert blocks.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
