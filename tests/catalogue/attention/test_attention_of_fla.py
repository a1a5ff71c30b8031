"""Variants by flash-linear-attention's kernels that are no recurrences, with each kernel replaced by its formula.

The formulas stand in the package's layout, ``(B, N, H, ...)``, so that layouts, scales, bases of logarithms and signs
are tested without a GPU.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from attnbench.catalogue.build import build
from attnbench.catalogue.engines import forms
from attnbench.catalogue.engines.fla import KERNELS
from attnbench.catalogue.engines.linear import fused
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported
from attnbench.laws.laws import gap
from attnbench.measure.flops import count

CASES = {
    "mesa": {},
    "mesa:steps=30": {},
    "path": {},
    "fox": {},
    "abc:slots=16": {},
    "parallax": {},
    "deltaformer": {},
    "deltaformer:asks=key": {},
    "kernel:sim=rebased,order=dense": {},
    "taylor": {},
    "nsa:block=16,length=8,stride=4,top_n=3,window=10": {"heads": 16, "kv_heads": 1, "seq_len": 83},
    "nsa:block=16,length=8,stride=4,top_n=3,branch=selected": {"heads": 6, "kv_heads": 2, "seq_len": 83},
}


def pairs(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bihd,bjhd->bhij", q, k)


def weighed(weights: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def before(x: Tensor) -> Tensor:
    """Bool, the keys up to each query."""
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


def softmax(logits: Tensor, seen: Tensor) -> Tensor:
    return logits.masked_fill(~seen, -torch.inf).softmax(-1)


def fox(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    total = g.cumsum(1).transpose(1, 2)
    logits = pairs(q, k) * q.shape[3] ** -0.5 + total[..., None] - total[:, :, None]
    return weighed(softmax(logits, before(q)), v)


def parallax(q: Tensor, r: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert q.dtype == r.dtype
    p, s = softmax(pairs(q, k) * q.shape[3] ** -0.5, before(q)), pairs(r, k)
    return weighed(p * (1 + (p * s).sum(-1, keepdim=True) - s), v)


def path(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> tuple[Tensor, None]:
    keys, rows = k[:, :0], []
    for i in range(q.shape[1]):
        keys = keys - beta[:, i, None, :, None] * (keys * w[:, i, None]).sum(-1, keepdim=True) * w[:, i, None]
        keys = torch.cat([keys, k[:, i, None]], 1)
        weights = (torch.einsum("bhd,bjhd->bhj", q[:, i], keys) * q.shape[3] ** -0.5).softmax(-1)
        rows.append(torch.einsum("bhj,bjhd->bhd", weights, v[:, : i + 1]))
    return torch.stack(rows, 1), None


def abc(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, None]:
    rows = []
    for i in range(q.shape[1]):
        shares = s[:, : i + 1].softmax(1)
        keys, values = (torch.einsum("bjhm,bjhd->bhmd", shares, y[:, : i + 1]) for y in (k, v))
        weights = (torch.einsum("bhmd,bhd->bhm", keys, q[:, i]) * q.shape[3] ** -0.5).softmax(-1)
        rows.append(torch.einsum("bhm,bhmd->bhd", weights, values))
    return torch.stack(rows, 1), None


def mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    lamb: Tensor,
    *,
    max_CG_iteration: int,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, None, None]:
    assert use_qk_l2norm_in_kernel
    assert max_CG_iteration in (16, 30)  # as many as channels, or as given
    q, k, rows = normalize(q, dim=-1), normalize(k, dim=-1), []
    of_keys = of_values = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], q.shape[3])
    for i in range(q.shape[1]):
        new = (beta[:, i, :, None] * k[:, i])[..., None]
        kept = g[:, i, :, None, None].exp()
        of_keys = kept * of_keys + new * k[:, i, :, None]
        of_values = kept * of_values + new * v[:, i, :, None]
        solved = torch.linalg.solve(of_keys + torch.diag_embed(lamb), q[:, i])
        rows.append(torch.einsum("bhd,bhde->bhe", solved, of_values))
    return torch.stack(rows, 1), None, None


def deltaformer(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The first step alone, which takes contiguous memory and, to be right in gradients, whole blocks."""
    assert all(x.is_contiguous() for x in (q, k, v, beta))
    assert q.shape[1] % min(512, 64 * -(-q.shape[1] // 64)) == 0
    logits = (pairs(q, k) * q.shape[3] ** -0.5).masked_fill(~before(q).tril(-1), -1e6)
    taken = (logits.softmax(-1) * before(q).tril(-1)) * beta.transpose(1, 2)[..., None]
    eye = torch.eye(q.shape[1], dtype=q.dtype)
    return torch.linalg.solve_triangular(eye + taken, v.transpose(1, 2), upper=False).transpose(1, 2).contiguous()


def rebased(
    q: Tensor, k: Tensor, v: Tensor, *, use_scale: bool, use_normalize: bool, return_both: bool
) -> tuple[Tensor, Tensor]:
    assert (use_scale, use_normalize, return_both) == (False, False, True)
    weights = pairs(q, k).square() * before(q)
    return weighed(weights, v).transpose(1, 2), weights.sum(-1)


def based(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = pairs(q, k) * q.shape[3] ** -0.5
    weights = (1 + s + s.square() / 2) * before(q)
    return weighed(weights / weights.sum(-1, keepdim=True), v)


def nsa(q: Tensor, k: Tensor, v: Tensor, *, block_indices: Tensor, block_counts: int, block_size: int) -> Tensor:
    shared = q.shape[2] // k.shape[2]
    assert block_counts == block_indices.shape[3]
    assert block_counts.bit_count() == shared.bit_count() == 1
    assert shared >= 16
    k, v, chosen = (x.repeat_interleave(shared, 2) for x in (k, v, block_indices))
    of_key = torch.arange(q.shape[1]) // block_size
    taken = (chosen[..., None] == of_key).any(3).transpose(1, 2)
    return weighed(softmax(pairs(q, k) * q.shape[3] ** -0.5, taken & before(q)), v)


FORMULAS: dict[str, tuple[str, Callable[..., Any]]] = {
    "mesa_net": ("chunk_mesa_net", mesa),
    "path_attn": ("parallel_path_attn", path),
    "forgetting_attn": ("parallel_forgetting_attn", fox),
    "abc": ("chunk_abc", abc),
    "parallax": ("parallel_parallax", parallax),
    "rebased": ("parallel_rebased", rebased),
    "based": ("parallel_based", based),
    "nsa": ("parallel_nsa", nsa),
    "deltaformer.parallel": ("ParallelDeltaformerFunction", deltaformer),
}


def rounded(formula: Callable[..., Any]) -> Callable[..., Any]:
    """The formula in float32, its output in the dtype of the queries, as a kernel has it."""

    def kernel(q: Tensor, *given: Tensor, **named: Any) -> Any:
        wide = [x.float() if x.is_floating_point() else x for x in (q, *given)]
        out = formula(*wide, **named)
        return tuple(x if x is None else x.to(q.dtype) for x in out) if isinstance(out, tuple) else out.to(q.dtype)

    return kernel


def no_triton(*_: object) -> Tensor:
    raise ImportError("No module named 'triton'")


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package with formulas for kernels, and a processor that forms take for a GPU without Triton."""
    monkeypatch.setattr(fused, "of_map", no_triton)
    for name, (function, formula) in FORMULAS.items():
        module = ModuleType(f"fla.ops.{name}")
        vars(module)[function] = kernel = rounded(formula)
        vars(kernel)["apply"] = kernel  # as a function with gradients of its own has it
        if name == "based":
            vars(module)["fused_chunk_based"] = rounded(formula)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(forms, "find_spec", lambda name: name)
    monkeypatch.setattr(forms, "on_device", lambda x: True)
    monkeypatch.setattr(forms, "a_device", lambda: True)
    forms.forget()
    yield
    forms.forget()


def shape_of(case: str, **more: Any) -> Shape:
    sizes: dict[str, Any] = {"batch": 2, "heads": 2, "head_dim": 16, "seq_len": 43, "causal": True}
    return Shape(**{**sizes, **CASES.get(case, {}), **more})


def inputs_of(case: str, shape: Shape, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draws = torch.Generator().manual_seed(3)
    sizes = [(shape.B, heads, shape.N, shape.D) for heads in (shape.H, shape.K, shape.K)]
    if VARIANTS.get(case.partition(":")[0]).kind == "mixer":
        sizes = [(shape.B, shape.N, shape.C)]  # type: ignore[list-item]  # of a token
    return [torch.randn(size, generator=draws).to(dtype).requires_grad_() for size in sizes]


def results(attend: Callable[..., Tensor], module: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    out = attend(*inputs)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out)
    wanted = [*inputs, *module.parameters()]
    return [out.detach(), *torch.autograd.grad(out, wanted, weight, allow_unused=True, materialize_grads=True)]


def held(case: str, shape: Shape) -> None:
    """form=fla gives the formula's output and gradients in float64."""
    module, inputs = build(case, shape, form="fla"), inputs_of(case, shape)
    exact = copy.deepcopy(module).double()
    expected = results(exact.dense, exact, [x.detach().double().requires_grad_() for x in inputs])  # type: ignore[arg-type]  # every variant has one
    off = [gap(one.double(), other) for one, other in zip(results(module, module, inputs), expected, strict=True)]
    assert max(off) < 1e-4, f"{case}: output and gradients are off by {off}"


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_given_what_its_formula_takes(case: str) -> None:
    held(case, shape_of(case))


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("case", CASES)
def test_in_bfloat16_the_kernel_is_what_auto_takes(case: str) -> None:
    """A trial with gradients compares it in the dtype of the layer, and not in that of the sums."""
    shape = shape_of(case)
    module = build(case, shape).to(torch.bfloat16)
    counted = count(lambda: module(*inputs_of(case, shape, torch.bfloat16)))
    assert not [why for why in forms.passed_over() if "form=fla" in why]  # a window has another kernel
    assert counted.kernel is not None
    assert "fla" in counted.kernel


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("case", ["mesa", "path", "fox", "abc:slots=16", "deltaformer"])
def test_a_layer_hands_its_kernel_nothing_that_must_be_copied(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, whole = case.partition(":")[0], list[bool]()
    row = KERNELS[name]

    def noting(kernel: Callable[..., Any], *given: Tensor, **named: Any) -> Any:
        whole.extend(x.is_contiguous() for x in given[:3])
        return row.call(kernel, *given, **named)

    monkeypatch.setitem(KERNELS, name, row._replace(call=noting))
    shape = shape_of(case)
    build(case, shape, form="fla")(*inputs_of(case, shape))
    assert whole == [True] * 3


@pytest.mark.usefixtures("fla")
def test_the_sums_of_few_channels_are_those_of_the_same_formula() -> None:
    held("taylor", shape_of("taylor", head_dim=8))


class Backwards(torch.autograd.Function):
    """In float16 backwards, where small numbers are 0."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.half().to(grad.dtype)


@pytest.mark.usefixtures("fla")
def test_mesa_s_kernel_sees_gradients_of_size_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It solves for them in float16, and adds 1e-5 to the squares of their lengths."""
    halved: Callable[[Tensor], Tensor] = Backwards.apply
    monkeypatch.setattr(sys.modules["fla.ops.mesa_net"], "chunk_mesa_net", lambda *x, **y: (halved(mesa(*x, **y)[0]),))
    (x,) = inputs_of("mesa", shape_of("mesa"))
    found = []
    for form in ("torch", "fla"):
        out = build("mesa", shape_of("mesa"), form=form)(x)
        found.append(torch.autograd.grad(out.sum() * 1e-12, x)[0] * 1e12)
    assert gap(*found) < 1e-3
    assert not torch.autograd.grad(build("mesa", shape_of("mesa"), form="fla")(x).sum() * 0.0, x)[0].any()


@pytest.mark.usefixtures("fla")
def test_squares_of_long_sequences_stay_within_float16() -> None:
    case = "kernel:sim=rebased,order=dense"
    shape = shape_of(case, seq_len=3000, head_dim=64, heads=1, batch=1)
    q, k, v = (x.detach() for x in inputs_of(case, shape, torch.float16))
    module = build(case, shape, form="fla")
    expected = build(case, shape, form="torch")(q.float(), k.float(), v.float())
    assert gap(module.half()(q, k, v).float(), expected) < 0.01


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize(
    ("case", "more"),
    [
        ("path", {"causal": False}),
        ("path", {"head_dim": 24}),
        ("path:chunk=32", {}),
        ("fox", {"causal": False}),
        ("fox:chunk=32", {}),
        ("abc", {"causal": False}),
        ("abc:chunk=32", {}),
        ("mesa", {"head_dim": 144}),
        ("mesa:chunk=32", {}),
        ("parallax", {"causal": False}),
        ("parallax", {"v_dim": 8}),
        ("kernel", {}),
        ("kernel:sim=rebased", {}),  # its sums take n·D³, and the kernel forms all pairs
        ("kernel:sim=rebased,order=dense", {"mask": "sliding:4"}),
        ("deltaformer", {"head_dim": 24}),
        ("deltaformer:chunk=32", {}),
        ("taylor", {"causal": False}),
        ("taylor", {"head_dim": 144}),
        ("taylor:chunk=32", {}),
        ("nsa:block=8,length=8,stride=4", {}),
        ("nsa:block=48", {}),
        ("nsa", {"causal": False}),
        ("nsa:branch=window", {"heads": 16, "kv_heads": 1}),
    ],
)
def test_what_no_kernel_computes_is_refused_by_name_and_left_to_the_operations(case: str, more: dict[str, Any]) -> None:
    shape = shape_of(case, **more)
    with pytest.raises(Unsupported, match="form=fla has no kernel for these options and this causality; form=torch"):
        build(case, shape, form="fla")
    module, inputs = build(case, shape), inputs_of(case, shape)
    if shape.E != shape.D:
        inputs[2] = inputs[2][..., : shape.E]
    assert count(lambda: module(*inputs)).kernel in (None, "torch")


@pytest.mark.usefixtures("fla")
def test_a_quadratic_kernel_serves_taylor_only_by_name() -> None:
    """Heads of up to 16 channels have a linear one."""
    for width, kernel in ((16, "fla"), (17, "torch")):
        shape = shape_of("taylor", head_dim=width, seq_len=40, heads=1, batch=1)
        for form, runs in (("auto", kernel), ("fla", "fla")):
            module = build("taylor", shape, form=form)
            assert count(lambda: module(*inputs_of("taylor", shape))).kernel == runs  # noqa: B023  # counted at once


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("case", ["path", "fox", "parallax", "taylor", "kernel:sim=rebased,order=dense", "nsa"])
def test_padding_is_left_to_the_operations(case: str) -> None:
    shape = shape_of(case)
    mask = torch.rand(shape.B, shape.N, generator=torch.Generator().manual_seed(5)) < 0.7
    module, inputs = build(case, shape), inputs_of(case, shape)
    assert count(lambda: module(*inputs, key_mask=mask)).kernel == "torch"
    with pytest.raises(Unsupported, match="key padding: flash-linear-attention's kernel takes no mask; form=torch"):
        build(case, shape, form="fla")(*inputs, key_mask=mask)


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("case", ["mesa", "abc", "deltaformer"])
def test_padded_tokens_are_cut_out_before_the_kernel(case: str) -> None:
    shape = shape_of(case)
    mask = torch.rand(shape.B, shape.N, generator=torch.Generator().manual_seed(5)) < 0.7
    (x,) = inputs_of(case, shape)
    got, expected = (build(case, shape, form=form)(x, key_mask=mask)[mask] for form in ("fla", "torch"))
    assert gap(got, expected) < 1e-4


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("case", ["deltaformer", "deltaformer:asks=key"])
@pytest.mark.parametrize("more", [{"seq_len": 530, "batch": 1}, {"causal": False}, {"seq_len": 64}])
def test_deltaformer_s_kernel_is_given_whole_blocks_from_either_end(case: str, more: dict[str, Any]) -> None:
    held(case, shape_of(case, **more))


def test_what_no_extra_brings_is_asked_for_by_name_only(fla: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row says of deltaformer that a package is missing which its users cannot get with the others."""
    monkeypatch.setattr(forms, "find_spec", lambda name: None if name == "fla.layers" else name)
    shape, more = shape_of("deltaformer"), r"modules that fla-core has not got; pip install flash-linear-attention"
    with pytest.raises(Unsupported, match=f"^form=fla needs {more}$"):
        build("deltaformer:form=fla", shape)
    assert count(lambda: build("deltaformer", shape)(*inputs_of("deltaformer", shape))).kernel == "torch"
    assert forms.passed_over() == []
    build("fox:form=fla", shape)

    def nowhere(name: str) -> None:  # as Python answers for a part of a package that is not there at all
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(forms, "find_spec", nowhere)
    with pytest.raises(Unsupported, match="pip install flash-linear-attention"):
        build("deltaformer:form=fla", shape)
