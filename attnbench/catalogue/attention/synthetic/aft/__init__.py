"""Attention Free Transformer: each channel weighs the values by its own keys and a learned bias of positions."""

from attnbench.catalogue.attention.synthetic.aft.aft import AFT as AFT
