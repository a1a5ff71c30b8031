"""Variants from elsewhere: plug-ins, modules of the user's own, and functions of a hub."""
