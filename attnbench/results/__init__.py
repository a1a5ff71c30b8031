"""Results: rows on disk and as a table, what may be claimed of them, and other formats."""
