from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnbench.catalogue.attention.exact.sdpa import BACKENDS, Sdpa
from attnbench.catalogue.build import build
from attnbench.catalogue.engines.masks import seeing
from attnbench.contract.problem.reference import exact_attention, relative_error
from attnbench.contract.problem.shape import Bias, Shape
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported
from attnbench.measure.flops import count
from attnbench.measure.memory import peak_tensor_bytes
from tests.catalogue.attention.test_softmax import B, D, H, N, draw, some_keys


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_a_mask_is_the_bare_call_to_the_bit(dtype: torch.dtype, causal: bool) -> None:
    q, k, v = draw(dtype=dtype)
    bare = scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert torch.equal(Sdpa(Shape(B, H, N, D, causal=causal))(q, k, v), bare)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["math", "flash"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)])
def test_hidden_keys_weigh_nothing_in_every_dtype(dtype: torch.dtype, bound: float, backend: str, causal: bool) -> None:
    q, k, v = draw(dtype=dtype)
    mask = some_keys()
    variant = Sdpa(Shape(B, H, N, D, causal=causal), backend=backend)  # type: ignore[arg-type]  # a plain str
    output = variant(q, k, v, key_mask=mask)
    assert output.dtype == dtype
    assert relative_error(output, exact_attention(q, k, v, causal=causal, key_mask=mask)) < bound
    poisoned = k.masked_fill(~mask[:, None, :, None], 50.0)
    torch.testing.assert_close(variant(q, poisoned, v, key_mask=mask), output)


@pytest.mark.parametrize(("causal", "masked"), [(False, False), (False, True), (True, False)])  # both: all pairs
@pytest.mark.parametrize("backward", [False, True])
def test_memory_grows_linearly_also_with_a_key_mask(causal: bool, masked: bool, backward: bool) -> None:
    def peak(n: int) -> int:
        q, k, v = (torch.randn(1, 1, n, 16, requires_grad=backward) for _ in range(3))
        variant = Sdpa(Shape(1, 1, n, 16, causal=causal))
        mask = torch.arange(n)[None] < n - 3 if masked else None

        def call() -> object:
            output = variant(q, k, v, key_mask=mask)
            return torch.autograd.grad(output.sum(), (q, k, v)) if backward else output

        return peak_tensor_bytes(call) or 0

    assert peak(4096) <= 4.2 * peak(1024)


@pytest.mark.parametrize("backend", ["efficient", "cudnn"])
def test_a_backend_that_cannot_run_is_named_and_nothing_runs_in_its_place(backend: str) -> None:
    variant = build(f"sdpa:backend={backend}", Shape(B, H, N, D))
    with pytest.raises(Unsupported, match=f"backend {backend} cannot run float64 on cpu"):
        variant(*draw())


def test_other_errors_are_not_called_unsupported() -> None:
    q, k, v = draw()
    with pytest.raises(RuntimeError):
        Sdpa(Shape(B, H, N, D), backend="math")(q, k[..., :3], v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_what_runs_is_what_the_results_name(causal: bool, masked: bool) -> None:
    q, k, v = draw()
    mask = some_keys() if masked else None
    shape = Shape(B, H, N, D, causal=causal)
    assert count(lambda: Sdpa(shape)(q, k, v, key_mask=mask)).kernel == "flash_cpu"
    assert count(lambda: Sdpa(shape, backend="math")(q, k, v, key_mask=mask)).kernel == "math"
    # Values of another width than keys are beyond the CPU's flash kernel.
    assert count(lambda: Sdpa(Shape(B, H, N, D))(q, k, v[..., :4])).kernel == "math"


@pytest.mark.parametrize("backend", ["auto", "math", "flash"])
@pytest.mark.parametrize("prompt", [0, 1, 9])
def test_decoding_runs_on_the_same_back_end_and_sees_every_key(backend: str, prompt: int) -> None:
    q, k, v = draw()
    module = Sdpa(Shape(B, H, N, D, causal=True), backend=backend)  # type: ignore[arg-type]  # a plain str
    exact = exact_attention(q, k, v, causal=True)
    state = module.begin(q[:, :, :prompt], k[:, :, :prompt], v[:, :, :prompt])
    for t in range(prompt, N):
        token = [x[:, :, t : t + 1] for x in (q, k, v)]
        counted = count(lambda: module.step(state, *token))  # noqa: B023  # called at once
        output, state = counted.output
        torch.testing.assert_close(output, exact[:, :, t : t + 1], rtol=0, atol=1e-14)
        assert counted.kernel == ("math" if backend == "math" else "flash_cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_on_a_gpu_equals_the_reference_where_the_backend_runs(backend: str, causal: bool) -> None:
    q, k, v = (x.to("cuda") for x in draw(dtype=torch.float16))
    variant = Sdpa(Shape(B, H, N, D, causal=causal), backend=backend)  # type: ignore[arg-type]  # a plain str
    try:
        variant(q, k, v)
    except Unsupported:
        pytest.skip(f"{backend} does not run here")
    for mask in (None, some_keys().cuda()):
        if mask is not None and backend == "flash":
            with pytest.raises(Unsupported):  # it takes no mask
                variant(q, k, v, key_mask=mask)
            continue
        output, exact = variant(q, k, v, key_mask=mask), exact_attention(q, k, v, causal=causal, key_mask=mask)
        if mask is not None:  # what a row without a key holds is PyTorch's affair
            output, exact = (x.masked_fill(~seeing(mask, causal), 0) for x in (output, exact))
        assert relative_error(output, exact) < 5e-3


@pytest.mark.parametrize(("options", "bias"), [({"backend": "math"}, "none"), ({}, "alibi")])
def test_math_and_a_bias_take_memory_with_the_square_of_the_length(
    options: dict[str, Literal["math"]], bias: Bias
) -> None:
    def peak(n: int) -> int:
        q, k, v = (torch.randn(1, 1, n, 4) for _ in range(3))
        variant = Sdpa(Shape(1, 1, n, 4, bias=bias), **options)
        return peak_tensor_bytes(lambda: variant(q, k, v)) or 0

    assert peak(512) >= 12 * peak(128)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_padding_is_what_a_user_would_write(causal: bool) -> None:
    q, k, v = torch.randn(3, 2, 4, 256, 32)
    real = torch.arange(256) < torch.tensor([[100], [256]])
    module = build("sdpa", Shape(2, 4, 256, 32, causal=causal))

    def bare() -> Tensor:
        mask = real[:, None, None]
        if causal:
            mask = mask & torch.ones(256, 256, dtype=torch.bool).tril()
        return scaled_dot_product_attention(q, k, v, mask)

    assert torch.equal(module(q, k, v, key_mask=real), bare())
    ours, theirs = (peak_tensor_bytes(one) or 0 for one in (lambda: module(q, k, v, key_mask=real), bare))
    assert 0 < ours <= 1.01 * theirs


@pytest.mark.parametrize("name", ["sdpa", "softmax", "chunked", "flex"])
def test_a_baseline_says_what_a_user_would_write(name: str) -> None:
    assert VARIANTS.get(name).traits.baseline
    assert [one.name for one in VARIANTS if one.traits.baseline and one.name not in BASELINES] == []


BASELINES = ("sdpa", "softmax", "chunked", "flex")
