"""Attention Free Transformer: each channel weighs the values by its own keys and a learned bias of positions."""

from attnbench.catalogue.attention.synthetic.aft.algorithm import AFT as AFT
