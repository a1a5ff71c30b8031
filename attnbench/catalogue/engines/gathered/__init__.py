"""Attention among rows found by content."""
