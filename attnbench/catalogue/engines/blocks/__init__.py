"""Softmax over blocks of keys that were chosen for each block of queries: the choice, and the arithmetic apart."""
