from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from attnbench.catalogue.build import build
from attnbench.contract.problem.position_bias import Alibi, PositionBias, Relative, position_bias
from attnbench.contract.problem.reference import exact_attention, relative_error
from attnbench.contract.problem.shape import Bias, Shape
from attnbench.contract.variant import VARIANTS, No
from attnbench.errors import Unsupported, UsageError
from attnbench.measure.flops import count, predict
from attnbench.measure.memory import peak_tensor_bytes

B, H, N, D = 3, 3, 23, 4
F64 = torch.float64
SHAPE = Shape(B, H, N, D)
EXACT = ("softmax", "chunked:query_chunk=5,key_chunk=7", "sdpa", "sdpa:backend=math")
each_bias = pytest.mark.parametrize("bias", ["alibi", "relative"])
each_form = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


def draw(n: int = N, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(3, B, H, n, D, dtype=F64).to(dtype).unbind())  # type: ignore[return-value]  # of three


def some_keys() -> Tensor:
    """Half of the first sequence, the middle of the second, nothing of the third."""
    mask = torch.rand(B, N) < 0.5
    mask[1] = (torch.arange(N) > 4) & (torch.arange(N) < 12)
    mask[2] = False
    return mask


def by_hand(module: nn.Module, bias: Bias, causal: bool) -> Tensor:
    """``(H, N, N)``, one number at a time from the definitions."""
    matrix = torch.zeros(H, N, N, dtype=F64)
    slopes = [2**-4, 2**-8, 2**-2]  # of 2 heads, and the first of those of 4
    for h in range(H):
        for i in range(N):
            for j in range(N):
                if bias == "alibi":
                    matrix[h, i, j] = -slopes[h] * abs(i - j)
                else:
                    matrix[h, i, j] = module.position_bias.table[h, bucket(j - i, causal)]  # type: ignore[index, union-attr]
    return matrix


def bucket(offset: int, causal: bool) -> int:
    """T5's bucket of j - i."""
    buckets, first = (32, 0) if causal else (16, 16 if offset > 0 else 0)
    distance = max(-offset, 0) if causal else abs(offset)
    if distance < buckets // 2:
        return first + distance
    wide = math.log(distance / (buckets // 2)) / math.log(128 / (buckets // 2)) * (buckets // 2)
    return first + min(buckets // 2 + math.floor(wide + 1e-9), buckets - 1)


# The numbers


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (8, [2**-h for h in range(1, 9)]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (12, [2**-h for h in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_slopes_are_those_of_the_paper(heads: int, slopes: list[float]) -> None:
    bias = Alibi(Shape(heads=heads, bias="alibi")).to(torch.bfloat16)  # which must not touch them
    at_one = bias.along(torch.tensor([1, -1]), torch.float32)
    want = -torch.tensor(slopes)[:, None].expand(-1, 2)
    torch.testing.assert_close(at_one, want, rtol=1e-6, atol=0)


@each_form
def test_buckets_are_those_of_t5_at_every_distance(causal: bool) -> None:
    bias = Relative(Shape(heads=1, causal=causal, bias="relative"))
    with torch.no_grad():
        bias.table.copy_(torch.arange(32)[None])
    offsets = range(-300, 1 if causal else 301)
    got = bias.along(torch.tensor(offsets), torch.float32)[0].tolist()
    assert got == [bucket(offset, causal) for offset in offsets]
    assert len(set(got)) == 32 if causal else len(set(got)) == 31  # j - i = 0 leaves one of those after it unused


@each_bias
@each_form
def test_tiles_are_parts_of_one_matrix(bias: Bias, causal: bool) -> None:
    module = build("softmax", replace(SHAPE, causal=causal, bias=bias))
    whole = by_hand(module, bias, causal)
    tiles: PositionBias = module.position_bias  # type: ignore[assignment]  # a module may hold anything
    torch.testing.assert_close(tiles(slice(0, N), slice(0, N), F64), whole)
    torch.testing.assert_close(tiles(slice(7, 9), slice(3, 20), F64), whole[:, 7:9, 3:20])
    torch.testing.assert_close(tiles.of_heads(slice(1, 3))(slice(7, 9), slice(3, 20), F64), whole[1:, 7:9, 3:20])
    heads = torch.tensor([2, 0, 2])
    torch.testing.assert_close(tiles(slice(22, 23), slice(0, 23), F64, heads), whole[heads, 22:])


def test_a_far_key_in_half_precision_still_lies_above_a_hidden_one() -> None:
    bias = Alibi(Shape(heads=1, bias="alibi"))
    bias.step *= 0.1
    far = bias.along(torch.tensor([10**6]), torch.float16)
    assert far.isfinite().all()
    assert far.item() > torch.finfo(torch.float16).min / 4


def test_every_variant_and_seed_meets_the_same_table() -> None:
    shape = replace(SHAPE, bias="relative")
    tables = [
        build(name, shape, seed=seed).position_bias.table  # type: ignore[union-attr]
        for name, seed in (("softmax", 0), ("softmax", 1), ("sdpa", 0))
    ]
    assert all(torch.equal(table, tables[0]) for table in tables)
    assert 0.8 < tables[0].std() < 1.2  # type: ignore[operator]


# Shapes


def test_a_shape_says_its_bias_and_refuses_others() -> None:
    assert Shape().bias == "none"
    assert position_bias(Shape()) is None
    with pytest.raises(UsageError, match="bias must be one of none, alibi, relative, got 'rotary'"):
        Shape(bias="rotary")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="bias alibi needs as many keys as queries, not 9 and 8"):
        Shape(seq_len=8, kv_len=9, bias="alibi")


@each_bias
def test_a_variant_that_forms_no_pairs_refuses_a_bias_with_the_reason(bias: Bias) -> None:
    refusing = [entry for entry in VARIANTS if not entry.traits.bias]
    assert "linear" in [entry.name for entry in refusing]
    for entry in refusing:
        assert isinstance(entry.traits.bias, No), entry.name
        with pytest.raises(Unsupported, match="bias: ") as refusal:
            build(entry.name, replace(SHAPE, bias=bias))
        assert entry.traits.bias in str(refusal.value)


# Variants


def test_a_table_that_is_not_to_be_learned_is_left_alone() -> None:
    module = build("chunked:query_chunk=5,key_chunk=7", replace(SHAPE, bias="relative")).double().requires_grad_(False)
    q, k, v = (x.requires_grad_() for x in draw())
    module(q, k, v).sum().backward()
    assert q.grad is not None
    assert module.position_bias.table.grad is None  # type: ignore[union-attr]


@each_bias
@each_form
@pytest.mark.parametrize("text", ["oracle-topk:keys=3", "oracle-lowrank:rank=3"])
def test_oracles_know_the_probabilities_with_it(text: str, causal: bool, bias: Bias) -> None:
    if causal and "lowrank" in text:
        return
    module = build(text, replace(SHAPE, causal=causal, bias=bias)).double()
    inputs, key_mask = draw(), some_keys()
    for mask in (None, key_mask):
        want = module.dense(*inputs, key_mask=mask)
        torch.testing.assert_close(module(*inputs, key_mask=mask), want, rtol=0, atol=1e-12)
    full = build(text.replace("3", str(N)), replace(SHAPE, causal=causal, bias=bias)).double()
    exact = exact_attention(*inputs, causal=causal, bias=full.position_bias)  # type: ignore[arg-type]
    torch.testing.assert_close(full(*inputs), exact, rtol=0, atol=1e-12)


@each_bias
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("text", EXACT)
def test_half_precision_rounds_no_more_than_it_must(text: str, dtype: torch.dtype, bound: float, bias: Bias) -> None:
    module = build(text, replace(SHAPE, causal=True, bias=bias)).to(dtype)
    inputs, key_mask = draw(dtype=dtype), some_keys()
    output = module(*inputs, key_mask=key_mask)
    exact = exact_attention(*inputs, causal=True, key_mask=key_mask, bias=module.position_bias)  # type: ignore[arg-type]
    assert output.dtype == dtype
    assert relative_error(output, exact) < bound


@each_bias
@pytest.mark.parametrize("training", [False, True])
def test_chunked_never_holds_the_matrix_of_the_bias(training: bool, bias: Bias) -> None:
    def peak(n: int) -> int:
        module = build("chunked:query_chunk=32,key_chunk=64", Shape(1, 1, n, 16, causal=True, bias=bias))
        inputs = [torch.randn(1, 1, n, 16, requires_grad=training) for _ in range(3)]

        def call() -> object:
            output = module(*inputs)
            return torch.autograd.grad(output.sum(), inputs) if training else output

        return peak_tensor_bytes(call) or 0

    assert peak(512) <= 4.2 * peak(128)


@each_bias
def test_a_dry_run_knows_what_it_costs(bias: Bias) -> None:
    def make(text: str) -> object:
        module = build(text, Shape(1, 2, 64, 8, bias=bias))
        x = torch.randn(1, 2, 64, 8)
        return lambda: module(x, x, x)

    for text in ("softmax", "chunked", "sdpa"):
        assert predict(lambda text=text: make(text)).matmul_flops == 4 * 2 * 64 * 64 * 8, text  # type: ignore[misc]


def test_fused_attention_of_a_cpu_trains_a_learned_bias_in_math_and_says_so() -> None:
    q = torch.randn(B, H, N, D)
    assert count(lambda: build("sdpa", replace(SHAPE, bias="relative"))(q, q, q)).kernel == "math"
    assert count(lambda: build("sdpa", replace(SHAPE, bias="alibi"))(q, q, q)).kernel == "flash_cpu"
