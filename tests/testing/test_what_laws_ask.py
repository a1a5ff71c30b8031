"""No law hands a variant what its traits refuse, and where nothing is claimed nothing is judged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnbench.cell import Cell
from attnbench.engines.masks import emptied
from attnbench.measure.standstill import Moment
from attnbench.reference import exact_attention
from attnbench.run import process
from attnbench.run.gate import HoldSetting
from attnbench.shape import Shape
from attnbench.spec import Spec
from attnbench.testing import LAWS, check_variant
from attnbench.testing.laws import Case
from attnbench.variant import VARIANTS, No, Traits, Variant


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
