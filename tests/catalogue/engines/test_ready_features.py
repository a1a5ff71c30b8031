"""The Triton kernels for ready features: by Triton's interpreter where there is no GPU, compiled where there is one."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.build import build
from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.linear import feature_attention, fused
from attnbench.catalogue.engines.linear.fused import CountedKeys
from attnbench.contract.problem.reference import relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.errors import Unsupported
from attnbench.measure.flops import count, predict

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if find_spec("triton") is None:
        pytest.skip("needs triton: make .venv/installed-all")
    if request.param == "cuda":
        return "cuda"
    if not fused._interpreted():
        pytest.skip("the GPU runs the same kernels")
    monkeypatch.setattr(forms, "on_device", lambda x: True)
    monkeypatch.setattr(forms, "a_device", lambda: True)
    return "cpu"


def dense(phi_q: Tensor, phi_k: Tensor, v: Tensor, keys: CountedKeys) -> Tensor:
    """The quotient of sums over all pairs; levels relative to the largest of each row."""
    weights = phi_q @ phi_k.mT
    seen = torch.ones_like(weights, dtype=torch.bool)
    if keys.causal:
        seen = seen.tril()
    if keys.mask is not None:
        seen = seen & keys.mask[:, None, None]
    if keys.levels is not None:
        level = keys.levels.to(weights.dtype)[:, :, None].expand_as(weights).masked_fill(~seen, -1e30)
        weights = weights * (level - level.amax(-1, keepdim=True)).exp2()
    weights = weights.masked_fill(~seen, 0.0)
    total = weights.sum(-1, keepdim=True)
    return weights @ v / total.masked_fill(~seen.any(-1, keepdim=True), 1.0)


def everything(attend: Any, inputs: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attend(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))


def drawn(N: int, M: int, F: int, E: int, device: str, B: int = 1) -> list[Tensor]:
    """Positive features and values, drawn on the CPU, so that every device gets the same."""
    inputs = torch.rand(B, 2, N, F) + 0.1, torch.rand(B, 2, M, F) + 0.1, torch.randn(B, 2, M, E)
    return [x.to(device) for x in inputs]


def errors(inputs: list[Tensor], keys: CountedKeys) -> list[float]:
    """Output and gradients against the dense formula in float64."""
    grad = torch.randn(*inputs[0].shape[:3], inputs[2].shape[3]).to(inputs[2])
    got = everything(lambda *x: fused.sums(*x, keys), inputs, grad)
    want = everything(lambda *x: dense(*x, keys), [x.double() for x in inputs], grad)
    for one, x in zip(got, (want[0].to(inputs[2]), *inputs), strict=True):
        assert (one.shape, one.dtype) == (x.shape, x.dtype)
    return [relative_error(one, other) for one, other in zip(got, want, strict=True)]


# The numbers


@pytest.mark.parametrize(
    ("N", "M", "F", "E", "causal"),
    [
        (2, 2, 5, 3, True),
        (70, 70, 33, 130, True),
        (70, 33, 70, 24, False),
        pytest.param(150, 150, 20, 40, True, marks=pytest.mark.slow),
        pytest.param(33, 150, 40, 200, False, marks=pytest.mark.slow),
    ],
)
def test_outputs_and_gradients_equal_the_dense_formula(
    N: int, M: int, F: int, E: int, causal: bool, device: str
) -> None:
    assert max(errors(drawn(N, M, F, E, device), CountedKeys(causal))) < 5e-6


@pytest.mark.parametrize("causal", [False, True])
def test_one_token_gives_its_value(causal: bool, device: str) -> None:
    phi_q, phi_k, v = drawn(1, 1, 5, 3, device)
    assert relative_error(fused.sums(phi_q, phi_k, v, CountedKeys(causal)), v) < 2e-6


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("levels", [False, True])
def test_padded_keys_are_left_out_in_every_segment(
    levels: bool, causal: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "FEATURE_PROGRAMS", 12)  # three segments of four pairs
    mask = torch.rand(2, 100) < 0.7
    mask[0, :3], mask[1] = False, False
    level = torch.randn(2, 2, 100) * 10 if levels else None
    keys = CountedKeys(causal, mask.to(device), None if level is None else level.to(device))
    inputs = drawn(100, 100, 20, 24, device, B=2)
    inputs[1][~keys.mask[:, None].expand(-1, 2, -1)] = float("nan")  # type: ignore[index]  # there is a mask
    inputs[2][~keys.mask[:, None].expand(-1, 2, -1)] = float("nan")  # type: ignore[index]  # there is a mask
    grad = torch.randn_like(inputs[2])
    got = everything(lambda *x: fused.sums(*x, keys), inputs, grad)
    want = everything(lambda *x: dense(*x, keys), [x.double().nan_to_num() for x in inputs], grad)
    assert max(relative_error(one, other) for one, other in zip(got, want, strict=True)) < 2e-5
    assert all(one[1].count_nonzero() == 0 for one in got)


def test_a_later_level_however_high_changes_no_earlier_output(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "FEATURE_PROGRAMS", 6)
    inputs, levels = drawn(100, 100, 20, 24, device), torch.randn(1, 2, 100).to(device)
    before = fused.sums(*inputs, CountedKeys(True, None, levels))
    levels[..., 70:] += 1000
    after = fused.sums(*inputs, CountedKeys(True, None, levels))
    assert torch.equal(before[:, :, :70], after[:, :, :70])
    assert after.isfinite().all()


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")
def test_a_denominator_of_zero_gives_zero_only_if_asked_for(device: str) -> None:
    phi_q, phi_k, v = drawn(3, 3, 5, 3, device)
    phi_q[:, :, 1] = 0.0
    assert fused.sums(phi_q, phi_k, v, CountedKeys(True))[:, :, 1].isnan().all()
    assert (fused.sums(phi_q, phi_k, v, CountedKeys(True, lenient=True))[:, :, 1] == 0).all()


# What it costs


@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_those_that_the_kernels_take(causal: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cuda":
        pytest.skip("only the interpreter lets its products be counted")
    from triton.runtime.interpreter import InterpreterBuilder

    taken, dot = [0], InterpreterBuilder.create_dot

    def counted_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        taken[0] += 2 * a.data.size * b.data.shape[-1]
        return dot(self, a, b, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted_dot)
    monkeypatch.setattr(fused, "FEATURE_PROGRAMS", 8)  # two segments, in two parts
    q, k, v = (x.requires_grad_() for x in drawn(64, 64, 64, 256, device))
    counted = count(lambda: torch.autograd.grad(fused.sums(q, k, v, CountedKeys(causal)).sum(), (q, k, v)))
    assert (counted.kernel, counted.matmul_flops) == ("triton_interpreter", taken[0])


@pytest.mark.parametrize("causal", [False, True])
def test_memory_grows_with_inputs_and_gradients_only(causal: bool) -> None:
    def peak(N: int) -> int:
        def make() -> Any:
            q, k = (torch.empty(1, 2, N, 256).requires_grad_() for _ in range(2))
            v = torch.empty(1, 2, N, 64, dtype=torch.bfloat16).requires_grad_()
            grad = torch.empty_like(v)
            return lambda: torch.autograd.grad(fused.sums(q, k, v, CountedKeys(causal)), (q, k, v), grad)

        predicted = predict(make).peak_bytes
        assert predicted is not None
        return predicted

    token = 2 * (2 * 256 * 4 + 2 * 64 * 2 + 2 * 4)  # of two heads: gradients, output, and two numbers in float32
    assert peak(2**20) - peak(2**18) == token * (2**20 - 2**18)


# The variants


SETTINGS = [
    ("performer:features=40", 2e-6),
    ("performer:features=20,kernel=hyperbolic,gamma=1.1", 2e-6),
    ("performer:features=20,kernel=trig,beta=0.9", 2e-3),  # some denominators are nearly 0
    ("performer:features=20,kernel=relu", 2e-6),
    ("hedgehog", 2e-6),
    ("rfa:features=20,temperature=1.5", 2e-6),
    ("rfa:features=20,kernel=arccos", 2e-6),
    ("favor-plus-plus:features=20", 2e-6),
    ("cosformer", 2e-6),
    ("taylor", 2e-6),
]


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("spec", "close"), SETTINGS)
def test_a_variant_by_the_kernels_gives_what_its_operations_give(
    spec: str, close: float, causal: bool, device: str
) -> None:
    agree(spec, close, causal, device)


@pytest.mark.parametrize(
    ("spec", "causal"),
    [
        *(("performer:features=20", True), ("favor-plus-plus:features=20", False), ("efficient", False)),
        ("taylor", False),
    ],
)
def test_stabilisers_of_keys_and_of_features_are_right(spec: str, causal: bool, device: str) -> None:
    agree(spec, 2e-6, causal, device)


def test_causal_averages_are_those_of_fading_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel replaced by its formula."""
    monkeypatch.setattr(forms, "on_device", lambda x: True)
    monkeypatch.setattr(forms, "a_device", lambda: True)
    monkeypatch.setattr(forms, "find_spec", lambda name: name)

    def recurrent(name: str, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        state, out = torch.zeros(*k.shape[:2], k.shape[3], v.shape[3]), []
        for t in range(k.shape[2]):
            state = state * log_decay[:, :, t, :, None].exp2() + k[:, :, t, :, None] * v[:, :, t, None]
            out.append(q[:, :, t, None] @ state * q.shape[3] ** -0.5)
        return torch.cat(out, 2)

    monkeypatch.setattr(fla, "run", recurrent)
    efficient = build("efficient:form=fla", Shape(2, 2, 40, 16, causal=True))
    inputs = [3 * torch.randn(2, 2, 40, 16) for _ in range(3)]
    assert relative_error(efficient(*inputs), efficient.dense(*inputs)) < 2e-6  # type: ignore[operator]  # an Efficient


def agree(spec: str, close: float, causal: bool, device: str) -> None:
    shape, made = Shape(2, 2, 40, 16, causal=causal), []
    for form in ("triton", "torch"):
        torch.manual_seed(0)
        made.append(build(f"{spec}{',' if ':' in spec else ':'}form={form}", shape).to(device))
    mask = torch.rand(2, 40) < 0.7
    mask[0, :3], mask[1] = False, False
    inputs, grad = [torch.randn(2, 2, 40, 16).to(device) for _ in range(3)], torch.randn(2, 2, 40, 16).to(device)
    for key_mask in (None, mask.to(device)):
        got, want = (everything(partial(each, key_mask=key_mask), inputs, grad) for each in made)
        for one, other in zip(got, want, strict=True):
            assert relative_error(one, other) < close


def test_auto_takes_the_kernels_after_a_trial_and_tells_it(device: str) -> None:
    forms.forget()
    performer = build("performer:features=20", Shape(1, 2, 70, 16, causal=True)).to(device)
    inputs = [torch.randn(1, 2, 70, 16).to(device).requires_grad_() for _ in range(3)]
    for _ in range(2):
        assert count(lambda: performer(*inputs)).kernel in ("triton", "triton_interpreter")
    assert forms.passed_over() == []
    forms.forget()


def test_features_that_would_take_too_much_memory_are_left_to_the_operations(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [torch.randn(1, 2, 40, 16).to(device) for _ in range(3)]
    for most, kernel in ((4 * 209 * 80, ("triton", "triton_interpreter")), (4 * 209 * 80 - 1, ("torch",))):
        forms.forget()
        monkeypatch.setattr(feature_attention, "_MOST_BYTES", most)
        taylor = build("taylor", Shape(1, 2, 40, 16)).to(device)
        assert count(lambda: taylor(*inputs)).kernel in kernel  # noqa: B023  # counted at once
    forms.forget()


@pytest.mark.cuda
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_auto_is_the_kernels_at_the_usual_size(dtype: torch.dtype, causal: bool) -> None:
    forms.forget()
    performer = build("performer", Shape(1, 4, 1000, 128, causal=causal)).to("cuda", dtype)
    inputs = [torch.randn(1, 4, 1000, 128, dtype=dtype, device="cuda").requires_grad_() for _ in range(3)]
    counted = count(lambda: torch.autograd.grad(performer(*inputs).sum(), inputs))
    assert (counted.kernel, forms.passed_over()) == ("triton", [])


@pytest.mark.cuda
@pytest.mark.parametrize("levels", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_segment_of_many_chunks_gives_what_the_formula_gives(
    dtype: torch.dtype, levels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "FEATURE_PROGRAMS", 1)
    inputs = drawn(1000, 1000, 256, 128, "cuda")
    inputs[2] = inputs[2].to(dtype)
    keys = CountedKeys(True, None, torch.randn(1, 2, 1000).cuda() * 3 if levels else None)
    assert max(errors(inputs, keys)) < (1e-4 if dtype == torch.float32 else 0.03)


@pytest.mark.cuda
def test_memory_grows_with_the_tokens_and_not_with_their_pairs() -> None:
    def peak(N: int) -> int:
        phi = torch.rand(1, 1, N, 256, device="cuda")
        q, k, v = (x.requires_grad_() for x in (phi, phi.clone(), torch.randn(1, 1, N, 128, device="cuda").bfloat16()))
        torch.cuda.reset_peak_memory_stats()
        fused.sums(q, k, v, CountedKeys(True)).sum().backward()
        return torch.cuda.max_memory_allocated()

    peak(2**14)
    small, large = peak(2**14), peak(2**16)
    assert large < 4 * small  # pairs would take 16 times as much, and the sums take the same


def test_asked_for_with_a_chunk_or_where_it_has_no_sums_it_says_so(device: str) -> None:
    with pytest.raises(Unsupported, match="form=triton has no kernel for these options"):
        build("performer:chunk=5,form=triton", Shape())
    with pytest.raises(Unsupported, match="form=triton has no kernel for these options and this causality"):
        build("efficient:form=triton", Shape(causal=True))
