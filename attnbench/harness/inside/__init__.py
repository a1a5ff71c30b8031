"""The worker's side: one cell is called, timed and recorded."""
