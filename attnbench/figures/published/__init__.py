"""Numbers of papers, drawn beside a run."""
