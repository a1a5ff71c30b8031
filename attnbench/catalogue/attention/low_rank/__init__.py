"""Low rank and memory: fewer keys, or fewer queries, stand for all."""
