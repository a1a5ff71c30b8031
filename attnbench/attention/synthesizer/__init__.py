"""Synthesizer: attention weights without queries and keys."""

from attnbench.attention.synthesizer.algorithm import Synthesizer as Synthesizer
