"""Synthesizer: attention weights without queries and keys."""

from attnbench.catalogue.attention.synthetic.synthesizer.algorithm import Synthesizer as Synthesizer
