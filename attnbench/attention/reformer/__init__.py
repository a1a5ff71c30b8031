"""Attention among tokens that a locality-sensitive hash puts side by side."""

from attnbench.attention.reformer.algorithm import Reformer as Reformer
