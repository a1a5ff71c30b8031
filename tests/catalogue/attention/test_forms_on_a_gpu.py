"""What a variant runs on a GPU by default has the variant's formula there."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnbench.catalogue.build import build
from attnbench.catalogue.engines import forms
from attnbench.contract.problem.reference import relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import VARIANTS
from attnbench.measure.flops import count

N = 150


@pytest.fixture(autouse=True)
def _first_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Triton's search stops at the first configuration that runs: numbers are tested here, and it takes a minute.

    Nothing of it stays on the disk, where a later measurement would find it.
    """
    pytest.importorskip("fla.ops", reason="needs fla-core")
    from triton.runtime.autotuner import Autotuner

    chosen, measured = Autotuner.prune_configs, Autotuner._bench

    def choose(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.found = self.cache_results = False
        return chosen(self, *args, **kwargs)

    def bench(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.found:
            return [float("inf")] * 3
        took = measured(self, *args, **kwargs)
        self.found = took[0] < float("inf") if isinstance(took, list | tuple) else took < float("inf")
        return took

    monkeypatch.setattr(Autotuner, "prune_configs", choose)
    monkeypatch.setattr(Autotuner, "_bench", bench)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forms.forget()
    yield
    forms.forget()


def results(module: Any, inputs: list[Tensor], mask: Tensor, *, dense: bool = False) -> list[Tensor]:
    """The output of real tokens, and the gradients of the inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = (module.dense if dense else module)(*leaves, key_mask=mask)
    real = mask[:, None, :, None] if out.ndim == 4 else mask[..., None]
    out = torch.where(real, out, 0.0)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(6)).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


def made(text: str, *, form: str) -> nn.Module:
    return build(text, Shape(2, 2, N, 64, causal=True), seed=3, form=form).cuda()


@pytest.mark.cuda
@pytest.mark.parametrize(
    "text",
    [
        *("gla", "delta", "gated-delta", "gated-delta-2", "kda", "comba", "rwkv7", "retnet", "linear", "ssd", "mamba2"),
        *("gsa", "log-linear"),
    ],
)
def test_the_kernel_runs_by_default_and_rounds_about_as_much_as_the_operations(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, causal, with padding: output and gradients beside the formula in float64."""
    generator = torch.Generator().manual_seed(4)
    operator = VARIANTS.get(text).kind == "operator"
    sizes = [(2, 2, N, 64)] * 3 if operator else [(2, N, 128)]
    inputs = [torch.randn(size, generator=generator).cuda() for size in sizes]
    mask = (torch.rand(2, N, generator=generator) < 0.8).cuda()
    modules = {form: made(text, form=form) for form in ("torch", "fla", "auto")}
    exact = copy.deepcopy(modules["torch"]).bfloat16().double()
    expected = results(exact, [x.bfloat16().double() for x in inputs], mask, dense=True)
    off = {}
    for form in ("torch", "fla"):
        got = results(modules[form].bfloat16(), [x.bfloat16() for x in inputs], mask)
        off[form] = [float(relative_error(one.double(), other)) for one, other in zip(got, expected, strict=True)]
    for plain, fused in zip(off["torch"], off["fla"], strict=True):
        assert fused < 3 * plain + 0.01, off
    module = modules["auto"].bfloat16()
    marked = [x.bfloat16().requires_grad_() for x in inputs]
    kernel = "triton" if text == "linear" else "fla"
    assert count(lambda: module(*marked)).kernel == kernel, forms.passed_over()
    forms.forget()
    monkeypatch.setattr(forms, "_tried", None)  # a later process makes no trial
    assert count(lambda: module(*marked)).kernel == kernel


@pytest.mark.cuda
@pytest.mark.parametrize(("text", "width"), [("retnet", 128), ("gated-delta", 128)])
def test_in_float32_what_runs_gives_its_digits(text: str, width: int) -> None:
    """A kernel whose products are in TF32 does not."""
    operator = VARIANTS.get(text).kind == "operator"
    generator = torch.Generator().manual_seed(4)
    size = (1, 2, N, width) if operator else (1, N, 2 * width)
    inputs = [torch.randn(size, generator=generator).cuda() for _ in range(3 if operator else 1)]
    module = build(text, Shape(1, 2, N, width, causal=True), seed=3).cuda()
    mask = torch.ones(1, N, dtype=torch.bool, device="cuda")
    exact = copy.deepcopy(module).double()
    for got, other in zip(
        results(module, inputs, mask), results(exact, [x.double() for x in inputs], mask, dense=True), strict=True
    ):
        assert relative_error(got.double(), other) < 1e-3
