"""No law hands a variant what its traits refuse, and where nothing is claimed nothing is judged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from attnbench.catalogue.engines.masks import emptied
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.variant import VARIANTS, No, Traits, Variant
from attnbench.errors import Unsupported
from attnbench.harness.outside.visit import HoldSetting
from attnbench.harness.wire import process
from attnbench.laws import LAWS, check_variant
from attnbench.laws import laws as laws_module
from attnbench.laws.laws import Case, DoesNotWork, Measured
from attnbench.measure.standstill import Moment
from attnbench.suite.cell import Cell


class Strict(nn.Module):
    """Softmax attention that fails at whatever its traits refuse."""

    claimed: Traits

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        assert self.claimed.causal or not shape.causal
        assert self.claimed.cross or not shape.cross
        assert self.claimed.bias or shape.bias == "none"
        self.causal = shape.causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        assert self.claimed.key_padding or key_mask is None
        assert str(q.dtype).removeprefix("torch.") in self.claimed.dtypes
        k, v = emptied(key_mask, k, v)
        return exact_attention(q, k, v, causal=self.causal, key_mask=key_mask).to(q.dtype)


FACTS: dict[str, Any] = {"family": "exact", "source": "", "formula": "", "cost": ""}


def variant(monkeypatch: pytest.MonkeyPatch, traits: Traits, **facts: Any) -> Variant:
    make = type("Strict", (Strict,), {"claimed": traits, "__doc__": Strict.__doc__})
    entry = Variant("strict", make, "", traits=traits, **{**FACTS, **facts})
    monkeypatch.setitem(VARIANTS._entries, "strict", entry)
    return entry


class WithoutHalves(TorchDispatchMode):
    """What torch does where /proc/cpuinfo cannot be read."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kinds = {args[0].dtype, (kwargs or {}).get("dtype")} if func is torch.ops.aten._to_copy.default else set()
        if {torch.float16, torch.float32} <= kinds:
            raise RuntimeError("Failed to initialize cpuinfo!")
        return func(*args, **(kwargs or {}))


def test_no_law_asks_for_a_data_type_that_torch_does_not_convert_here() -> None:
    laws_module._is_converted.cache_clear()
    try:
        with WithoutHalves():
            report = check_variant("local", laws=["shape and type", "hidden pairs"])
    finally:
        laws_module._is_converted.cache_clear()
    assert not report.faults
    assert {finding.law for finding in report.findings} == {"shape and type"}


@pytest.mark.parametrize(
    "refused",
    [
        {"key_padding": No("a mask and causality exclude each other")},
        {"causal": No("it has no order")},
        {"cross": No("it has one sequence")},
        {"dtypes": ("float32",)},
        {"dtypes": ("float16", "float32")},
        {"dtypes": ("bfloat16",)},
        {"key_padding": False, "cross": False, "causal": False},
    ],
    ids=str,
)
def test_no_law_asks_for_what_the_traits_refuse(refused: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    traits = Traits(exact=True, permutable=True, **refused)
    report = check_variant(variant(monkeypatch, traits, time_exponent=2.0, memory_exponent=2.0), time=False)
    assert report.held, [f"{finding.law}, {finding.case}: {finding.fault}" for finding in report.faults]


def test_a_frozen_parameter_and_what_is_computed_again_break_no_law(monkeypatch: pytest.MonkeyPatch) -> None:
    class Frozen(Strict):
        def __init__(self, shape: Shape) -> None:
            super().__init__(shape)
            self.one = nn.Parameter(torch.ones(()), requires_grad=False)

        def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return super(Frozen, self).forward(q, k, v, key_mask=key_mask) * self.one

            if not torch.is_grad_enabled() or not q.requires_grad:
                return attend(q, k, v)
            out: Tensor = checkpoint(attend, q, k, v, use_reentrant=True)
            return out

    entry = variant(monkeypatch, Traits(exact=True, permutable=True), time_exponent=2.0, memory_exponent=2.0)
    report = check_variant(replace(entry, make=type("Strict", (Frozen,), {"claimed": entry.traits})), time=False)
    assert report.held, [f"{finding.law}, {finding.case}: {finding.fault}" for finding in report.faults]
    asked = {finding.law for finding in report.findings if not finding.skipped}
    assert {"strides", "finite differences", "formula's gradients", "gradients reach", "unwritten memory"} <= asked


@pytest.mark.parametrize(
    ("laws", "held", "skipped"),
    [
        ([[0.0]], True, ""),
        ([[2.0], [2.0]], False, ""),
        ([[2.0], [0.0]], True, "broken once, and held when asked again: it is 2"),
        ([RuntimeError("no /proc")], True, "asking it raises RuntimeError: no /proc"),
        ([DoesNotWork("TypeError: no"), DoesNotWork("TypeError: no")], False, ""),
    ],
)
def test_a_law_holds_is_broken_twice_or_could_not_be_asked(
    laws: list[Any], held: bool, skipped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = iter(laws)

    def holds(case: Case) -> Iterator[Measured]:
        found = next(asked)
        if isinstance(found, Exception):
            raise found
        yield from (Measured(number, 1.0, f"it is {number:g}") for number in found)

    case = Case(variant(monkeypatch, Traits()), Spec("strict"))
    (finding,) = replace(LAWS["batch"], holds=holds).examine(case)
    assert (finding.held, finding.skipped) == (held, skipped)
    assert finding.held or finding.fault
    assert next(asked, None) is None


def test_where_no_growth_is_claimed_none_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = variant(monkeypatch, Traits(exact=True, permutable=True))
    report = check_variant(entry, laws=["time", "memory"])
    assert report.held
    assert report.skipped.keys() == {"time", "memory"}
    assert all("nothing is claimed" in reason for reason in report.skipped.values())
    assert not any(finding.number for finding in report.findings)


def test_a_variant_that_waited_for_a_core_is_not_accused_of_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Moment, "delay_until", lambda start, end: 1.0)
    monkeypatch.setattr("attnbench.measure.time.LONGEST_WAIT", 0.01)
    entry = variant(monkeypatch, Traits(exact=True), time_exponent=-9.0)
    report = check_variant(entry, laws=["time"])
    assert report.held
    assert report.skipped["time"].startswith("it could not be asked, since the machine is busy: its threads waited")
    monkeypatch.setattr(Moment, "delay_until", lambda start, end: 0.0)
    assert not check_variant(entry, laws=["time"]).held


def test_an_option_that_the_class_refuses_breaks_no_law() -> None:
    cell = Cell("s", "w", parse_spec("nystrom:conv=2"), Shape(heads=1, seq_len=8, head_dim=4))
    assert HoldSetting(cell).found(lambda done, of: None) == {"tried": 0, "fault": None}
    with pytest.raises(Unsupported, match=r"^nystrom: option conv=2 must be odd"):
        check_variant("nystrom:conv=2")


@pytest.mark.parametrize("causal", [False, True])
def test_a_setting_whose_large_float32_products_lose_precision_breaks_its_formula(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = [False]

    class Rounding(Strict):
        claimed = Traits(exact=True, permutable=True)

        def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
            libraries.append(torch.get_float32_matmul_precision())
            if rounds[0] and q.dtype == torch.float32 and q.numel() * k.shape[2] > 1 << 21:
                q, k, v = (x.bfloat16().float() for x in (q, k, v))
            return super().forward(q, k, v, key_mask=key_mask)

    monkeypatch.setattr(process, "_products", process.Products("oneDNN", "oneDNN"))
    monkeypatch.setitem(VARIANTS._entries, "strict", Variant("strict", Rounding, "", traits=Rounding.claimed, **FACTS))
    cell = Cell("s", "w", Spec("strict"), Shape(heads=1, seq_len=8, head_dim=4, causal=causal))
    for rounds[0] in (False, True):
        libraries = list[str]()
        process.choose_products(of_one_row=True)  # as a decoding step leaves it
        try:
            fault = HoldSetting(cell).found(lambda done, of: None)["fault"]
        finally:
            torch.set_float32_matmul_precision("highest")
        assert set(libraries) == {"medium"}  # the library that will be timed
        if rounds[0]:
            assert fault["law"] == "formula"
            assert fault["fault"].startswith("in float32 a row differs from the formula by 0.00")
            assert fault["number"] > 10 * fault["bound"]
        else:
            assert fault is None


def test_growth_is_measured_with_one_thread_and_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    class Counting(nn.Module):
        def __init__(self, shape: Shape) -> None:
            super().__init__()

        def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
            counted.append(torch.get_num_threads())
            return v * 2

    entry = Variant("counting", Counting, "", time_exponent=1.0, memory_exponent=1.0, **FACTS)
    monkeypatch.setitem(VARIANTS._entries, "counting", entry)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for law in ("time", "memory"):
            LAWS[law].examine(Case(entry, Spec("counting")))
        assert set(counted) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_wrong_gradient_of_a_mixer_is_that_of_x(monkeypatch: pytest.MonkeyPatch) -> None:
    true = VARIANTS.get("gated-softmax")

    class Spoilt(true.make):  # type: ignore[misc, name-defined]
        def forward(self, x: Tensor, **given: Any) -> Tensor:
            out: Tensor = super().forward(1.1 * x - 0.1 * x.detach(), **given)
            return out

    monkeypatch.setitem(VARIANTS._entries, "gated-softmax", replace(true, make=Spoilt))
    case = Case(VARIANTS.get("gated-softmax"), Spec("gated-softmax"))
    faults = [finding.fault for finding in LAWS["masks"].examine(case) if not finding.held]
    assert faults
    assert all("the gradient of x differs" in fault for fault in faults)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d, partial(nn.GroupNorm, 1)])
def test_a_norm_over_tokens_is_named_as_what_looks_ahead(norm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Normed(Strict):
        def __init__(self, shape: Shape) -> None:
            super().__init__(shape)
            self.norm = norm(shape.H * shape.D, dtype=torch.float64)

        def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
            channels = v.transpose(2, 3)
            v = self.norm(channels.flatten(1, 2)).view_as(channels).mT
            return super().forward(q, k, v, key_mask=key_mask)

    monkeypatch.setattr(f"{__name__}.Strict", Normed)
    case = Case(variant(monkeypatch, Traits(causal=True)), Spec("strict"), causal=True)
    fault = next(finding.fault for finding in LAWS["causality"].examine(case) if not finding.held)
    assert fault.endswith(f": {getattr(norm, 'func', norm).__name__} is over all tokens")
