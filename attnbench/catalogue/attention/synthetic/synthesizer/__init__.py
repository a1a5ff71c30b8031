"""Synthesizer: attention weights without queries and keys."""

from attnbench.catalogue.attention.synthetic.synthesizer.synthesizer import Synthesizer as Synthesizer
