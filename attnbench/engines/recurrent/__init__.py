"""Recurrences whose state fades, many tokens at a time."""
