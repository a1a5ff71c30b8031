"""Attention among rows that are found by content."""
