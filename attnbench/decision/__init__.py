"""From finished runs to a decision: which rows of two runs belong together, and what their difference means."""
