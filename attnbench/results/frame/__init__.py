"""Rows as a table: which of them belong together, and their settings in words."""
