"""Sparse Transformer attention: strided and fixed factorised patterns, merged in one softmax or head by head."""

from attnbench.attention.sparse.algorithm import Sparse as Sparse
