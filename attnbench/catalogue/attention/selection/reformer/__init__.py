"""Attention among tokens that a locality-sensitive hash puts side by side."""

from attnbench.catalogue.attention.selection.reformer.reformer import Reformer as Reformer
