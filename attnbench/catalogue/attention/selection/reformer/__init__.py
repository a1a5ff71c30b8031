"""Attention among tokens that a locality-sensitive hash puts side by side."""

from attnbench.catalogue.attention.selection.reformer.algorithm import Reformer as Reformer
