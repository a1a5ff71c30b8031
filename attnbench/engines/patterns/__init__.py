"""Softmax over patterns of blocks: how a pattern is written down, which keys it reads, and the arithmetic."""
