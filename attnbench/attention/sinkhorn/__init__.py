"""Attention to a query's own block and to one that a learned, soft permutation puts beside it."""

from attnbench.attention.sinkhorn.algorithm import Sinkhorn as Sinkhorn
