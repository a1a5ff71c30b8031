"""The display in a terminal: progress, tables, plans and decisions."""
