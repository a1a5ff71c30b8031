"""Sparse Transformer attention: strided and fixed factorised patterns, merged in one softmax or head by head."""

from attnbench.catalogue.attention.pattern.sparse.sparse import Sparse as Sparse
