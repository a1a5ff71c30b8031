"""A run for other programs: Parquet, Markdown and LaTeX."""
