from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from attnbench.catalogue.attention.selection.routing import Routing
from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built, close, peak_of

B, H, D = 2, 3, 6


def draw(N: int, M: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, N, D, dtype=torch.float64), *torch.randn(2, B, H, M or N, D, dtype=torch.float64)


def routing(options: str, N: int, M: int | None = None, seed: int = 1) -> Routing:
    return built(Routing, f"routing:{options}".rstrip(":"), Shape(B, H, N, D, M), seed=seed).double()


def definition(q: Tensor, k: Tensor, v: Tensor, centroids: Tensor, wq: int, wk: int) -> Tensor:
    """One head: q ``(N, D)``; every centroid, every query that it picks, over the keys that it picks."""
    q, k = layer_norm(q, (D,)), layer_norm(k, (D,))
    outputs: list[list[Tensor]] = [[] for _ in q]
    for centroid in centroids:
        picked = (k @ centroid).sort(descending=True).indices[:wk]
        for i in (q @ centroid).sort(descending=True).indices[:wq].tolist():
            outputs[i].append((k[picked] @ q[i] / D**0.5).softmax(0) @ v[picked])
    return torch.stack([sum(o, torch.zeros(D).double()) / max(1, len(o)) for o in outputs])


@pytest.mark.parametrize(
    ("options", "N", "M", "wq", "wk"),
    [
        ("clusters=4", 20, None, 5, 5),
        ("clusters=4", 21, None, 6, 6),
        ("clusters=4", 21, 9, 6, 3),
        ("clusters=3,window=2", 20, None, 2, 2),
        ("clusters=3,window=99", 7, 11, 7, 11),
        ("", 17, None, 5, 5),  # √17 is 4 clusters
        ("clusters=8", 3, None, 1, 1),
    ],
)
def test_queries_attend_within_the_clusters_that_pick_them(
    options: str, N: int, M: int | None, wq: int, wk: int
) -> None:
    q, k, v = draw(N, M)
    module = routing(options, N, M)
    heads = [
        [definition(*(x[b, h] for x in (q, k, v)), module.centroids[h], wq, wk) for h in range(H)] for b in range(B)
    ]
    expected = torch.stack([torch.stack(head) for head in heads])
    close(module(q, k, v), expected, 1e-12)
    close(module.dense(q, k, v), expected, 1e-12)


def test_the_order_of_the_centroids_does_not_matter() -> None:
    q, k, v = draw(24)
    for options in ("clusters=5", "clusters=5,kmeans=2"):
        module = routing(options, 24)
        before = module(q, k, v)
        module.centroids = module.centroids.flip(1)
        close(module(q, k, v), before, 1e-12)


def test_a_token_that_no_centroid_picks_gives_zero_and_coverage_counts_the_others() -> None:
    q, k, v = draw(40)
    module = routing("clusters=8", 40)
    out = module(q, k, v)
    share = module.coverage(q, k)
    close(share, (out != 0).any(-1).double().mean(-1), 1e-12)
    assert 0.2 < float(share.mean()) < 0.9
    mask = torch.rand(B, 40) < 0.5
    out, share = module(q, k, v, key_mask=mask), module.coverage(q, k, key_mask=mask)
    close(share, ((out != 0).any(-1) & mask[:, None]).sum(-1) / mask.sum(1)[:, None].double(), 1e-12)
    assert torch.equal(routing("clusters=1", 40).coverage(q, k), torch.ones(B, H, dtype=torch.float64))


def test_more_than_a_third_of_random_directions_are_picked_by_no_centroid() -> None:
    q, k, _ = torch.randn(3, 1, 1, 1024, 64, dtype=torch.float64)
    module = built(Routing, "routing", Shape(1, 1, 1024, 64)).double()
    assert 0.5 < float(module.coverage(q, k)) < 2 / 3


def test_kmeans_pulls_the_centroids_to_the_keys() -> None:
    centres = torch.nn.functional.normalize(torch.randn(4, D, dtype=torch.float64), dim=1)
    k = (5 * centres.repeat_interleave(10, 0) + 0.1 * torch.randn(B, H, 40, D, dtype=torch.float64)).contiguous()

    def nearness(steps: int) -> float:
        module = routing(f"clusters=12,kmeans={steps}", 40)
        x = torch.nn.functional.normalize(layer_norm(k, (D,)), dim=-1).flatten(0, 1)
        centroids = module._move(module.centroids.repeat(B, 1, 1), x, None)
        return float((x @ centroids.mT).amax(-1).mean())

    found = [nearness(steps) for steps in (0, 1, 5)]
    assert found[0] < found[1] <= found[2]
    assert found[2] > 0.95


def test_memory_grows_no_faster_than_the_sequence_where_clusters_are_few() -> None:
    def peak(N: int) -> int:
        module, x = build("routing:clusters=2", Shape(1, 1, N, 16)), torch.randn(1, 1, N, 16)
        return peak_of(lambda: module(x, x, x))

    assert peak(8192) < 4.2 * peak(2048)


def test_a_centroid_with_no_key_stays_where_it_is() -> None:
    module = routing("clusters=2,kmeans=1", 8)
    direction = torch.nn.functional.normalize(torch.arange(D, dtype=torch.float64), dim=0)
    before = torch.stack([direction, -direction]).expand(1, 2, D).contiguous()
    keys = direction + 0.1 * torch.randn(1, 8, D, dtype=torch.float64)
    after = module._move(before, keys, None)
    close(after[:, 0], torch.nn.functional.normalize(keys.sum(1), dim=-1), 1e-12)
    assert torch.equal(after[:, 1], before[:, 1])
