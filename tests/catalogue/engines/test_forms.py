"""Which form of a computation runs, and what is held against a kernel before it does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attnbench.catalogue.engines import forms
from attnbench.contract.compiled import apart, out_of_sight
from attnbench.contract.index import code
from attnbench.errors import Unsupported
from attnbench.measure import flops
from attnbench.measure.flops import count

Compute = Callable[..., Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).tril() @ v


class Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return plain(q, k, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with apart(), torch.enable_grad():
            return torch.autograd.grad(plain(*leaves), leaves, grad)


def right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same numbers, as a kernel that torch does not see into."""
    opaque: Compute = Opaque.apply
    return out_of_sight(lambda: opaque(q, k, v), like=v, kernel="fla", matmul_flops=None)


def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return 1.01 * plain(q, k, v)


def broken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise RuntimeError("no such width\nat line 3")


def unfinished(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k, v) * torch.nan


def narrow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k, v)[..., :-1]


class Turned(torch.autograd.Function):
    """Right forwards, and wrong backwards."""

    @staticmethod
    def forward(ctx: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain(q, k, v)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return grad, grad, -grad


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A processor that forms take for a GPU."""
    monkeypatch.setattr(forms, "on_device", lambda x: True)
    monkeypatch.setattr(forms, "a_device", lambda: True)
    forms.forget()
    yield
    forms.forget()


def given(
    tokens: int = 300, heads: tuple[int, int, int] = (4, 4, 4), dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, H, tokens, 8, generator=generator).to(dtype) for H in heads]


def kernel(form: str, fast: dict[str, Compute], *inputs: Tensor) -> str | None:
    return count(lambda: forms.attend("it", form, plain, *inputs, fast=fast)).kernel


@pytest.mark.usefixtures("gpu")
def test_the_first_form_that_gives_the_same_numbers_runs_and_the_row_names_it() -> None:
    q, k, v = given()
    counted = count(lambda: forms.attend("it", "auto", plain, q, k, v, fast={"triton": wrong, "fla": right}))
    assert counted.kernel == "fla"
    assert counted.matmul_flops == count(lambda: plain(q, k, v)).matmul_flops  # what the operations would take
    assert counted.exponentials is None
    assert torch.allclose(counted.output, plain(q, k, v), atol=1e-4)
    assert forms.passed_over() == ["it: form=triton is not used: its output is off by 0.01 of its norm"]
    assert forms.passed_over() == []


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (wrong, "its output is off by 0.01 of its norm"),
        (broken, "RuntimeError: no such width"),
        (unfinished, "its output is off by nan of its norm"),
        (narrow, r"it gives \(2, 2, 200, 7\) where \(2, 2, 200, 8\) is wanted"),
    ],
)
def test_a_kernel_that_is_wrong_is_not_used_and_the_reason_is_kept(compute: Compute, reason: str) -> None:
    q, k, v = given()
    out = forms.attend("it", "auto", plain, q, k, v, fast={"fla": compute})
    assert torch.equal(out, plain(q, k, v))
    assert kernel("auto", {"fla": compute}, q, k, v) == "torch"
    (said,) = forms.passed_over()  # once, and not for each call
    assert re.match(f"it: form=fla is not used: {reason}", said)
    assert "\n" not in said


@pytest.mark.usefixtures("gpu")
def test_a_form_whose_gradients_are_off_serves_where_none_are_wanted() -> None:
    inputs = given()
    turned: Compute = Turned.apply
    fast = {"fla": turned}
    marked = [x.clone().requires_grad_() for x in inputs]
    out = forms.attend("it", "auto", plain, *marked, fast=fast)
    assert forms.passed_over()[0].startswith("it: form=fla is not used: a gradient is off by ")
    for got, wanted in zip(
        torch.autograd.grad(out.sum(), marked), torch.autograd.grad(plain(*marked).sum(), marked), strict=True
    ):
        assert torch.equal(got, wanted)
    forms.attend("it", "auto", plain, *inputs, fast=fast)
    assert forms.passed_over() == []
    with torch.no_grad():
        forms.attend("it", "auto", plain, *marked, fast=fast)
    assert forms.passed_over() == []


@pytest.mark.usefixtures("gpu")
def test_a_verdict_is_remembered_for_what_it_was_found_for() -> None:
    calls: list[tuple[int, ...]] = []

    def seen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(tuple(q.shape))
        return plain(q, k, v)

    fast: dict[str, Compute] = {"fla": seen}
    for tokens in (300, 300, 70):
        forms.attend("it", "auto", plain, *given(tokens), fast=fast)
    assert calls == [(2, 2, 200, 8), (3, 4, 300, 8), (3, 4, 300, 8), (3, 4, 70, 8)]
    calls.clear()
    forms.attend("it", "auto", plain, *given(dtype=torch.bfloat16), fast=fast)
    forms.attend("another", "auto", plain, *given(), fast=fast)
    forms.attend("it", "auto", plain, *(x.requires_grad_() for x in given()), fast=fast)
    assert len(calls) == 6


@pytest.mark.usefixtures("gpu")
def test_a_verdict_under_one_precision_of_products_is_none_under_another(monkeypatch: pytest.MonkeyPatch) -> None:
    for precision in ("ieee", "tf32", "ieee"):
        monkeypatch.setattr(torch._C, "_get_fp32_precision_getter", lambda *_, now=precision: now)
        forms.attend("it", "auto", plain, *given(), fast={"fla": wrong})
    assert len(forms.passed_over()) == 2


@pytest.mark.usefixtures("gpu")
def test_heads_that_share_keys_are_tried_together() -> None:
    shapes = []

    def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shapes.append((q.shape[1], k.shape[1], v.shape[1]))
        return plain(q, *(x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)))

    forms.attend("it", "auto", shared, *given(heads=(12, 4, 4)), fast={"fla": shared})
    assert shapes == [(6, 2, 2), (6, 2, 2), (12, 4, 4)]


@pytest.mark.usefixtures("gpu")
def test_a_mask_is_cut_by_its_tokens() -> None:
    mask = torch.rand(3, 300) < 0.5

    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT * mask[:, None, None]) @ v

    forms.attend("it", "auto", masked, *given(), mask, fast={"fla": masked})
    assert forms.passed_over() == []


@pytest.mark.usefixtures("gpu")
def test_float64_and_predictions_are_plain() -> None:
    assert kernel("auto", {"fla": right}, *given(dtype=torch.float64)) == "torch"
    with pytest.raises(Unsupported, match="form=fla sums in float32, and float64 inputs expect more; form=torch"):
        forms.attend("it", "fla", plain, *given(dtype=torch.float64), fast={"fla": right})
    with FakeTensorMode():
        fakes = [torch.empty(1, 2, 30, 4) for _ in range(3)]
        for form in ("auto", "fla"):
            assert forms.attend("it", form, plain, *fakes, fast={"fla": broken}).shape == (1, 2, 30, 4)


@pytest.mark.usefixtures("gpu")
def test_a_form_that_is_named_runs_untried() -> None:
    q, k, v = given()
    assert torch.equal(forms.attend("it", "fla", plain, q, k, v, fast={"fla": wrong}), wrong(q, k, v))
    with pytest.raises(RuntimeError, match="no such width"):
        forms.attend("it", "fla", plain, q, k, v, fast={"fla": broken})
    assert kernel("torch", {"fla": right}, q, k, v) == "torch"


@pytest.mark.usefixtures("gpu")
def test_products_of_a_kernel_are_those_of_the_operations_backwards_as_well() -> None:
    fast = {"fla": right}
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [x.requires_grad_() for x in given(tokens=70, dtype=dtype)]
        numbers = []
        for form in ("auto", "torch"):
            total = forms.attend("it", form, plain, *inputs, fast=fast).sum()
            counted = count(partial(torch.autograd.grad, total, inputs))
            numbers.append((counted.matmul_flops, counted.kernel))
        assert numbers[0] == (numbers[1][0], "fla")


@pytest.mark.usefixtures("gpu")
def test_products_are_not_known_where_the_operations_do_not_tell_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "SAME_STEPS", 1)
    assert count(lambda: forms.attend("it", "auto", plain, *given(), fast={"fla": right})).matmul_flops is None


@pytest.mark.usefixtures("gpu")
def test_a_trial_is_no_part_of_a_count() -> None:
    q, k, v = given(tokens=50)
    with_trial = count(lambda: forms.attend("it", "auto", plain, q, k, v, fast={"fla": wrong}))
    assert with_trial.matmul_flops == count(lambda: plain(q, k, v)).matmul_flops


def test_on_a_processor_it_is_always_the_operations() -> None:
    q, k, v = given()
    assert kernel("auto", {"fla": broken}, q, k, v) is None
    assert forms.passed_over() == []
    with pytest.raises(Unsupported, match="form=fla runs on a CUDA device, not on cpu"):
        forms.attend("it", "fla", plain, q, k, v, fast={"fla": right})


@pytest.mark.usefixtures("gpu")
def test_what_is_counted_in_the_place_of_compiled_code_is_the_operations() -> None:
    inputs = given(tokens=70)
    call = partial(forms.attend, "it", "auto", plain, *inputs, fast={"fla": right})
    assert count(call).kernel == "fla"
    assert count(call, partial(plain, *inputs)).kernel == "torch"


def test_compiled_code_is_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(forms, "on_device", lambda x: True)
    q, k, v = given()
    assert torch.equal(forms.attend("it", "auto", plain, q, k, v, fast={"fla": broken}), plain(q, k, v))


def test_a_named_form_is_refused_before_any_tensor_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for form in ("auto", "torch"):
        forms.require("it", form, ())
    with pytest.raises(
        Unsupported, match="it: form=fla has no kernel for these options and this causality; form=torch"
    ):
        forms.require("it", "fla", ())
    monkeypatch.setattr(forms, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"form=fla needs flash-linear-attention's .*pip install 'attnbench\[gpu\]'"):
        forms.require("it", "fla", {"fla"})
    monkeypatch.setattr(forms, "find_spec", lambda name: name)
    monkeypatch.setattr(forms, "a_device", lambda: False)
    with pytest.raises(Unsupported, match="form=fla needs a CUDA device, and there is none"):
        forms.require("it", "fla", {"fla"})
    monkeypatch.setattr(forms, "a_device", lambda: True)
    forms.require("it", "fla", {"fla"})


@pytest.fixture
def kept(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of verdicts on a card of which they are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(forms, "machine", lambda device: ("a card", "a driver"))
    return tmp_path / "attnbench" / "forms"


def trials(compute: Compute, *inputs: Tensor, name: str = "it") -> int:
    """The trials that a new process makes."""
    calls = []

    def seen(*given: Tensor) -> Tensor:
        calls.append(given[0].shape[2] == forms.TOKENS)
        return compute(*given)

    forms.forget()
    assert torch.equal(forms.attend(name, "auto", plain, *inputs, fast={"fla": seen}), plain(*inputs))
    return sum(calls)


def test_a_later_process_makes_no_trial_of_what_was_compared(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = given()
    for compute, told in ((plain, []), (wrong, ["it: form=fla is not used: its output is off by 0.01 of its norm"])):
        monkeypatch.setattr(forms, "machine", lambda device, compute=compute: ("a card", compute.__name__))
        for count_ in (1, 0, 0):
            assert trials(compute, q, k, v) == count_
            assert forms.passed_over() == told  # in each process, once
    assert len(list(kept.iterdir())) == 2


@pytest.mark.usefixtures("kept")
def test_a_verdict_of_other_circumstances_is_none() -> None:
    inputs = given()
    assert trials(plain, *inputs) == 1
    assert trials(plain, *inputs, name="another") == 1
    assert trials(plain, *given(dtype=torch.bfloat16)) == 1
    assert trials(plain, *given(heads=(6, 6, 6))) == 1
    assert trials(plain, inputs[0].clone().requires_grad_(), *inputs[1:]) == 1
    assert trials(plain, *(x.clone().requires_grad_() for x in inputs)) == 1
    before = torch._C._get_fp32_precision_getter("cuda", "matmul")
    try:
        torch._C._set_fp32_precision_setter("cuda", "matmul", "tf32")  # beside older switches, which then raise
        assert trials(plain, *inputs) == 1
    finally:
        torch._C._set_fp32_precision_setter("cuda", "matmul", before)


@pytest.mark.parametrize(
    "left", [b"", b"[", b"\xff", b"5", b'"ab"', b"[1, 2]", b'["another", ""]', b"{}", "half", None]
)
def test_a_file_that_is_torn_or_anothers_is_no_verdict_and_no_fault(kept: Path, left: bytes | str | None) -> None:
    inputs = given()
    assert trials(plain, *inputs) == 1
    (file,) = kept.iterdir()
    whole = file.read_bytes()
    file.unlink()
    if left is None:
        file.mkdir()
    else:
        file.write_bytes(whole[: len(whole) // 2] if isinstance(left, str) else left)
    assert trials(plain, *inputs) == 1
    assert forms.passed_over() == []
    assert left is None or file.read_bytes() == whole


def test_where_nothing_can_be_written_each_process_makes_its_trial(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert trials(plain, *given()) == 1
        assert forms.passed_over() == []


def test_what_may_pass_is_not_kept(kept: Path) -> None:
    raised: list[BaseException] = [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()]

    def passing(*inputs: Tensor) -> Tensor:
        if raised:
            raise raised.pop(0)
        return plain(*inputs)

    assert trials(passing, *given()) == 1
    assert forms.passed_over() == ["it: form=fla is not used: OutOfMemoryError: no memory"]
    with pytest.raises(KeyboardInterrupt):
        trials(passing, *given())
    assert not kept.exists()
    assert trials(passing, *given()) == 1
    assert forms.passed_over() == []


def test_two_processes_at_once_leave_one_whole_verdict(kept: Path) -> None:
    """The second makes its whole trial during that of the first."""
    inputs, within = given(), []

    def interrupted(*given: Tensor) -> Tensor:
        if not within:
            within.append(True)
            assert trials(plain, *inputs) == 1
        return plain(*given)

    forms.forget()
    forms.attend("it", "auto", plain, *inputs, fast={"fla": interrupted})
    assert [file.suffix for file in kept.iterdir()] == [".json"]
    assert trials(plain, *inputs) == 0


def test_what_decides_is_the_card_its_driver_the_packages_and_this_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert forms.machine(torch.device("cpu")) is None
    card = SimpleNamespace(name="H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)

    def facts() -> tuple[object, ...] | None:
        return forms.machine.__wrapped__(torch.device("cuda", 0))

    first = facts()
    assert {"H200", 9, 0, code()} < {one for one in first or () if isinstance(one, str | int)}
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    assert facts() == first
    for change in (
        lambda: monkeypatch.setenv("FLA_TRIL_PRECISION", "tf32"),
        lambda: monkeypatch.setattr(forms, "version", lambda package: "99"),
        lambda: monkeypatch.setattr(Path, "read_text", lambda path: "NVRM version: 999"),
        lambda: monkeypatch.setattr(card, "minor", 1),
        lambda: monkeypatch.setattr(forms, "code", lambda: "other code"),
    ):
        before = facts()
        change()
        assert facts() != before
