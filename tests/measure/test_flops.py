from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import register_flop_formula

from attnbench.catalogue.build import build
from attnbench.contract.compiled import out_of_sight, without_compiler
from attnbench.contract.problem.shape import Shape
from attnbench.measure import flops
from attnbench.measure.flops import Prediction, count, move_fake, predict
from tests.bare import in_bare_process

B, H, N, D = 1, 4, 256, 32


def _qkv() -> torch.Tensor:
    return torch.randn(B, H, N, D)


def test_the_fused_kernel_of_the_cpu_counts_like_the_naive_one_and_is_named() -> None:
    q = _qkv()
    naive = count(lambda: (q @ q.transpose(-1, -2)).softmax(-1) @ q)
    fused = count(lambda: scaled_dot_product_attention(q, q, q))
    assert naive.matmul_flops == fused.matmul_flops == 4 * B * H * N * N * D
    assert (naive.kernel, fused.kernel) == (None, "flash_cpu")


@torch.inference_mode()
def test_the_kernel_is_named_in_inference_mode_as_well() -> None:
    q = _qkv()
    counted = count(lambda: scaled_dot_product_attention(q, q, q))
    assert (counted.kernel, counted.matmul_flops) == ("flash_cpu", 4 * B * H * N * N * D)


def test_bytes_are_those_that_the_operations_touch_each_once() -> None:
    q, k, v = (_qkv() for _ in range(3))
    memory = torch.randn(2, N, D)  # inputs are windows into a longer stretch of memory
    half, places = memory[0], torch.arange(8)

    def moved(call: Callable[[], Any]) -> float:
        found = count(call).moved_bytes
        assert found is not None
        return found / (N * D * 4)

    assert moved(lambda: (q @ k.mT).softmax(-1) @ v) == 4 * H
    assert moved(lambda: build("mean-value", Shape(B, H, N, D))(q, k, v)) == H * (1 + 1 / N)
    assert moved(lambda: q) == moved(lambda: q.mT[:, 1:]) == moved(lambda: torch.empty_like(q).shape) == 0
    assert moved(lambda: half * 2 + half) == 2
    assert moved(lambda: half.view(-1).as_strided((N - 7, 8, D), (D, D, 1)).sum()) == pytest.approx(1, abs=1e-3)
    assert moved(lambda: half[places]) == 2 * 8 / N + 8 * 8 / (N * D * 4)

    def repeated() -> None:
        for i in range(4):
            k[:, :, i : i + 1].copy_(q[:, :, :1])

    assert moved(repeated) == 4 * H / N + H / N
    out = q.clone()
    assert count(lambda: out_of_sight(lambda: out, like=q, kernel="k", matmul_flops=1)).moved_bytes is None


def test_the_backward_pass_of_the_fused_kernel_counts_five_products() -> None:
    q = _qkv().requires_grad_()
    counted = count(lambda: torch.autograd.grad(scaled_dot_product_attention(q, q, q).sum(), q))
    assert counted.matmul_flops == 7 * 2 * B * H * N * N * D
    assert counted.kernel == "flash_cpu"


@pytest.mark.parametrize(("n", "m", "seen"), [(6, 6, 21), (3, 9, 6), (5, 2, 9)])
def test_a_causal_kernel_is_not_charged_for_the_pairs_that_it_skips(n: int, m: int, seen: int) -> None:
    def make() -> Callable[[], torch.Tensor]:
        q, k = torch.randn(B, H, n, D, requires_grad=True), torch.randn(B, H, m, D)
        return lambda: scaled_dot_product_attention(q, k, k, is_causal=True)

    assert count(make()).matmul_flops == predict(make).matmul_flops == 4 * D * B * H * seen
    assert type(count(make()).matmul_flops) is int
    assert count(lambda: make()().sum().backward()).matmul_flops == 14 * D * B * H * seen


def test_exponentials_are_counted_in_whatever_function_they_are_taken() -> None:
    q = _qkv()
    n, pairs = q.numel(), B * H * N * N
    calls = {
        lambda: q.exp() + q: n,
        lambda: q.clone().exp_(): n,
        lambda: torch.exp(q, out=torch.empty_like(q)): n,
        lambda: torch.nn.functional.elu(q) + q.sigmoid(): 2 * n,
        lambda: q.logsumexp(-1): n,
        lambda: (q @ q.transpose(-1, -2)).softmax(-1) @ q: pairs,
        lambda: scaled_dot_product_attention(q, q, q): pairs,
        lambda: scaled_dot_product_attention(q, q, q, is_causal=True): B * H * N * (N + 1) // 2,
        lambda: q * q + q.sum(-1, keepdim=True): 0,
    }
    assert [count(call).exponentials for call in calls] == list(calls.values())
    learned = _qkv().requires_grad_()
    both = count(lambda: scaled_dot_product_attention(learned, learned, learned).sum().backward())
    assert both.exponentials == 2 * pairs


@pytest.mark.skipif(torch.__version__ < "2.10", reason="torch 2.9 has no such products on the device meta")
def test_a_product_whose_type_is_given_counts_like_any_other() -> None:
    a, b = torch.empty(3, 4, 5, dtype=torch.bfloat16, device="meta"), torch.empty(3, 5, 6, device="meta").bfloat16()
    c = torch.empty(4, 6, device="meta")
    assert count(lambda: torch.bmm(a, b)).matmul_flops == 2 * 3 * 4 * 5 * 6
    assert count(lambda: torch.bmm(a, b, out_dtype=torch.float32)).matmul_flops == 2 * 3 * 4 * 5 * 6
    assert count(lambda: torch.mm(a[0], b[0], out_dtype=torch.float32)).matmul_flops == 2 * 4 * 5 * 6
    assert count(lambda: torch.addmm(c, a[0], b[0], out_dtype=torch.float32)).matmul_flops == 2 * 4 * 5 * 6


def test_a_product_that_is_added_in_place_counts_like_any_other() -> None:
    a, b, c = (torch.ones(3, *size) for size in ((4, 6), (4, 5), (5, 6)))
    assert count(lambda: a.baddbmm_(b, c)).matmul_flops == 2 * 3 * 4 * 5 * 6
    assert count(lambda: a[0].addmm_(b[0], c[0])).matmul_flops == 2 * 4 * 5 * 6


@pytest.mark.parametrize(("causal", "products"), [(False, 2), (True, 4)])
def test_linear_attention_is_charged_for_the_sums_of_its_keys(causal: bool, products: int) -> None:
    """Causal, in chunks of as many tokens as features, for the pairs of a chunk as well."""
    shape = Shape(heads=2, seq_len=256, head_dim=32, causal=causal)
    q, k, v = (torch.randn(1, 2, 256, 32) for _ in range(3))
    counted = count(lambda: build("linear", shape)(q, k, v))
    assert counted.matmul_flops == products * 2 * 2 * 256 * 32 * 32


def test_code_out_of_sight_is_booked_forward_and_each_time_it_runs_backward() -> None:
    x = _qkv().requires_grad_()

    def call() -> torch.Tensor:
        return out_of_sight(lambda: x * 2, like=x, kernel="mine", matmul_flops=3, backward_flops=7, exponentials=5)

    output = call()
    counted = [count(call), count(lambda: torch.autograd.grad(output.sum(), x)), count(lambda: call().sum().backward())]
    assert [one.matmul_flops for one in counted] == [3, 7, 10]
    assert [one.exponentials for one in counted] == [5, 5, 10]
    assert {one.kernel for one in counted} == {"mine"}


def test_a_prediction_equals_the_count_and_the_exact_peak_without_allocating() -> None:
    def make() -> object:
        q = _qkv()
        return lambda: (q @ q.transpose(-1, -2)).softmax(-1) @ q

    predicted = predict(make)  # type: ignore[arg-type]
    assert predicted.matmul_flops == 4 * B * H * N * N * D
    assert predicted.peak_bytes == 2 * B * H * N * N * 4


def test_what_the_data_decide_is_unknown() -> None:
    def make() -> object:
        q = _qkv()
        return lambda: q[: int(q.sum().item())]

    assert predict(make) == Prediction(None, None, "unknown: depends on the data")  # type: ignore[arg-type]


def test_a_module_with_parameters_is_predicted_in_any_type() -> None:
    def make() -> object:
        module = move_fake(torch.nn.Linear(64, 32, bias=False), torch.device("cpu"), torch.bfloat16)
        x = torch.randn(128, 64, dtype=torch.bfloat16)
        return lambda: module(x)

    predicted = predict(make)  # type: ignore[arg-type]
    assert predicted.matmul_flops == 2 * 128 * 64 * 32
    assert predicted.peak_bytes == 128 * 32 * 2


def test_the_backward_pass_alone_names_its_kernel() -> None:
    q = _qkv().requires_grad_()
    loss = scaled_dot_product_attention(q, q, q).sum()
    assert count(lambda: torch.autograd.grad(loss, q)).kernel == "flash_cpu"


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_math_back_end_is_named_though_it_is_no_fused_kernel(grad: bool, causal: bool) -> None:
    q = _qkv().requires_grad_(grad)
    with torch.inference_mode(not grad), sdpa_kernel(SDPBackend.MATH):
        counted = count(lambda: scaled_dot_product_attention(q, q, q, is_causal=causal))
    assert (counted.kernel, counted.matmul_flops) == ("math", 4 * B * H * N * N * D)


def test_kernels_that_only_the_compiled_call_calls_were_put_there_by_the_compiler() -> None:
    x = _qkv()

    def plain() -> torch.Tensor:
        return (x @ x.mT).softmax(-1) @ x

    def fused() -> torch.Tensor:
        return scaled_dot_product_attention(x, x, x)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        return plain(), fused()

    def twice() -> tuple[torch.Tensor, torch.Tensor]:
        return fused(), fused()

    found = [count(call, compiled) for call, compiled in ((plain, fused), (both, twice), (fused, fused), (both, plain))]
    assert [(one.kernel, one.put) for one in found] == [
        ("flash_cpu", "flash_cpu"),
        ("flash_cpu", "flash_cpu"),
        ("flash_cpu", ""),
        (None, ""),
    ]
    assert found[0].matmul_flops == count(plain).matmul_flops
    with sdpa_kernel(SDPBackend.MATH):
        assert count(fused, plain).kernel == "math"


@pytest.mark.parametrize("kernel", ["efficient", "flash"])
def test_kernels_of_other_devices_are_named_by_what_they_are(kernel: str) -> None:
    q = torch.empty(1, 2, 16, 8, device="meta")
    run = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
    given = (None, False) if kernel == "efficient" else ()
    counted = count(lambda: run(q, q, q, *given))
    assert (counted.kernel, counted.matmul_flops, counted.exponentials) == (kernel, 4 * 2 * 16 * 16 * 8, 2 * 16 * 16)


def test_neither_looking_at_a_call_nor_the_laws_in_front_of_a_run_import_the_compiler_which_takes_a_second() -> None:
    code = (
        "import sys, torch; from attnbench.measure.flops import count; "
        "from attnbench.measure.memory import peak_tensor_bytes; x = torch.randn(4, 4, requires_grad=True); "
        "call = lambda: torch.autograd.grad((x @ x).sum(), x); "
        "count(call); peak_tensor_bytes(call); assert 'torch._dynamo' not in sys.modules; "
        "import attnbench.catalogue.attention; from attnbench.laws import LAWS, check_variant; "
        "laws = [name for name, law in LAWS.items() if law.gates and not law.needs_time]; "
        "assert check_variant('softmax', laws=laws).held; assert not {'torch._dynamo', 'sympy'} & sys.modules.keys()"
    )
    done = in_bare_process(code)
    assert done.returncode == 0, done.stderr


def test_a_mode_runs_without_the_wrapper_that_torch_may_put_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    class Wrapped(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func)
            return func(*args, **(kwargs or {}))

    class Bare:
        def __torch_dispatch__(self) -> None: ...

    before = dict(vars(Bare))
    without_compiler(Bare)
    assert vars(Bare) == before
    without_compiler(Wrapped)
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # cannot be imported
    with Wrapped():
        torch.ones(2)
    assert called


def test_two_back_ends_of_one_call_are_both_named_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    q = _qkv()

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            one = scaled_dot_product_attention(q, q, q)
        return one + scaled_dot_product_attention(q, q, q)

    counted = count(call)
    assert counted.kernel == "flash_cpu+math"
    assert torch.equal(counted.output, call())
    assert capfd.readouterr() == ("", "")


def test_the_pairs_of_a_fused_kernel_have_exponentials_and_products_of_both_widths() -> None:
    q, k, v = (torch.empty(2, 3, *size, device="meta") for size in ((5, 7), (6, 7), (6, 11)))
    out, sums = torch.empty(2, 3, 5, 11, device="meta"), torch.empty(2, 3, 5, device="meta")
    kernel, backward = "_scaled_dot_product_flash_attention_for_cpu", (out, q, k, v, out, sums, 0.0)

    def counted(name: str, *given: object, **named: object) -> tuple[int, int]:
        counter = flops._FlopCounter()
        counter._look_inside(getattr(torch.ops.aten, name).default, given, named)
        return counter.exponentials, counter.matmul_flops

    seen, all_of_them = 2 * 3 * (1 + 2 + 3 + 4 + 5), 2 * 3 * 5 * 6
    assert counted(kernel, q, k, v, is_causal=True) == (seen, 2 * seen * (7 + 11))
    assert counted(kernel, q, k, v) == (all_of_them, 2 * all_of_them * (7 + 11))
    assert counted(f"{kernel}_backward", *backward, True) == (seen, 2 * seen * (3 * 7 + 2 * 11))
    assert counted(f"{kernel}_backward", *backward, False) == (all_of_them, 2 * all_of_them * (3 * 7 + 2 * 11))


def test_an_operation_that_torch_makes_of_others_counts_as_those() -> None:
    a, b = torch.ones(2, 3, 5), torch.ones(2, 5, 7)

    def call() -> torch.Tensor:
        with torch.inference_mode():  # in which they arrive as they were called
            return torch.einsum("bij,bjk->bik", a, torch.matmul(b, torch.ones(7, 7)).exp())

    assert count(call).matmul_flops == 2 * 2 * 3 * 5 * 7 + 2 * 2 * 5 * 7 * 7
    assert count(call).exponentials == 2 * 5 * 7


def test_a_formula_that_a_library_gives_torch_for_its_operation_is_used() -> None:
    schema = "(Tensor a, Tensor b) -> Tensor"
    product = torch.library.custom_op("attnbench_test::product", torch.matmul, mutates_args=(), schema=schema)
    register_flop_formula(torch.ops.attnbench_test.product)(lambda a, b, out_shape: 1000 * out_shape[0])
    assert count(lambda: product(torch.ones(3, 2), torch.ones(2, 4))).matmul_flops == 3000


def predicted_peak(call: Callable[[torch.Tensor], object]) -> int | None:
    """Bytes of a call whose argument of 1000 bytes was there before."""

    def make() -> Callable[[], object]:
        x = torch.empty(1000, dtype=torch.uint8)
        return lambda: call(x)

    return predict(make).peak_bytes


def new(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def test_a_storage_counts_once_however_many_tensors_see_it() -> None:
    assert predicted_peak(lambda x: new(1000).view(10, 100).add_(1).t()) == 1000
    assert predicted_peak(lambda x: x.view(10, 100).add_(1)) == 0
    assert predicted_peak(lambda x: (x[:10], x + 1)) == 1000
    assert predicted_peak(lambda x: torch.add(x, 1, out=x)) == 0


def test_what_is_freed_makes_room_and_what_comes_in_its_place_is_seen() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        a, b = new(1000), new(3000)
        del a, b
        return new(2000)

    def in_turn(x: torch.Tensor) -> None:
        for size in range(1, 100):
            new(size)  # in the memory of the one before it, as like as not

    assert predicted_peak(call) == 4000
    assert predicted_peak(in_turn) == 99


def test_a_prediction_counts_what_is_booked_and_what_causality_spares() -> None:
    def make() -> Callable[[], torch.Tensor]:
        x, q = torch.randn(4), _qkv()

        def call() -> torch.Tensor:
            scaled_dot_product_attention(q, q, q, is_causal=True)
            return out_of_sight(lambda: x * 2, like=x, kernel="mine", matmul_flops=3)

        return call

    assert predict(make).matmul_flops == 4 * D * B * H * N * (N + 1) // 2 + 3


def test_a_prediction_is_given_up_after_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Callable[[], torch.Tensor]:
        q = _qkv()
        return lambda: q + q

    assert predict(make) == Prediction(0, B * H * N * D * 4)
    assert predict(make).steps == 1
    assert predict(make, most=1) == predict(make)
    assert predict(make, most=0) == Prediction(None, None, "", too_long=True)
    monkeypatch.setattr(flops, "STEPS", 0)
    assert predict(make) == Prediction(None, None, "", too_long=True)


def test_every_part_of_a_module_is_moved_and_keeps_what_it_is() -> None:
    inner = torch.nn.Linear(3, 2)
    inner.weight.requires_grad_(False)
    inner.register_buffer("scale", torch.ones(2))
    inner.register_buffer("places", torch.arange(2))
    outer = torch.nn.Sequential(inner)
    outer.register_parameter("counts", torch.nn.Parameter(torch.arange(2), requires_grad=False))
    names = {name: set(vars(part)) for name, part in outer.named_modules()}
    moved = move_fake(outer, torch.device("meta"), torch.bfloat16)
    assert moved is outer
    assert {name: set(vars(part)) for name, part in moved.named_modules()} == names
    tensors = dict(moved.named_parameters()) | dict(moved.named_buffers())
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "counts": torch.int64,
        "0.weight": torch.bfloat16,
        "0.bias": torch.bfloat16,
        "0.scale": torch.bfloat16,
        "0.places": torch.int64,
    }
    assert {str(tensor.device) for tensor in tensors.values()} == {"meta"}
    assert [name for name, one in moved.named_parameters() if one.requires_grad] == ["0.bias"]


GIVEN_UP = """
import gc
import torch
import attnbench.measure.flops as flops

gc.freeze()  # each prediction looks for garbage first

def make():
    a = torch.ones(1, 2, 4, 8, requires_grad=True)
    def call():
        for _ in range(50):
            outer = torch.einsum("...nd,...ne->...nde", a, a)
            torch.einsum("...nde,...nd,...n->...ne", outer, a, a[..., 0])
    return call

for steps in range(2, 50, 3):
    assert flops.predict(make, most=steps).too_long, steps

from attnbench.suite.cell import Cell
from attnbench.contract.inputs import draw_sizes
from attnbench.harness.inside.call import prepare
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec

for name in ("linear", "local"):
    cell = Cell("s", "w", parse_spec(name), Shape(heads=1, seq_len=256, head_dim=4), pass_="training")
    for steps in range(2, 26):
        assert flops.predict(lambda: prepare(cell, flops.move_fake, draw_sizes).run, most=steps).too_long, (name, steps)
"""


@pytest.mark.usefixtures("forks")
def test_what_has_too_many_steps_is_given_up_wherever_it_stands_without_ending_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", GIVEN_UP], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
