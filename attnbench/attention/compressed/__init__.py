"""Attention to near tokens one by one, and to one entry for every run of earlier ones."""

from attnbench.attention.compressed.csa import CSA as CSA
from attnbench.attention.compressed.hca import HCA as HCA
