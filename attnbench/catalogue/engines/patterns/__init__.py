"""Softmax over patterns of blocks: their notation, the keys they read, and the arithmetic."""
