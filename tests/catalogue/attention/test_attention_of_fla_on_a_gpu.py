"""Variants by flash-linear-attention's kernels that are no recurrences, on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch

from attnbench.catalogue.build import build
from attnbench.catalogue.engines import forms
from attnbench.contract.problem.reference import relative_error
from attnbench.measure.flops import count
from tests.catalogue.attention.test_attention_of_fla import CASES, inputs_of, results, shape_of
from tests.catalogue.attention.test_forms_on_a_gpu import _first_that_runs

assert _first_that_runs  # it is used by every test of this module


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_runs_by_default_and_rounds_about_as_much_as_the_operations(case: str) -> None:
    """In bfloat16: output and gradients beside the formula in float64, with the same weights."""
    if case.startswith("deltaformer"):
        pytest.importorskip("fla.layers.utils", reason="needs flash-linear-attention")
    shape = shape_of(case, seq_len=150, head_dim=64)
    modules = {form: build(case, shape, form=form).cuda().bfloat16() for form in ("torch", "fla", "auto")}
    inputs = [x.detach().cuda() for x in inputs_of(case, shape, torch.bfloat16)]
    exact = copy.deepcopy(modules["torch"]).double()
    expected = results(exact.dense, exact, [x.double().requires_grad_() for x in inputs])  # type: ignore[arg-type]  # every variant has one
    off = {}
    for form in ("torch", "fla"):
        got = results(modules[form], modules[form], [x.clone().requires_grad_() for x in inputs])
        off[form] = [float(relative_error(one.double(), other)) for one, other in zip(got, expected, strict=True)]
    for plain, fused in zip(off["torch"], off["fla"], strict=True):
        assert fused < 3 * plain + 0.04, off
    marked = [x.clone().requires_grad_() for x in inputs]
    assert "fla" in (count(lambda: modules["auto"](*marked)).kernel or ""), forms.passed_over()
