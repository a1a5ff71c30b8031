"""What a choice of pairs keeps, against a count of every pair one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from attnbench.contract.problem.mask import mask_of
from attnbench.contract.problem.visible import Visible
from attnbench.measure import coverage as module
from attnbench.measure.coverage import Coverage, kept

B, H, K, N, M, D = 2, 4, 2, 7, 9, 4
WHOLE = slice(0, N)


@dataclass
class Chosen:
    """Pairs that somebody chose, seen or not; notes of which queries they were asked for."""

    all: Tensor
    asked: list[tuple[int, int]] = field(default_factory=list)

    def pairs(self, queries: slice) -> Tensor:
        self.asked.append((queries.start, queries.stop))
        return self.all[:, :, queries]


def drawn() -> tuple[Tensor, Tensor, Chosen]:
    q, k = torch.randn(B, H, N, D), torch.randn(B, K, M, D)
    return q, k, Chosen(torch.rand(B, H, N, M) < 0.5)


def counted(q: Tensor, k: Tensor, chosen: Tensor, sees: Tensor) -> Coverage:
    """The same shares, pair by pair; ``sees`` is ``(B, N, M)``."""
    masses: list[float] = []
    pairs, every = 0, 0
    for b, h, n in ((b, h, n) for b in range(B) for h in range(H) for n in range(N)):
        seen = [m for m in range(M) if sees[b, n, m]]
        weights = {m: math.exp(float(q[b, h, n].double() @ k[b, h * K // H, m].double()) / math.sqrt(D)) for m in seen}
        taken = [m for m in seen if chosen[b, h, n, m]]
        pairs, every = pairs + len(taken), every + len(seen)
        if seen:
            masses.append(sum(weights[m] for m in taken) / sum(weights.values()))
    return Coverage(sum(masses) / len(masses), pairs / every)


def close(found: Coverage, expected: Coverage) -> None:
    assert (found.mass, found.pairs) == (pytest.approx(expected.mass, rel=1e-12), pytest.approx(expected.pairs))
    assert 0.2 < found.pairs < 0.8  # or nothing is told apart


@pytest.mark.parametrize(
    "causal", [False, True, Visible(True, start=2), Visible(False, mask_of("sliding:3"), 1)], ids=str
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("some", [False, True], ids=["every query", "some queries"])
def test_shares_are_those_of_the_pairs_that_are_seen_counted_one_by_one(
    causal: bool | Visible, padded: bool, some: bool
) -> None:
    q, k, chosen = drawn()
    visible = causal if isinstance(causal, Visible) else Visible(causal)
    sees = visible.pairs(WHOLE, slice(0, M), M, q.device).expand(B, N, M).clone()
    key_mask, queries = None, None
    if padded:
        key_mask = torch.ones(B, M, dtype=torch.bool)
        key_mask[0, :2], key_mask[1, 6:] = False, False  # the first queries of the first see nothing, if causal
        sees &= key_mask[:, None]
    if some:
        queries = torch.ones(B, N, dtype=torch.bool)
        queries[0, 3:], queries[1, :2] = False, False
        sees &= queries[:, :, None]
    close(kept(chosen, q, k, causal=causal, key_mask=key_mask, queries=queries), counted(q, k, chosen.all, sees))
    assert chosen.asked == [(0, N)]


@pytest.mark.parametrize(
    ("queries", "asked"),
    [
        (0.5, [(n, n + 1) for n in range(N)]),  # one at least
        (1, [(n, n + 1) for n in range(N)]),
        (3.5, [(0, 3), (3, 6), (6, 7)]),
        (7, [(0, 7)]),
    ],
)
def test_only_so_many_logits_are_in_memory_at_once_and_the_shares_stay_the_same(
    queries: float, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, chosen = drawn()
    padding = torch.rand(B, M) < 0.7
    expected = kept(chosen, q, k, causal=True, key_mask=padding)
    chosen.asked.clear()
    monkeypatch.setattr(module, "LOGITS", int(queries * B * H * M))
    found = kept(chosen, q, k, causal=True, key_mask=padding, queries=torch.ones(B, N, dtype=torch.bool))
    close(found, expected)
    assert chosen.asked == asked


def test_what_leaves_nothing_out_keeps_all_and_what_takes_nothing_keeps_nothing() -> None:
    q, k, _ = drawn()
    for everything, share in ((torch.ones, 1.0), (torch.zeros, 0.0)):
        found = kept(Chosen(everything(B, H, N, M, dtype=torch.bool)), q, k, causal=True)
        assert found == Coverage(pytest.approx(share), share)


def test_without_a_word_every_query_sees_every_key() -> None:
    q, k, chosen = drawn()
    close(kept(chosen, q, k), counted(q, k, chosen.all, torch.ones(B, N, M, dtype=torch.bool)))


def test_a_single_query_that_takes_the_only_key_takes_all() -> None:
    one = torch.ones(1, 1, 1, D)
    assert kept(Chosen(torch.ones(1, 1, 1, 1, dtype=torch.bool)), one, one) == Coverage(1.0, 1.0)


def test_where_no_query_sees_a_key_nothing_is_kept() -> None:
    q, k, chosen = drawn()
    assert kept(chosen, q, k, key_mask=torch.zeros(B, M, dtype=torch.bool)) == Coverage(0.0, 0.0)


def test_a_choice_may_be_the_same_for_every_head_and_sequence() -> None:
    q, k, chosen = drawn()
    same = chosen.all[:1, :1]
    assert kept(Chosen(same), q, k) == kept(Chosen(same.expand(B, H, N, M)), q, k)


def test_weights_are_of_float64_whatever_the_inputs_are_of() -> None:
    q, k, chosen = drawn()
    assert kept(chosen, q, k) == kept(chosen, q.double(), k.double())
