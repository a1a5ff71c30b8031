from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.engines import tiling
from attnbench.catalogue.engines.low_rank.thin import FEW, attend_from_few_queries, attend_to_few_keys
from attnbench.measure.memory import peak_tensor_bytes

F64 = torch.float64
Form = Callable[..., Tensor]
FORMS: list[Form] = [attend_to_few_keys, attend_from_few_queries]


def qkv(form: Form, many: int, few: int = 5, layout: str = "heads outside") -> list[Tensor]:
    """q, k and v of two examples with three heads; values are wider than keys."""
    lengths = (many, few, few) if form is attend_to_few_keys else (few, many, many)
    return [heads(length, D, layout) for length, D in zip(lengths, (4, 4, 6), strict=True)]


def heads(length: int, D: int, layout: str) -> Tensor:
    if layout == "heads inside":
        return torch.randn(2, length, 3, D, dtype=F64).transpose(1, 2)
    return torch.randn(2, 3, length, D, dtype=F64)


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    logits = q @ k.mT / q.shape[3] ** 0.5
    out: Tensor = (logits if mask is None else logits.masked_fill(~mask, -torch.inf)).softmax(-1) @ v
    return out


@pytest.fixture(params=[4, 6, 7, 18], ids=lambda log2: f"pieces of 2^{log2}")
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 3 tokens or of 12 of one head, pieces of two heads, and all at once."""
    monkeypatch.setitem(tiling.TUNED, "low_rank.weights", tiling.Tuned(1 << request.param, 1))


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("layout", ["heads outside", "heads inside"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("many", [11, 12, 31])
def test_it_is_softmax_attention_with_its_gradients_however_it_is_cut(form: Form, many: int, layout: str) -> None:
    inputs = [x.requires_grad_() for x in qkv(form, many, layout=layout)]
    out, expected = form(*inputs), plain(*inputs)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(out)
    for found, right in zip(
        torch.autograd.grad(out, inputs, direction), torch.autograd.grad(expected, inputs, direction), strict=True
    ):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("layout", ["heads outside", "heads inside"])
def test_weights_that_are_kept_give_the_same_gradients(layout: str) -> None:
    inputs = [x.requires_grad_() for x in qkv(attend_to_few_keys, 31, layout=layout)]
    kept, computed = (
        torch.autograd.grad(attend_to_few_keys(*inputs, keep=keep).square().sum(), inputs) for keep in (True, False)
    )
    for one, other in zip(kept, computed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_that_is_one_number_for_all_is_taken_as_it_comes(form: Form) -> None:
    inputs = [x.requires_grad_() for x in qkv(form, 31)]
    for found, right in zip(
        torch.autograd.grad(form(*inputs).sum(), inputs),
        torch.autograd.grad(plain(*inputs).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_masked_keys_take_no_part(form: Form) -> None:
    q, k, v = qkv(form, 31)
    mask = torch.rand(2, 1, 1, k.shape[2]) < 0.5
    mask[..., 0] = True
    torch.testing.assert_close(form(q, k, v, mask), plain(q, k, v, mask), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("few", [1, FEW, FEW + 1])
def test_more_than_a_few_is_right_as_well(form: Form, few: int) -> None:
    inputs = qkv(form, 31, few)
    torch.testing.assert_close(form(*inputs), plain(*inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("form", FORMS)
def test_large_logits_overflow_in_no_piece(form: Form) -> None:
    q, k, v = qkv(form, 31)
    out = form(1000 * q, k, v)
    torch.testing.assert_close(out, plain(1000 * q, k, v), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_it_holds_a_piece_of_the_weights_beside_the_output(form: Form) -> None:
    q, k, v = (
        torch.randn(1, 2, length, 16) for length in ((65536, 64, 64) if form is FORMS[0] else (64, 65536, 65536))
    )
    output = 4 * q.numel()
    with torch.inference_mode():
        peak = peak_tensor_bytes(lambda: form(q, k, v), "cpu")
    assert peak is not None
    assert peak < output + 1.5 * 2**20


@pytest.mark.parametrize("form", FORMS)
def test_it_compiles_as_one_graph_with_heads_inside(form: Form) -> None:
    inputs = [x.requires_grad_() for x in qkv(form, 12, layout="heads inside")]
    out = torch.compile(form, backend="eager", fullgraph=True)(*inputs)
    torch.testing.assert_close(out, plain(*inputs), rtol=1e-12, atol=1e-12)


def test_an_empty_batch_has_an_empty_output() -> None:
    q, k, v = torch.empty(0, 2, 30, 4), torch.empty(0, 2, 5, 4), torch.empty(0, 2, 5, 3)
    assert attend_to_few_keys(q, k, v).shape == (0, 2, 30, 3)
