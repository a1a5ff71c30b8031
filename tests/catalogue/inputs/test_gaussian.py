from __future__ import annotations

import math

import pytest
import torch

from attnbench.contract.inputs import INPUTS, draw_qkv
from attnbench.contract.problem.reference import exact_attention, relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.errors import UsageError

SYNTHETIC = ("gaussian", "peaked", "clustered", "low-rank", "banded")


def test_inputs_are_listed_in_the_order_shown_to_users() -> None:
    assert INPUTS.names() == [*SYNTHETIC[:3], "sink", *SYNTHETIC[3:], "listops", "smollm2", "minilm", "file"]


@pytest.mark.parametrize("name", INPUTS.names())
def test_every_input_has_a_summary_of_one_line_and_described_options(name: str) -> None:
    entry = INPUTS.get(name)
    assert 10 < len(entry.summary) <= 80
    assert entry.summary.endswith(".")
    assert all(option.description for option in entry.options.values())


@pytest.mark.parametrize("name", SYNTHETIC)
@pytest.mark.parametrize("shape", [Shape(2, 3, 17, 16, 29), Shape(1, 1, 1, 9), Shape(2, 1, 7, 8, causal=True)], ids=str)
def test_shapes_dtype_and_seed(name: str, shape: Shape) -> None:
    inputs = parse_spec(name)
    q, k, v = draw_qkv(inputs, shape, seed=3)
    assert q.shape == (shape.B, shape.H, shape.N, shape.D)
    assert k.shape == v.shape == (shape.B, shape.H, shape.M, shape.D)
    assert {x.dtype for x in (q, k, v)} == {torch.float32}
    assert all(x.isfinite().all() for x in (q, k, v))
    for drawn, again, other in zip((q, k, v), draw_qkv(inputs, shape, 3), draw_qkv(inputs, shape, 4), strict=True):
        assert torch.equal(drawn, again)
        assert not torch.equal(drawn, other)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_drawing_leaves_the_global_generator_alone(name: str) -> None:
    before = torch.get_rng_state()
    draw_qkv(parse_spec(name), Shape(1, 1, 8, 16), 0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", SYNTHETIC)
def test_logit_std_must_be_positive(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: option logit_std=0 must be greater than 0"):
        draw_qkv(parse_spec(f"{name}:logit_std=0"), Shape(1, 1, 4, 8), 0)


@pytest.mark.parametrize("std", [0.1, 1, 4])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_logits_have_the_standard_deviation_asked_for(std: float, head_dim: int) -> None:
    q, k, v = draw_qkv(parse_spec(f"gaussian:logit_std={std}"), Shape(1, 8, 256, head_dim), 0)
    logits = q @ k.mT * head_dim**-0.5
    assert logits.std().item() == pytest.approx(std, rel=0.03)
    assert logits.mean().item() == pytest.approx(0, abs=0.02 * std)
    assert v.std().item() == pytest.approx(1, rel=0.03)


@pytest.mark.parametrize("std", [0.25, 0.5, 1.0])
def test_the_mean_of_v_is_as_wrong_as_documented(std: float) -> None:
    q, k, v = draw_qkv(parse_spec(f"gaussian:logit_std={std}"), Shape(1, 4, 2048, 64), 0)
    exact = exact_attention(q[:, :, :256], k, v)
    trivial = v.mean(2, keepdim=True).expand_as(exact)
    assert relative_error(trivial, exact) == pytest.approx(math.sqrt(1 - math.exp(-(std**2))), rel=0.08)
