from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnbench.catalogue.attention.exact.flex.flex import Flex
from attnbench.catalogue.attention.exact.flex.window_mask import Places
from attnbench.catalogue.build import build
from attnbench.catalogue.engines.flex.flex_attention import FlexKernel
from attnbench.contract.problem.reference import exact_attention, relative_error
from attnbench.contract.problem.shape import Bias, Shape
from attnbench.contract.problem.visible import Visible
from attnbench.errors import Unsupported
from attnbench.measure.flops import count, predict
from tests.compilers import compiles

# Loading the compiler imports a part of torch that uses another, deprecated one.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

B, H, N, D = 3, 2, 150, 16  # two blocks, the second one ragged
SHAPE = Shape(B, H, N, D)


def draw(M: int = N, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, N, D, dtype=dtype), *torch.randn(2, B, H, M, D, dtype=dtype)


def some_keys(M: int = N) -> Tensor:
    """Half of the first sequence, the middle of the second, nothing of the third."""
    mask = torch.rand(B, M) < 0.5
    mask[1] = (torch.arange(M) > 4) & (torch.arange(M) < 140)
    mask[2] = False
    return mask


def holds(module: Flex, inputs: tuple[Tensor, ...], key_mask: Tensor | None, bound: float) -> None:
    causal = module.causal
    exact = exact_attention(*inputs, causal=causal, key_mask=key_mask, bias=module.position_bias)
    counted = count(lambda: module(*inputs, key_mask=key_mask))
    assert counted.kernel == "flex"
    assert counted.output.dtype == inputs[0].dtype
    assert relative_error(counted.output, exact) < bound
    assert torch.equal(module(*inputs, key_mask=key_mask), counted.output)  # counting must not change what runs
    if key_mask is not None:
        assert counted.output[2].count_nonzero() == 0


# Compiled


def test_a_kernel_with_causality_padding_and_a_bias_equals_the_reference() -> None:
    module = build("flex", replace(SHAPE, causal=True, bias="alibi"))
    try:
        holds(module, draw(), some_keys(), 1e-6)  # type: ignore[arg-type]
    except Unsupported as reason:
        if "no working C++ compiler" not in str(reason):
            raise
        pytest.skip(str(reason))


@compiles
@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bias", ["none", "alibi", "relative"])
@pytest.mark.parametrize("causal", [False, True])
def test_every_kernel_equals_the_reference(causal: bool, bias: Bias, masked: bool) -> None:
    module = build("flex", replace(SHAPE, causal=causal, bias=bias))
    holds(module, draw(), some_keys() if masked else None, 1e-6)  # type: ignore[arg-type]


@compiles
@pytest.mark.parametrize(("n", "M"), [(N, 300), (N, 7), (1, 1), (256, 256)])
def test_every_length_will_do(n: int, M: int) -> None:
    q, k, v = draw(M)
    module = build("flex", Shape(B, H, n, D, M))
    holds(module, (q[:, :, :n], k, v) if n <= N else (q.repeat(1, 1, 2, 1)[:, :, :n], k, v), None, 1e-6)  # type: ignore[arg-type]


@compiles
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)])
def test_half_precision_rounds_no_more_than_it_must(dtype: torch.dtype, bound: float) -> None:
    holds(build("flex", replace(SHAPE, causal=True)), draw(dtype=dtype), some_keys(), bound)  # type: ignore[arg-type]


@compiles
def test_more_shapes_than_torch_keeps_of_one_piece_of_code_are_compiled_all_the_same() -> None:
    for n in range(2, 11):
        module = build("flex", Shape(1, 1, n, D))
        q, k, v = torch.randn(3, 1, 1, n, D)
        assert relative_error(module(q, k, v), exact_attention(q, k, v)) < 1e-6


@compiles
@pytest.mark.parametrize("bias", ["none", "alibi"])
@torch.no_grad()
def test_decoding_compiles_once_and_sees_every_key(bias: Bias) -> None:
    inputs = draw()
    module = build("flex", replace(SHAPE, causal=True, bias=bias))
    exact = exact_attention(*inputs, causal=True, bias=module.position_bias)  # type: ignore[arg-type]
    state = module.begin(*(x[:, :, :100] for x in inputs))
    recompiles = torch._dynamo.config.patch(error_on_recompile=True)
    for t in range(100, N):
        token = [x[:, :, t : t + 1] for x in inputs]
        with recompiles:
            output, state = module.step(state, *token)
        assert relative_error(output, exact[:, :, t : t + 1]) < 1e-6


# Without compiling


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("causal", "n", "M"), [(False, 300, 140), (True, 300, 300), (True, 256, 256), (True, 1, 1)])
def test_blocks_hold_every_pair_that_is_seen_and_full_ones_hide_none(
    causal: bool, n: int, M: int, masked: bool
) -> None:
    key_mask = torch.rand(1, M) < 0.5 if masked else None
    pattern = Places(Visible(causal))
    mask = pattern.block_mask(n, M, torch.device("cpu"), key_mask)
    seen = torch.ones(n, M, dtype=torch.bool).tril(0 if causal else M)
    computed = torch.zeros(n, M, dtype=torch.bool)
    for row in range(-(-n // 128)):
        rows = slice(128 * row, 128 * row + 128)
        for kind, counts, indices in (
            ("full", mask.full_kv_num_blocks, mask.full_kv_indices),
            ("asked", mask.kv_num_blocks, mask.kv_indices),
        ):
            assert counts is not None
            assert indices is not None
            for block in indices[0, 0, row, : counts[0, 0, row]].tolist():
                keys = slice(128 * block, 128 * block + 128)
                assert not computed[rows, keys].any(), "a block is computed twice"
                computed[rows, keys] = True
                assert kind == "asked" or seen[rows, keys].all()
    assert computed[seen].all()
    assert pattern.pairs(n, M) == computed.sum()
    assert all(any(seen[128 * row : 128 * row + 128, -1]) for row in range(-(-n // 128)) if not causal)


@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_those_of_the_blocks_that_are_computed(causal: bool) -> None:
    n = 1024

    def call() -> object:
        module = build("flex", Shape(1, 2, n, D, causal=causal))
        x = torch.randn(1, 2, n, D)
        return lambda: module(x, x, x)

    predicted = predict(call)  # type: ignore[arg-type]  # a call that makes a call
    blocks = 36 if causal else 64
    assert predicted.matmul_flops == 4 * 2 * D * 128 * 128 * blocks
    assert predicted.peak_bytes is not None
    assert predicted.peak_bytes < 2 * n * n * 4


def test_what_a_cpu_cannot_compile_is_refused_and_nothing_runs_in_its_place() -> None:
    q, k, v = draw()
    module = build("flex", SHAPE)
    with pytest.raises(Unsupported, match="FlexAttention has no float64 on a CPU"):
        module(q.double(), k.double(), v.double())
    with pytest.raises(Unsupported, match="FlexAttention has no backward pass on a CPU"):
        module(q, k.requires_grad_(), v)
    with pytest.raises(Unsupported, match="no backward pass"):
        build("flex", replace(SHAPE, bias="relative"))(q, k.detach(), v)


def test_a_machine_without_a_compiler_is_told_so() -> None:
    import torch._inductor.config as settings

    module = build("flex", Shape(1, 1, 7, D))
    without = settings.patch({"cpp.cxx": ("there-is-no-such-compiler",)})
    with without, pytest.raises(Unsupported, match="there is no working C\\+\\+ compiler"):
        module(*torch.randn(3, 1, 1, 7, D))


@pytest.mark.cuda
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu_equals_the_reference_with_gradients(causal: bool) -> None:
    q, k, v = (x.cuda().requires_grad_() for x in draw())
    mask = some_keys().cuda()
    module = build("flex", replace(SHAPE, causal=causal, bias="alibi")).cuda()
    output = module(q, k, v, key_mask=mask)
    exact = exact_attention(q, k, v, causal=causal, key_mask=mask, bias=module.position_bias)  # type: ignore[arg-type]
    assert relative_error(output, exact) < 5e-3
    grad = torch.randn_like(output)
    got, want = torch.autograd.grad(output, (q, k, v), grad), torch.autograd.grad(exact, (q, k, v), grad.double())
    for one, other in zip(got, want, strict=True):
        assert relative_error(one, other) < 5e-3


@pytest.mark.parametrize(("filled", "blocks"), [(1, 1), (128, 1), (129, 2), (300, 3)])
def test_a_decoding_step_reads_the_blocks_that_are_filled(
    filled: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def run(self: FlexKernel, q: Tensor, k: Tensor, v: Tensor, mask: Callable[[], BlockMask], **how: object) -> Tensor:
        made = mask()
        assert made.full_kv_num_blocks is not None
        read.append(int(made.kv_num_blocks.sum() + made.full_kv_num_blocks.sum()))
        return q

    monkeypatch.setattr(FlexKernel, "__call__", run)
    module = build("flex", Shape(1, 1, 512, 4, causal=True))
    token = [torch.randn(1, 1, 1, 4) for _ in range(3)]
    module.step(module.begin(*(x.expand(1, 1, filled - 1, 4) for x in token)), *token)
    assert read == [blocks]


def test_with_a_key_mask_every_block_that_is_left_asks_it() -> None:
    for causal, blocks in ((True, [1, 2, 3]), (False, [3, 3, 3])):
        mask = Places(Visible(causal)).block_mask(300, 300, torch.device("cpu"), torch.ones(1, 300, dtype=torch.bool))
        assert mask.full_kv_num_blocks is not None
        assert mask.full_kv_num_blocks.sum() == 0
        assert mask.kv_num_blocks[0, 0].tolist() == blocks
