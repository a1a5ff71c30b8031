"""Softmax attention over all pairs, computed in several ways."""
