"""Attention to a query's own block and to one that a learned, soft permutation joins to it."""

from attnbench.catalogue.attention.selection.sinkhorn.sinkhorn import Sinkhorn as Sinkhorn
