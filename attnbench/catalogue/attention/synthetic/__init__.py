"""Synthetic weights and mixing: tokens meet without a product of query and key."""
