"""Patterns and choices in one kernel of FlexAttention: its block masks, and its numbers in uncompiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as of_torch
from torch import Tensor, nn

from attnbench.catalogue.build import build
from attnbench.catalogue.engines import forms
from attnbench.catalogue.engines.flex import flex_attention
from attnbench.contract.capabilities import chooser
from attnbench.contract.compiled import out_of_sight
from attnbench.contract.problem.reference import relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.errors import Unsupported
from attnbench.measure.flops import count

pytestmark = [
    # Loading the compiler imports a part of torch that uses another, deprecated one.
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    # It asks each tensor that a function of a pair reads for its gradient, a learned bias's line too.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

B, H, N, D = 2, 2, 270, 8  # three blocks, the last one ragged

PATTERNS = [
    # options, causal, padding, bias and sink
    ("local:window=40", False, False, "none", "none"),
    ("local:window=140", True, True, "alibi", "learned"),
    ("local:window=20,dilation=3", True, False, "relative", "none"),
    ("local:block=50,look_around=1", False, True, "none", "learned"),
    ("longformer:window=20,global_tokens=3", False, True, "alibi", "learned"),
    ("longformer:window=20,global_tokens=130,dilation=2,projections=own", False, False, "none", "none"),
    ("streaming:window=40,sinks=4", True, False, "none", "none"),
    ("streaming:window=40,sinks=4", False, True, "none", "none"),
    ("sparse:length=17", True, True, "alibi", "none"),
    ("sparse:pattern=fixed,length=17,summary=3", False, False, "none", "none"),
    ("sparse:pattern=stride,length=130", True, False, "none", "none"),
    ("sparse:length=17,heads=split", False, True, "alibi", "none"),
    ("etc:window=20,global_tokens=5,max_distance=3", False, True, "none", "none"),
    ("bigbird:block=20,random_blocks=2", False, False, "relative", "none"),
    ("graph:edges=2,ring=3,form=flex", True, True, "none", "none"),
    ("graph:edges=2,ring=3,form=flex", False, False, "none", "none"),
]


CHOICES = [
    # options, causal, padding, sink, heads of queries for one of keys
    ("moba:block=16,blocks=3", True, False, "none", 1),
    ("moba:block=100,blocks=2", False, True, "learned", 2),
    ("oracle-blocks:block=3,blocks=20", True, True, "none", 1),
    ("xattention:block=64,stride=8,threshold=0.5", True, False, "learned", 2),
    ("xattention:block=256,stride=8,threshold=0.5", False, False, "none", 1),
    ("flexprefill:block=32,mass=0.5,least=0,distance=0", True, True, "none", 1),
    ("minference:block=16,vertical=9,first=3,slash=9,recent=2,last=20", True, False, "none", 1),
    ("minference:pattern=a-shape,block=32,sink=3,window=40", True, False, "none", 2),
    ("sparge:queries=64,keys=16,similarity=0,threshold=0.5", True, True, "none", 1),
    ("msa:block=16,blocks=3,index_dim=4", True, False, "none", 1),
    ("nsa:block=16,length=8,stride=4,top_n=4,window=20", True, True, "none", 2),
    ("nsa:block=16,length=8,stride=4,top_n=4,branch=selected", False, False, "none", 2),
    ("nsa:branch=window,window=140", True, False, "none", 2),
    ("sta:frame=4x6,tile=2x2x3,window=3x1x2,text=9", False, False, "learned", 2),
    ("radial:frame=20,block=8,text=5", False, False, "none", 1),
]


class Uncompiled:
    """What takes the place of the compiled kernel: the same call, pair by pair, and the block masks that it got."""

    def __init__(self) -> None:
        self.masks: list[Any] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, blocks: Callable[[], Any], **given: Any) -> Tensor:
        self.masks.append(blocks())
        return out_of_sight(
            lambda: flex_attention._attend(q, k, v, given["score_mod"], self.masks[-1], given["sink"]),
            like=v,
            kernel="flex",
            matmul_flops=0,
        )


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Uncompiled]:
    """A processor that forms take for a GPU, on which the kernel is not compiled."""
    made = Uncompiled()
    monkeypatch.setattr(flex_attention.FlexKernel, "__call__", lambda self, *given, **more: made(*given, **more))
    monkeypatch.setattr(of_torch, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(of_torch, "_validate_device", lambda *x: None)  # refuses gradients on a processor
    monkeypatch.setattr(forms, "on_device", lambda x: True)
    monkeypatch.setattr(forms, "a_device", lambda: True)
    forms.forget()
    yield made
    forms.forget()


def some_keys() -> Tensor:
    """The middle of the first sequence, and every seventh of the second."""
    mask = torch.zeros(B, N, dtype=torch.bool)
    mask[0, 140:160], mask[1, ::7] = True, True
    return mask


def holds_the_pairs(mask: Any, pattern: Tensor) -> None:
    """The listed blocks hold every pair of ``(B, H, n, n)``, and those that are not asked about hold no other."""
    heads, n, size = mask.kv_indices.shape[:2], pattern.shape[2], mask.BLOCK_SIZE[0]
    computed, full = torch.zeros(2, *heads, n, n, dtype=torch.bool)
    for b, h in torch.cartesian_prod(*map(torch.arange, heads)).tolist():
        for counts, indices, whole in (
            (mask.full_kv_num_blocks, mask.full_kv_indices, True),
            (mask.kv_num_blocks, mask.kv_indices, False),
        ):
            for row in range(-(-n // size)):
                for block in indices[b, h, row, : counts[b, h, row]].tolist():
                    part = b, h, slice(size * row, size * row + size), slice(size * block, size * block + size)
                    assert not computed[part].any(), "a block is computed twice"
                    computed[part] = True
                    full[part] = whole
    assert computed.expand_as(pattern)[pattern].all()
    assert pattern[full.expand_as(pattern)].all()


def made(text: str, causal: bool, bias: str, sink: str, groups: int = 1) -> nn.Module:
    kv_heads = H // groups if groups > 1 else None
    return build(text, Shape(B, H, N, D, causal=causal, bias=bias, sink=sink, kv_heads=kv_heads), seed=3)  # type: ignore[arg-type]  # names


@pytest.mark.parametrize(("text", "causal", "padded", "bias", "sink"), PATTERNS)
def test_a_pattern_in_one_kernel_equals_its_formula_with_gradients(
    text: str, causal: bool, padded: bool, bias: str, sink: str, uncompiled: Uncompiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Untraced code gives no gradient to what a function of a pair reads; tracing takes seconds.
    monkeypatch.setattr(of_torch, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", not text.startswith("etc"))
    module: Any = made(text, causal, bias, sink)
    mask = some_keys() if padded else None
    generator = torch.Generator().manual_seed(1)
    inputs = [x.requires_grad_() for x in torch.randn(3, B, H, N, D, generator=generator)]
    counted = count(lambda: module(*inputs, key_mask=mask))
    assert forms.passed_over() == []
    assert uncompiled.masks
    double = [x.detach().double().requires_grad_() for x in inputs]
    want = module.dense(*double, key_mask=mask)
    assert relative_error(counted.output, want) < 1e-6
    grad = torch.randn(counted.output.shape, generator=generator)
    for one, other in zip(
        torch.autograd.grad(counted.output, inputs, grad), torch.autograd.grad(want, double, grad.double()), strict=True
    ):
        assert relative_error(one, other) < 2e-6
    if not hasattr(module, "groups") or module.groups is None:
        zeros, values = torch.zeros(B, H, N, D), torch.eye(N).expand(B, H, N, N)
        if getattr(module, "maps", None) is None:
            holds_the_pairs(uncompiled.masks[-1], module.dense(zeros, zeros, values, key_mask=mask) > 0)


@pytest.mark.parametrize(("text", "causal", "padded", "sink", "groups"), CHOICES)
def test_a_choice_in_one_kernel_equals_the_operations_with_gradients(
    text: str,
    causal: bool,
    padded: bool,
    sink: str,
    groups: int,
    uncompiled: Uncompiled,
) -> None:
    module: Any = made(text, causal, "none", sink, groups)
    mask = some_keys() if padded else None
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(B, heads, N, D, generator=generator) for heads in (H, H // groups, H // groups)]
    inputs = [x.requires_grad_() for x in inputs]
    grad = torch.randn(B, H, N, D, generator=generator)

    def computed() -> tuple[Tensor, ...]:
        out = module(*inputs, key_mask=mask)
        return out, *torch.autograd.grad(out, inputs, grad)

    got = computed()
    assert forms.passed_over() == []
    last = uncompiled.masks[-1]
    if chooser(module) is not None:
        with torch.no_grad():
            holds_the_pairs(last, module.select(*inputs[:2], key_mask=mask).pairs(slice(0, N)).expand(B, H, N, N))
    for flex in (module.flex, getattr(module, "flex_near", module.flex)):
        flex.form = "torch"
    for one, other in zip(got, computed(), strict=True):
        assert relative_error(one, other) < 2e-6
    assert uncompiled.masks[-1] is last


def test_block_masks_of_choices_are_made_with_the_choice(uncompiled: Uncompiled) -> None:
    module: Any = made("moba:block=16,blocks=3", causal=True, bias="none", sink="none")
    q, k, v = torch.randn(3, B, H, N, D)
    selection = module.select(q, k)
    module.attend(q, k, v, selection)
    assert uncompiled.masks[-1] is selection.block_mask


@pytest.mark.usefixtures("uncompiled")
def test_block_masks_are_kept_and_padding_is_that_of_the_call(uncompiled: Uncompiled) -> None:
    module: Any = made("local:window=9", causal=True, bias="none", sink="none")
    x = torch.randn(3, B, H, N, D)
    asked: list[int] = []
    sees = module._sees
    module._sees = lambda i, j: asked.append(1) or sees(i, j)
    first, mask = module(*x), some_keys()
    assert relative_error(module(*x, key_mask=mask), module.dense(*x.double(), key_mask=mask)) < 1e-6
    assert relative_error(module(*x, key_mask=~mask), module.dense(*x.double(), key_mask=~mask)) < 1e-6
    asked.clear()
    kept = uncompiled.masks[-1].kv_indices
    assert torch.equal(module(*x), first)
    module(*x, key_mask=mask)
    assert uncompiled.masks[-1].kv_indices is kept
    assert relative_error(module(*x[:, :, :, :200]), module.dense(*x[:, :, :, :200].double())) < 1e-6


def test_options_without_a_kernel_are_refused_by_name_and_else_run_as_operations(uncompiled: Uncompiled) -> None:
    with pytest.raises(Unsupported, match="form=flex has no kernel for these options"):
        made("streaming:rotary=true,form=flex", causal=True, bias="none", sink="none")
    with pytest.raises(Unsupported, match="form=flex has no kernel for these options"):
        build("graph:form=flex", Shape(seq_len=16_385))
    module = made("streaming:rotary=true", causal=True, bias="none", sink="none")
    x = torch.randn(3, B, H, N, D)
    assert count(lambda: module(*x)).kernel == "torch"
    assert not uncompiled.masks


def test_on_a_processor_the_operations_run_unless_the_kernel_is_named() -> None:
    module = made("local:window=9", causal=False, bias="none", sink="none")
    x = torch.randn(3, B, H, N, D)
    assert count(lambda: module(*x)).kernel is None
    module = made("local:window=9,form=flex", causal=False, bias="none", sink="learned")
    with pytest.raises(Unsupported, match="no sums of exponentials on a CPU"):
        module(*x)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("text", "causal", "padded", "bias", "sink"),
    [
        ("local:window=128", True, False, "none", "none"),
        ("local:window=128", True, True, "none", "learned"),
        ("longformer", False, False, "none", "none"),
        ("streaming", True, False, "none", "none"),
        ("sparse", True, False, "none", "none"),
        ("graph:form=flex", True, False, "none", "none"),
        ("bigbird", False, False, "none", "none"),
        ("moba", True, False, "none", "none"),
        ("xattention:threshold=0.5", True, False, "none", "none"),
        ("sta", False, False, "none", "none"),
    ],
)
def test_on_a_gpu_the_kernel_is_the_default_and_right(
    text: str, causal: bool, padded: bool, bias: str, sink: str
) -> None:
    n, width = 1000, 64
    shape = Shape(B, 4, n, width, causal=causal, bias=bias, sink=sink)  # type: ignore[arg-type]  # names
    module: Any = build(text, shape, seed=3).cuda()
    mask = torch.rand(B, n, device="cuda") < 0.5 if padded else None
    inputs = [x.requires_grad_() for x in torch.randn(3, B, 4, n, width, device="cuda", dtype=torch.bfloat16)]
    forms.passed_over()
    counted = count(lambda: module(*inputs, key_mask=mask))
    assert forms.passed_over() == []
    assert counted.kernel == "flex"
    double = [x.detach().double().requires_grad_() for x in inputs]
    want, grad = module.dense(*double, key_mask=mask), torch.randn_like(inputs[0])
    assert relative_error(counted.output, want) < 0.02
    got = torch.autograd.grad(counted.output, inputs, grad)
    for one, other in zip(got, torch.autograd.grad(want, double, grad.double()), strict=True):
        assert relative_error(one, other) < 0.03
