"""The kernels of flash-linear-attention as functions of our tensors: layouts, scales, bases of logarithms and signs.

What stands for a kernel here is its recurrence, token by token, in its own layout. The kernels themselves are held to
the formulas on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from inspect import signature
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from attnbench.catalogue.build import build
from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.recurrent.short_convolution import ShortConvolution
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported
from attnbench.measure.flops import count

Given = Callable[..., tuple[Tensor, None]]


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    erased: Tensor | None = None,
    along: Tensor | None = None,
    early: bool = False,
) -> tuple[Tensor, None]:
    """S = Diag(e^g) S - b (e S) + k vᵀ, o = scale · Sᵀ q, of tensors ``(B, N, H, ...)``; g may be 1 wide."""
    assert q.shape[:3] == k.shape[:3] == v.shape[:3] == g.shape[:3]
    along = k if along is None else along
    state, rows = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None]), []
    for t in range(q.shape[1]):
        before, state = state, state * g[:, t, :, :, None].exp()
        if erased is not None:
            read = ((before if early else state) * erased[:, t, :, :, None]).sum(2, keepdim=True)
            state = state - along[:, t, :, :, None] * read
        state = state + k[:, t, :, :, None] * v[:, t, :, None]
        rows.append((state * q[:, t, :, :, None]).sum(2))
    return torch.stack(rows, 1) * (q.shape[3] ** -0.5 if scale is None else scale), None


def simple(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, scale: float = 0.0):  # type: ignore[no-untyped-def]  # a stand-in
    gates = g[..., None] if g is not None else g_gamma[:, None].expand(*q.shape[:3], 1)  # type: ignore[index]
    return recurrence(q, k, v, gates, scale=scale)


def linear(q: Tensor, k: Tensor, v: Tensor, scale: float, normalize: bool) -> tuple[Tensor, None]:
    assert normalize
    weights = torch.einsum("bihd,bjhd->bhij", q, k).tril() * scale
    return (weights @ v.transpose(1, 2) / (weights.sum(-1, keepdim=True) + 1e-10)).transpose(1, 2), None


def delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float) -> tuple[Tensor, None]:
    b = beta[..., None]
    return recurrence(q, k, b * v, torch.zeros_like(b), scale=scale, erased=b * k)


def with_more_values(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(x.repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))  # type: ignore[return-value]


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float) -> tuple[Tensor, None]:
    b = beta[..., None]
    q, k = with_more_values(q, k, v)
    return recurrence(q, k, b * v, g[..., None] if g.ndim == 3 else g, scale=scale, erased=b * k)


def gdn2(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, scale: float) -> tuple[Tensor, None]:
    return recurrence(q, k, w * v, g, scale=scale, erased=b * k)


def comba(q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor, scale: float) -> tuple[Tensor, None]:
    b = beta[..., None]
    return recurrence(q, k, b * v, g[..., None], scale=scale, erased=b * p, early=True)


def rwkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, scale: float, lower_bound: float = -100.0):  # type: ignore[no-untyped-def]  # a stand-in
    assert bool((w > lower_bound).all())
    return recurrence(r, k, v, w, scale=scale, erased=-a, along=b, early=True)


def gsa(q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor, scale: float) -> tuple[Tensor, None]:
    slots = torch.zeros_like(s[:, 0, :, :, None] * k[:, 0, :, None])
    values, rows = torch.zeros_like(s[:, 0, :, :, None] * v[:, 0, :, None]), []
    for t in range(q.shape[1]):
        left, own = g[:, t, :, :, None].exp(), s[:, t, :, :, None]
        slots, values = slots * left + own * k[:, t, :, None], values * left + own * v[:, t, :, None]
        weights = torch.softmax(scale * (slots * q[:, t, :, None]).sum(3), -1)
        rows.append((values * weights[..., None]).sum(2))
    return torch.stack(rows, 1), None


def log_linear(q: Tensor, k: Tensor, v: Tensor, g: Tensor, weights: Tensor, scale: float) -> tuple[Tensor, None]:
    N = v.shape[1]
    q, k = with_more_values(q, k, v)
    total = g.cumsum(1).transpose(1, 2)
    levels = torch.tensor([[int(i ^ j).bit_length() for j in range(N)] for i in range(N)])
    assert weights.shape[3] > int(levels.max())
    of_pairs = torch.einsum("bnhl,nml->bhnm", weights, one_hot(levels, weights.shape[3]).to(weights))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (total[..., None] - total[:, :, None]).tril().exp() * of_pairs
    return (scale * scores.tril() @ v.transpose(1, 2)).transpose(1, 2), None


FAKES: dict[str, Callable[..., object]] = {
    "gla": recurrence,
    "simple-gla": simple,
    "linear": linear,
    "delta": delta,
    "gated-delta": gated_delta,
    "kda": gated_delta,
    "gated-delta-2": gdn2,
    "comba": comba,
    "rwkv7": rwkv7,
    "gsa": gsa,
    "log-linear": log_linear,
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package, made of recurrences, on a processor that forms take for a GPU."""
    for name, fake in FAKES.items():
        row = fla.KERNELS[name]
        module = ModuleType(f"fla.ops.{row.module}")
        setattr(module, row.function, fake)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.ops", ModuleType("fla.ops"))
    monkeypatch.setattr(fla, "refused", lambda: False)
    monkeypatch.setattr(forms, "find_spec", lambda name: name)
    monkeypatch.setattr(forms, "on_device", lambda x: True)
    monkeypatch.setattr(forms, "a_device", lambda: True)
    forms.forget()
    yield
    forms.forget()


SETTINGS = [
    *(
        (name, causal)
        for name in ("gla", "delta", "retnet", "ssd", "mamba2", "rwkv7", "gsa")
        for causal in (True, False)
    ),
    *((name, causal) for name in ("gated-delta", "kda", "gated-delta-2", "comba") for causal in (True, False)),
    *(("log-linear:state=8", causal) for causal in (True, False)),
    ("linear", True),
    ("gla:tied_keys=true", True),
    ("delta:negative=true", True),
    ("gated-delta:value_groups=2", True),
    ("kda:value_groups=2,decay=bounded", True),
    ("comba:expand=1", True),
    ("retnet:rotation=false,decay=lightning", True),
    ("retnet:decay=lightning-linear", False),
    ("ssd:groups=2", True),
    ("ssd:groups=2", False),
    ("mamba2:groups=2", True),
    ("log-linear:state=8,levels=3", True),
]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("text", "causal"), SETTINGS)
def test_the_layer_around_the_kernel_has_the_layers_formula(text: str, causal: bool) -> None:
    """Output and gradients, padded and not, beside the form of torch; and ``auto`` takes the kernel."""
    shape, spec = Shape(2, 2, 11, 8, causal=causal), parse_spec(text)
    modules = {form: build(spec, shape, seed=3, form=form) for form in ("torch", "fla", "auto")}
    generator = torch.Generator().manual_seed(4)
    operator = VARIANTS.get(spec.name).kind == "operator"
    sizes = [(2, 2, 11, 8)] * 3 if operator else [(2, 11, 16)]
    inputs = [torch.randn(size, generator=generator) for size in sizes]
    real = torch.rand(2, 11, generator=generator) < 0.7
    real[:, 0] = True
    for mask in (None, real):
        results = {}
        for form in ("torch", "fla"):
            module = modules[form]
            leaves = [x.clone().requires_grad_() for x in inputs]
            out = module(*leaves, key_mask=mask)
            if mask is not None:
                out = torch.where(mask[:, None, :, None] if operator else mask[..., None], out, 0.0)
            wanted = [*leaves, *module.parameters()]
            grads = torch.autograd.grad(out.square().sum(), wanted, allow_unused=True, materialize_grads=True)
            results[form] = [out.detach(), *grads]
        for got, expected in zip(results["fla"], results["torch"], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()) + 1e-6)
    if spec.name != "linear":  # its Triton form comes first
        assert count(lambda: modules["auto"](*inputs)).kernel == "fla"
        assert forms.passed_over() == []
    assert count(lambda: modules["torch"](*inputs)).kernel == "torch"


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("text", "causal"),
    [
        *(
            (text, causal)
            for text in ("gated-delta", "comba", "ssd", "ssd:groups=2", "mamba2")
            for causal in (True, False)
        ),
        ("gated-delta:value_groups=2", True),
    ],
)
def test_where_gradients_of_a_heads_decay_are_refused_each_channel_has_it(
    text: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refused() -> bool:
        asked.append(True)
        return True

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("incorrect results for gated chunk_bwd_dqkwg")

    for name in ("simple-gla", "gated-delta", "comba"):
        row = fla.KERNELS[name]
        monkeypatch.setattr(sys.modules[f"fla.ops.{row.module}"], row.function, refuse)
    monkeypatch.setattr(fla, "refused", refused)
    shape, x = Shape(2, 2, 11, 8, causal=causal), torch.randn(2, 11, 16)
    results = []
    for form in ("torch", "fla"):
        leaf = x.clone().requires_grad_()
        out = build(text, shape, seed=3, form=form)(leaf)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaf)])
    assert asked
    for got, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("heads", "keys"), [(4, 2), (4, 1)])
def test_heads_that_share_keys_in_retention(heads: int, keys: int) -> None:
    shape = Shape(1, heads, 9, 8, causal=True, kv_heads=keys)
    q, k, v = (torch.randn(1, H, 9, 8) for H in (heads, keys, keys))
    one, other = (build("retnet", shape, form=form)(q, k, v) for form in ("torch", "fla"))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "text", ["gla:chunk=16", "delta:steps=2", "delta:decay=true", "log-linear:base=gated-delta", "kda:chunk=16"]
)
def test_options_that_no_kernel_has_are_torchs(text: str) -> None:
    shape = Shape(1, 2, 9, 8, causal=True)
    with pytest.raises(Unsupported, match="form=fla has no kernel for these options and this causality; form=torch"):
        build(text, shape, form="fla")
    module = build(text, shape)
    assert count(lambda: module(torch.randn(1, 9, 16))).kernel == "torch"


@pytest.mark.usefixtures("kernels")
def test_what_a_kernel_has_in_one_direction_only_is_refused_in_both() -> None:
    with pytest.raises(Unsupported, match="linear: form=fla has no kernel"):
        build("linear:form=fla", Shape(1, 2, 9, 8))
    with pytest.raises(Unsupported, match="gated-delta: form=fla has no kernel"):
        build("gated-delta:value_groups=2,form=fla", Shape(1, 2, 9, 8))


def test_the_package_is_named_where_it_is_missing() -> None:
    with pytest.raises(Unsupported, match=r"form=fla needs .*(pip install 'attnbench\[gpu\]'|CUDA device)"):
        build("gla:form=fla", Shape(1, 2, 9, 8, causal=True))


def test_auto_stands_in_no_label_id_or_options() -> None:
    for name in ("gla", "linear"):
        entry = VARIANTS.get(name)
        assert "form" not in dict(entry.complete(parse_spec(name)).options)
        assert entry.normalise(parse_spec(f"{name}:form=auto")).label == name
        assert dict(entry.complete(parse_spec(f"{name}:form=torch")).options)["form"] == "torch"


def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments, from now on, that the package would copy: it wants memory in the order ``(B, N, H, ...)``."""
    found: list[str] = []

    def noting(kernel: Callable[..., object]) -> Callable[..., object]:
        names = list(signature(kernel).parameters)

        def noted(*given: Any, **named: Any) -> object:
            together = dict(zip(names, given, strict=False)) | named
            found.extend(name for name, x in together.items() if isinstance(x, Tensor) and not x.is_contiguous())
            return torch.zeros_like(together["v"]), None

        return noted

    for name, fake in FAKES.items():
        row = fla.KERNELS[name]
        monkeypatch.setattr(sys.modules[f"fla.ops.{row.module}"], row.function, noting(fake))
    return found


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "text",
    [
        *("gla", "delta", "gated-delta", "gated-delta:value_groups=2", "kda", "gated-delta-2", "comba", "rwkv7", "gsa"),
        *("ssd", "mamba2", "mamba2:groups=2", "log-linear:state=8"),
    ],
)
def test_a_layer_hands_its_kernel_nothing_of_its_heads_that_must_be_copied(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = build(text, Shape(2, 2, 11, 8, causal=True), form="fla").bfloat16()
    found = copied(monkeypatch)
    module(torch.randn(2, 11, 16, dtype=torch.bfloat16))
    # In log-linear all heads share these: to copy them is less work than one more product.
    assert found == (["q", "k"] if text.startswith("log-linear") else [])


def test_on_a_processor_a_short_convolution_leaves_its_output_as_it_is() -> None:
    short = ShortConvolution(6, 4)
    x = torch.randn(2, 9, 6, dtype=torch.bfloat16)
    assert short(x).mT.is_contiguous()
