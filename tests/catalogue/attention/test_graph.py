from __future__ import annotations

from dataclasses import replace

import torch

from attnbench.catalogue.attention.pattern.graph import Graph
from attnbench.contract.problem.reference import masked_attention
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import SHAPE, both, built, close, qkv


def make(shape: Shape, edges: int = 3, ring: int = 2) -> Graph:
    return built(Graph, "graph", shape, edges=edges, ring=ring)


@both
def test_without_random_edges_the_graph_is_a_ring(shape: Shape) -> None:
    inputs, i = qkv(SHAPE), torch.arange(23)
    apart = (i[:, None] - i) % 23
    allowed = (apart <= 2) | (apart >= 21)
    close(make(shape, edges=0)(*inputs), masked_attention(*inputs, allowed.tril() if shape.causal else allowed))


def test_each_token_has_its_own_random_neighbours_and_none_twice() -> None:
    listed = make(SHAPE, edges=5, ring=1).neighbours
    real = [row[row >= 0] for row in listed]
    assert all(len(row) == len(row.unique()) for row in real)
    assert all({(i - 1) % 23, i, (i + 1) % 23} <= set(row.tolist()) for i, row in enumerate(real))
    assert len({tuple((row - i).tolist()) for i, row in enumerate(real)}) > 10
    assert {len(row) for row in real} <= set(range(3, 9))


def test_a_shorter_input_lacks_the_edges_to_what_is_not_there() -> None:
    module, inputs = make(SHAPE), qkv(replace(SHAPE, seq_len=11))
    close(module(*inputs), module.dense(*inputs))
