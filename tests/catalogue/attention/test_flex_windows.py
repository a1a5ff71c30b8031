from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.exact.flex.flex import Flex
from attnbench.catalogue.attention.exact.flex.window_mask import WindowPattern
from attnbench.catalogue.build import build
from attnbench.contract.problem.reference import relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported, UsageError
from attnbench.measure.flops import count, predict
from tests.compilers import compiles
from tests.pairwise import pairwise

# Loading the compiler imports a part of torch that uses another, deprecated one.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

B, H, N, D = 3, 2, 300, 16  # three blocks, the last one ragged
SHAPE = Shape(B, H, N, D)
KINDS = [1, 60, 127, 128, 260, 900], [0, 1, 128, 140], [False, True]


def some_keys() -> Tensor:
    """The middle of the first sequence, every seventh of the second, nothing of the third."""
    mask = torch.zeros(B, N, dtype=torch.bool)
    mask[0, 140:160], mask[1, ::7] = True, True
    return mask


def seen_pairs(windows: WindowPattern, n: int) -> Tensor:
    """``(n, n)``, from the definition."""
    i, j = torch.arange(n)[:, None], torch.arange(n)
    seen = ((i - j).abs() <= windows.window) | (i < windows.global_tokens) | (j < windows.global_tokens)
    return seen.tril() if windows.causal else seen


@pytest.mark.parametrize(("window", "tokens", "causal", "n"), pairwise(*KINDS, [1, 128, 129, 300, 1000]))
def test_blocks_hold_every_pair_that_is_seen_and_full_ones_hide_none(
    window: int, tokens: int, causal: bool, n: int
) -> None:
    windows = WindowPattern(window, tokens, causal)
    seen = seen_pairs(windows, n)
    i, j = torch.arange(n)[:, None], torch.arange(n)
    assert torch.equal(windows.sees(n, n, i.device)(i, j), seen)
    mask = windows.block_mask(n, n, torch.device("cpu"), None)
    computed, full = torch.zeros(2, n, n, dtype=torch.bool)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    for kind, counts, indices in (
        ("full", mask.full_kv_num_blocks, mask.full_kv_indices),
        ("asked", mask.kv_num_blocks, mask.kv_indices),
    ):
        for row in range(-(-n // 128)):
            for block in indices[0, 0, row, : counts[0, 0, row]].tolist():
                part = slice(128 * row, 128 * row + 128), slice(128 * block, 128 * block + 128)
                assert not computed[part].any(), "a block is computed twice"
                assert seen[part].any(), "a block is computed of which no pair is seen"
                computed[part] = True
                full[part] = kind == "full"
    assert computed[seen].all()
    assert seen[full].all()
    assert windows.pairs(n, n) == computed.sum()


@pytest.mark.parametrize("kind", pairwise(*KINDS), ids=str)
def test_queries_whose_keys_are_all_padded_are_known(kind: tuple[int, int, bool]) -> None:
    windows = WindowPattern(*kind)
    mask = some_keys()
    expected = (seen_pairs(windows, N) & mask[:, None]).any(-1)
    assert torch.equal(windows.seeing(mask, N)[:, 0, :, 0], expected)


@pytest.mark.parametrize(
    ("options", "other", "causal"),
    [
        ("window=7", "local:window=7", False),
        ("window=7", "local:window=7", True),
        ("window=7,global_tokens=3", "longformer:window=7,global_tokens=3", False),
    ],
)
def test_its_formula_is_that_of_local_and_of_longformer(options: str, other: str, causal: bool) -> None:
    shape = Shape(B, H, 40, D, causal=causal, bias="alibi")
    inputs = torch.randn(3, B, H, 40, D, dtype=torch.float64)
    mask = torch.rand(B, 40) < 0.6
    mine, theirs = build(f"flex:{options}", shape), build(other, shape)
    assert torch.equal(mine.dense(*inputs, key_mask=mask), theirs.dense(*inputs, key_mask=mask))  # type: ignore[operator]  # any module


def test_flops_are_those_of_the_blocks_that_are_computed() -> None:
    def call() -> object:
        module = build("flex:window=100", Shape(1, 2, 1024, D))
        x = torch.randn(1, 2, 1024, D)
        return lambda: module(x, x, x)

    blocks = 8 + 7 + 7
    assert predict(call).matmul_flops == 4 * 2 * D * 128 * 128 * blocks  # type: ignore[arg-type]  # a call that makes a call


def test_what_a_window_rules_out_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="global_tokens stand beside a window"):
        build("flex:global_tokens=2", SHAPE)
    with pytest.raises(Unsupported, match="queries and keys at the same positions"):
        build("flex:window=3", replace(SHAPE, kv_len=7))
    module = build("flex:window=3", replace(SHAPE, causal=True))
    token = torch.randn(3, B, H, 1, D)
    with pytest.raises(Unsupported, match="with a window it has whole sequences only"):
        module.step(module.begin(*token), *token)  # type: ignore[operator]  # any module


def test_only_without_a_window_it_claims_to_be_exact() -> None:
    flex = VARIANTS.get("flex")
    assert flex.claims(parse_spec("flex")).exact
    claims = flex.claims(parse_spec("flex:window=3"))
    assert not any((claims.exact, claims.permutable, claims.cross, claims.decode))


def holds(options: str, causal: bool, masked: bool, device: str, bound: float) -> Flex:
    module = build(f"flex:{options}", Shape(B, H, N, D, causal=causal, bias="alibi")).to(device)
    assert isinstance(module, Flex)
    inputs = torch.randn(3, B, H, N, D).to(device)
    mask = some_keys().to(device) if masked else None
    counted = count(lambda: module(*inputs, key_mask=mask))
    assert counted.kernel == "flex"
    assert relative_error(counted.output, module.dense(*inputs.double(), key_mask=mask)) < bound
    return module


def compiled(options: str, causal: bool, masked: bool) -> None:
    try:
        holds(options, causal, masked, "cpu", 1e-6)
    except Unsupported as reason:
        if "no working C++ compiler" not in str(reason):
            raise
        pytest.skip(str(reason))


@pytest.mark.slow
def test_a_kernel_with_a_window_padding_and_a_bias_equals_the_formula() -> None:
    compiled("window=60,global_tokens=3", causal=False, masked=True)


@compiles
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("options", "causal"),
    [
        ("window=60", False),
        ("window=60", True),
        ("window=20,global_tokens=130", True),
        ("window=20,global_tokens=130", False),
    ],
)
def test_every_kernel_equals_the_formula(options: str, causal: bool, masked: bool) -> None:
    compiled(options, causal, masked)


@pytest.mark.cuda
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("options", "causal"), [("window=60", False), ("window=60", True), ("window=60,global_tokens=3", False)]
)
def test_on_a_gpu_equals_the_formula_with_gradients(options: str, causal: bool, masked: bool) -> None:
    module = holds(options, causal, masked, "cuda", 5e-3)
    inputs = [x.cuda().requires_grad_() for x in torch.randn(3, B, H, N, D)]
    mask = some_keys().cuda() if masked else None
    grad = torch.randn_like(inputs[0])
    got = torch.autograd.grad(module(*inputs, key_mask=mask), inputs, grad)
    want = torch.autograd.grad(module.dense(*(x.double() for x in inputs), key_mask=mask), inputs, grad.double())
    for one, other in zip(got, want, strict=True):
        assert relative_error(one, other) < 5e-3
