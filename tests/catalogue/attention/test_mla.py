from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.exact.mla import MLA
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.suite.cell import Cell
from tests.catalogue.attention.small import built, close

both = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
each_form = pytest.mark.parametrize("form", ["expanded", "absorbed", "auto"])


def make(causal: bool, form: str = "auto", n: int = 23) -> MLA:
    shape = Shape(batch=2, heads=3, seq_len=n, head_dim=4, causal=causal)
    module = built(MLA, "mla", shape, kv_rank=5, q_rank=7, rope_dim=6, value_dim=3, form=form).double()
    with torch.no_grad():
        for norm in (module.norm, module.q_norm):
            weight, drawn = norm.weight, torch.Generator().manual_seed(3)
            weight += 0.3 * torch.randn(weight.shape, dtype=weight.dtype, generator=drawn)
    return module


def turned(vector: Tensor, place: int) -> Tensor:
    """Pairs i and i + P/2 by the angle place · 10000^(-2i/P)."""
    P = len(vector)
    out = torch.empty_like(vector)
    for i in range(P // 2):
        angle = place * 10000.0 ** (-2 * i / P)
        one, other = vector[i], vector[i + P // 2]
        out[i] = one * math.cos(angle) - other * math.sin(angle)
        out[i + P // 2] = one * math.sin(angle) + other * math.cos(angle)
    return out


def normed(vector: Tensor, weight: Tensor) -> Tensor:
    return vector / (vector @ vector / len(vector) + 1e-6).sqrt() * weight


@torch.no_grad()
def by_hand(m: MLA, x: Tensor, real: Tensor | None = None) -> Tensor:
    """Token by token and head by head, with D = 4, P = 6, E = 3 and a latent of 5 numbers."""
    H, D, P, E, R = 3, 4, 6, 3, 5
    rows = []
    for b, tokens in enumerate(x):
        latents = [normed(m.down.weight[:R] @ one, m.norm.weight) for one in tokens]
        shared = [turned(m.down.weight[R:] @ one, j) for j, one in enumerate(tokens)]
        for t, one in enumerate(tokens):
            query, heads = m.q_up.weight @ normed(m.q_down.weight @ one, m.q_norm.weight), []
            for h in range(H):
                own = query[h * (D + P) : (h + 1) * (D + P)]
                q = torch.cat([own[:D], turned(own[D:], t)])
                to_both = m.up.weight[h * (D + E) : (h + 1) * (D + E)]
                seen = [j for j in range(t + 1 if m.causal else len(tokens)) if real is None or bool(real[b, j])]
                logits = [q @ torch.cat([to_both[:D] @ latents[j], shared[j]]) / math.sqrt(D + P) for j in seen]
                values = [to_both[D:] @ latents[j] for j in seen]
                if not seen:
                    heads.append(torch.zeros(E, dtype=x.dtype))
                    continue
                weights = torch.stack(logits).softmax(0)
                heads.append(sum(w * v for w, v in zip(weights, values, strict=True)))
            rows.append(m.out.weight @ torch.cat(heads))
    return torch.stack(rows).view(*x.shape)


@both
@each_form
@pytest.mark.parametrize("n", [1, 7, 23])
def test_equals_keys_and_values_made_of_latents_token_by_token(causal: bool, form: str, n: int) -> None:
    module, x = make(causal, form, n), torch.randn(2, n, 12, dtype=torch.float64)
    expected = by_hand(module, x)
    close(module(x).detach(), expected)
    close(module.dense(x).detach(), expected)


def test_the_defaults_are_those_of_the_papers_in_proportion_to_a_head() -> None:
    module = built(MLA, "mla", Shape(heads=12, head_dim=128, seq_len=4))
    assert (module.rank, module.P, module.E, module.q_down.out_features) == (512, 64, 128, 1536)
    assert module.scale == pytest.approx(192**-0.5)
    small = built(MLA, "mla", Shape(heads=2, head_dim=64, seq_len=4))
    assert (small.rank, small.P, small.E, small.q_down.out_features) == (128, 32, 64, 128)  # no more than C


def row(label: str, shape: Shape, dtype: str) -> Record:
    return Record.of(Cell("x", "s", parse_spec(label), shape, level="layer", dtype=dtype), Status.OK)


def test_a_token_of_the_papers_model_keeps_576_numbers_for_all_heads() -> None:
    shape = Shape(heads=128, head_dim=128, seq_len=4)
    of_row = row("mla", shape, "bfloat16")
    assert (of_row.kv_bytes_per_token, of_row.density) == (1152, None)
    assert row("softmax", shape, "bfloat16").kv_bytes_per_token == 2 * 128 * 128 * 2
