from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from attnbench.catalogue.attention.pattern.etc import Etc
from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from tests.catalogue.attention.patterns import draw
from tests.pairwise import pairwise


def made(n: int, window: int, tokens: int, most: int) -> Etc:
    """With tables that matter."""
    f = build(f"etc:window={window},global_tokens={tokens},max_distance={most}", Shape(2, 2, n, 4)).double()
    for parameter in f.parameters():
        nn.init.normal_(parameter)
    assert isinstance(f, Etc)
    return f


def pair_by_pair(f: Etc, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Both streams as the paper describes them, one query and key at a time."""
    B, H, n, D = q.shape
    g, most = f.global_tokens, f.max_distance
    logits = torch.full((B, H, n, n), float("-inf"), dtype=q.dtype)
    for i in range(n):
        for j in range(n):
            if i >= g and j >= g and abs(i - j) > f.window:
                continue
            key = k[:, :, j]
            if f.tables is not None:
                table = f.tables[1 if i < g else 0]
                same = (i < g) == (j < g)
                key = key + table[:, most + max(-most, min(most, j - i)) if same else 2 * most + 1]
            logits[:, :, i, j] = (q[:, :, i] * key).sum(-1) / D**0.5
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None, None], float("-inf"))
    return logits.softmax(-1).nan_to_num(0) @ v


@pytest.mark.parametrize(("window", "tokens", "most"), pairwise([1, 2, 50], [0, 1, 4, 50], [0, 1, 3, 40]))
def test_each_pair_that_is_seen_adds_the_logit_of_its_relation_to_one_softmax(
    window: int, tokens: int, most: int
) -> None:
    n = 15
    f = made(n, window, tokens, most)
    q, k, v = draw(n)
    for mask in (None, torch.rand(2, n) < 0.6):
        torch.testing.assert_close(f(q, k, v, key_mask=mask), pair_by_pair(f, q, k, v, mask), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("n", "window", "tokens", "most"), pairwise([1, 65, 150], [1, 5, 90, 1000], [0, 3, 70], [0, 1, 12, 300])
)
def test_output_and_all_gradients_are_those_of_the_dense_formula(n: int, window: int, tokens: int, most: int) -> None:
    f = made(n, window, tokens, most)
    wanted_by = [*draw(n), *f.parameters()]
    q, k, v = wanted_by[:3]
    weight = torch.randn_like(v)
    key_mask = torch.rand(2, n) < 0.8
    key_mask[:, 0] = True
    for mask in (None, key_mask) if tokens else (None,):  # a row that sees nothing has no gradient in the dense formula
        out, wanted = f(q, k, v, key_mask=mask), f.dense(q, k, v, key_mask=mask)
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-11)
        pairs = zip(
            torch.autograd.grad(out, wanted_by, weight), torch.autograd.grad(wanted, wanted_by, weight), strict=True
        )
        for gradient, expected in pairs:
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-10)


def test_a_table_has_an_entry_for_each_distance_in_both_directions_and_one_for_the_other_input() -> None:
    f = build("etc:max_distance=12", Shape(1, 3, 100, 5))
    assert [tuple(p.shape) for p in f.parameters()] == [(2, 3, 26, 5)]
    assert not list(build("etc:max_distance=0", Shape(1, 3, 100, 5)).parameters())


def test_without_tables_the_error_is_one_of_an_approximation() -> None:
    entry = VARIANTS.get("etc")
    assert entry.target(parse_spec("etc")) == "other"
    assert entry.target(parse_spec("etc:max_distance=0")) == "softmax"


def test_tables_are_drawn_small() -> None:
    (tables,) = (p.detach() for p in build("etc:max_distance=200", Shape(1, 8, 16, 16)).parameters())
    assert float(tables.mean()) == pytest.approx(0, abs=2e-4)
    assert float(tables.std()) == pytest.approx(0.02, rel=0.02)
