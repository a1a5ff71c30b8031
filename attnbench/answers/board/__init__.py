"""Runs of many people beside each other: the site that ``attnbench board`` writes, and what ``submit`` adds to it."""
