"""Recurrences with a state that fades, many tokens at a time."""
