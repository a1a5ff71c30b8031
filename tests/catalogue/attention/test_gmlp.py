from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from attnbench.catalogue.attention.synthetic.gmlp import GMLP
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built, close, draw


def make(shape: Shape, options: str = "ffn=10", *, trained: bool = True) -> GMLP:
    module = built(GMLP, f"gmlp:{options}".rstrip(":"), shape)
    if trained:
        with torch.no_grad():
            for parameter in (module.W, module.b, module.norm.weight, module.norm.bias):
                parameter.normal_()
    return module.double()


def halves(module: GMLP, x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = gelu(module.U(x)).split(5, -1)
    return first, torch.nn.functional.layer_norm(second, (5,), module.norm.weight, module.norm.bias)


def test_with_no_mixture_and_a_bias_of_one_it_is_a_feed_forward_layer_of_the_first_half() -> None:
    module, x = make(Shape(2, 2, 9, 2)), draw(2, 9, 4)
    with torch.no_grad():
        module.W.zero_()
        module.b.fill_(1.0)
    close(module(x), module.V(halves(module, x)[0]))


def test_with_an_identity_the_halves_are_multiplied() -> None:
    module, x = make(Shape(2, 2, 9, 2)), draw(2, 9, 4)
    with torch.no_grad():
        module.W.copy_(torch.eye(9))
        module.b.zero_()
    first, second = halves(module, x)
    close(module(x), module.V(first * second))


def test_the_bias_belongs_to_the_position() -> None:
    module, x = make(Shape(1, 2, 9, 2)), draw(1, 9, 4)
    before = module(x)
    with torch.no_grad():
        module.b[5] += 1
    first, _ = halves(module, x)
    changed = torch.zeros(9, 1, dtype=torch.float64)
    changed[5] = 1
    close(module(x) - before, (first * changed) @ module.V.weight.T)


@pytest.mark.parametrize("causal", [False, True])
def test_the_tiny_attention_is_softmax_attention_of_one_head_added_to_the_gate(causal: bool) -> None:
    module, x = make(Shape(2, 2, 9, 2, causal=causal), "ffn=10,attention=3"), draw(2, 9, 4)
    assert module.qkv is not None
    assert module.from_head is not None
    plain = make(Shape(2, 2, 9, 2, causal=causal))
    plain.load_state_dict({name: value for name, value in module.state_dict().items() if "." not in name}, strict=False)
    for name in ("U", "V", "norm"):
        getattr(plain, name).load_state_dict(getattr(module, name).state_dict())
    q, k, v = (y[:, None] for y in module.qkv(x).split(3, -1))
    head = module.from_head(exact_attention(q, k, v, causal=causal)[:, 0])
    close(module(x) - plain(x), (halves(module, x)[0] * head) @ module.V.weight.T)


def test_it_starts_next_to_a_layer_that_mixes_nothing() -> None:
    module, x = make(Shape(1, 2, 16, 8), "", trained=False), draw(1, 16, 16)
    assert module.U.out_features == 6 * 16
    first = gelu(module.U(x)).chunk(2, -1)[0]
    error = (module(x) - module.V(first)).norm() / module(x).norm()
    assert 0 < error < 0.02


def test_a_shorter_input_uses_the_first_rows() -> None:
    module, x = make(Shape(1, 2, 9, 2)), draw(1, 6, 4)
    before = module(x)
    with torch.no_grad():
        module.W[6:] += 1
        module.W[:, 6:] += 1
    close(module(x), before)
