"""Pairwise weights: another score of each pair of tokens, without features."""
