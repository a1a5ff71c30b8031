"""Attention with few keys or few queries, and how tokens are averaged into them."""
