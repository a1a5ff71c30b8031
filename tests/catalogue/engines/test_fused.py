"""The Triton kernels: by Triton's interpreter where there is no GPU, compiled where there is one."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.kernel.linear import Linear
from attnbench.catalogue.build import build
from attnbench.catalogue.engines.linear import fused
from attnbench.contract.problem.reference import relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported, UsageError
from attnbench.laws.laws import gap
from attnbench.measure.flops import count, predict

# What the interpreter of Triton 3.5 does itself.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    if find_spec("triton") is None:
        pytest.skip("needs triton: make .venv/installed-all")
    if request.param == "interpreter" and not fused._interpreted():
        pytest.skip("the GPU runs the same kernels")
    return "cpu" if request.param == "interpreter" else "cuda"


def qkv(N: int, M: int, D: int, device: str, dtype: torch.dtype = torch.float32, B: int = 1) -> list[Tensor]:
    """Drawn on the CPU, so that every device gets the same."""
    return [torch.randn(B, 2, n, D).to(device, dtype) for n in (N, M, M)]


def some_keys(M: int, device: str) -> Tensor:
    """Not the first and some later ones of the first sequence, none of the second."""
    mask = torch.rand(2, M) < 0.7
    mask[0, :3], mask[1] = False, False
    return mask.to(device)


def everything(attend: Any, inputs: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attend(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))


def errors(
    inputs: list[Tensor],
    causal: bool,
    key_mask: Tensor | None = None,
    attend: Any = fused.attend,
    measure: Any = gap,
) -> list[float]:
    """Errors of output and gradients against the dense formula in float64."""
    formula = Linear(Shape(causal=causal)).dense
    grad = torch.randn(inputs[0].shape).to(inputs[0])
    got = everything(lambda q, k, v: attend(q, k, v, causal=causal, key_mask=key_mask), inputs, grad)
    want = everything(lambda q, k, v: formula(q, k, v, key_mask=key_mask), [x.double() for x in inputs], grad)
    for one, x in zip(got, (inputs[0], *inputs), strict=True):
        assert (one.shape, one.dtype) == (x.shape, x.dtype)
    return [measure(one, other) for one, other in zip(got, want, strict=True)]


# The numbers


LARGER = [
    (23, 23, 64, True),
    (200, 200, 16, True),
    (17, 17, 128, True),
    (1, 200, 16, False),
    (200, 65, 128, False),
]


@pytest.mark.parametrize(
    ("N", "M", "D", "causal"),
    [
        (1, 1, 16, True),
        (65, 65, 5, True),
        (65, 23, 40, False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGER),
    ],
)
def test_outputs_and_gradients_equal_the_dense_formula(N: int, M: int, D: int, causal: bool, device: str) -> None:
    assert max(errors(qkv(N, M, D, device), causal)) < 2e-6


@pytest.mark.parametrize("causal", [False, True])
def test_padded_keys_are_left_out_and_a_query_without_keys_gives_zero(causal: bool, device: str) -> None:
    mask = some_keys(50, device)
    inputs = qkv(50, 50, 16, device, B=2)
    assert max(errors(inputs, causal, mask)) < 2e-6
    q, k, v = (x.requires_grad_() for x in inputs)
    out = fused.attend(q, k, v, causal=causal, key_mask=mask)
    assert out[1].count_nonzero() == 0
    assert not causal or out[0, :, :3].count_nonzero() == 0
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert grad[1].count_nonzero() == 0


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("programs", [2, 4, 6, 512])
def test_segments_do_not_change_the_result(
    programs: int, causal: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "PROGRAMS", programs)  # 1, 2, 3 and 5 segments of two pairs
    assert max(errors(qkv(70, 70, 16, device), causal)) < 2e-6


@pytest.fixture
def digits_of_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes TF32 products in float32, and cuts what becomes bfloat16 instead of rounding it."""
    if device == "cuda":
        return
    from triton.runtime import interpreter

    dot, convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def cut(x: Any) -> Any:
        bits = x.data.view("uint32") & 0xFFFFE000  # what the matrix units of an H200 read of a float32
        return interpreter.TensorHandle(bits.view("float32"), x.dtype)

    def rounded(x: Any, type_: Any, target: Any, mode: Any) -> Any:
        if target.primitive_bitwidth > 16:
            return convert(x, type_, target, mode)
        return torch.tensor(x).bfloat16().view(torch.uint16).numpy()

    def cut_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, *others: Any) -> Any:
        tf32 = precision.name == "TF32"  # TF32x3 is nearly float32
        return dot(self, cut(a) if tf32 else a, cut(b) if tf32 else b, d, precision, *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", cut_dot)
    monkeypatch.setattr(interpreter, "_convert_float", rounded)


@pytest.mark.slow
@pytest.mark.usefixtures("digits_of_a_gpu")
@pytest.mark.parametrize("causal", [False, True])
def test_bfloat16_is_rounded_as_in_the_torch_form_and_float16_within_its_last_bit(causal: bool, device: str) -> None:
    """TF32 has the 11 bits of float16, eight times finer than bfloat16; the torch form computes in float32."""
    shape = Shape(1, 2, 200, 64, causal=causal)
    torch_form = Linear(shape)
    inputs = qkv(200, 200, 64, device, torch.bfloat16)
    seed = torch.get_rng_state()
    mine = errors(inputs, causal, measure=relative_error)
    torch.set_rng_state(seed)
    theirs = errors(inputs, causal, attend=lambda q, k, v, **_: torch_form(q, k, v), measure=relative_error)
    for one, other in zip(mine, theirs, strict=True):
        assert one < 1.05 * other
    assert max(errors([x.half() for x in inputs], causal, measure=relative_error)) < torch.finfo(torch.float16).eps


def test_tensors_may_lie_in_memory_in_any_order(device: str) -> None:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(40, 40, 16, device, B=2))
    key = k[:, :, :1].expand(-1, -1, 40, -1)  # one key for all
    value = v.mT.contiguous().mT
    assert max(errors([q, key, value], True)) < 2e-6
    assert fused.attend(q, key, value, causal=True).stride() == q.stride()
    x = q.detach().requires_grad_()
    (spread,) = torch.autograd.grad(fused.attend(x, k, v, causal=True).sum(), x)  # its gradient has no strides
    plain = torch.ones_like(q).contiguous()
    (wanted,) = torch.autograd.grad(fused.attend(x, k, v, causal=True), x, plain)
    assert torch.equal(spread, wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_masks_are_truths_and_no_integers(causal: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of Triton 3.9 refuses a mask of integers; those before it take it."""
    if device == "cuda":
        pytest.skip("only the interpreter lets its masks be seen")
    from triton.runtime.interpreter import InterpreterBuilder

    seen: dict[str, set[str]] = {"load": set(), "store": set()}
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def spied_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        seen["load"].add(mask.data.dtype.name)
        return load(self, pointers, mask, *others)

    def spied_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        seen["store"].add(mask.data.dtype.name)
        return store(self, pointers, value, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", spied_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", spied_store)
    monkeypatch.setattr(fused, "PROGRAMS", 4)  # two segments, of which the first begins with no sums
    inputs = qkv(50, 50, 5, device, B=2)
    everything(partial(fused.attend, causal=causal, key_mask=some_keys(50, device)), inputs, inputs[0])
    assert seen == {"load": {"bool"}, "store": {"bool"}}


# What it costs


@pytest.mark.parametrize("causal", [False, True])
def test_flops_and_exponentials_are_those_that_the_kernels_take(
    causal: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda":
        pytest.skip("only the interpreter lets its products be counted")
    from triton.runtime.interpreter import InterpreterBuilder

    taken = {"products": 0, "exponentials": 0}
    dot, exp = InterpreterBuilder.create_dot, InterpreterBuilder.create_exp

    def counted_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        taken["products"] += 2 * a.data.size * b.data.shape[-1]
        return dot(self, a, b, *others)

    def counted_exp(self: Any, x: Any) -> Any:
        taken["exponentials"] += x.data.size
        return exp(self, x)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted_dot)
    monkeypatch.setattr(InterpreterBuilder, "create_exp", counted_exp)
    monkeypatch.setattr(fused, "PROGRAMS", 4)  # two segments of two chunks
    q, k, v = (x.requires_grad_() for x in qkv(64, 64, 16, device))
    counted = count(lambda: torch.autograd.grad(fused.attend(q, k, v, causal=causal).sum(), (q, k, v)))
    assert counted.kernel == "triton_interpreter"
    assert taken == {"products": counted.matmul_flops, "exponentials": counted.exponentials}


@pytest.mark.parametrize("causal", [False, True])
def test_a_training_step_is_predicted_without_triton(causal: bool) -> None:
    N, D = 16, 32  # one chunk

    def make() -> Any:
        q, k, v = (x.requires_grad_() for x in qkv(N, N, D, "cpu"))
        return lambda: torch.autograd.grad(fused.attend(q, k, v, causal=causal).sum(), (q, k, v))

    across, within = (2 + 3 + 3, 2 + 4 + 4) if causal else (2 + 3 + 3, 0)
    assert predict(make).matmul_flops == 2 * 2 * (across * N * D * D + within * N * N * D)


@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_that_of_inputs_and_gradients_and_a_constant(causal: bool) -> None:
    def peak(N: int) -> int:
        def make() -> Any:
            q, k, v = (x.requires_grad_() for x in qkv(N, N, 64, "cpu", torch.bfloat16))
            grad = torch.empty_like(q)
            return lambda: torch.autograd.grad(fused.attend(q, k, v, causal=causal), (q, k, v), grad)

        predicted = predict(make).peak_bytes
        assert predicted is not None
        return predicted

    token = 2 * (64 * 2 * 4 + 2 * 4)  # of two heads: output and three gradients, and two numbers in float32
    assert peak(2**20) - peak(2**18) == token * (2**20 - 2**18)


# What it refuses


def test_asked_for_without_triton_or_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match="form=triton needs triton, which comes with torch for CUDA"):
        build("linear:form=triton", Shape())
    monkeypatch.setattr(fused, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unsupported, match="form=triton needs a CUDA device, and there is none"):
        build("linear:form=triton", Shape())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    module = build("linear:form=triton", Shape(1, 1, 3, 4, causal=True))
    with pytest.raises(Unsupported, match="form=triton runs on a CUDA device, not on cpu"):
        module(*torch.randn(3, 1, 1, 3, 4))
    with pytest.raises(Unsupported, match="float64"):
        module(*torch.randn(3, 1, 1, 3, 4).double())
    with pytest.raises(Unsupported, match="head_dim is at most 128, not 129"):
        build("linear:form=triton", Shape(head_dim=129))
    with pytest.raises(UsageError, match="chunk belongs to form=torch"):
        build("linear:form=triton,chunk=5", Shape())
    with pytest.raises(Unsupported, match="whole sequences only"):
        module.begin(*torch.randn(3, 1, 1, 2, 4))  # type: ignore[operator]  # a Linear
    assert not VARIANTS.get("linear").claims(parse_spec("linear:form=triton")).decode


def test_the_form_that_was_asked_for_is_the_one_that_runs(device: str) -> None:
    shape = Shape(1, 2, 20, 16, causal=True)
    inputs = qkv(20, 20, 16, device)
    counted = {
        form: count(lambda form=form: build("linear", shape, form=form)(*inputs)) for form in ("torch", "triton")
    }
    assert counted["torch"].kernel == ("torch" if device == "cuda" else None)
    assert counted["triton"].kernel in ("triton", "triton_interpreter")
    assert relative_error(counted["triton"].output, counted["torch"].output) < 2e-6


def test_triton_is_not_imported_until_it_is_asked_for() -> None:
    code = (
        "import sys, attnbench.catalogue.attention; from attnbench import Shape, build; "
        "build('linear', Shape(1, 1, 3, 4)); assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_kernels_are_interpreted_before_a_conftest_of_a_folder_can_import_triton(device: str) -> None:
    if device == "cuda":
        pytest.skip("kernels are compiled")
    code = "import os; del os.environ['TRITON_INTERPRET']; import tests.conftest; os.environ['TRITON_INTERPRET']"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
