from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.selection.clustered import Clustered
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built, close

B, H, D = 2, 3, 6


def draw(N: int, M: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, N, D, dtype=torch.float64), *torch.randn(2, B, H, M or N, D, dtype=torch.float64)


def clustered(options: str, N: int, M: int | None = None, seed: int = 1) -> Clustered:
    return built(Clustered, f"clustered:{options}".rstrip(":"), Shape(B, H, N, D, M), seed=seed).double()


def lloyd(codes: list[list[int]], clusters: int, iterations: int) -> list[int]:
    """Lists of bits to clusters, in plain Python."""
    n = len(codes)
    count = min(clusters, n)
    centroids = [codes[j * n // count] for j in range(count)]
    nearest: list[int] = []
    for _ in range(iterations):
        apart = [[sum(x != y for x, y in zip(code, c, strict=True)) for c in centroids] for code in codes]
        nearest = [row.index(min(row)) for row in apart]
        for c in range(count):
            members = [code for code, home in zip(codes, nearest, strict=True) if home == c]
            if members:
                centroids[c] = [int(2 * sum(bits) >= len(members)) for bits in zip(*members, strict=True)]
    return nearest


@pytest.mark.parametrize("options", ["clusters=5,bits=7,iterations=4", "clusters=1", "clusters=64,bits=3", "bits=64"])
@pytest.mark.parametrize("N", [1, 40])
def test_clusters_are_those_of_lloyd_in_hamming_distance(options: str, N: int) -> None:
    q, _, _ = draw(N)
    module = clustered(options, N)
    found = module.assign(q.flatten(0, 1))
    for head, x in zip(found, q.flatten(0, 1), strict=True):
        codes = (x @ module.directions > 0).int().tolist()
        assert head.tolist() == lloyd(codes, module.clusters, module.iterations)


@pytest.mark.parametrize("options", ["clusters=5,bits=7", "clusters=5,bits=7,improved=4", "clusters=1,improved=2"])
@pytest.mark.parametrize("M", [None, 13])
def test_members_of_a_cluster_share_the_weights_of_their_mean(options: str, M: int | None) -> None:
    q, k, v = draw(20, M)
    module = clustered(options, 20, M)
    out = torch.zeros_like(q)
    for b in range(B):
        for h, cluster in enumerate(module.assign(q[b])):
            for i in range(20):
                mean = q[b, h, cluster == cluster[i]].mean(0)
                weights = (k[b, h] @ mean / D**0.5).softmax(0)
                if module.improved:
                    top = weights.sort(descending=True).indices[: module.improved]
                    weights[top] = weights[top].sum() * (k[b, h, top] @ q[b, h, i] / D**0.5).softmax(0)
                out[b, h, i] = weights @ v[b, h]
    close(module(q, k, v), out)
    close(module.dense(q, k, v), out)
