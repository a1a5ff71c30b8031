"""Attention with few keys or few queries, and averages of tokens that make them."""
