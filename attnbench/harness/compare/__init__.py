"""Variants in turn at each length."""
