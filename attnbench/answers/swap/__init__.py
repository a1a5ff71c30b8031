"""The rows of a swap in summary and as a figure."""
