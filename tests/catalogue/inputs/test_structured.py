from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.contract.inputs import draw_qkv
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.errors import Unsupported, UsageError

SHAPE = Shape(2, 4, 200, 64)


def logits_of(text: str, shape: Shape = SHAPE) -> Tensor:
    q, k, _ = draw_qkv(parse_spec(text), shape, seed=0)
    return q @ k.mT * shape.D**-0.5


@pytest.mark.parametrize("name", ["peaked", "clustered", "banded"])
def test_without_structure_the_logits_are_gaussian_of_the_std_asked_for(name: str) -> None:
    logits = logits_of(f"{name}:structure=0,logit_std=2")
    assert logits.std().item() == pytest.approx(2, rel=0.03)
    assert logits.mean().item() == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize(("std", "structure"), [(1.0, 0.9), (2.0, 0.5), (0.5, 1.0)])
def test_peaked_has_one_key_that_stands_out_by_what_is_documented(std: float, structure: float) -> None:
    logits = logits_of(f"peaked:logit_std={std},structure={structure}").flatten(0, 2)
    highest, rest = logits.max(-1).values, logits.sort(-1).values[:, :-1]
    assert highest.mean().item() == pytest.approx(std * structure * 8, rel=0.08)
    assert rest.std().item() == pytest.approx(std, rel=0.05)


def test_peaks_lie_anywhere() -> None:
    chosen = logits_of("peaked:structure=1").argmax(-1).flatten()
    assert len(chosen.unique()) > 190
    assert chosen.float().mean().item() == pytest.approx(99.5, abs=6)


def test_causal_peaks_lie_where_the_query_sees_them() -> None:
    chosen = logits_of("peaked:structure=1", Shape(2, 4, 200, 64, causal=True)).argmax(-1)
    assert (chosen <= torch.arange(200)).all()
    assert (chosen / torch.arange(1, 201)).mean().item() == pytest.approx(0.5, abs=0.05)


def test_clustered_logits_are_high_inside_a_group_and_gaussian_between() -> None:
    logits = logits_of("clustered:clusters=10,structure=0.9,logit_std=1")
    inside = logits > 0.5 * 0.9 * 8
    assert inside.float().mean().item() == pytest.approx(0.1, abs=0.02)
    assert logits[inside].mean().item() == pytest.approx(0.9 * 8, rel=0.08)
    assert logits[~inside].std().item() == pytest.approx(1, rel=0.08)


def test_one_cluster_makes_all_pairs_match() -> None:
    assert logits_of("clustered:clusters=1").mean().item() == pytest.approx(0.9 * 8, rel=0.2)


@pytest.mark.parametrize(("sinks", "share"), [(1, 0.5), (4, 0.5), (4, 0.9), (16, 0.02)])
def test_sinks_take_the_share_of_the_weight_that_is_asked_for(sinks: int, share: float) -> None:
    even = logits_of(f"sink:sinks={sinks},share={share},logit_std=0.001").softmax(-1)
    torch.testing.assert_close(even[..., :sinks].sum(-1), torch.full((2, 4, 200), share), atol=1e-3, rtol=0)
    spread = logits_of(f"sink:sinks={sinks},share={share}", Shape(1, 4, 4000, 64)).softmax(-1)
    assert spread[..., :sinks].sum(-1).mean().item() == pytest.approx(share, rel=0.03)


def test_a_sink_has_one_logit_for_all_queries_and_the_others_are_gaussian() -> None:
    logits = logits_of("sink:sinks=3,share=0.6,logit_std=1.5")
    assert logits[..., :3].std().item() < 1e-4
    assert logits[..., 3:].std().item() == pytest.approx(1.5, rel=0.03)
    assert logits[..., 3:].mean().item() == pytest.approx(0, abs=0.05)


def test_sinks_have_small_values_and_heads_that_share_keys_share_them() -> None:
    shape = Shape(2, 4, 200, 64, kv_heads=2, causal=True)
    q, k, v = draw_qkv(parse_spec("sink:sinks=5,value_std=0.2"), shape, seed=0)
    assert v[:, :, :5].std().item() == pytest.approx(0.2, rel=0.1)
    assert v[:, :, 5:].std().item() == pytest.approx(1, rel=0.05)
    logits = q @ k.repeat_interleave(2, 1).mT / 8
    assert logits[..., :5].std().item() < 1e-4
    assert (
        logits.masked_fill(~torch.ones(200, 200).tril().bool(), -torch.inf).softmax(-1)[..., :5].sum(-1) > 0.35
    ).all()


def test_sinks_need_other_keys_and_a_second_dimension() -> None:
    with pytest.raises(Unsupported, match="200 sinks leave no other key among 200"):
        logits_of("sink:sinks=200")
    with pytest.raises(Unsupported, match="head_dim 1"):
        logits_of("sink", Shape(1, 1, 9, 1))


@pytest.mark.parametrize("rank", [1, 8, 64])
def test_low_rank_has_the_rank_and_the_spread_asked_for(rank: int) -> None:
    logits = logits_of(f"low-rank:rank={rank},logit_std=1.5", Shape(4, 16, 100, 64))
    values = torch.linalg.svdvals(logits[:1, :2].double())
    assert (values[..., :rank] > 1e-3).all()
    assert (values[..., rank:] < 1e-3).all()
    assert logits.square().mean().sqrt().item() == pytest.approx(1.5, rel=0.1)


def test_low_rank_cannot_exceed_the_head_width() -> None:
    with pytest.raises(Unsupported, match="rank 65 exceeds head_dim 64"):
        logits_of("low-rank:rank=65")


def test_banded_logits_fall_with_distance_as_documented() -> None:
    logits = logits_of("banded:width=10,structure=0.9,logit_std=1", Shape(4, 16, 200, 64))
    for distance in (0, 5, 10, 20):
        expected = 0.9 * 8 * torch.tensor(-(distance**2) / 200).exp().item()
        assert logits.diagonal(distance, -2, -1).mean().item() == pytest.approx(expected, abs=0.3)
    far = logits.masked_select((torch.arange(200)[:, None] - torch.arange(200)).abs() > 60)
    assert far.mean().item() == pytest.approx(0, abs=0.1)
    assert far.std().item() == pytest.approx(1, rel=0.08)


def test_structure_is_a_share() -> None:
    with pytest.raises(UsageError, match=r"option structure=1\.5 must be at most 1"):
        logits_of("banded:structure=1.5")
