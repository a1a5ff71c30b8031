"""Attention to near tokens one by one, and to one entry for every run of earlier ones."""
