"""A run for other programs: Parquet, MLflow, Markdown and LaTeX."""
