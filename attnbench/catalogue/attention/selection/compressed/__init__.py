"""Attention to near tokens one by one, and to one entry for every run of earlier ones."""

from attnbench.catalogue.attention.selection.compressed.csa import CSA as CSA
from attnbench.catalogue.attention.selection.compressed.hca import HCA as HCA
