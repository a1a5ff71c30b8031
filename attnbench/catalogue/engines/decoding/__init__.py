"""Caches of earlier tokens, from which a module answers the next one."""
