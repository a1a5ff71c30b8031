"""Attention to a query's own block and to one that a learned, soft permutation joins to it."""

from attnbench.attention.sinkhorn.algorithm import Sinkhorn as Sinkhorn
