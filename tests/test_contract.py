"""The laws that every variant meets. What a variant is excused from, its traits say, with the reason."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

import attnbench.attention
from attnbench.cell import ModelSize
from attnbench.errors import Unsupported
from attnbench.measure.memory import peak_tensor_bytes
from attnbench.model import Encoder, as_layer
from attnbench.reference import exact_attention, masked_attention
from attnbench.shape import Shape
from attnbench.spec import Scalar, Spec, parse_spec
from attnbench.variant import VARIANTS, No, Traits, Variant, build

ALL = [entry for entry in VARIANTS if entry.make.__module__.startswith("attnbench.attention.")]

OPTIONS: dict[str, dict[str, Scalar]] = {
    entry.name: dict(parse_spec(f"{entry.name}:{entry.settings[0]}".rstrip(":")).options) for entry in ALL
}
"""Options that make each variant do its work, not degenerate into exact attention, at the sizes used here."""

MODES = [f"{entry.name}:{setting}" for entry in ALL for setting in entry.settings[1:]]
"""Other algorithms under the same name, for the laws that are broken most easily."""

BELOW_FOUR: dict[str, dict[str, Scalar]] = {"linformer": {"rank": 1}}
"""For lengths below 4, where the options above are refused."""

SHAPE = Shape(batch=2, heads=2, seq_len=23, head_dim=4)
F64 = torch.float64

MORE = ALL + [replace(VARIANTS.get(text.partition(":")[0]), name=text) for text in MODES]
OPERATORS = [entry for entry in ALL if entry.kind == "operator"]
PADDED = [entry for entry in MORE if entry.traits.key_padding]


@pytest.fixture(scope="module", autouse=True)
def _quick_collection() -> Iterator[None]:
    """The memory measurement collects garbage first; among all of torch's objects that takes longer than the rest."""
    gc.freeze()
    yield
    gc.unfreeze()


def each(entries: list[Variant]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("entry", entries, ids=lambda entry: entry.name)


def each_shape(entries: list[Variant]) -> pytest.MarkDecorator:
    """Each variant without and, where it can, with causality."""
    cases = [(entry, causal) for entry in entries for causal in (False, True) if entry.traits.causal or not causal]
    ids = [entry.name + "-causal" * causal for entry, causal in cases]
    shapes = [(entry, replace(SHAPE, causal=causal)) for entry, causal in cases]
    return pytest.mark.parametrize(("entry", "shape"), shapes, ids=ids)


def make(entry: Variant, shape: Shape, *, seed: int = 0, dtype: torch.dtype = F64) -> nn.Module:
    options = OPTIONS.get(entry.name, {}) | (BELOW_FOUR.get(entry.name, {}) if shape.M < 4 else {})
    return build(entry.name, shape, seed=seed, **options).to(dtype)


def draw(entry: Variant, shape: Shape, dtype: torch.dtype = F64, *, grad: bool = False) -> list[Tensor]:
    """q, k, v for an operator, x for a mixer; tokens along axis -2."""
    one = (shape.B, shape.H, shape.M, shape.D)
    sizes = [(shape.B, shape.N, shape.C)] if entry.kind == "mixer" else [(*one[:2], shape.N, shape.D), one, one]
    return [torch.randn(size, dtype=F64).to(dtype).requires_grad_(grad) for size in sizes]


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# What a variant says about itself


def test_every_file_with_a_variant_is_imported_by_the_package() -> None:
    files = Path(attnbench.attention.__path__[0]).glob("*.py")
    written = {path.stem for path in files if "\n@register(" in path.read_text(encoding="utf-8")}
    assert written == {entry.make.__module__.rpartition(".")[2] for entry in ALL}


@each(ALL)
def test_it_describes_itself_in_one_line_each(entry: Variant) -> None:
    for text in (entry.summary, entry.source, entry.formula, entry.cost):
        assert text
        assert "\n" not in text
    assert len(entry.summary) <= 80
    assert entry.make.__doc__ is not None


@each(ALL)
def test_every_option_has_a_default_and_says_what_it_is(entry: Variant) -> None:
    for name, option in entry.options.items():
        assert not option.is_required(), name
        assert option.description, name


@each(ALL)
def test_what_it_cannot_do_is_refused_with_the_reason(entry: Variant) -> None:
    cross = replace(SHAPE, kv_len=SHAPE.N + 1)
    for trait, shape in ((entry.traits.causal, replace(SHAPE, causal=True)), (entry.traits.cross, cross)):
        if trait:
            make(entry, shape)
            continue
        assert isinstance(trait, No)
        assert 10 < len(trait) <= 120
        with pytest.raises(Unsupported) as refusal:
            make(entry, shape)
        assert trait in str(refusal.value)
    if not entry.traits.key_padding:
        assert isinstance(entry.traits.key_padding, No)
        assert entry.traits.key_padding in str(entry.unsupported_reason(SHAPE, key_mask=True))


# Shapes and types


@each_shape(ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, F64], ids=str)
def test_shape_and_type_are_kept(entry: Variant, dtype: torch.dtype, shape: Shape) -> None:
    inputs = draw(entry, shape, dtype)
    out = make(entry, shape, dtype=dtype)(*inputs)
    assert out.shape == inputs[0].shape
    assert out.dtype == dtype
    assert out.isfinite().all()


@each_shape(ALL)
@pytest.mark.parametrize("length", [1, 2, 7, 12, 29])
def test_any_length_will_do(entry: Variant, length: int, shape: Shape) -> None:
    shape = replace(shape, seq_len=length)
    module, inputs = make(entry, shape), draw(entry, shape)
    out = module(*inputs)
    assert out.shape == inputs[0].shape
    assert out.isfinite().all()


@each([entry for entry in ALL if entry.traits.cross])
def test_keys_may_come_from_a_sequence_of_another_length(entry: Variant) -> None:
    for kv_len in (9, 31):
        shape = replace(SHAPE, kv_len=kv_len)
        module, (q, k, v) = make(entry, shape), draw(entry, shape)
        out = module(q, k, v)
        assert out.shape == q.shape
        assert out.isfinite().all()


# What may influence what


@each([entry for entry in MORE if entry.traits.causal])
@pytest.mark.parametrize("change", ["noise", "last token times three", "last token times thirty"])
def test_later_tokens_change_nothing(entry: Variant, change: str) -> None:
    shape = replace(SHAPE, causal=True)
    module, before = make(entry, shape), draw(entry, shape)
    expected = module(*before)
    for t in (0, 11, 21):
        after = [x.clone() for x in before]
        for x in after:
            if change == "noise":
                x[..., t + 1 :, :] = torch.randn_like(x[..., t + 1 :, :])
            else:
                x[..., -1, :] *= 3 if "three" in change else 30
        seen = slice(t + 1) if change == "noise" else slice(SHAPE.N - 1)
        close(module(*after)[..., seen, :], expected[..., seen, :])


@each_shape(PADDED)
@pytest.mark.parametrize("real", [22, 21, 12, 5])
def test_padding_gives_what_the_shorter_sequence_gives(entry: Variant, real: int, shape: Shape) -> None:
    module, inputs = make(entry, shape), draw(entry, shape)
    mask = torch.ones(2, SHAPE.N, dtype=torch.bool)
    mask[0, real:] = False
    for x in inputs:
        x[0, ..., real:, :] *= 50
    padded = module(*inputs, key_mask=mask)
    close(padded[:1, ..., :real, :], module(*(x[:1, ..., :real, :] for x in inputs)))
    close(padded[1:], module(*(x[1:] for x in inputs)))
    assert padded.isfinite().all()


@each_shape(PADDED)
def test_what_hidden_keys_hold_changes_nothing(entry: Variant, shape: Shape) -> None:
    module, inputs = make(entry, shape), draw(entry, shape)
    mask = torch.rand(2, SHAPE.N) < 0.6
    real = mask.view(2, *[1] * (inputs[0].ndim - 3), SHAPE.N, 1)
    expected = module(*inputs, key_mask=mask)
    other = module(*(torch.where(real, x, 10 * torch.randn_like(x)) for x in inputs), key_mask=mask)
    close(other * real, expected * real)


@each([entry for entry in OPERATORS if entry.traits.key_padding and entry.traits.cross])
def test_padding_of_another_sequence_gives_what_the_shorter_one_gives(entry: Variant) -> None:
    shape = replace(SHAPE, kv_len=17)
    module, (q, k, v) = make(entry, shape), draw(entry, shape)
    mask = torch.arange(17) < torch.tensor([[11], [17]])
    padded = module(q, k, v, key_mask=mask)
    close(padded[:1], module(q[:1], k[:1, :, :11], v[:1, :, :11]))
    close(padded[1:], module(q[1:], k[1:], v[1:]))


@each_shape([entry for entry in OPERATORS if entry.traits.key_padding])
def test_a_query_that_sees_no_key_gives_zero(entry: Variant, shape: Shape) -> None:
    module, inputs = make(entry, shape), draw(entry, shape, grad=True)
    mask = torch.tensor([[False], [True]]).expand(2, SHAPE.N)
    out = module(*inputs, key_mask=mask)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    out.square().sum().backward()
    assert all(x.grad is None or x.grad.isfinite().all() for x in inputs)


@each_shape(MORE)
def test_an_example_does_not_depend_on_the_others_in_its_batch(entry: Variant, shape: Shape) -> None:
    module, inputs = make(entry, shape), draw(entry, shape)
    for x in inputs:
        x[1] *= 20
    close(module(*inputs)[:1], module(*(x[:1] for x in inputs)))


@each_shape([entry for entry in OPERATORS if entry.traits.rows_sum_to_one])
def test_the_output_is_an_average_of_the_values(entry: Variant, shape: Shape) -> None:
    q, k, v = draw(entry, shape)
    close(make(entry, shape)(q, k, torch.ones_like(v)), torch.ones_like(v))


@each_shape([entry for entry in OPERATORS if entry.traits.exact])
@pytest.mark.parametrize("masked", [False, True])
def test_exact_means_softmax_attention(entry: Variant, shape: Shape, masked: bool) -> None:
    inputs = draw(entry, shape)
    mask = torch.rand(2, SHAPE.N) < 0.6 if masked else None
    expected = exact_attention(*inputs, causal=shape.causal, key_mask=mask)
    close(make(entry, shape)(*inputs, key_mask=mask), expected, 1e-12)


# Decoding


@each([entry for entry in MORE if entry.traits.decode])
@pytest.mark.parametrize("prompt", [0, 9, SHAPE.N - 1])
def test_token_by_token_gives_what_forward_gives(entry: Variant, prompt: int) -> None:
    shape = replace(SHAPE, causal=True)
    module, inputs = make(entry, shape), draw(entry, shape)
    expected = module(*inputs)
    state = module.begin(*(x[..., :prompt, :] for x in inputs[-2:]))
    for t in range(prompt, SHAPE.N):
        token = [x[..., t : t + 1, :] for x in inputs]
        module.step(state, *token)  # nothing that the next line can see
        out, state = module.step(state, *token)
        close(out, expected[..., t : t + 1, :])


# Random numbers


@each(ALL)
def test_the_seed_decides_everything_random(entry: Variant) -> None:
    inputs = draw(entry, SHAPE)
    first, again, other = (make(entry, SHAPE, seed=seed)(*inputs) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert torch.equal(first, other) is not entry.traits.stochastic


@each(ALL)
def test_forward_draws_nothing(entry: Variant) -> None:
    module, inputs = make(entry, SHAPE), draw(entry, SHAPE)
    state = torch.get_rng_state()
    first = module(*inputs)
    assert torch.equal(first, module(*inputs))
    assert torch.equal(state, torch.get_rng_state())


# How it is called


@each(ALL)
def test_inputs_are_left_as_they_were(entry: Variant) -> None:
    module, inputs = make(entry, SHAPE), draw(entry, SHAPE)
    copies = [x.clone() for x in inputs]
    with torch.inference_mode():
        module(*inputs)
    assert all(torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True))


@each_shape(MORE)
def test_inputs_may_be_strided_views(entry: Variant, shape: Shape) -> None:
    module, inputs = make(entry, shape), draw(entry, shape)
    expected = module(*inputs)
    of_one_product = torch.stack(inputs, dim=-3).transpose(1, -2).contiguous().transpose(1, -2).unbind(-3)
    close(module(*of_one_product), expected)
    close(module(*(x.mT.contiguous().mT for x in inputs)), expected)


@each_shape(ALL)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_output_is_the_same(
    entry: Variant, shape: Shape, masked: bool, mode: Callable[[], torch.inference_mode]
) -> None:
    module, inputs = make(entry, shape), draw(entry, shape, grad=True)
    mask = (torch.arange(SHAPE.N) < 19).expand(2, -1) if masked and entry.traits.key_padding else None
    expected = module(*inputs, key_mask=mask)
    with mode():
        close(module(*inputs, key_mask=mask), expected)


@each(ALL)
def test_shapes_can_be_traced_without_computing_or_it_says_that_they_depend_on_the_data(entry: Variant) -> None:
    with FakeTensorMode():
        inputs = draw(entry, SHAPE, torch.float32)
        try:
            out = build(entry.name, SHAPE, **OPTIONS[entry.name])(*inputs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return
        assert out.shape == inputs[0].shape


# Gradients


@each_shape(MORE)
def test_gradients_match_finite_differences(entry: Variant, shape: Shape) -> None:
    shape = replace(shape, batch=1, heads=1, seq_len=7, head_dim=2)
    module, inputs = make(entry, shape), draw(entry, shape, grad=True)
    assert torch.autograd.gradcheck(lambda *x: module(*x), inputs, fast_mode=True)


@each_shape(PADDED)
def test_gradients_match_finite_differences_with_padding(entry: Variant, shape: Shape) -> None:
    shape = replace(shape, batch=1, heads=1, seq_len=7, head_dim=2)
    module, inputs = make(entry, shape), draw(entry, shape, grad=True)
    mask = torch.tensor([[True] * 5 + [False] * 2])
    assert torch.autograd.gradcheck(lambda *x: module(*x, key_mask=mask), inputs, fast_mode=True)


@each(ALL)
def test_gradients_reach_the_values_and_every_parameter(entry: Variant) -> None:
    module, inputs = make(entry, SHAPE), draw(entry, SHAPE, grad=True)
    module(*inputs).square().sum().backward()
    wanted = dict(module.named_parameters()) | {"the values": inputs[-1]}
    for name, tensor in wanted.items():
        assert tensor.grad is not None, name
        assert tensor.grad.isfinite().all(), name
        assert tensor.grad.abs().max() > 0, name


# Memory


@each_shape(ALL)
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_memory_grows_as_claimed(entry: Variant, shape: Shape, training: bool) -> None:
    # With the defaults, whose tiles are of real size, and long enough to fill them.
    small = 256 if entry.memory_exponent > 1.5 else 1024

    def peak(n: int) -> int:
        long = Shape(1, 1, n, 8, causal=shape.causal)
        module = build(entry.name, long)
        inputs = draw(entry, long, torch.float32, grad=training)

        def call() -> None:
            out = module(*inputs)
            if training:
                out.sum().backward()

        with nullcontext() if training else torch.inference_mode():
            bytes_ = peak_tensor_bytes(call)
        assert bytes_ is not None
        return bytes_

    growth = 4 ** max(1.0, entry.memory_exponent)  # the output alone grows linearly
    assert peak(4 * small) <= 1.05 * growth * peak(small)


# Inside a model


@each_shape(ALL)
def test_it_works_as_a_layer_and_in_the_encoder(entry: Variant, shape: Shape) -> None:
    spec = Spec.of(entry.name, OPTIONS[entry.name])
    x = torch.randn(SHAPE.B, SHAPE.N, SHAPE.C)
    assert as_layer(spec, shape)(x).shape == x.shape
    model = Encoder(spec, shape, ModelSize(layers=2, ffn=8, vocab=11)).double()
    tokens = torch.randint(11, (SHAPE.B, SHAPE.N))
    logits = model(tokens)
    assert logits.shape == (SHAPE.B, 2)
    logits.square().sum().backward()
    assert model.token.weight.grad is not None
    assert 0 < model.token.weight.grad.abs().max() < torch.inf
    if entry.traits.key_padding:
        mask = torch.arange(SHAPE.N) < torch.tensor([[13], [SHAPE.N]])
        close(model(tokens, key_mask=mask)[:1], model(tokens[:1, :13]))


# The laws themselves


class Broken(nn.Module):
    """Softmax attention that breaks one law, the one it is called by."""

    def __init__(self, shape: Shape, *, law: str = "") -> None:
        super().__init__()
        self.law, self.causal = law, shape.causal and law != "causality"
        self.register_buffer("noise", torch.randn(()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        law = self.law
        allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(0 if self.causal else k.shape[2])
        if key_mask is not None and law != "padding":
            allowed = allowed & key_mask[:, None, None, :]
        if law == "generator":
            torch.rand(())
        if law == "inputs":
            v.add_(1)
        if law == "strides" and not q.is_contiguous():
            q = q + 1
        if law == "modes" and torch.is_grad_enabled():
            q = q + 1
        if law == "gradients":
            k = k.detach()
        out = masked_attention(q, k, v, allowed)
        if law == "seed":
            out = out + self.noise
        if law == "batch":
            out = out * v.abs().max()
        if law == "average":
            out = out * 1.01
        return out.float() if law == "type" else out


LAWS: dict[str, Callable[[Variant, Shape], None]] = {
    "type": lambda entry, shape: test_shape_and_type_are_kept(entry, torch.bfloat16, shape),
    "causality": lambda entry, _: test_later_tokens_change_nothing(entry, "last token times three"),
    "padding": lambda entry, shape: test_padding_gives_what_the_shorter_sequence_gives(entry, 21, shape),
    "batch": test_an_example_does_not_depend_on_the_others_in_its_batch,
    "average": test_the_output_is_an_average_of_the_values,
    "seed": lambda entry, _: test_the_seed_decides_everything_random(entry),
    "generator": lambda entry, _: test_forward_draws_nothing(entry),
    "inputs": lambda entry, _: test_inputs_are_left_as_they_were(entry),
    "strides": test_inputs_may_be_strided_views,
    "modes": lambda entry, shape: test_without_gradients_the_output_is_the_same(entry, shape, False, torch.no_grad),
    "gradients": test_gradients_match_finite_differences,
    "memory": lambda entry, shape: test_memory_grows_as_claimed(entry, shape, False),
}


@pytest.mark.parametrize("law", LAWS)
def test_breaking_a_law_is_noticed(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Variant("broken", Broken, "one law is broken", traits=Traits())
    monkeypatch.setitem(VARIANTS._entries, "broken", entry)
    monkeypatch.setitem(OPTIONS, "broken", {"law": "none broken"})
    if law != "memory":  # which it breaks in any case
        LAWS[law](entry, SHAPE)
    monkeypatch.setitem(OPTIONS, "broken", {"law": law})
    with pytest.raises((AssertionError, RuntimeError)):
        LAWS[law](entry, SHAPE)
