"""Recurrence: a state is written and read token by token."""
