from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.pattern.bigbird import BigBird
from attnbench.catalogue.build import build
from attnbench.contract.problem.reference import relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported
from attnbench.measure.flops import count

# Loading the compiler imports a part of torch that uses another, deprecated one.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

B, H, N, D = 2, 3, 150, 16  # ten blocks of 16 tokens, the last one ragged


def made(options: str, n: int = N, bias: str = "none", width: int = D) -> BigBird:
    module = build(f"bigbird:{options}", Shape(B, H, n, width, bias=bias), seed=3)  # type: ignore[arg-type]  # a name
    assert isinstance(module, BigBird)
    return module


def pattern(module: BigBird, n: int) -> Tensor:
    """``(H, n, n)``: the pairs that the formula sees, whose weights are not 0."""
    q = torch.zeros(1, H, n, n, dtype=torch.float64)
    values = torch.eye(n, dtype=torch.float64).expand(1, H, n, n)
    return module.dense(q, q, values)[0] > 0


@pytest.mark.parametrize("wanted", [0, 1, 3, 9])
@pytest.mark.parametrize("n", [1, 4, 5, 8, 12, 14, 16, 20, 21, 24, 28, 41])
def test_the_blocks_listed_are_those_of_the_formula(n: int, wanted: int) -> None:
    module = made(f"block=4,random_blocks={wanted}", n)
    seen, expected = module._seen(torch.zeros(1, H, n, D)), pattern(module, n)
    assert seen.some.all()  # of so few tokens
    assert torch.equal(seen.full, expected.all(2).all(1)[None, :, None, None])
    h, i, j = torch.meshgrid(torch.arange(H), torch.arange(n), torch.arange(n), indexing="ij")
    assert torch.equal(seen.mod(h, h, i, j), expected)
    assert seen.pairs(H) == H * n * n


@pytest.mark.slow
@pytest.mark.parametrize("bias", ["none", "alibi"])
def test_the_kernel_equals_the_formula(bias: str) -> None:
    module = made("block=16,random_blocks=2,form=flex", bias=bias)
    inputs = torch.randn(3, B, H, N, D)
    try:
        counted = count(lambda: module(*inputs))
    except Unsupported as reason:
        if "no working C++ compiler" not in str(reason):
            raise
        pytest.skip(str(reason))
    assert counted.kernel == "flex"
    assert counted.matmul_flops == 4 * D * B * H * N * N  # of 2 × 2 blocks of 128
    assert relative_error(counted.output, module.dense(*inputs.double())) < 1e-6
    for other in (made("block=16,random_blocks=2,form=flex"), made("block=16,random_blocks=2")):
        assert torch.equal(other.draws, module.draws)
    # Other draws are other blocks, also for code that is compiled already.
    module.draws.copy_(module.draws.flip(0))
    assert relative_error(module(*inputs), module.dense(*inputs.double())) < 1e-6


def test_what_it_cannot_do_is_refused_with_the_reason() -> None:
    module, x = made("block=16,form=flex"), torch.randn(B, H, N, D)
    with pytest.raises(Unsupported, match="form=torch takes it"):
        module(x, x, x, key_mask=torch.ones(B, N, dtype=torch.bool))
    with pytest.raises(Unsupported, match="no backward pass on a CPU"):
        module(x.requires_grad_(), x, x)
    claims = VARIANTS.get("bigbird").claims(parse_spec("bigbird:form=flex"))
    assert claims.compiled
    assert not claims.key_padding
    assert "float64" not in claims.dtypes


@pytest.mark.cuda
@pytest.mark.parametrize("bias", ["none", "alibi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("block", "width"), [(16, D), (64, D), (64, 64), (96, 128)])
def test_on_a_gpu_equals_the_formula_with_gradients(block: int, width: int, dtype: torch.dtype, bias: str) -> None:
    n = 10 * block - 3
    module = made(f"block={block},form=flex", n, bias, width).cuda()
    inputs = [x.cuda().to(dtype).requires_grad_() for x in torch.randn(3, B, H, n, width)]
    grad = torch.randn_like(inputs[0])
    got, want = module(*inputs), module.dense(*(x.double() for x in inputs))
    bound = 5e-3 if dtype == torch.float32 else 2e-2
    assert relative_error(got, want) < bound
    for one, other in zip(
        torch.autograd.grad(got, inputs, grad), torch.autograd.grad(want, inputs, grad.double()), strict=True
    ):
        assert relative_error(one, other) < bound
